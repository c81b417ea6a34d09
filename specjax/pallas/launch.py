"""One way to launch a kernel: whole arrays in and out, and a line of programs."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

__all__ = [
    "arrive",
    "divide",
    "dot",
    "fast_exp2",
    "launch",
    "like",
    "only",
    "settled",
    "start_next",
    "value_when",
]

_WHOLE = pl.BlockSpec(memory_space=pl.ANY)
# Of the first three Pallas would make one product of bfloat16.
_NOT_OF_TRITON = ("BF16_BF16_F32_X3", "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "F64_F64_F64")


def launch(
    kernel: Callable[..., None],
    operands: Any,
    outputs: Any,
    *,
    num_programs: int,
    num_warps: int,
    interpret: bool,
    num_stages: int = 1,
    in_place: Mapping[str, jax.Array] = MappingProxyType({}),
) -> Any:
    """Runs `kernel(operands, outputs)` as a line of programs over references to whole arrays.

    Args:
      kernel: of two NamedTuples of references.
      operands: NamedTuple of arrays, pytrees of arrays or None.
      outputs: NamedTuple of `jax.ShapeDtypeStruct`, pytrees of them or None.
      num_programs: length of the grid, which has one axis.
      num_warps: per program.
      interpret: run in Pallas' interpreter.
      num_stages: how many turns of a loop are loaded at a time.
      in_place: by name of an output, the array among the operands whose memory it takes.

    Returns:
      The outputs, of their type.
    """
    flat = jax.tree.leaves(operands)
    shapes, tree = jax.tree.flatten(outputs)
    aliases = {}
    for name, operand in in_place.items():
        [source] = [i for i, leaf in enumerate(flat) if leaf is operand]
        [place] = [i for i, leaf in enumerate(shapes) if leaf is getattr(outputs, name)]
        aliases[source] = place

    axes = jax.typeof(flat[0]).manual_axis_type
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in shapes]
    # In a list the outputs are one pytree, which the kernel gets as it is.
    (results,) = pl.pallas_call(
        kernel,
        name=getattr(kernel, "func", kernel).__name__.strip("_"),
        grid=(num_programs,),
        in_specs=[jax.tree.map(lambda _: _WHOLE, operands)],
        out_specs=[jax.tree.map(lambda _: _WHOLE, outputs)],
        out_shape=[jax.tree.unflatten(tree, shapes)],
        input_output_aliases=aliases,
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
    )(operands)
    return results


def like(shape: tuple[int, ...], dtype: Any = jnp.float32) -> Any:
    """An output's shape and dtype; one of its own for each output."""
    return jax.ShapeDtypeStruct(shape, dtype)


def fast_exp2(interpret: bool) -> Callable[[jax.Array], jax.Array]:
    """Powers of two by the GPU's own instruction, which takes results below 2^-126 for 0.

    `jnp.exp2` would spend three more instructions on them, on every logit. The interpreter has
    no such instruction.
    """
    return jnp.exp2 if interpret else _ex2


def _ex2(x: jax.Array) -> jax.Array:
    (result,) = plgpu.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return result


def arrive(counter: Any, place: tuple[Any, ...], total: int, interpret: bool) -> jax.Array:
    """Counts this program in; bool[], whether it is the last of `total`.

    The last one sees everything the others stored before they arrived: the addition releases
    what was stored before it and acquires what the earlier ones released. One thread adds, for
    all: behind a barrier, so that the others' stores come before, and Triton gives them the sum
    behind another, so that their loads come after.
    """
    if not interpret:
        plgpu.debug_barrier()
    return plgpu.atomic_add(counter, place, jnp.uint32(1)) == jnp.uint32(total - 1)


def start_next(index: jax.Array) -> jax.Array:
    """The same index i32[]; where it is computed, the kernel behind may begin to start.

    On Hopper and newer GPUs, XLA starts kernels before the one in front has ended, and each waits
    in its first instruction until that one has. Without this one, it starts as programs end.

    Only if a kernel of ours reads the results: it loads them behind its wait, while XLA's own may
    be compiled to load what they take for constant before.
    """
    (same,) = plgpu.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[jnp.broadcast_to(index, (1,))],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), index.dtype)],
    )
    return jnp.sum(same, dtype=index.dtype)


def value_when(holds: jax.Array, function: Callable[[], Any], otherwise: Any) -> Any:
    """What `function()` returns where `holds`, and the constants `otherwise` elsewhere."""
    # Triton's lowering wants every result of a branch computed, and takes no literal.
    return jax.lax.cond(
        holds, function, lambda: jax.tree.map(lambda x: jnp.where(holds, x, x), otherwise)
    )


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The float32 product of two tiles of one dtype, summed over an axis of each.

    Of float32 as `jax_default_matmul_precision` says, or more exactly where Triton has no such way.
    Short floats are multiplied as they are whatever it says: Triton has no other way for them.
    """
    precision = None
    if a.dtype.itemsize <= 2:
        precision = jax.lax.Precision.DEFAULT
    elif jax.default_matmul_precision.value in _NOT_OF_TRITON:
        precision = jax.lax.Precision.HIGHEST
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, contract, precision=precision, preferred_element_type=jnp.float32
    )


def divide(number: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder, i32, of a number >= 0."""
    by = jnp.int32(divisor)
    return jax.lax.div(number, by), jax.lax.rem(number, by)


def only(values: jax.Array, chosen: jax.Array) -> jax.Array:
    """The one of `values` [N] that is `chosen`, []; whatever the others hold."""
    zero = jnp.zeros((), values.dtype)
    return jnp.sum(jnp.where(chosen, values, zero), dtype=values.dtype)


def settled(values: Any, interpret: bool) -> Any:
    """Arrays as they are; in the interpreter behind a barrier.

    Without one between them XLA compiles chained hashes for minutes on a CPU.
    """
    return jax.lax.optimization_barrier(values) if interpret else values
