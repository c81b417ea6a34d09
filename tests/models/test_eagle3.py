"""EAGLE-3 heads against float64 NumPy: what they draft from, whatever was accepted before."""

import dataclasses
import functools

import eagle3_heads as heads
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_eagle3 import Head

import specjax
from specjax.models import TransformerConfig, build
from specjax.models.heads.eagle3 import Eagle3Config, build_eagle3, eagle3_functions
from specjax.models.heads.eagle3_drafter import eagle3_drafter
from specjax.models.heads.eagle3_folder import load_eagle3

pytestmark = pytest.mark.once

K, B, SLOTS = 3, 3, 32
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
    rng, (extend, propose) = np.random.default_rng(5), (jax.jit(drafter.extend), drafter.propose)
    propose = jax.jit(functools.partial(propose, config=CONFIG, sampling=None, history=None))
    text = rng.integers(0, heads.VOCAB, (B, SLOTS)).astype(np.int32)
    width = oracle.fields.get("target_hidden_size", heads.SIZE)
    features = rng.normal(size=(B, SLOTS, 3 * width)).astype(np.float32)
    state, lengths = drafter.init(drafter.params, B, SLOTS), np.array([7, 3, 2])

    def read(state, first, counts, size):
        """Gives the drafter tokens of the text from `first` on; what is no token is NaN."""
        place = np.arange(size)[None]
        index, inside = first[:, None] + place, place < counts[:, None]
        ids = np.take_along_axis(text, index, axis=1)
        given = np.take_along_axis(features, index[..., None], axis=1)
        given = np.where(inside[..., None], given, np.nan)
        return extend(drafter.params, state, ids, np.where(inside, index, -1), given)

    state = read(state, np.zeros(B, int), np.minimum(lengths - 1, 4), 4)
    state = read(state, np.full(B, 4), np.clip(lengths - 5, 0, None), 4)
    for committed in ([1, 4, 2], [K + 1, 1, 3], [0, 2, 1], None):
        draft, state = propose(
            drafter.params,
            state,
            text,
            jnp.zeros((B, width)),
            keys=jax.random.split(jax.random.key(int(lengths.sum())), B),
            positions=jnp.asarray(lengths, jnp.int32),
            num_tokens=jnp.full((B,), K, jnp.int32),
            temperature=jnp.ones((B,)),
            implementation=None,
        )
        for b, length in enumerate(lengths):
            drafted = np.asarray(draft.token_ids[b])
            wanted = oracle.draft_logits(text[b, :length], features[b, : length - 1], drafted)
            assert wanted.std() > 1
            np.testing.assert_allclose(draft.logits[b], wanted, rtol=1e-4, atol=1e-4)
        if committed is not None:
            state = read(state, lengths - 1, np.array(committed), K + 1)
            lengths = lengths + committed


@jax.jit
def whole_forward(model, text):
    """Logits and taps of whole texts [B, T], on an empty cache."""
    place = jnp.broadcast_to(jnp.arange(text.shape[1], dtype=jnp.int32)[None], text.shape)
    cache = model.init_cache(*text.shape)
    taps = (1, 2, 4)
    hidden, features, _ = model.apply_with_taps(model.params, text, place, cache, taps)
    return model.logits(model.params, hidden), features


def softmax(logits):
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def test_drafts_are_accepted_as_often_as_the_target_and_the_head_overlap(tmp_path):
    """q is the oracle's, by the target's taps of whole texts: the mean of sum min(p, q).

    At a temperature at which they overlap.
    """
    model, drafter, oracle = load(tmp_path, "some tokens")
    ids = heads.random_d2t(oracle.fields) + np.arange(oracle.lm_head.shape[0])
    size, rng = 64, np.random.default_rng(7)
    lengths = rng.integers(1, 6, size).astype(np.int32)
    prompts = rng.integers(0, heads.VOCAB, (size, 5)).astype(np.int32)
    options = {"keys": jax.random.key(2), "config": CONFIG, "max_new_tokens": 20}
    options |= {"temperature": 12.0, "prefill_chunk_size": 3}
    state = specjax.init(model, drafter, prompts, lengths, **options)
    excess, variance, num_accepted = 0.0, 0.0, 0
    for _ in range(4):
        lengths, drafted = np.asarray(state.lengths), np.asarray(state.draft.token_ids)
        text = np.maximum(np.asarray(state.token_ids), 0)
        for b, length in enumerate(lengths):
            text[b, length : length + K] = drafted[b]
        logits, features = map(np.asarray, whole_forward(model, text))
        pending = state.draft
        state, info = specjax.step(model, drafter, state, config=CONFIG)
        for b, length in enumerate(lengths):
            given = features[b, : length - 1].astype(np.float64)
            wanted = oracle.draft_logits(text[b, :length], given, drafted[b])
            np.testing.assert_allclose(pending.logits[b], wanted, rtol=2e-3, atol=2e-3)
            q = np.zeros((K, heads.VOCAB))
            q[:, ids] = softmax(wanted / 12)
            p = softmax(logits[b, length - 1 : length - 1 + K].astype(np.float64) / 12)
            overlap, accepted = np.minimum(p, q).sum(-1), int(info.verification.num_accepted[b])
            tested = overlap[: accepted + 1]
            excess += min(accepted, K) - tested.sum()
            variance += (tested * (1 - tested)).sum()
            num_accepted += accepted
    assert num_accepted > 80
    assert abs(excess) < 4 * variance**0.5


@pytest.mark.parametrize("num_tokens", [K, "auto"])
def test_a_greedy_text_is_the_target_s(tmp_path, num_tokens):
    costs = (1.0, 1.2, 1.4, 1.6) if num_tokens == "auto" else None
    config = specjax.SpeculativeConfig(num_tokens, step_costs=costs)
    model, drafter, _ = load(tmp_path, "llama")
    prompts = np.random.default_rng(1).integers(0, heads.VOCAB, (3, 6)).astype(np.int32)

    def generate(drafter):
        options = {"keys": jax.random.key(0), "max_new_tokens": 12, "temperature": 0.0}
        return specjax.generate(model, drafter, prompts, [6, 2, 1], config=config, **options)

    drafted, plain = generate(drafter), generate(None)
    np.testing.assert_array_equal(drafted.token_ids, plain.token_ids)


@pytest.mark.interpret
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_the_layer_runs_through_the_kernels():
    """Wide enough for products in parts; two tokens of which one is padding, then one."""
    layer = TransformerConfig(64, 256, 256, 1, 4, 2, 32)
    config = Eagle3Config(layer, 256, 64, taps=(1, 2), norm_before_residual=True)
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x + 0.1, build_eagle3(config))
    rng = np.random.default_rng(3)
    tokens, states = (
        jnp.asarray(rng.normal(size=(2, 2, 256)).astype(np.float32)) for _ in range(2)
    )
    steps = {}
    for name in ("xla", "interpret"):
        functions = eagle3_functions(config, name)
        cache = functions.init_cache(2, 64)
        run = jax.jit(functions.apply)
        first, cache = run(params, tokens, states, jnp.array([[0, 1], [0, -1]], jnp.int32), cache)
        second, _ = run(params, tokens, states, jnp.array([[2, -1], [1, -1]], jnp.int32), cache)
        steps[name] = (first[0], first[1, 0], second[:, 0])
    for found, wanted in zip(steps["interpret"], steps["xla"], strict=True):
        np.testing.assert_allclose(found, wanted, rtol=5e-5, atol=5e-5)
