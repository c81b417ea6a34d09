"""A step of decoding through the kernels is what plain JAX gives, for every kind of layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import has_gpu

import specjax
from specjax.implementation import Implementation
from specjax.models import RopeScaling, TransformerConfig, build
from specjax.models.decoder import attention
from specjax.models.decoder import decode_ops as kernel_ops
from specjax.models.decoder.layers import rms_norm
from specjax.models.decoder.pallas.attention_kernels import num_active_splits
from specjax.models.decoder.pallas.kv_split import VisibleBlocks
from specjax.models.decoder.pallas.qkv import PreparedQKV, prepare_qkv_kernel
from specjax.models.decoder.pallas.request_qkv import QKVOperands
from specjax.models.decoder.pallas.tilings import DecodeConfig, attention_tiling
from specjax.models.decoder.shared_math import AttentionSpec, NormSpec
from specjax.pallas.launch import launch, output

# Wide enough for products in parts, and for heads of every kind of tile.
LLAMA = TransformerConfig(
    vocab_size=64,
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    tie_word_embeddings=False,
    rope_scaling=RopeScaling("llama3", 4.0, 1.0, 4.0, 8),
)
KINDS = {
    "llama": LLAMA,
    "qwen": dataclasses.replace(LLAMA, qkv_bias=True, qk_norm=True, num_key_value_heads=1),
    "gemma": dataclasses.replace(
        LLAMA,
        num_hidden_layers=2,
        qk_norm=True,
        out_bias=True,
        sandwich_norms=True,
        norm_offset=1.0,
        layer_windows=(40, None),
        local_rope_theta=100.0,
        attention_softcap=5.0,
        hidden_act="gelu_pytorch_tanh",
    ),
}
CONTEXT, SLOTS = 90, 160
# On the GPU "float32" products of XLA and of the kernels differ in the tensor cores' rounding.
TOLERANCE = 1e-2 if has_gpu() else 5e-5

# Some tests call kernels without a public call, which would silence JAX's warning.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@pytest.fixture(
    params=[
        pytest.param("interpret", marks=pytest.mark.interpret),
        pytest.param(None, marks=pytest.mark.gpu, id="triton"),
    ]
)
def kernels(request):
    return request.param


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


def in_units_of_rows(found, wanted):
    """Both in units of the wanted rows' root mean square: taps are not normed, as states are."""
    scale = np.sqrt(np.mean(wanted**2, axis=-1, keepdims=True))
    scale = np.where(scale == 0, 1, scale)
    return found / scale, wanted / scale


def larger(x):
    """Four times a matrix, a vector and a tenth, in its dtype."""
    return x * x.dtype.type(4) if x.ndim > 1 else x + x.dtype.type(0.1)


def random_ids(seed, shape):
    ids = jax.random.randint(jax.random.key(seed), shape, 0, LLAMA.vocab_size, jnp.int32)
    return np.asarray(ids)


@functools.cache
def prefill(config, dtype):
    """Parameters whose attention is not uniform, two prompts' lengths and cache, in plain JAX."""
    model = build(dataclasses.replace(config, dtype=dtype), seed=3, implementation="xla")
    params = jax.tree.map(larger, jax.device_get(model.params))
    lengths = np.array([CONTEXT, CONTEXT - 25], np.int32)
    place = np.arange(CONTEXT, dtype=np.int32)[None]
    positions = np.where(place < lengths[:, None], place, -1)
    ids = random_ids(0, positions.shape)
    _, cache = jax.jit(model.apply)(params, ids, positions, model.init_cache(2, SLOTS))
    return params, lengths, cache


def taps_of(config):
    """The embeddings and the stream after every layer."""
    return tuple(range(config.num_hidden_layers + 1))


# Tokens of each request in steps that follow one another, and how many of them are taken back.
STEPS = [((3, 1), 2), ((1, 1), 0), ((0, 3), 0), ((3, 2), 0)]


