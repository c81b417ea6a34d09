"""What lies between a layer's products, by many programs: a gate, and a sum on its way to a norm.

Axes: `R` rows, `E` hidden, `I` intermediate, `Q` parts of a sum, `n` tiles of E.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.pallas.launch import divide
from specjax.pallas.tiles import GATE_TILE, JOIN_TILE, power_of_two

__all__ = ["Block", "Gated", "Joined", "Sum", "gate", "join", "late_scale"]


class Block(Protocol):
    """A gated MLP.

    Attributes:
      activation: of the gate, in float32.
      size: E.
      eps: added to the mean square of its input.
    """

    activation: Any
    size: int
    eps: float


class Gated(NamedTuple):
    """References: `gate_up` [R, 2 * I], and `squares` f32[R, n] by whose root mean to divide."""

    gate_up: Any
    squares: Any


class Sum(NamedTuple):
    """References: a stream `x` [R, E], `parts` [Q, R, E] to be added or None, a `weight` [E]."""

    x: Any
    parts: Any
    weight: Any


class Joined(NamedTuple):
    """What is left of a sum.

    Attributes:
      x: [R, E], the stream with the sum.
      rows: [R, E], the same with the weight.
      squares: f32[R, n], of x, summed by tiles.
    """

    x: Any
    rows: Any
    squares: Any


def gate(inputs: Gated, out: Any, *, block: Block) -> None:
    """One tile of one row of `out.y` [R, I]."""
    inner = out.y.shape[1]
    row, tile = divide(pl.program_id(0), GATE_TILE.count(inner))
    index, inside = _columns(tile, GATE_TILE.size, inner)
    gate, up = (_load(inputs.gate_up, (row, at), inside) for at in (index, index + inner))
    scale = late_scale(inputs.squares, (row,), block)
    y = block.activation(gate * scale) * (up * scale)
    plgpu.store(out.y.at[row, index], y.astype(out.y.dtype), mask=inside)


def join(inputs: Sum, out: Joined, *, offset: float) -> None:
    """One tile of one row; the weight is what is given and an offset."""
    size = out.x.shape[1]
    row, tile = divide(pl.program_id(0), JOIN_TILE.count(size))
    index, inside = _columns(tile, JOIN_TILE.size, size)
    x, weight = _load(inputs.x, (row, index), inside), _load(inputs.weight, (index,), inside)
    if inputs.parts is not None:
        count = inputs.parts.shape[0]
        parts = [_load(inputs.parts, (q, row, index), inside) for q in range(count)]
        # Rounded as the product and as the stream would be.
        x += sum(parts[1:], parts[0]).astype(out.x.dtype).astype(jnp.float32)
    rounded = x.astype(out.x.dtype)
    x = rounded.astype(jnp.float32)
    plgpu.store(out.x.at[row, index], rounded, mask=inside)
    plgpu.store(
        out.rows.at[row, index], (x * (weight + offset)).astype(out.rows.dtype), mask=inside
    )
    out.squares[row, tile] = jnp.sum(x * x)


def late_scale(squares: Any, row: tuple[Any, ...], norm: Any) -> jax.Array:
    """What a row has to be multiplied by: one over its root mean square.

    Args:
      squares: reference to sums of squares f32[..., n].
      row: its place.
      norm: has the `size` that was summed, and `eps`.
    """
    lane = jax.lax.iota(jnp.int32, power_of_two(squares.shape[-1]))
    total = jnp.sum(_load(squares, (*row, lane), lane < squares.shape[-1]))
    return jax.lax.rsqrt(total / norm.size + norm.eps)


def _columns(tile: jax.Array, width: int, size: int) -> tuple[jax.Array, jax.Array]:
    index = tile * width + jax.lax.iota(jnp.int32, width)
    return index, index < size


def _load(reference: Any, at: Any, mask: jax.Array) -> jax.Array:
    x = plgpu.load(reference.at[at], mask=mask, other=jnp.zeros((), reference.dtype))
    return x.astype(jnp.float32)
