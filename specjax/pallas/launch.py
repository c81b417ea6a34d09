"""The launch of a kernel over references to whole arrays, on a grid of one axis; shared operations.

The grid's programs run in no fixed order, but start in about the order of their index. Programs of
one launch see each other's stores only through `is_last_arrival`, and in `cutoff_search_kernel`
through the arrivals of a team (`cutoff.team`). Two exceptions give equal results in any order:

- the `atomic_max` that publishes a stop in `verify_accept_kernel`;
- the slots of new tokens in `fused_attention_kernel`.

The stores of a launch are visible to the next one, with programmatic dependent launch too
(`launch_dependents`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.core.logsumexp import nan_to_inf

_WHOLE_ARRAY = pl.BlockSpec(memory_space=pl.ANY)
# Pallas lowers each of the first three to one bfloat16 product; Triton lacks the last.
_UNSUPPORTED_PRECISIONS = (
    "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6",
    "BF16_BF16_F32_X9",
    "F64_F64_F64",
)


def launch(
    kernel: Callable[..., None],
    operands: Any,
    outputs: Any,
    *,
    num_programs: int,
    num_warps: int,
    interpret: bool,
    num_stages: int = 1,
) -> Any:
    """Runs `kernel(operands, outputs)` on every program of a grid, and returns the outputs.

    A profile shows the kernel under its function's name, which `docs/kernels.md` lists.

    Args:
      kernel: function of two pytrees of references, or a `functools.partial` of one.
      operands: a pytree of arrays.
      outputs: a pytree of `jax.ShapeDtypeStruct` from `output`, or of operands, in whose memory
        the kernel then writes.
      num_programs: length of the grid, which has one axis.
      num_warps: per program.
      interpret: whether to run in Pallas' interpreter.
      num_stages: iterations of a loop whose loads are in flight at once.

    Returns:
      Arrays in the structure of `outputs`.
    """
    arrays = jax.tree.leaves(operands)
    shapes, tree = jax.tree.flatten(outputs)
    aliases = {
        source: target
        for target, shape in enumerate(shapes)
        for source, array in enumerate(arrays)
        if shape is array
    }

    axes = jax.typeof(arrays[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in shapes]
    # In a list the outputs are one pytree, which the kernel receives unchanged.
    (results,) = pl.pallas_call(
        kernel,
        name=getattr(kernel, "func", kernel).__name__,
        grid=(num_programs,),
        in_specs=[jax.tree.map(lambda _: _WHOLE_ARRAY, operands)],
        out_specs=[jax.tree.map(lambda _: _WHOLE_ARRAY, outputs)],
        out_shape=[jax.tree.unflatten(tree, shapes)],
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )(operands)
    return results


def output(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """Returns the shape and dtype of an output; each output needs a separate object."""
    return jax.ShapeDtypeStruct(shape, dtype)


def inline_asm(
    ptx: str, constraints: str, *args: jax.Array, pack: int = 1, dtype: Any = None
) -> jax.Array:
    """Returns the result of PTX on the elements of arrays of one shape.

    Args:
      ptx: whose operand 0 is the result.
      constraints: of the result and the arguments.
      *args: arrays of at least one axis.
      pack: elements per call.
      dtype: of the result; None is that of the first argument.
    """
    shape = jax.ShapeDtypeStruct(args[0].shape, args[0].dtype if dtype is None else dtype)
    (result,) = plgpu.elementwise_inline_asm(
        ptx, args=list(args), constraints=constraints, pack=pack, result_shape_dtypes=[shape]
    )
    return result


def make_exp2(interpret: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns the function x -> 2^x by the GPU's `ex2.approx.ftz`, which flushes below 2^-126 to 0.

    `jnp.exp2` spends three more instructions on those results, for every logit. The interpreter
    lacks the instruction and gets `jnp.exp2`.
    """
    return jnp.exp2 if interpret else _ex2


def _ex2(x: jax.Array) -> jax.Array:
    return inline_asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", x)


def make_nan_to_inf(interpret: bool) -> Callable[[jax.Array], jax.Array]:
    """Returns the function of bf16, f16 or f32 that replaces NaN by +inf.

    On a GPU it is the minimum of a number and +inf, which is +inf for NaN: one instruction for two
    short floats. A comparison and a select would be four, and compilers replace
    `jnp.minimum(x, inf)` by x.
    """
    return nan_to_inf if interpret else _min_inf