@functools.cache
def decode(config, implementation, dtype="float32", width=0):
    """Hidden states and taps of steps, zeros where a request had no token, and the cache.

    width: least number of columns of a step; one of as many as another shares its program.
    """
    params, lengths, cache = prefill(config, dtype)
    config = dataclasses.replace(config, dtype=dtype)
    apply = build(config, params, implementation=implementation).apply_with_taps
    apply = jax.jit(apply, static_argnums=4)
    states, taps = [], []
    for number, (sizes, taken_back) in enumerate(STEPS):
        place = np.arange(max(*sizes, width), dtype=np.int32)[None]
        fed = place < np.array(sizes)[:, None]
        positions = np.where(fed, lengths[:, None] + place, -1)
        ids = random_ids(number, fed.shape)
        hidden, features, cache = apply(params, ids, positions, cache, taps_of(config))
        hidden, features = (np.asarray(x, np.float32) for x in (hidden, features))
        assert np.isfinite(hidden).all()
        states.append(np.where(fed[..., None], hidden, 0))
        taps.append(np.where(fed[..., None], features, 0))
        lengths = (
            lengths + np.array(sizes, np.int32) - np.minimum(sizes, taken_back, dtype=np.int32)
        )
    return states, taps, jax.device_get(cache)


# Steps of one token are steps of one column, and in the larger program of three columns.
@pytest.mark.parametrize(
    ("kind", "alone", "width"),
    [
        ("llama", True, 1),
        ("qwen", False, 3),
        pytest.param("gemma", True, 3, marks=pytest.mark.checks),
    ],
)
def test_steps_through_the_kernels_are_those_of_plain_jax(kind, alone, width, kernels):
    # Two splits of the cache, so that each has blocks to go through.
    through = Implementation(kernels, (DecodeConfig(alone, num_kv_splits=2),))
    *wanted, cache = decode(KINDS[kind], "xla", width=width)
    *found, own = decode(KINDS[kind], through, width=width)
    for step, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        # Each hidden state and each tap of it by itself.
        rows = (x.reshape(*x.shape[:2], -1, KINDS[kind].hidden_size) for x in (step, other))
        close(*in_units_of_rows(*rows))
    for entry, other in zip(jax.tree.leaves(own), jax.tree.leaves(cache), strict=True):
        close(entry, other)


@pytest.mark.gpu
def test_short_floats_err_as_much_through_the_kernels_as_without():
    exact, _, _ = decode(LLAMA, "xla")
    plain, _, _ = decode(LLAMA, "xla", "bfloat16")
    found, _, _ = decode(LLAMA, None if has_gpu() else "interpret", "bfloat16")

    def error(steps):
        pairs = zip(steps, exact, strict=True)
        return [np.linalg.norm(x - y) for x, y in pairs]

    for ours, theirs in zip(error(found), error(plain), strict=True):
        assert 0 < ours < 1.5 * theirs


NORM = NormSpec(20, 0.3)


