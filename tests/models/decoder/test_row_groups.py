"""Rows that depend on no other row are right, and their bits are the same in any batch."""

import concurrent.futures
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import has_gpu
from scripts import run_process

from specjax.implementation import Implementation, with_row_invariance
from specjax.models import TransformerConfig, build
from specjax.models.decoder.dispatch import run_product
from specjax.models.decoder.pallas.tilings import DecodeConfig

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

LLAMA = TransformerConfig(64, 128, 256, 2, 4, 2, 32, tie_word_embeddings=False)
KINDS = {
    "llama": LLAMA,
    "gemma": dataclasses.replace(
        LLAMA,
        sandwich_norms=True,
        norm_offset=1.0,
        layer_windows=(70, None),
        attention_softcap=5.0,
    ),
    # Tiles of one token's queries, of 128 rows here and of 64 below.
    "queries": dataclasses.replace(
        LLAMA, num_hidden_layers=1, num_attention_heads=72, num_key_value_heads=1
    ),
    # The other sums that a kernel puts in order: those of biases and QK-norm.
    "everything": TransformerConfig(
        *(64, 160, 256, 1, 40, 1, 32),
        qkv_bias=True,
        out_bias=True,
        qk_norm=True,
        sandwich_norms=True,
    ),
}
# Two segments of the cache, of which the second one is read in part.
TOKENS = 280
TOLERANCE = 2e-2 if has_gpu() else 5e-5


@pytest.fixture(
    params=[
        "xla",
        pytest.param("interpret", marks=pytest.mark.interpret),
        pytest.param("triton", marks=pytest.mark.gpu),
    ]
)
def kernels(request):
    return request.param


def read(model, ids, chunk, place=0, size=1):
    """Logits of one text, which is read in chunks at a place in a batch of texts."""
    batch = np.random.default_rng(1).integers(0, 64, (size, len(ids)), np.int32)
    batch[place] = ids
    cache, rows = model.init_cache(size, len(ids) + 110), []
    apply, logits = jax.jit(model.apply), jax.jit(model.logits)
    for start in range(0, len(ids), chunk):
        part = batch[:, start : start + chunk]
        positions = np.broadcast_to(
            np.arange(start, start + part.shape[1], dtype=np.int32), part.shape
        )
        hidden, cache = apply(model.params, part, positions, cache)
        rows.append(np.asarray(logits(model.params, hidden)[place].astype(jnp.float32)))
    return np.concatenate(rows)


def weights(config):
    """Random ones, of norms and biases, too: those are ones and zeros until a model is trained."""
    params = build(config, implementation="xla").params
    return jax.tree.map(
        lambda x: x + (x.ndim == 1) * (0.3 * jnp.sin(jnp.arange(x.shape[-1]))).astype(x.dtype),
        params,
    )


def text(length=TOKENS):
    return np.random.default_rng(0).integers(0, 64, length, np.int32)


# Programs share the segments of a text, or each reads all.
@pytest.mark.parametrize(("kind", "whole"), [*((kind, 256) for kind in KINDS), ("llama", 1)])
def test_rows_are_those_of_the_plain_step(kind, whole, kernels):
    params = weights(KINDS[kind])
    plain = build(KINDS[kind], params, implementation="xla")
    implementation = Implementation(kernels, (DecodeConfig(min_whole_programs=whole),))
    ours = build(KINDS[kind], params, implementation=implementation, row_invariant=True)
    found = read(ours, text(), 140, place=1, size=2)
    np.testing.assert_allclose(found, read(plain, text(), 140), atol=TOLERANCE, rtol=TOLERANCE)


# The process of the tests leaves out passes of XLA by which these bits differed.
CACHES = """
import jax, numpy as np
from specjax.models import TransformerConfig, build
model = build(TransformerConfig(64, 128, 256, 2, 4, 2, 32), row_invariant=True)
ids = np.random.default_rng(0).integers(0, 64, (1, 48), np.int32)
positions, found = np.arange(48, dtype=np.int32)[None], []
for slots in (64, 256, 257, 512):
    hidden, _ = jax.jit(model.apply)(model.params, ids, positions, model.init_cache(1, slots))
    found.append(np.asarray(hidden))
print(all(np.array_equal(x, found[0]) for x in found))
"""


