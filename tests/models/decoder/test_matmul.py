"""Products of few rows by kernels: against float64, and how they are shared out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machine import has_gpu

from specjax.models import TransformerConfig, build
from specjax.models.decoder.decode_ops import (
    DeferredNorm,
    KernelChoice,
    glu,
    num_xla_parts,
    product_tiling,
)
from specjax.models.decoder.pallas import matmul
from specjax.models.decoder.pallas.tilings import (
    DecodeConfig,
    attention_tiling,
    glu_tiling,
    matmul_tiling,
    num_attention_stages,
)
from specjax.models.decoder.shared_math import NormSpec
from specjax.pallas import launch

# Kernels are called here without a public call, which would silence JAX's warning.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

KERNELS = [
    pytest.param("interpret", marks=pytest.mark.interpret),
    pytest.param("triton", marks=pytest.mark.gpu),
]
# Of float32, whose products the GPU's tensor cores round to ten bits first.
TOLERANCE = {"float32": 3e-3 if has_gpu() else 2e-6, "bfloat16": 1e-5, "float16": 1e-5}
# Requests and tokens, rows and columns of a matrix.
SIZES = [
    (8, 1, 256, 256),
    (1, 1, 192, 96),
    (3, 4, 320, 160),
    (5, 5, 128, 128),
    (8, 6, 640, 384),
    (10, 10, 256, 192),
    (3, 4, 736, 224),  # Steps of 32 along the summed axis, which no 64 divides.
]


def factors(batch, tokens, size, width, dtype):
    rng = np.random.default_rng(size + batch)
    x = rng.normal(size=(batch, tokens, size))
    matrix = rng.normal(size=(size, width)) * size**-0.5
    return jnp.asarray(x.astype(jnp.dtype(dtype))), jnp.asarray(matrix.astype(jnp.dtype(dtype)))


def double(x):
    return np.asarray(x).astype(np.float64)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(SIZES[0], "float16"), (SIZES[2], "float32"), *((sizes, "bfloat16") for sizes in SIZES)],
    ids=str,
)
def test_parts_sum_to_the_product(sizes, dtype, kernels):
    batch, tokens, size, width = sizes
    x, matrix = factors(*sizes, dtype)
    tiling = matmul_tiling(batch * tokens, size, width, x.dtype.itemsize)
    wanted = double(x) @ double(matrix)
    options = {"pdl": False, "interpret": kernels == "interpret"}
    # By default, and in parts of which none is as large as the next.
    uneven = tiling._replace(split_k=3, swap_ab=not tiling.swap_ab)
    for way in (tiling, tiling._replace(split_k=1), uneven):
        parts = matmul.split_k_matmul(x, matrix, tiling=way, **options)
        assert parts.shape == (way.split_k, batch, tokens, width)
        np.testing.assert_allclose(double(parts).sum(0), wanted, atol=TOLERANCE[dtype] * 4)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "is_late"), [(SIZES[0], False), *((sizes, True) for sizes in SIZES)], ids=str
)
def test_gates_are_of_rows_divided_late(sizes, is_late, kernels):
    batch, tokens, size, width = sizes
    x, matrix = factors(batch, tokens, size, 2 * width, "bfloat16")
    squares = np.random.default_rng(1).uniform(1, 99, (batch, tokens, 3)).astype(np.float32)
    tiling = glu_tiling(batch * tokens, size, width, 2)
    scale = 1 / np.sqrt(double(squares).sum(-1, keepdims=True) / size + 0.3) if is_late else 1
    gate, up = np.split(double(x) @ double(matrix) * scale, 2, axis=-1)
    squares = jnp.asarray(squares) if is_late else None
    options = {
        "norm": NormSpec(size, 0.3),
        "activation": jnp.tanh,
        "pdl": False,
        "interpret": kernels == "interpret",
    }
    for way in (tiling, tiling._replace(swap_ab=False)):
        found = matmul.fused_glu(x, squares, matrix, tiling=way, **options)
        assert found.dtype == x.dtype
        np.testing.assert_allclose(double(found), np.tanh(gate) * up, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("is_late", [False, True])
def test_products_of_more_rows_are_those_of_xla_in_parts_that_kernels_read(is_late, kernels):
    batch, tokens, size, inner = 5, 30, 512, 256
    choice = KernelChoice(DecodeConfig(), 227 * 1024, False, kernels == "interpret")
    x, gate_up = factors(batch, tokens, size, 2 * inner, "bfloat16")
    _, down = factors(batch, tokens, inner, 384, "bfloat16")
    squares = np.random.default_rng(1).uniform(1, 99, (batch, tokens, 3)).astype(np.float32)
    scale = 1 / np.sqrt(double(squares).sum(-1, keepdims=True) / size + 0.3) if is_late else 1
    gate, up = np.split(double(x) @ double(gate_up) * scale, 2, axis=-1)
    normed = DeferredNorm(x, jnp.asarray(squares) if is_late else None)
    options = {"norm": NormSpec(size, 0.3), "activation": jnp.tanh, "is_summed": False}
    for next_is_kernel, num_parts in ((False, 1), (True, 2)):
        found = glu(normed, gate_up, down, choice, next_is_kernel=next_is_kernel, **options)
        assert found.shape == (num_parts, batch, tokens, 384)
        wanted = (np.tanh(gate) * up) @ double(down)
        np.testing.assert_allclose(double(found).sum(0), wanted, rtol=2**-5, atol=0.02)
    assert num_xla_parts(jnp.zeros((1, 1024, 512)), jnp.zeros((512, 4096))) == 1


# Hidden and intermediate size, and columns of queries, keys and values.
MODELS = {
    "SmolLM 135M": (576, 1536, 960),
    "Gemma 3 270M": (640, 2048, 1536),
    "Qwen 2.5 0.5B": (896, 4864, 1152),
    "Llama 3.2 1B": (2048, 8192, 3072),
    "Gemma 2 2B": (2304, 9216, 4096),
    "Llama 2 7B": (4096, 11008, 12288),
    "Llama 3.1 8B": (4096, 14336, 6144),
    "Qwen 2.5 7B": (3584, 18944, 4608),
    "Llama 3.1 70B": (8192, 28672, 10240),
}


def shared_memory(tiling, rows, tiles):
    """Bytes that a program has in flight."""
    return (max(rows, 16) + tiles * tiling.block_n) * tiling.block_k * 2 * tiling.num_stages


@pytest.mark.parametrize("rows", [8, 16, 64, 128])
@pytest.mark.parametrize("name", MODELS)
def test_products_of_known_models_fill_a_gpu_and_fit_on_it(name, rows):
    hidden, inner, heads = MODELS[name]
    for size, width in ((hidden, heads), (hidden, hidden), (inner, hidden)):
        tiling = matmul_tiling(rows, size, width, 2)
        assert width % tiling.block_n == 0
        assert size % tiling.block_k == 0
        assert shared_memory(tiling, rows, 1) <= 227 * 1024
        programs = width // tiling.block_n * tiling.split_k
        assert programs <= (132 if rows <= 64 else 264) or tiling.split_k == 1
        # More parts than eight cost what adds them more than they save here.
        assert programs > 66 or tiling.split_k == 8
    tiling = glu_tiling(rows, hidden, inner, 2)
    assert inner % tiling.block_n == 0
    # Together on the GPU, if there are not very many.
    crowd = -(-inner // tiling.block_n // 132)
    assert crowd > (3 if rows <= 64 else 2) or shared_memory(tiling, rows, 2) * crowd <= 227 * 1024


@pytest.mark.parametrize("rows", [8, 64, 128])
@pytest.mark.parametrize("name", MODELS)
def test_products_fit_on_a_small_gpu(name, rows):
    hidden, inner, heads = MODELS[name]
    room = 99 * 1024
    for size, width in ((hidden, heads), (hidden, hidden), (inner, hidden)):
        tiling = matmul_tiling(rows, size, width, 2, room)
        assert tiling.num_stages >= 3
        assert shared_memory(tiling, rows, 1) <= room
    assert shared_memory(glu_tiling(rows, hidden, inner, 2, room), rows, 2) <= room


@pytest.mark.parametrize("tiling", [matmul_tiling, glu_tiling])
def test_a_matrix_that_does_not_divide_is_left_to_xla(tiling):
    assert tiling(8, 4096, 4096, 2) is not None
    assert tiling(8, 4096 + 32, 4096, 2).block_k == 32
    assert tiling(8, 4096 + 16, 4096, 2) is None
    assert tiling(8, 4096, 4096 + 16, 2) is None


def test_steps_of_half_a_line_are_taken_only_where_rows_must_not_depend_on_each_other():
    matrix = jax.ShapeDtypeStruct((736, 256), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((1, 4, 736), jnp.bfloat16)
    found = {
        row_invariant: product_tiling(
            x,
            matrix,
            KernelChoice(DecodeConfig(row_invariant=row_invariant), 227 * 1024, True, True),
        )
        for row_invariant in (False, True)
    }
    assert found[False] is None
    assert found[True].block_k == 32


@pytest.mark.once
def test_a_model_that_does_not_divide_is_served_all_the_same():
    config = TransformerConfig(64, 40, 72, 1, 2, 1, 20, dtype="bfloat16")
    rng, built = np.random.default_rng(0), build(config)
    cache = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32),
        jax.eval_shape(lambda: built.init_cache(2, 20)),
    )
    ids = jnp.array([[3, 4], [5, 6]])

    def read(implementation):
        model = build(config, built.params, implementation=implementation)
        hidden, _ = jax.jit(model.apply)(model.params, ids, ids, cache)
        return double(hidden)

    np.testing.assert_allclose(read("interpret"), read("xla"), atol=0.05)


# Kilobytes of keys, values, queries and weights that Triton 3.9 keeps for `attention_kernel`,
# compiled for compute capability 9.0: rows, head dimension, bytes of a number, and of 1, 2 and 3
# iterations.
ATTENDED = [
    (16, 64, 2, (12, 20, 36)),
    (16, 128, 2, (22, 38, 70)),
    (64, 128, 2, (48, 80, 112)),
    (16, 128, 4, (44, 76, 140)),
    (16, 256, 2, (42, 74, 138)),
    (64, 256, 2, (96, 160, 224)),
    (16, 256, 4, (84, 148, 276)),
    (64, 256, 4, (192, 320, 448)),
]


@pytest.mark.parametrize(("rows", "head_dim", "itemsize", "kilobytes"), ATTENDED)
def test_attention_loads_as_many_iterations_as_fit(rows, head_dim, itemsize, kilobytes):
    for room in (99, 227):
        stages = num_attention_stages(rows, head_dim, itemsize, room * 1024)
        assert stages == sum(size <= room for size in kilobytes)
    for stages, size in enumerate(kilobytes, start=1):
        assert num_attention_stages(rows, head_dim, itemsize, size * 1024) == stages
        assert num_attention_stages(rows, head_dim, itemsize, size * 1024 - 1) == stages - 1


def test_attention_for_which_a_gpu_is_too_small_is_left_to_xla():
    def tiling(room):
        return attention_tiling(
            (8, 8),
            (8, 1, 100, 256),
            num_padded_tokens=8,
            queries_per_kv=8,
            itemsize=4,
            shared_memory_bytes=room * 1024,
        )

    assert tiling(99) is None
    assert tiling(227) is not None


def test_precisions_that_triton_lacks_are_not_less_exact():
    tile = jnp.zeros((16, 16))
    precision = jax.lax.Precision
    found = {}
    for asked in ("default", "BF16_BF16_F32_X3", "F64_F64_F64"):
        with jax.default_matmul_precision(asked):
            jaxpr = jax.make_jaxpr(lambda x: launch.dot(x, x, (1, 0)))(tile)
        found[asked] = jaxpr.eqns[0].params["precision"]
    assert found.pop("default") != (precision.HIGHEST,) * 2
    assert set(found.values()) == {(precision.HIGHEST,) * 2}
