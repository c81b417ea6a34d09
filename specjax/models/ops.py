"""Norms divided by late and sums made late: for few rows on a GPU, where each launch costs.

The rows of a product can be scaled behind it as well as before, so that a product starts from rows
that only had their weight, and whoever reads it divides by the root mean square on the way. A
product with a small matrix comes as parts of a sum, enough of them to read it at the memory's rate.
Axes: `B` requests, `T` tokens, `E` hidden, `N` of a product.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.implementation import (
    by_implementation,
    has_early_starts,
    read_implementation,
    shared_memory,
)
from specjax.mesh import pvary_like

__all__ = [
    "Normed",
    "Product",
    "by_launches",
    "chosen",
    "gated",
    "is_few",
    "join",
    "may_wait",
    "multiply",
    "padding",
]

_MIN_ROWS = 8
_MAX_ROWS = 64


class Normed(NamedTuple):
    """Rows behind a norm, or on their way.

    Attributes:
      rows: [B, T, E].
      squares: f32[B, T, n], sums of squares by whose root mean they are to be divided; None
        where they are.
    """

    rows: jax.Array
    squares: jax.Array | None


class Product(NamedTuple):
    """A product that is not summed yet, of rows that may not be divided yet.

    Attributes:
      parts: [Q, B, T, N], of a sum.
      squares: as in `Normed`.
    """

    parts: jax.Array
    squares: jax.Array | None = None

    def whole(self, size: int, eps: float) -> jax.Array:
        """[B, T, N], in float32 if anything was left to do.

        Args:
          size: E, of the rows that were squared.
          eps: added to their mean square.
        """
        if self.parts.shape[0] == 1 and self.squares is None:
            return self.parts[0]
        total = jnp.sum(self.parts.astype(jnp.float32), axis=0)
        if self.squares is None:
            return total
        mean = jnp.sum(self.squares, axis=-1, keepdims=True) / size
        return total * jax.lax.rsqrt(mean + eps)


def chosen() -> str:
    """Which implementation serves few rows here, as `read_implementation` names it."""
    return read_implementation(None)


def is_few(batch: int, tokens: int) -> bool:
    """Whether that many rows are a step of decoding on a GPU."""
    return 0 < batch * tokens <= _MAX_ROWS and chosen() != "xla"


def may_wait(x: jax.Array) -> bool:
    """Whether rows [B, T, E] may be divided by their root mean square late.

    Not in float16: what a product makes of a stream of thousands does not fit before the division.
    """
    return is_few(*x.shape[:2]) and x.dtype != jnp.float16


def by_launches(
    implementation: str,
    xla: Callable[..., Any],
    kernels: Callable[..., Any],
    *operands: Any,
    early: int | None = None,
) -> Any:
    """As `by_implementation`, with the derivatives of `xla`: a kernel has none of its own.

    Args:
      implementation: as there.
      xla: as there.
      kernels: as there.
      *operands: as there.
      early: which operand a kernel may have made that lets this one start early.
    """
    if implementation == "xla":
        return xla(*operands)

    def differentiate(primals: Any, tangents: Any) -> Any:
        if early is not None and has_early_starts():
            awaited = jax.tree.map(functools.partial(_wait, implementation), primals[early])
            primals = (*primals[:early], awaited, *primals[early + 1 :])
        return jax.jvp(xla, primals, tangents)

    # Inside shard_map an empty cache and a weight differ over no axis; a launch does as a whole.
    operands = pvary_like(operands, operands)
    run = jax.custom_jvp(lambda *each: by_implementation(implementation, xla, kernels, *each))
    run.defjvp(differentiate)
    return run(*operands)


def _wait(implementation: str, x: jax.Array) -> jax.Array:
    """The same, behind whatever lets XLA's kernels start before it is there.

    Of a derivative by some weights alone the other products are kernels still, and XLA reads them.
    """

    def kernels(x: jax.Array, interpret: bool) -> jax.Array:
        from specjax.models.pallas.add_rms_norm import waited

        return waited(x, interpret=interpret)

    run = jax.custom_jvp(lambda x: by_implementation(implementation, lambda x: x, kernels, x))
    run.defjvp(lambda primals, tangents: (run(*primals), *tangents))
    return run(x)


def padding(batch: int, tokens: int) -> int:
    """How many more tokens a request is given, so that a GPU has eight rows to multiply.

    Fewer are not worth its matrix units to XLA, which then reads weights at half the rate.
    """
    return max(-(-_MIN_ROWS // batch) - tokens, 0) if is_few(batch, tokens) else 0


def _cut(cut: Callable[..., Any], x: jax.Array, matrix: jax.Array, width: int) -> Any:
    """How few rows' product with a matrix is shared out by kernels; None if XLA multiplies."""
    batch, tokens, _ = x.shape
    if not is_few(batch, tokens) or x.dtype != matrix.dtype:
        return None
    return cut(batch * tokens, len(matrix), width, x.dtype.itemsize, shared_memory())