@pytest.mark.optimised
def test_bits_of_a_row_depend_on_no_length_of_the_cache(tmp_path):
    assert run_process("-c", CACHES, cwd=tmp_path) == "True\n"


def test_a_process_with_64_bit_numbers_runs():
    model = build(LLAMA, implementation="xla", row_invariant=True)
    wanted = read(model, text(4), 4)
    with jax.enable_x64(True):
        found = read(model, text(4), 4)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE, rtol=TOLERANCE)


# Chunks, a place, and the size of a batch. In float32 the interpreter's own products have no order.
MANY = [(7, 0, 1), (4, 5, 64), (280, 0, 1), (1, 2, 3), (1, 11, 17), (56, 1, 40)]


@pytest.mark.parametrize(
    ("kind", "kernels", "length", "batches"),
    [
        pytest.param(
            *("everything", "interpret", 8, [(8, 5, 8)]),
            marks=(pytest.mark.interpret, pytest.mark.checks),
        ),
        *(pytest.param(kind, "triton", TOKENS, MANY[:2], marks=pytest.mark.gpu) for kind in KINDS),
        pytest.param("llama", "triton", 3 * TOKENS, MANY[1:], marks=pytest.mark.gpu),
    ],
)
def test_bits_of_a_row_depend_on_no_chunk_place_and_batch(kind, kernels, length, batches):
    config = dataclasses.replace(KINDS[kind], dtype="bfloat16")
    model = build(config, weights(config), implementation=kernels, row_invariant=True)
    wanted = read(model, text(length), 1)
    for chunk, place, size in batches:
        found = read(model, text(length), chunk, place, size)
        assert np.array_equal(found, wanted), (chunk, place, size)


@pytest.mark.parametrize(
    ("size", "width", "kernels"),
    [
        pytest.param(160, 224, "interpret", marks=pytest.mark.interpret),
        *(
            pytest.param(*shape, "triton", marks=pytest.mark.gpu)
            for shape in ((160, 224), (736, 256), (4096, 4096), (4096, 6144))
        ),
    ],
)
def test_bits_of_a_product_depend_on_no_number_of_rows(size, width, kernels):
    """Of up to 200 rows with a matrix of an embedded or an 8B model."""
    matrix = (jax.random.normal(jax.random.key(0), (size, width)) / 64).astype(jnp.bfloat16)
    rows = jax.random.normal(jax.random.key(1), (1, 200, size)).astype(jnp.bfloat16)
    product = jax.jit(lambda x, y: run_product(x, y, with_row_invariance(kernels)))
    few = (1, 3, 8, 17, 64)
    counts = few if kernels == "interpret" else (*range(1, 65), 65, 96, 127, 128, 129, 192)

    def multiply(num_rows):
        return np.asarray(product(rows[:, :num_rows], matrix).astype(jnp.float32))

    # Programs are compiled side by side.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        wanted, *found = pool.map(multiply, (200, *counts))
    others = [n for n, x in zip(counts, found, strict=True) if not np.array_equal(x, wanted[:, :n])]
    assert others == []


@pytest.mark.interpret
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "float16"}, "it needs bfloat16 or float32"),
        ({"intermediate_size": 144}, "no tile that divides a matrix of 128 x 288"),
        ({"num_attention_heads": 256, "num_key_value_heads": 1}, "no tiling for 256 queries"),
    ],
)
def test_a_model_of_which_xla_would_compute_a_sum_is_refused_by_the_kernels(change, sentence):
    config = dataclasses.replace(LLAMA, **change)
    model = build(config, implementation="interpret", row_invariant=True)
    ids = np.zeros((1, 2), np.int32)
    with pytest.raises(ValueError, match=sentence):
        jax.eval_shape(model.apply, model.params, ids, ids, model.init_cache(1, 64))


def test_a_model_on_a_mesh_is_refused():
    from specjax.models import load, pretrained_folder

    mesh = jax.make_mesh((1, 2), ("data", "model"))
    with pytest.raises(ValueError, match="row_invariant is True with a mesh; it needs a model on"):
        load(pretrained_folder("draft"), mesh=mesh, row_invariant=True)
