"""With `row_invariant` the bits of a text depend on nothing but its request.

The reference is each text alone, decoded token by token without drafts. On the GPU the models are
one layer of an 8B model, and the embedded target.
"""

import functools

import jax
import numpy as np
import pytest
from machine import has_gpu

import specjax
from specjax import LoopOptions, SpeculativeConfig
from specjax.models import TransformerConfig, build, load, load_drafter, pretrained_folder

B, NEW, LENGTH = 6, 20, 64
SIZES = (512, 256, 512, 2, 4, 2, 32)
if has_gpu():
    B, NEW, LENGTH = 24, 48, 512
    SIZES = (4096, 4096, 14336, 1, 32, 8, 128)
CONFIG = TransformerConfig(*SIZES, tie_word_embeddings=False, dtype="bfloat16")
KEYS = jax.vmap(jax.random.key)(np.arange(B))
TEMPERATURE = np.resize(np.float32([0, 0.7, 1]), B)
COUPLED = SpeculativeConfig(rejection_sample_method="coupled", num_speculative_tokens=3)


@pytest.fixture(params=["cpu", *(pytest.param(x, marks=pytest.mark.gpu) for x in ("gpu", "pair"))])
def name(request):
    """The machine's own device, or on a GPU the embedded target; a run there selects the marked."""
    return request.param


@functools.cache
def model(name, row_invariant=True):
    if name == "pair":
        return load(pretrained_folder("target"), "bfloat16", row_invariant=row_invariant)[0]
    made = build(CONFIG, seed=0, row_invariant=row_invariant)
    # Small logits are near one another: 8 bits of a bfloat16 leave many ties.
    head = made.params["head"] * 0.25
    params = made.params | {"head": head.astype(made.params["head"].dtype)}
    return build(CONFIG, params, row_invariant=row_invariant)


@functools.cache
def prompts():
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, LENGTH - NEW, B)
    return [rng.integers(0, 512, size).tolist() for size in sizes]


def texts(name, order, drafter=None, row_invariant=True, together=True, config=None, **options):
    """Tokens and log-probabilities of the prompts, decoded in an order."""
    options = LoopOptions(max_length=LENGTH, **options)
    groups = [list(order)] if together else [[each] for each in order]
    result = {}
    for group in groups:
        output = specjax.generate(
            model(name, row_invariant),
            drafter,
            [prompts()[b] for b in group],
            keys=KEYS[np.array(group)],
            max_new_tokens=NEW,
            temperature=TEMPERATURE[np.array(group)],
            options=options,
            config=config,
        )
        for row, b in enumerate(group):
            length = int(output.lengths[row])
            ids = np.asarray(output.token_ids[row, :length])
            result[b] = (ids, np.asarray(output.logprobs[row, :length]))
    return result


@functools.cache
def alone(name, row_invariant=True):
    options = {"together": False, "prefill_chunk_size": 16}
    return texts(name, range(B), row_invariant=row_invariant, **options)


def num_differing(found, wanted):
    return sum(
        not all(
            np.array_equal(x, y, equal_nan=True) for x, y in zip(found[b], wanted[b], strict=True)
        )
        for b in wanted
    )


@pytest.mark.parametrize("chunk", [5, 64])
def test_a_text_is_the_same_in_any_batch_and_chunk(name, chunk):
    found = texts(name, range(B)[::-1], prefill_chunk_size=chunk)
    assert num_differing(found, alone(name)) == 0


@pytest.mark.parametrize("k", [1, 3])
def test_a_text_is_the_same_with_a_draft_model_that_is_coupled(name, k):
    config = SpeculativeConfig(rejection_sample_method="coupled", num_speculative_tokens=k)
    drafter = specjax.model_drafter(model(name, False))
    assert num_differing(texts(name, range(B), drafter, config=config), alone(name)) == 0


def test_a_text_is_the_same_with_drafts_of_its_own_words(name):
    found = texts(name, range(B), specjax.ngram_drafter(), config=COUPLED)
    assert num_differing(found, alone(name)) == 0


def test_a_text_is_the_same_in_an_engine(name):
    engine = specjax.Engine(
        model(name),
        specjax.ngram_drafter(),
        num_slots=3,
        options=LoopOptions(max_length=LENGTH, prefill_chunk_size=16),
        config=COUPLED,
    )
    requests = [
        engine.submit(
            prompts()[b], max_new_tokens=NEW, temperature=float(TEMPERATURE[b]), key=KEYS[b]
        )
        for b in range(B)
    ]
    engine.run()
    for b, request in enumerate(requests):
        ids, logprobs = alone(name)[b]
        np.testing.assert_array_equal(request.token_ids, ids[len(prompts()[b]) :])
        np.testing.assert_array_equal(np.float32(request.logprobs), logprobs[len(prompts()[b]) :])


@pytest.mark.parametrize("method", ["standard", "block"])
def test_by_other_rules_a_text_is_the_same_next_to_others_if_the_draft_has_the_option_too(method):
    drafter = specjax.model_drafter(build(CONFIG, seed=1, row_invariant=True))
    config = SpeculativeConfig(rejection_sample_method=method, num_speculative_tokens=3)
    options = {"drafter": drafter, "config": config}
    wanted = texts("cpu", range(B), together=False, prefill_chunk_size=16, **options)
    found = texts("cpu", range(B)[::-1], prefill_chunk_size=5, **options)
    assert num_differing(found, wanted) == 0


def test_without_the_option_these_texts_differ(name):
    """Else the tests above would show nothing."""
    found = texts(name, range(B), specjax.ngram_drafter(), row_invariant=False, config=COUPLED)
    assert num_differing(found, alone(name, False)) > 0


@pytest.mark.parametrize("row_invariant", [False, True])
def test_a_draft_model_is_loaded_with_the_option_of_its_target(row_invariant):
    folder = pretrained_folder("draft")
    target, _ = load(pretrained_folder("target"), row_invariant=row_invariant)
    loaded = load_drafter(folder, target)
    draft, _ = load(folder, row_invariant=row_invariant)
    # Equal models have the same functions.
    assert loaded.propose == specjax.model_drafter(draft).propose