def heads(batch, tokens, groups, shared, head_dim, slots, *, parts=1, seed=0):
    """A case of attention alone: what is projected, cosines and sines, and a full cache."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    width = (groups * shared + 2 * groups) * head_dim
    projected = normal(parts, batch, tokens, width)
    squares = jnp.asarray(rng.uniform(1, 9, (batch, tokens, 3)).astype(np.float32))
    cache = tuple(normal(batch, groups, slots, head_dim) for _ in range(2))
    angles = rng.uniform(0, 6, (batch, tokens, 1, head_dim // 2)).astype(np.float32)
    cos_sin = (jnp.cos(angles), jnp.sin(angles))
    return kernel_ops.PartialProduct(projected, squares), cos_sin, cache


NO_WEIGHTS = kernel_ops.QKVWeights()


def norms_of_heads(head_dim):
    """Norms of queries and of keys, with weights that differ."""
    weights = np.random.default_rng(1).normal(1, 0.5, (2, head_dim)).astype(np.float32)
    return kernel_ops.QKVWeights(None, *map(jnp.asarray, weights), NormSpec(head_dim, 0.2))


def attend(implementation, spec, weights=NO_WEIGHTS, **choices):
    """Attention to a cache of (product, cosines and sines, positions, cache), jitted.

    By default two programs share a key-value head's cache, so that each has blocks to go through.
    """
    config = DecodeConfig(**{"num_kv_splits": 2, **choices})
    choice = kernel_ops.KernelChoice(config, 227 * 1024, False, implementation == "interpret")

    def plain(qkv, cos_sin, positions, cache):
        parts = qkv.parts.reshape(*qkv.parts.shape[:3], -1, cache[0].shape[3])
        squares = None if qkv.squares is None else qkv.squares[:, :, None]
        projected = kernel_ops.PartialProduct(parts, squares).reduce(NORM)[:, : positions.shape[1]]
        if weights.head_norm is not None:
            groups, num_heads = cache[0].shape[1], parts.shape[3]
            q, k, v = jnp.split(projected, [num_heads - 2 * groups, num_heads - groups], axis=2)
            q = rms_norm(q, weights.query_norm[None, None, None], weights.head_norm)
            k = rms_norm(k, weights.key_norm[None, None, None], weights.head_norm)
            projected = jnp.concatenate([q, k, v], axis=2)
        return attention.attend(projected, cos_sin, positions, cache, spec=spec)

    def kernels(*operands):
        return kernel_ops.attention(*operands, choice, spec=spec, norm=NORM, weights=weights)

    return jax.jit(plain if implementation == "xla" else kernels)


POSITIONS = {
    "the first tokens of all": [[0, 1, 2], [0, -1, -1]],
    "the last slots": [[197, 198, 199], [63, 64, 65]],
    "past the end": [[198, 199, 200], [62, 63, 64]],
    "in no order": [[70, 3, 64], [5, 4, -1]],
    # The window of seven begins with the last slot of a block.
    "after a block": [[69, 70, 71], [133, -1, -1]],
    "no token": [[-1, -1, -1], [-1, -1, -1]],
}


@pytest.mark.parametrize("alone", [True, False], ids=["few requests", "more requests"])
@pytest.mark.parametrize(
    ("limits", "has_norms"),
    [((None, None), False), ((7, 3.0), True)],
    ids=["all", "window, soft cap and norms of heads"],
)
def test_tokens_anywhere_see_what_plain_jax_lets_them_see(limits, has_norms, alone, kernels):
    spec, head_dim = AttentionSpec(0.3, *limits), 16
    norms = norms_of_heads(head_dim) if has_norms else NO_WEIGHTS
    projected, cos_sin, cache = heads(2, 3, 2, 3, head_dim, 200, parts=2)
    plain = attend("xla", spec, norms)
    ours = attend(kernels, spec, norms, prepares_in_attention=alone)
    for name, place in POSITIONS.items():
        place = jnp.array(place, jnp.int32)
        y, written = ours(projected, cos_sin, place, cache)
        wanted, held = plain(projected, cos_sin, place, cache)
        # What a token past the end of the cache sees is not promised.
        seen = ((place >= 0) & (place < 200))[..., None]
        assert bool(jnp.isfinite(y).all()), name
        close(jnp.where(seen, y, 0), jnp.where(seen, wanted, 0))
        for entry, other in zip(written, held, strict=True):
            close(entry, other)


@pytest.mark.parametrize(
    ("alone", "quick"),
    [(True, True), (False, True), (False, False)],
    ids=["few requests", "more requests", "a launch of its own"],
)
def test_what_a_row_does_not_see_is_not_in_it_and_what_it_sees_is_not_hidden(alone, quick, kernels):
    spec, (groups, shared, head_dim) = AttentionSpec(0.3), (2, 3, 16)
    projected, cos_sin, cache = heads(2, 3, groups, shared, head_dim, 70)
    calm = projected.parts.reshape(1, 2, 3, -1, head_dim)
    key_head = groups * shared + 1
    together = jnp.array([[5, 6, 7], [5, 6, 7]], jnp.int32)
    anew = jnp.array([[6, -1, -1], [5, 6, 7]], jnp.int32)
    after = jnp.array([[8, -1, -1], [8, 9, 10]], jnp.int32)

    for name in ("xla", kernels):
        step = attend(name, spec, prepares_in_attention=alone, combines_in_attention=quick)

        def run(parts, positions, cache, step=step):
            product = kernel_ops.PartialProduct(parts.reshape(*parts.shape[:3], -1))
            y, cache = step(product, cos_sin, positions, cache)
            # What padding sees is not promised.
            y = jnp.where((positions >= 0)[..., None], y, 0)
            return y.reshape(2, 3, groups, -1), cache

        wanted, filled = run(calm, together, cache)
        wanted_anew, wanted_after = run(calm, anew, filled)[0], run(calm, after, filled)[0]
        for head in (key_head, key_head + groups):
            for value in (jnp.nan, jnp.inf, -jnp.inf):
                found, spoilt = run(calm.at[0, 0, 1, head, 3].set(value), together, cache)
                spoils = jnp.zeros((2, 3, groups), bool).at[0, 1:, 1].set(True)[..., None]
                np.testing.assert_array_equal(found, jnp.where(spoils, jnp.nan, wanted))
                # The next step writes the token's slot anew, and sees nothing after it.
                np.testing.assert_array_equal(run(calm, anew, spoilt)[0], wanted_anew)
                # Or sees the token, which had been kept.
                spoils = jnp.zeros((2, 3, groups), bool).at[0, 0, 1].set(True)[..., None]
                found, _ = run(calm, after, spoilt)
                np.testing.assert_array_equal(found, jnp.where(spoils, jnp.nan, wanted_after))


def init_nothing(*prompts):
    return ()


@pytest.mark.checks
def test_a_drafted_token_without_finite_numbers_is_rejected_and_changes_nothing(kernels):
    config, bad = TransformerConfig(64, 32, 48, 1, 2, 1, 16), 60
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, build(config, seed=3).params)
    params |= {"embedding": params["embedding"].at[bad].set(jnp.nan)}
    models = {
        name: build(config, params, implementation=name) for name in dict.fromkeys(["xla", kernels])
    }

    def propose(params, state, token_ids, hidden, inputs, *, config, implementation):
        width = config.num_speculative_tokens
        ids = jnp.full((len(token_ids), width), bad, jnp.int32).at[:, 0].set(params)
        return specjax.Draft(ids, num_tokens=inputs.num_tokens), state

    def decode(implementation, drafter):
        output = specjax.generate(
            models[implementation],
            drafter,
            (jnp.array([[7, 8, 9], [10, 11, -1]]), jnp.array([3, 2])),
            keys=jax.random.key(0),
            temperature=jnp.array([0.0, 1.0]),
            max_new_tokens=12,
            config=specjax.SpeculativeConfig(num_speculative_tokens=2),
            sampling=specjax.SamplingParams(allowed=jnp.arange(64) != bad),
        )
        assert output.finish.tolist() == [1, 1]
        return output.token_ids

    wanted = decode("xla", None)
    assert not jnp.any(wanted == bad)
    for first in (bad, int(wanted[0, 3])):
        drafter = specjax.whole_prompt_drafter(jnp.int32(first), init_nothing, propose)
        found = decode(kernels, drafter)
        np.testing.assert_array_equal(found[0], wanted[0])


@pytest.mark.parametrize(
    ("head_dim", "tokens", "shared", "alone"),
    [
        (24, 1, 1, True),
        (64, 16, 4, False),
        pytest.param(64, 16, 4, True, marks=pytest.mark.checks),
        pytest.param(96, 2, 7, False, marks=pytest.mark.checks),
        # Of float32 heads this wide fewer iterations are loaded at a time.
        pytest.param(256, 1, 1, False, marks=pytest.mark.checks),
    ],
)
def test_heads_of_any_size_and_as_many_tokens_as_fit(head_dim, tokens, shared, alone, kernels):
    spec = AttentionSpec(head_dim**-0.5)
    projected, cos_sin, cache = heads(1, tokens, 2, shared, head_dim, 70, parts=3)
    positions = 50 + jnp.arange(tokens, dtype=jnp.int32)[None]
    operands = (projected, cos_sin, positions, cache)
    wanted, _ = attend("xla", spec)(*operands)
    found, _ = attend(kernels, spec, prepares_in_attention=alone)(*operands)
    close(found, wanted)


@pytest.mark.parametrize(
    ("parts", "at_once", "quick"),
    [
        pytest.param(1, 4, True, marks=pytest.mark.checks),
        (4, 4, True),
        pytest.param(4, 1, True, marks=pytest.mark.checks),
        (4, 4, False),
    ],
    ids=["one split", "all at once", "one after the other", "a launch of its own"],
)
def test_splits_of_a_cache_combine_to_one_softmax(parts, at_once, quick, kernels):
    spec = AttentionSpec(0.3, 90, 3.0)
    # Two tokens and one of padding, for which the tile of the two has no room.
    projected, cos_sin, cache = heads(5, 3, 2, 7, 80, 200, parts=2)
    cos_sin = tuple(x[:, :2] for x in cos_sin)
    places = [[198, 199], [62, 63], [0, -1], [-1, -1], [130, 129]]
    positions = jnp.array(places, jnp.int32)
    operands = (projected, cos_sin, positions, cache)
    choices = {
        "num_kv_splits": parts,
        "num_register_splits": at_once,
        "combines_in_attention": quick,
    }
    wanted, _ = attend("xla", spec)(*operands)
    found, _ = attend(kernels, spec, prepares_in_attention=False, **choices)(*operands)
    seen = (positions >= 0)[..., None]
    close(jnp.where(seen, found[:, :2], 0), jnp.where(seen, wanted, 0))
    assert not jnp.any(found[:, 2]), "padding is not zero"


def test_a_long_request_has_more_splits_and_its_bits_do_not_depend_on_the_others(kernels):
    spec = AttentionSpec(0.3)
    projected, cos_sin, cache = heads(5, 2, 2, 3, 16, 600)
    places = [[598, 599], [62, 63], [0, -1], [-1, -1], [130, 129]]
    positions = jnp.array(places, jnp.int32)
    choices = {"prepares_in_attention": False, "num_kv_splits": 1, "blocks_per_split": 2}
    ours = attend(kernels, spec, **choices)
    tiling = attention_tiling(
        positions.shape,
        cache[0].shape,
        num_padded_tokens=2,
        queries_per_kv=3,
        itemsize=4,
        shared_memory_bytes=227 * 1024,
        config=DecodeConfig(**choices),
    )
    blocks = [VisibleBlocks(*map(jnp.int32, (0, n, 0))) for n in (0, 1, 2, 3, 10)]
    assert [int(num_active_splits(x, tiling)) for x in blocks] == [1, 1, 1, 2, 5]
    found, written = ours(projected, cos_sin, positions, cache)
    wanted, held = attend("xla", spec)(projected, cos_sin, positions, cache)
    seen = (positions >= 0)[..., None]
    close(jnp.where(seen, found, 0), jnp.where(seen, wanted, 0))
    for entry, other in zip(written, held, strict=True):
        close(entry, other)
    others = positions.at[1:].set(jnp.array([[5, 6], [598, 599], [300, -1], [-1, -1]]))
    found_anew, _ = ours(projected, cos_sin, others, cache)
    np.testing.assert_array_equal(found_anew[0], found[0])


def test_programs_that_share_a_text_add_its_segments_as_one_program_does(kernels):
    spec = AttentionSpec(0.3)
    projected, cos_sin, cache = heads(2, 1, 2, 4, 16, 2400)
    # Ten segments, one more than are loaded at a time, and one.
    operands = (projected, cos_sin, jnp.array([[2399], [5]], jnp.int32), cache)
    shared, whole = (
        attend(kernels, spec, row_invariant=True, min_whole_programs=most)(*operands)[0]
        for most in (256, 1)
    )
    wanted, _ = attend("xla", spec)(*operands)
    close(whole[:, :1], wanted)
    close(shared, whole)
    if kernels == "triton":  # XLA rounds the interpreter's two programs otherwise.
        np.testing.assert_array_equal(shared, whole)


@pytest.mark.parametrize(
    ("limits", "shared", "splits"),
    [((None, None), 7, 2), ((33, 3.0), 3, 1)],
    ids=["all", "window and soft cap"],
)
def test_tokens_of_a_prompt_are_tiles_and_see_what_plain_jax_lets_them_see(
    limits, shared, splits, kernels
):
    spec, head_dim = AttentionSpec(0.3, *limits), 16
    norms = norms_of_heads(head_dim)
    projected, cos_sin, cache = heads(2, 50, 2, shared, head_dim, 200, parts=2)
    # A chunk after 120 tokens, and one with an end, of which two values are not finite.
    positions = jnp.arange(50, dtype=jnp.int32)[None] + jnp.array([[120], [0]], jnp.int32)
    positions = positions.at[1, 37:].set(-1).at[0, 47:].set(-1)
    values = projected.parts.reshape(2, 2, 50, -1, head_dim)
    values = values.at[0, 0, 30, -1, 2].set(jnp.inf).at[0, 1, 36, -2, 0].set(jnp.nan)
    projected = projected._replace(parts=values.reshape(projected.parts.shape))
    operands = (projected, cos_sin, positions, cache)
    wanted, held = attend("xla", spec, norms)(*operands)
    found, written = attend(kernels, spec, norms, num_kv_splits=splits)(*operands)
    seen = (positions >= 0)[..., None]
    assert 0 < int(jnp.isnan(jnp.where(seen, wanted, 0)).sum()) < wanted.size // 3
    close(jnp.where(seen, found, 0), jnp.where(seen, wanted, 0))
    assert not jnp.any(jnp.where(seen, 0, found)), "rows without a token are not zero"
    for entry, other in zip(written, held, strict=True):
        close(entry, other)


def test_splits_are_counted_from_zero_whatever_the_memory_held(kernels):
    batch, tokens, groups, shared, head_dim = 5, 2, 2, 3, 16
    projected, cos_sin, cache = heads(batch, tokens, groups, shared, head_dim, 200)
    positions = 150 + jnp.tile(jnp.arange(tokens, dtype=jnp.int32), (batch, 1))
    parts = projected.parts.reshape(1, batch, tokens, -1, head_dim)
    cos, sin = (x[:, :, 0] for x in cos_sin)
    operands = QKVOperands(parts, projected.squares, cos, sin, positions, *cache)
    # The interpreter begins integers at zero, which a GPU does not. Three tiles for each head.
    held = jnp.full((batch * groups * 3,), 7, jnp.uint32)

    def kernel(references, out):
        prepare_qkv_kernel(references[0], out, norm=NORM, head_norm=None, token_tile=tokens)

    prepared = launch(
        kernel,
        (operands, held),
        PreparedQKV(
            output((batch, tokens, groups * shared, head_dim)),
            *cache,
            held,
        ),
        num_programs=batch * groups * (shared + 1),
        num_warps=4,
        interpret=kernels == "interpret",
    )
    np.testing.assert_array_equal(prepared.counters, 0)


@pytest.mark.checks
def test_a_batch_under_vmap_is_each_by_itself(kernels):
    # Each is a batch of one, for which the launch of few requests is chosen.
    through = Implementation(kernels, (DecodeConfig(True),))
    params, lengths, cache = prefill(LLAMA, "float32")
    plain, apply = (build(LLAMA, params, implementation=x).apply for x in ("xla", through))
    ids, positions = np.array([[3, 4], [5, 6]], np.int32), lengths[:, None] + np.arange(2)
    positions = positions.astype(np.int32)
    wanted, _ = jax.jit(plain)(params, ids, positions, cache)

    def by_itself(ids, positions, cache):
        cache = jax.tree.map(lambda x: x[None], cache)
        return apply(params, ids[None], positions[None], cache)[0][0]

    close(jax.jit(jax.vmap(by_itself))(ids, positions, cache), wanted)


@pytest.mark.checks
def test_float16_holds_large_activations_through_the_kernels(kernels):
    # One coordinate is some thousands, as in the first layers of large models.
    config = dataclasses.replace(LLAMA, dtype="float16", num_hidden_layers=1)
    model = build(config, seed=3)
    params = model.params | {"embedding": model.params["embedding"].at[:, 5].set(3000)}
    params["layers"][0]["attention_norm"]["weight"] *= 25
    ids = jnp.array([[3, 4, 5]])

    def read(implementation):
        apply = jax.jit(build(config, params, implementation=implementation).apply)
        hidden, _ = apply(params, ids, ids - 3, model.init_cache(1, 64))
        return hidden.astype(jnp.float32)

    np.testing.assert_allclose(read(kernels), read("xla"), atol=0.02)


@pytest.mark.checks
def test_derivatives_and_wide_positions_are_those_of_plain_jax(kernels):
    config = TransformerConfig(64, 32, 48, 1, 2, 1, 16)
    model = build(config, seed=3)
    params = jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, model.params)
    cache = model.init_cache(2, 20)
    cache = jax.tree.map(lambda x: jax.random.normal(jax.random.key(0), x.shape), cache)
    ids = jnp.array([[3, 4], [5, 6]])

    def read(implementation):
        apply = build(config, params, implementation=implementation).apply

        def loss(params, positions):
            hidden, _ = apply(params, ids, positions, cache)
            return jnp.sum(jnp.sin(hidden)), hidden

        @jax.jit
        def both(params, positions):
            return loss(params, positions)[1], jax.grad(loss, has_aux=True)(params, positions)[0]

        with jax.enable_x64(True):
            return both(params, ids.astype(jnp.int64))

    (hidden, slopes), (wanted, steepness) = read(kernels), read("xla")
    close(hidden, wanted)
    for found, wanted in zip(jax.tree.leaves(slopes), jax.tree.leaves(steepness), strict=True):
        assert jnp.linalg.norm(wanted) > 0
        assert jnp.linalg.norm(found - wanted) <= TOLERANCE * jnp.linalg.norm(wanted)


def test_a_derivative_by_some_weights_alone_is_that_of_plain_jax(kernels):
    params, lengths, cache = prefill(LLAMA, "float32")
    ids, positions = np.array([[3, 4], [5, 6]], np.int32), lengths[:, None] + np.arange(2)
    positions = positions.astype(np.int32)

    def slope(implementation, weight):
        apply = build(LLAMA, params, implementation=implementation).apply

        def loss(weight):
            layer = params["layers"][0] | {"mlp_norm": {"weight": weight}}
            hidden, _ = apply(params | {"layers": {0: layer}}, ids, positions, cache)
            return jnp.sum(jnp.sin(hidden))

        return jax.jit(jax.grad(loss))(weight)

    weight = params["layers"][0]["mlp_norm"]["weight"]
    wanted, found = slope("xla", weight), slope(kernels, weight)
    assert jnp.linalg.norm(wanted) > 0
    assert jnp.linalg.norm(found - wanted) <= TOLERANCE * jnp.linalg.norm(wanted)
