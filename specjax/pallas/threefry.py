"""Threefry-2x32 in kernels: the rounds as PTX, one operation of a kernel's program.

A hash of `specjax.core.noise` is about a hundred operations, and a draw takes six. Triton's pass
that coalesces memory accesses walks over the program's dependent operations for each of them, again
for every load and store: a kernel that draws twice compiled for 8 s, and compiles for 1 s so.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.noise import PARITY, ROTATIONS, Hash, Words, threefry2x32

__all__ = ["make_threefry", "threefry_ptx"]


def make_threefry(interpret: bool) -> Hash:
    """Returns the function that hashes words in a kernel, or `threefry2x32` for the interpreter."""
    return threefry2x32 if interpret else _threefry2x32


def _threefry2x32(key: Words, count: Words) -> Words:
    """Returns what `specjax.core.noise.threefry2x32` does."""
    operands = [jnp.asarray(word, jnp.uint32) for word in (*key, *count)]
    shape = jnp.broadcast_shapes(*[word.shape for word in operands])
    # The instruction takes tiles alone; the sum of one element is that element.
    operands = [jnp.broadcast_to(word, shape or (1,)) for word in operands]
    # JAX gives such an instruction one result, so both words are packed. To hash twice took
    # `residual_draw_kernel` 8.6 us for 7.6.
    packed = _run(threefry_ptx(), "=l,r,r,r,r", jnp.int64, *operands)
    x0, x1 = [
        _run(f"{{ .reg .b32 unused; mov.b64 {{{halves}}}, $1; }}", "=r,l", jnp.int32, packed)
        for halves in ("$0, unused", "unused, $0")
    ]
    if not shape:
        x0, x1 = jnp.sum(x0, dtype=jnp.int32), jnp.sum(x1, dtype=jnp.int32)
    return x0.astype(jnp.uint32), x1.astype(jnp.uint32)


def _run(ptx: str, constraints: str, dtype: Any, *operands: jax.Array) -> jax.Array:
    shape = jax.ShapeDtypeStruct(operands[0].shape, dtype)
    (result,) = plgpu.elementwise_inline_asm(
        ptx, args=operands, constraints=constraints, pack=1, result_shape_dtypes=[shape]
    )
    return result


@functools.cache
def threefry_ptx() -> str:
    """Returns PTX that packs the two words of the hash into operand 0, the first one lower.

    Operands 1 and 2 are the key, 3 and 4 the count.
    """
    words = ("$1", "$2", "parity")
    lines = [
        ".reg .b32 x0, x1, parity;",
        "xor.b32 parity, $1, $2;",
        f"xor.b32 parity, parity, {PARITY};",
        "add.u32 x0, $3, $1;",
        "add.u32 x1, $4, $2;",
    ]
    for i in range(5):
        for rotation in ROTATIONS[i % 2]:
            lines += [
                "add.u32 x0, x0, x1;",
                f"shf.l.wrap.b32 x1, x1, x1, {rotation};",
                "xor.b32 x1, x1, x0;",
            ]
        lines += [
            f"add.u32 x0, x0, {words[(i + 1) % 3]};",
            f"add.u32 x1, x1, {words[(i + 2) % 3]};",
            f"add.u32 x1, x1, {i + 1};",
        ]
    return " ".join(["{", *lines, "mov.b64 $0, {x0, x1};", "}"])
