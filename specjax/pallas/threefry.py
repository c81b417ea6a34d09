"""Threefry-2x32 in kernels: the rounds as PTX, one operation per word of the hash.

A hash of `specjax.core.noise` is about a hundred operations, and a draw takes six hashes. Triton's
coalescing pass walks over all operations for every load and store. A kernel that draws twice took
8 s to compile so, and takes 1 s with a hash of two PTX operations.
"""

import functools

import jax
import jax.numpy as jnp

from specjax.core.noise import PARITY, ROTATIONS, Hash, Words, threefry2x32
from specjax.pallas.launch import inline_asm


def make_threefry(interpret: bool) -> Hash:
    """Returns the function that hashes words in a kernel, or `threefry2x32` for the interpreter."""
    return _called_threefry2x32 if interpret else _threefry2x32


# A call is lowered once per shape. Inlined, some twenty hashes would be two thirds of the
# operations of an interpreted kernel.
_called_threefry2x32 = jax.jit(threefry2x32)


def _threefry2x32(key: Words, count: Words) -> Words:
    """Returns the two words of `specjax.core.noise.threefry2x32`, by PTX."""
    operands = [jnp.asarray(word, jnp.uint32) for word in (*key, *count)]
    shape = jnp.broadcast_shapes(*[word.shape for word in operands])
    # The instruction takes only tiles; the sum of one element is that element.
    operands = [jnp.broadcast_to(word, shape or (1,)) for word in operands]
    words = [
        inline_asm(threefry_ptx(index), "=r,r,r,r,r", *operands, dtype=jnp.int32)
        for index in (0, 1)
    ]
    words = [word.astype(jnp.uint32) for word in words]
    x0, x1 = words if shape else [jnp.sum(word, dtype=jnp.uint32) for word in words]
    return x0, x1


@functools.cache
def threefry_ptx(index: int) -> str:
    """Returns PTX that writes word `index`, 0 or 1, of the hash to operand 0.

    Operands 1 and 2 are the key, 3 and 4 the count. JAX allows one result of such code. The
    assembler computes the common part of both words once.
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
    return " ".join(["{", *lines, f"mov.b32 $0, x{index};", "}"])
