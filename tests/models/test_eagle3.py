"""EAGLE-3 heads against float64 NumPy: what they draft from, whatever was accepted before."""

import dataclasses
import functools

import eagle3_heads as heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_steps import Acceptance, accepted_steps, check_greedy_texts, drafted_steps, softmax
from oracle_eagle3 import Head

import specjax
from specjax.models import TransformerConfig, build, eagle3_drafter, functions, load_eagle3
from specjax.models.heads.eagle3 import (
    Eagle3Config,
    build_eagle3,
    merge_eagle3,
    unrolled_eagle3,
)

pytestmark = pytest.mark.once

K = 3
CONFIG = specjax.SpeculativeConfig(num_speculative_tokens=K)
TARGET = TransformerConfig(heads.VOCAB, heads.SIZE, 40, heads.TARGET_LAYERS, 4, 2, 6)


@functools.cache
def target(size=heads.SIZE):
    model = build(dataclasses.replace(TARGET, hidden_size=size), seed=3)
    # Larger weights than at the start of a training, so that attention is not uniform.
    return dataclasses.replace(model, params=jax.tree.map(lambda a: a * 16, model.params))


def load(folder, name):
    """A variant's drafter, read from a folder, and the same in NumPy."""
    fields, owned = heads.variant(name)
    tensors = heads.random_tensors(fields, owned)
    heads.write_head(folder / "head", fields, tensors)
    model = target(fields.get("target_hidden_size", heads.SIZE))
    layers = heads.TARGET_LAYERS
    params, config = load_eagle3(folder / "head", "float32", num_target_layers=layers)
    table = np.asarray(model.params["embedding"])
    oracle = Head(fields, tensors, embedding=table, lm_head=table)
    return model, eagle3_drafter(model, config, params), oracle


@pytest.mark.parametrize("name", heads.VARIANTS)
def test_a_head_drafts_from_what_the_formulas_say(tmp_path, name):
    """Of a ragged batch; after steps that committed from no draft to all, and other tokens."""
    _, drafter, oracle = load(tmp_path, name)
    size = oracle.fields.get("target_hidden_size", heads.SIZE)
    width = heads.num_taps(oracle.fields) * size
    for *given, logits in drafted_steps(drafter, vocab_size=heads.VOCAB, width=width):
        wanted = oracle.draft_logits(*given)
        assert wanted.std() > 1
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4)


@jax.jit
def whole_forward(model, text):
    """Logits and taps of a whole text [T], on an empty cache."""
    place = jnp.arange(len(text), dtype=jnp.int32)[None]
    cache, taps = model.init_cache(1, len(text)), (1, 2, 4)
    hidden, features, _ = model.apply_with_taps(model.params, text[None], place, cache, taps)
    return model.logits(model.params, hidden[0]), features[0]


@pytest.mark.checks
def test_drafts_are_accepted_as_often_as_the_target_and_the_head_overlap(tmp_path):
    """q is the oracle's, by the target's taps of whole texts: the mean of sum min(p, q).

    At a temperature at which they overlap.
    """
    model, drafter, oracle = load(tmp_path, "some tokens")
    ids = heads.random_d2t(oracle.fields) + np.arange(oracle.lm_head.shape[0])
    size, rng = 64, np.random.default_rng(7)
    lengths = rng.integers(1, 6, size).astype(np.int32)
    prompts = rng.integers(0, heads.VOCAB, (size, 5)).astype(np.int32)
    options = {"temperature": 12.0, "num_drafted": K, "num_steps": 4}
    acceptance = Acceptance(3)
    for text, length, found, accepted in accepted_steps(
        model, drafter, prompts, lengths, **options
    ):
        logits, features = (np.asarray(x, np.float64) for x in whole_forward(model, text))
        drafted = text[length : length + K]
        wanted = oracle.draft_logits(text[:length], features[: length - 1], drafted)
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
        q = np.zeros((K, heads.VOCAB))
        q[:, ids] = softmax(wanted / 12)
        acceptance.add(softmax(logits[length - 1 : length - 1 + K] / 12), q, accepted)
    acceptance.check(at_least=80)


def test_a_greedy_text_is_the_target_s(tmp_path):
    """Each request drafts as many as are worth it, or none."""
    config = specjax.SpeculativeConfig("auto", step_costs=(1.0, 1.2, 1.4, 1.6))
    model, drafter, _ = load(tmp_path, "llama")
    prompts = np.random.default_rng(1).integers(0, heads.VOCAB, (3, 6)).astype(np.int32)

    lengths = [6, 2, 1]
    options = {"keys": jax.random.key(0), "max_new_tokens": 12, "temperature": 0.0}
    output = specjax.generate(model, drafter, (prompts, lengths), config=config, **options)
    check_greedy_texts(whole_forward, model, output, lengths)


