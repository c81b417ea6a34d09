"""The decoder: steps through the cache give what a whole forward gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_features import FEATURES

from specjax.models import TransformerConfig, build, causal_hidden
from specjax.models.decoder.attention import attend
from specjax.models.decoder.shared_math import AttentionSpec

CONFIG = TransformerConfig(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
FULL = dataclasses.replace(CONFIG, **FEATURES, tie_word_embeddings=False, embedding_scale=24**0.5)
LENGTH, SLOTS = 10, 16


@pytest.fixture(scope="module", params=[CONFIG, FULL], ids=["plain", "full"])
def config(request):
    return request.param


@pytest.fixture(scope="module")
def model(config):
    model = build(config, seed=3)
    # Larger weights than at the start of a training, so that attention is not uniform.
    return dataclasses.replace(model, params=jax.tree.map(lambda a: a * 8, model.params))


@pytest.fixture(scope="module")
def token_ids():
    ids = jax.random.randint(jax.random.key(1), (2, LENGTH), 0, CONFIG.vocab_size, jnp.int32)
    return np.asarray(ids)


def span(start, stop, batch=2):
    return np.broadcast_to(np.arange(start, stop, dtype=np.int32)[None], (batch, stop - start))


def assert_close(a, b):
    np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5)


# Compiled, as a loop runs it: operation by operation it is a hundred compilations.
_apply = jax.jit(lambda model, *tokens: model.apply(model.params, *tokens))


def apply_model(model, token_ids, positions, cache=None):
    cache = model.init_cache(token_ids.shape[0], SLOTS) if cache is None else cache
    return _apply(model, token_ids, positions, cache)


@pytest.mark.once
def test_the_forward_for_training_is_the_forward_through_the_cache(config, model, token_ids):
    hidden, _ = apply_model(model, token_ids, span(0, LENGTH))
    causal = jax.jit(causal_hidden, static_argnums=0)(config, model.params, token_ids)
    assert_close(causal, hidden)


@pytest.mark.once
def test_tap_k_is_the_residual_stream_after_k_layers(config, model, token_ids):
    """That of a model of the first k layers, whose norm is taken back."""
    taps, params = (2, 0, 1), model.params
    # Large: else a norm would not tell a stream from the same stream normed.
    config = dataclasses.replace(config, rms_norm_eps=0.5)
    model = build(config, params)
    operands = (token_ids, span(0, LENGTH), model.init_cache(2, SLOTS), taps)
    apply = jax.jit(model.apply_with_taps, static_argnums=4)
    hidden, features, cache = apply(params, *operands)
    wanted, own = apply_model(model, token_ids, span(0, LENGTH))
    jax.tree.map(assert_close, (hidden, cache), (wanted, own))
    stream = dict(zip(taps, jnp.split(features, 3, axis=-1), strict=True))
    scale = config.embedding_scale or 1.0
    assert_close(stream[0], np.asarray(params["embedding"])[token_ids] * np.float32(scale))
    weight = jnp.full((24,), 0.7 - config.norm_offset)
    for tap in (1, 2):
        windows = config.layer_windows[:tap]
        few = dataclasses.replace(config, num_hidden_layers=tap, layer_windows=windows)
        layers = {n: params["layers"][n] for n in range(tap)}
        part = build(few, params | {"layers": layers, "norm": {"weight": weight}})
        normed, _ = apply_model(part, token_ids, span(0, LENGTH))
        mean = jnp.mean(stream[tap] ** 2, axis=-1, keepdims=True)
        assert_close(normed * jnp.sqrt(mean + config.rms_norm_eps) / 0.7, stream[tap])


@pytest.mark.parametrize("taps", [(0, 3), (-1,), ()])
def test_taps_that_the_model_has_not_are_refused_in_a_sentence(model, token_ids, taps):
    operands = (token_ids, span(0, LENGTH), model.init_cache(2, SLOTS), taps)
    with pytest.raises(ValueError, match="from 0, the embeddings, to 2, all layers of this model"):
        model.apply_with_taps(model.params, *operands)


# With the features of all families: without them the cache is that of the tests above.
only_full = pytest.mark.parametrize("config", [FULL], ids=["full"], indirect=True, scope="module")


@pytest.mark.once
@only_full
@pytest.mark.parametrize("pieces", [(1,) * LENGTH, (3, 1, 6)])
def test_tokens_fed_in_pieces_give_what_they_give_at_once(model, token_ids, pieces):
    whole, _ = apply_model(model, token_ids, span(0, LENGTH))
    cache, start, outputs = None, 0, []
    for size in pieces:
        stop = start + size
        hidden, cache = apply_model(model, token_ids[:, start:stop], span(start, stop), cache)
        outputs.append(hidden)
        start = stop
    assert_close(np.concatenate(outputs, axis=1), whole)


@pytest.mark.once
@only_full
def test_a_ragged_batch_gives_what_each_request_gives_alone(model, token_ids):
    positions = np.where(span(0, LENGTH) < np.array([[LENGTH], [4]]), span(0, LENGTH), -1)
    hidden, cache = apply_model(model, token_ids, positions)
    alone, single_cache = apply_model(model, token_ids[1:, :4], span(0, 4, 1))
    assert_close(hidden[1, :4], alone[0])
    for together, single in zip(jax.tree.leaves(cache), jax.tree.leaves(single_cache), strict=True):
        assert_close(together[1], single[0])


@pytest.mark.once
@only_full
def test_a_request_does_not_depend_on_where_padding_stands(model, token_ids):
    padded = np.insert(token_ids, [0, 3], 7, axis=1)
    positions = np.insert(span(0, LENGTH), [0, 3], -1, axis=1)
    hidden, _ = apply_model(model, padded, positions)
    whole, _ = apply_model(model, token_ids, span(0, LENGTH))
    assert_close(hidden[:, -1], whole[:, -1])


def test_padding_writes_nothing_and_gives_finite_numbers(model, token_ids):
    _, cache = apply_model(model, token_ids, span(0, LENGTH))
    hidden, after = apply_model(model, token_ids[:, :3], np.full((2, 3), -1, np.int32), cache)
    assert jnp.isfinite(hidden).all()
    jax.tree.map(np.testing.assert_array_equal, after, cache)


@pytest.mark.once
@pytest.mark.parametrize(("size", "output"), [(1e15, 1.0), (1e20, np.nan)])
def test_only_visible_slots_have_weight_whatever_the_scores(size, output):
    """Also where each visible score is below any finite number for masked ones, or overflows."""
    query = jnp.full((4,), size)
    heads = jnp.stack([query, -query, jnp.ones(4)])[None, None]
    cache = tuple(jnp.zeros((1, 1, 8, 4)).at[:, :, 1:].set(x) for x in (1.0, 100.0))
    no_rotation = (jnp.ones((1, 1, 1, 2)), jnp.zeros((1, 1, 1, 2)))
    spec = AttentionSpec(scale=0.5)
    y, _ = attend(heads, no_rotation, jnp.zeros((1, 1), jnp.int32), cache, spec=spec)
    np.testing.assert_array_equal(y[0, 0], output)


@pytest.mark.once
@only_full
def test_a_rewind_leaves_no_trace(model, token_ids):
    _, cache = apply_model(model, token_ids, span(0, LENGTH))
    other = (token_ids[:, 5:8] + 1) % CONFIG.vocab_size
    rewound, _ = apply_model(model, other, span(5, 8), cache)
    # Padded at the end, in the program of a whole text.
    text = np.concatenate([token_ids[:, :5], other, token_ids[:, 8:]], axis=1)
    fresh, _ = apply_model(model, text, np.where(span(0, LENGTH) < 8, span(0, LENGTH), -1))
    logits = model.logits(model.params, rewound)
    assert_close(logits, model.logits(model.params, fresh[:, 5:8]))
    assert logits.shape == (2, 3, CONFIG.vocab_size)


def test_positions_change_the_hidden_states(model, token_ids):
    in_order, _ = apply_model(model, token_ids, span(0, LENGTH))
    other_order, _ = apply_model(model, token_ids[:, ::-1], span(0, LENGTH)[:, ::-1])
    assert_close(other_order[:, ::-1], in_order)
    reversed_tokens, _ = apply_model(model, token_ids[:, ::-1], span(0, LENGTH))
    assert jnp.abs(in_order[:, -1] - reversed_tokens[:, 0]).max() > 1e-2


def test_models_of_equal_configurations_share_one_compilation():
    traces = []

    @jax.jit
    def step(model, token_ids, positions, cache):
        traces.append(1)
        return model.apply(model.params, token_ids, positions, cache)

    ids = jnp.zeros((1, 1), jnp.int32)
    for seed in (0, 1):
        model = build(dataclasses.replace(CONFIG), seed=seed)
        step(model, ids, ids, model.init_cache(1, 4))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "layers_by", ["xla", pytest.param("interpret", marks=pytest.mark.interpret)]
)
def test_a_program_holds_each_kind_of_layer_once_whatever_the_depth(layers_by):
    """Two kinds here: layers with a window and without, and the first reads another norm's sums."""

    def lowered(depth):
        config = dataclasses.replace(
            CONFIG, num_hidden_layers=depth, layer_windows=(4, None) * (depth // 2)
        )
        model = jax.eval_shape(lambda: build(config, implementation=layers_by))
        cache = jax.eval_shape(lambda: model.init_cache(2, 16))
        ids = jax.ShapeDtypeStruct((2, 1), jnp.int32)
        return jax.jit(model.apply).lower(model.params, ids, ids, cache).as_text()

    counts = [(text.count("dot_general"), text.count("func.func")) for text in map(lowered, (4, 6))]
    assert counts[0] == counts[1]


def test_a_window_hides_the_tokens_before_it():
    windowed = dataclasses.replace(CONFIG, layer_windows=(3, 3))
    model = build(windowed, seed=3)
    ids = np.random.default_rng(1).integers(0, CONFIG.vocab_size - 1, (2, LENGTH), np.int32)
    reference, _ = apply_model(model, ids, span(0, LENGTH))
    # Two layers of three tokens reach four tokens back.
    changed = ids + (np.arange(LENGTH, dtype=np.int32) == LENGTH - 6)
    other, _ = apply_model(model, changed, span(0, LENGTH))
    assert_close(other[:, -1], reference[:, -1])
    assert jnp.abs(other[:, -2] - reference[:, -2]).max() > 1e-5


def test_a_soft_cap_is_trained_by_one_implementation_only():
    params = build(FULL).params
    with pytest.raises(ValueError, match="implementation is 'cudnn'; a model with attention_soft"):
        causal_hidden(FULL, params, jnp.ones((1, 3), jnp.int32), "cudnn")


@pytest.mark.once
def test_the_cache_may_be_bfloat16(config):
    model = build(dataclasses.replace(config, dtype="bfloat16"))
    hidden, cache = apply_model(model, np.ones((1, 3), np.int32), span(0, 3, 1))
    assert {a.dtype for a in jax.tree.leaves((hidden, cache))} == {jnp.dtype("bfloat16")}


def test_heads_that_cannot_share_keys_are_refused():
    with pytest.raises(ValueError, match="multiple of num_key_value_heads"):
        dataclasses.replace(CONFIG, num_key_value_heads=3)
    with pytest.raises(ValueError, match="head_dim is 5; it needs to be even"):
        dataclasses.replace(CONFIG, head_dim=5)
