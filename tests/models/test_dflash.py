"""DFlash heads against float64 NumPy: what they draft from, whatever was accepted before."""

import dataclasses
import functools

import dflash_heads as heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations
from drafter_steps import Acceptance, accepted_steps, check_greedy_texts, drafted_steps, softmax
from machine import has_gpu
from oracle_dflash import BlockHead

import specjax
from specjax.implementation import Implementation
from specjax.models import TransformerConfig, build, build_dflash, dflash_drafter, load_dflash
from specjax.models.decoder.pallas.tilings import DecodeConfig
from specjax.models.heads.dflash import DFlashConfig, init_dflash_cache, merge_dflash

pytestmark = pytest.mark.once

K = 4
CONFIG = specjax.SpeculativeConfig(num_speculative_tokens=K)
TARGET = TransformerConfig(heads.VOCAB, heads.SIZE, 40, heads.TARGET_LAYERS, 4, 2, 6)


@functools.cache
def target():
    model = build(TARGET, seed=3)
    # Larger weights than at the start of a training, so that attention is not uniform.
    return dataclasses.replace(model, params=jax.tree.map(lambda a: a * 16, model.params))


def load(folder, name):
    """A variant's drafter, read from a folder, and the same in NumPy."""
    fields, owned = heads.variant(name)
    tensors = heads.random_tensors(fields, owned)
    heads.write_head(folder / "head", fields, tensors)
    layers = heads.TARGET_LAYERS
    params, config = load_dflash(folder / "head", "float32", num_target_layers=layers)
    table = np.asarray(target().params["embedding"])
    oracle = BlockHead(fields, tensors, embedding=table, lm_head=table)
    return dflash_drafter(target(), config, params), oracle