def test_a_head_of_another_dtype_leaves_the_target_s_logits_in_its_own():
    model = build(dataclasses.replace(TARGET, dtype="bfloat16"), seed=3)
    layer = dataclasses.replace(TARGET, num_hidden_layers=1)
    config = Eagle3Config(layer, heads.SIZE, heads.VOCAB, taps=(1, 2), has_lm_head=False)
    with jax.numpy_dtype_promotion("strict"):
        drafter = eagle3_drafter(model, config, build_eagle3(config))
        prompts, options = jnp.zeros((2, 4), jnp.int32), {"max_new_tokens": 8, "config": CONFIG}
        lengths, key = jnp.array([4, 1]), jax.random.key(0)
        state = jax.eval_shape(
            lambda: specjax.init(model, drafter, (prompts, lengths), keys=key, **options)
        )
    assert state.draft.logits.dtype == jnp.bfloat16


def test_a_request_drafts_the_same_in_any_place_and_next_to_one_that_ended(tmp_path):
    model, drafter, _ = load(tmp_path, "fc_norm")
    keys = jax.random.split(jax.random.key(9), 3)
    prompts = np.random.default_rng(1).integers(0, heads.VOCAB, (3, 7)).astype(np.int32)
    lengths = np.array([7, 3, 1], np.int32)

    def generate(order, end):
        order = np.array(order)
        output = specjax.generate(
            model,
            drafter,
            (prompts[order], lengths[order]),
            keys=keys[order],
            config=CONFIG,
            max_new_tokens=16,
            temperature=8.0,
            eos_token_ids=[end],
        )
        return specjax.unpad(output.token_ids)

    texts = generate([2, 0, 1], heads.VOCAB)
    # The first token that the second request wrote ends it at once now, and maybe the others later.
    end = texts[2][3]
    whole = [texts[1], texts[2], texts[0]]
    for ended, text, length in zip(generate([0, 1, 2], end), whole, lengths.tolist(), strict=True):
        written = text[length:]
        assert ended == text[:length] + written[: [*written, end].index(end) + 1]


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_the_layer_runs_through_the_kernels():
    """Wide enough for products in parts; two tokens of which one is padding, then one."""
    layer = TransformerConfig(64, 256, 256, 1, 4, 2, 32)
    config = Eagle3Config(layer, 256, 64, taps=(1, 2), norm_before_residual=True)
    params = jax.device_get(build_eagle3(config))
    params = jax.tree.map(
        lambda x: x * np.float32(4) if x.ndim > 1 else x + np.float32(0.1), params
    )
    rng = np.random.default_rng(3)
    tokens, states = (
        jnp.asarray(rng.normal(size=(2, 2, 256)).astype(np.float32)) for _ in range(2)
    )
    steps = {}
    for name in ("xla", "interpret"):
        (cache,) = functions(layer)[0](2, 64)

        def run(params, *operands, name=name):
            return merge_eagle3(config, params)(*operands, name)

        run = jax.jit(run)
        first, cache = run(params, tokens, states, jnp.array([[0, 1], [0, -1]], jnp.int32), cache)
        second, _ = run(params, tokens, states, jnp.array([[2, -1], [1, -1]], jnp.int32), cache)
        steps[name] = (first[0], first[1, 0], second[:, 0])
    for found, wanted in zip(steps["interpret"], steps["xla"], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=5e-5, atol=5e-5)


@pytest.mark.parametrize("name", ["qwen3", "fc_norm", "some tokens"])
def test_an_unrolled_head_drafts_what_it_drafts_from_a_cache(tmp_path, name):
    """Proposals that begin at every token of a text; NumPy's are of one proposal each."""
    fields, owned = heads.variant(name)
    tensors = heads.random_tensors(fields, owned)
    heads.write_head(tmp_path / "head", fields, tensors)
    params, config = load_eagle3(tmp_path / "head", "float32", num_target_layers=4)
    params.pop("token_map", None)
    table = np.asarray(target().params["embedding"])
    oracle = Head(fields, tensors, embedding=table, lm_head=table)
    rng, length = np.random.default_rng(4), 9
    text = rng.integers(0, heads.VOCAB, length).astype(np.int32)
    features = rng.normal(size=(length, 3 * heads.SIZE)).astype(np.float32)
    unrolled = jax.jit(functools.partial(unrolled_eagle3, config, num_steps=K))
    rows = unrolled(params, oracle.embedding[text][None].astype(np.float32), features[None])
    found = np.asarray(rows[:, 0]) @ oracle.lm_head.T * fields.get("logit_scale", 1.0)
    for last in range(1, length - K):
        # The rows of drafts after text[last], the text's own tokens being fed.
        drafted = text[last + 1 : last + 1 + K]
        wanted = oracle.draft_logits(text[: last + 1], features[:last], drafted)
        np.testing.assert_allclose(found[:, last], wanted, rtol=1e-4, atol=1e-4)