def multiply(x: jax.Array, matrix: jax.Array, *, early: bool = False) -> jax.Array:
    """The product of [B, T, E] with [E, N] as parts [Q, B, T, N]: Q is 1 but for few rows.

    Args:
      x: rows.
      matrix: what they are multiplied by.
      early: whether a kernel of ours reads the parts, and may start before they are there.
    """
    from specjax.models.pallas.tiles import product_cut

    cut = _cut(product_cut, x, matrix, matrix.shape[1])
    if cut is None:
        return (x @ matrix)[None]

    def xla(x: jax.Array, matrix: jax.Array) -> jax.Array:
        whole = jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
        # Of as many parts as the kernel leaves: both are branches of one program.
        return jnp.pad(whole[None], ((0, cut.parts - 1), *[(0, 0)] * 3))

    def kernels(*operands: jax.Array, interpret: bool) -> jax.Array:
        from specjax.models.pallas.matmul import multiplied

        return multiplied(
            *operands, cut=cut, early=early and has_early_starts(), interpret=interpret
        )

    return by_launches(chosen(), xla, kernels, x, matrix, early=0)


def gated(x: Normed, gate_up: jax.Array, down: jax.Array, *, mlp: Any, early: bool) -> jax.Array:
    """A gated MLP's product as parts [Q, B, T, E].

    Args:
      x: its input.
      gate_up: [E, 2 * I], the gate beside what it gates.
      down: [I, E].
      mlp: has `activation`, and `size` and `eps` of the norm.
      early: as of `multiply`.
    """
    from specjax.models.pallas.tiles import gate_cut, product_cut

    def xla(rows: jax.Array, squares: jax.Array | None, gate_up: jax.Array) -> jax.Array:
        y = Product((rows @ gate_up)[None], squares).whole(mlp.size, mlp.eps)
        gate, up = jnp.split(y, 2, axis=-1)
        return (mlp.activation(gate) * up).astype(rows.dtype)

    def kernels(*operands: Any, interpret: bool) -> jax.Array:
        from specjax.models.pallas.matmul import gated

        # XLA's own product does not wait as ours does.
        next_waits = _cut(product_cut, x.rows, down, down.shape[1]) is not None
        next_early = next_waits and has_early_starts()
        return gated(*operands, mlp=mlp, cut=cut, early=next_early, interpret=interpret)

    cut = _cut(gate_cut, x.rows, gate_up, len(down))
    implementation = "xla" if cut is None else chosen()
    y = by_launches(implementation, xla, kernels, x.rows, x.squares, gate_up)
    return multiply(y, down, early=early)


def join(
    x: jax.Array, parts: jax.Array | None, weight: jax.Array, offset: float
) -> tuple[jax.Array, Normed]:
    """Adds a product to few rows, and begins the norm behind the sum.

    Args:
      x: [B, T, E].
      parts: [Q, B, T, E]; None adds nothing.
      weight: [E], of the norm, but for its offset.
      offset: added to the weight, in float32.

    Returns:
      [B, T, E], and the same on the way through the norm.
    """
    from specjax.models.pallas.tiles import JOIN_TILE

    def xla(x: jax.Array, parts: jax.Array | None, weight: jax.Array) -> tuple[jax.Array, Normed]:
        if parts is not None:
            x += Product(parts).whole(0, 0.0).astype(x.dtype)
        wide = x.astype(jnp.float32)
        squares = jnp.sum(wide * wide, axis=-1, keepdims=True)
        # Of as many numbers as the kernel leaves: both are branches of one program.
        squares = jnp.pad(squares, ((0, 0), (0, 0), (0, JOIN_TILE.count(x.shape[2]) - 1)))
        scale = offset + weight.astype(jnp.float32)
        return x, Normed((wide * scale[None, None]).astype(x.dtype), squares)

    def kernels(*operands: jax.Array, interpret: bool) -> tuple[jax.Array, Normed]:
        from specjax.models.pallas.add_rms_norm import joined

        x, *normed = joined(*operands, offset=offset, interpret=interpret)
        return x, Normed(*normed)

    return by_launches(chosen(), xla, kernels, x, parts, weight, early=1)