@pytest.mark.parametrize(
    ("name", "k"), [("z-lab", 4), ("own tables", 3), ("anchor", 5), ("some tokens", 4)]
)
def test_a_block_is_drafted_from_what_the_formulas_say(tmp_path, name, k):
    """Of a ragged batch; after steps that committed from no draft to all, and other tokens."""
    drafter, oracle = load(tmp_path, name)
    steps = drafted_steps(drafter, vocab_size=heads.VOCAB, width=3 * heads.SIZE, num_drafted=k)
    for *given, logits in steps:
        wanted = oracle.draft_logits(*given)
        assert len(wanted) == k
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

    At each position, at a temperature at which they overlap.
    """
    drafter, oracle = load(tmp_path, "some tokens")
    ids = heads.random_d2t(oracle.fields) + np.arange(oracle.lm_head.shape[0])
    size, rng = 64, np.random.default_rng(7)
    lengths = rng.integers(1, 6, size).astype(np.int32)
    prompts = rng.integers(0, heads.VOCAB, (size, 5)).astype(np.int32)
    options = {"temperature": 12.0, "num_drafted": K, "num_steps": 4}
    acceptance = Acceptance(K)
    for text, length, found, accepted in accepted_steps(
        target(), drafter, prompts, lengths, **options
    ):
        logits, features = (np.asarray(x, np.float64) for x in whole_forward(target(), text))
        drafted = text[length : length + K]
        wanted = oracle.draft_logits(text[:length], features[: length - 1], drafted)
        np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
        q = np.zeros((K, heads.VOCAB))
        q[:, ids] = softmax(wanted / 12)
        acceptance.add(softmax(logits[length - 1 : length - 1 + K] / 12), q, accepted)
    acceptance.check(at_least=80)


def test_a_greedy_text_is_the_target_s_and_other_lengths_compile_nothing(tmp_path):
    """Each request drafts as many as are worth it, or none."""
    config = specjax.SpeculativeConfig("auto", step_costs=(1.0, 1.2, 1.4, 1.6))
    drafter, _ = load(tmp_path, "z-lab")
    prompts = np.random.default_rng(1).integers(0, heads.VOCAB, (3, 6)).astype(np.int32)

    def generate(drafter, lengths):
        options = {"keys": jax.random.key(0), "max_new_tokens": 12, "temperature": 0.0}
        return specjax.generate(target(), drafter, (prompts, lengths), config=config, **options)

    lengths = [6, 2, 1]
    check_greedy_texts(whole_forward, target(), generate(drafter, lengths), lengths)
    drafter, _ = load(tmp_path, "z-lab")
    with compilations() as found:
        generate(drafter, [1, 5, 3])
    assert not found


def test_a_block_beyond_the_buffer_drafts_what_it_would_in_a_larger_one(tmp_path):
    drafter, _ = load(tmp_path, "z-lab")
    text = np.random.default_rng(2).integers(0, heads.VOCAB, (1, 8)).astype(np.int32)
    features = np.random.default_rng(3).normal(size=(1, 7, 3 * heads.SIZE)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=1)
    def draft(params, slots):
        cache, place = drafter.init(params, 1, slots), jnp.arange(7, dtype=jnp.int32)[None]
        cache = drafter.extend(params, cache, text[:, :7], place, features)
        ids = jnp.pad(text, ((0, 0), (0, slots - 8)))
        numbers = jnp.array([8]), jnp.array([1]), jnp.ones(1)
        inputs = specjax.DraftInputs(jax.random.key(0), *numbers)
        hidden = jnp.zeros((1, 1))
        return drafter.propose(params, cache, ids, hidden, inputs, config=CONFIG)[0].logits

    small, large = draft(drafter.params, 8), draft(drafter.params, 32)
    np.testing.assert_allclose(small, large, rtol=1e-5, atol=1e-5)


def test_more_tokens_than_a_block_has_are_refused_in_a_sentence(tmp_path):
    for name, most in (("z-lab", 4), ("anchor", 5)):
        drafter, _ = load(tmp_path, name)
        config = specjax.SpeculativeConfig(num_speculative_tokens=most + 1)
        options = {"keys": jax.random.key(0), "max_new_tokens": 4, "config": config}
        sentence = f"num_speculative_tokens is {most + 1}; the DFlash head drafts blocks of {most}"
        with pytest.raises(ValueError, match=sentence):
            specjax.generate(target(), drafter, [[1]], **options)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(
    "kernels",
    [
        pytest.param("interpret", marks=pytest.mark.interpret),
        pytest.param(None, marks=pytest.mark.gpu, id="triton"),
    ],
)
def test_a_block_runs_through_the_kernels(kernels, alone):
    """Wide enough for products in parts, over a cache in two splits; one request drafts none."""
    layer = TransformerConfig(64, 128, 128, 1, 4, 2, 32, qk_norm=True)
    config = DFlashConfig(layer, 64, taps=(1, 2), block_size=3, mask_token_id=63)
    params = jax.device_get(build_dflash(config))
    params = jax.tree.map(
        lambda x: x * np.float32(4) if x.ndim > 1 else x + np.float32(0.1), params
    )
    rng = np.random.default_rng(1)
    table = rng.normal(size=(64, 128)).astype(np.float32)
    features = rng.normal(size=(3, 70, 256)).astype(np.float32)
    context = np.arange(70, dtype=np.int32)[None]
    context = np.where(context < np.array([[70], [3], [1]]), context, -1)
    place = np.array([[70, 71, 72], [3, 4, 5], [-1, -1, -1]], np.int32)
    ids, steps = np.array([[5, 63, 63], [9, 63, 63], [2, 63, 63]], np.int32), []
    through = Implementation(kernels, (DecodeConfig(alone, num_kv_splits=2),))
    for implementation in ("xla", through):

        def append(params, *operands, implementation=implementation):
            return merge_dflash(config, params).append(*operands, implementation)

        def apply(params, table, *operands, implementation=implementation):
            return merge_dflash(config, params, table).decoder(*operands, implementation)

        weights, cache = merge_dflash(config, params).context(), init_dflash_cache(config, 3, 90)
        append, apply = jax.jit(append), jax.jit(apply)
        for part in (slice(0, 66), slice(66, 70)):
            cache = append(params, weights, features[:, part], context[:, part], cache)
        states, cache = apply(params, table, ids, place, cache)
        steps.append((np.asarray(states)[:2], cache))
    # On a GPU the tensor cores round float32.
    tolerance = 1e-2 if has_gpu() else 5e-5
    for found, wanted in zip(*map(jax.tree.leaves, jax.device_get(steps)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance)