def _min_inf(x: jax.Array) -> jax.Array:
    register, kind, inf = {
        "bfloat16": ("r", "bf16x2", "0x7F807F80"),
        "float16": ("r", "f16x2", "0x7C007C00"),
        "float32": ("f", "f32", "0f7F800000"),
    }[x.dtype.name]
    size = "f32" if register == "f" else "b32"
    ptx = f"{{ .reg .{size} inf; mov.{size} inf, {inf}; min.{kind} $0, $1, inf; }}"
    return inline_asm(ptx, f"={register},{register}", x, pack=4 // x.dtype.itemsize)


def make_add_above(interpret: bool) -> Callable[..., jax.Array]:
    """Returns the function of f32 of one shape: sums + (weights where x >= pivots, else 0).

    On a GPU it is a comparison that gives 1 or 0, and a multiply-add: two instructions, where a
    select and an addition are three. The result is equal for finite weights.
    """

    def add_above(
        sums: jax.Array, x: jax.Array, pivots: jax.Array, weights: jax.Array
    ) -> jax.Array:
        return sums + jnp.where(x >= pivots, weights, jnp.float32(0))

    return add_above if interpret else _add_above


def _add_above(sums: jax.Array, x: jax.Array, pivots: jax.Array, weights: jax.Array) -> jax.Array:
    ptx = "{ .reg .f32 reached; set.ge.f32.f32 reached, $2, $3; fma.rn.f32 $0, reached, $4, $1; }"
    return inline_asm(ptx, "=f,f,f,f,f", sums, x, pivots, weights)


def is_last_arrival(
    counter: Any, index: tuple[Any, ...], total: int | jax.Array, interpret: bool
) -> jax.Array:
    """Counts this program in and returns whether it is the last of `total` to arrive, bool[].

    All stores of the others before their arrivals are visible to the last program. Triton's
    atomic addition has acquire-release order at GPU scope: it releases the stores that precede it,
    and acquires what earlier additions released. One thread of a program adds. A barrier before the
    addition orders the other threads' stores before it. Triton hands the sum to the other threads
    through a second barrier, which orders their loads after it.

    No program waits: one that is not the last ends. So the grid may have more programs than the
    GPU runs at once.
    """
    if not interpret:
        plgpu.debug_barrier()
    return plgpu.atomic_add(counter, index, jnp.uint32(1)) == jnp.uint32(total - 1)


def launch_dependents(index: jax.Array) -> jax.Array:
    """Executes `griddepcontrol.launch_dependents` and returns `index` i32[] unchanged.

    This is programmatic dependent launch (PDL), on Hopper and newer GPUs. The next kernel's
    programs may become resident once all programs of this kernel have executed the instruction
    here, or have ended. XLA begins every Triton kernel with `griddepcontrol.wait`, which returns
    once all kernels before it have ended and their stores are visible.

    A kernel may execute it only if kernels of this library alone read its results. XLA's kernels
    may load supposed constants before they wait.

    The caller uses the returned index in operations that must follow, its stores for example: the
    data dependency keeps the instruction before them. Only program order keeps it after a main
    loop.
    """
    ptx = "griddepcontrol.launch_dependents; mov.b32 $0, $1;"
    return jnp.sum(inline_asm(ptx, "=r,r", jnp.broadcast_to(index, (1,))), dtype=index.dtype)


def cond_or(predicate: jax.Array, function: Callable[[], Any], otherwise: Any) -> Any:
    """Returns `function()` where `predicate` holds, and the arrays `otherwise` elsewhere."""
    # Triton's lowering needs computed results in both branches, and takes no literal.
    return jax.lax.cond(
        predicate, function, lambda: jax.tree.map(lambda x: jnp.where(predicate, x, x), otherwise)
    )


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """Returns the float32 product of two tiles of one dtype, summed over one axis of each.

    float32 tiles follow `jax_default_matmul_precision`, or HIGHEST where Triton lacks that
    precision. Triton multiplies 16-bit floats in one way only, so the setting does not apply.
    """
    precision = None
    if a.dtype.itemsize <= 2:
        precision = jax.lax.Precision.DEFAULT
    elif jax.default_matmul_precision.value in _UNSUPPORTED_PRECISIONS:
        precision = jax.lax.Precision.HIGHEST
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, contract, precision=precision, preferred_element_type=jnp.float32
    )


def divmod_i32(number: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Returns quotient and remainder, i32, of a number >= 0."""
    divisor_i32 = jnp.int32(divisor)
    return jax.lax.div(number, divisor_i32), jax.lax.rem(number, divisor_i32)


def reduce_where(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the element [] of `values` [N] where `mask` is True, 0 if it is nowhere."""
    zero = jnp.zeros((), values.dtype)
    return jnp.sum(jnp.where(mask, values, zero), dtype=values.dtype)


def interpreter_barrier(values: Any, interpret: bool) -> Any:
    """Returns the arrays unchanged; in the interpreter through an optimization barrier.

    Without the barrier, XLA compiles chained hashes for minutes on a CPU.
    """
    return jax.lax.optimization_barrier(values) if interpret else values
