"""What lies between a layer's products, by many programs: a sum on its way to a norm.

Axes: `R` rows, `E` hidden, `Q` parts of a sum, `n` tiles of E.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.pallas.tiles import (
    JOIN_TILE,
)
from specjax.pallas.launch import divide, launch, like
from specjax.pallas.tiles import power_of_two

__all__ = [
    "Joined",
    "Sum",
    "join",
    "joined",
    "load_squares",
    "scale_of",
    "waited",
]


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


def load_squares(squares: Any, *row: Any) -> jax.Array:
    """Sums of squares [..., lanes] at rows of a reference f32[..., n], zeros behind the n.

    Args:
      squares: the reference.
      *row: their places, scalars or arrays [...] of one shape.
    """
    count = squares.shape[-1]
    lane = jax.lax.iota(jnp.int32, power_of_two(count))
    inside = lane < count
    if row[-1].ndim:
        row, lane = tuple(each[:, None] for each in row), lane[None]
        inside = jnp.broadcast_to(inside[None], (row[-1].shape[0], lane.shape[1]))
    return _load(squares, (*row, lane), inside)


def scale_of(squares: jax.Array, norm: Any) -> jax.Array:
    """What rows have to be multiplied by: one over their root mean square.

    Args:
      squares: [..., lanes], sums of their squares.
      norm: has the `size` that was summed, and `eps`.
    """
    return jax.lax.rsqrt(jnp.sum(squares, axis=-1) / norm.size + norm.eps)


def _columns(tile: jax.Array, width: int, size: int) -> tuple[jax.Array, jax.Array]:
    index = tile * width + jax.lax.iota(jnp.int32, width)
    return index, index < size


def _load(reference: Any, at: Any, mask: jax.Array) -> jax.Array:
    x = plgpu.load(reference.at[at], mask=mask, other=jnp.zeros((), reference.dtype))
    return x.astype(jnp.float32)


def joined(
    x: jax.Array, parts: jax.Array | None, weight: jax.Array, *, offset: float, interpret: bool
) -> Joined:
    """A product added to the residual stream, and the beginning of the norm behind it.

    Args:
      x: [B, T, E].
      parts: [Q, B, T, E], of the product; None adds nothing.
      weight: [E], of the norm, but for its offset.
      offset: added to the weight.
      interpret: run in Pallas' interpreter.

    Returns:
      The stream [B, T, E], the same with the weight, and sums of its squares f32[B, T, n].
    """
    *lead, size = x.shape
    rows, tiles = math.prod(lead), JOIN_TILE.count(size)
    parts = None if parts is None else parts.reshape(-1, rows, size)
    done = launch(
        functools.partial(join, offset=offset),
        Sum(x.reshape(rows, size), parts, weight),
        Joined(like((rows, size), x.dtype), like((rows, size), x.dtype), like((rows, tiles))),
        num_programs=rows * tiles,
        num_warps=JOIN_TILE.num_warps,
        interpret=interpret,
    )
    return Joined(*(y.reshape(*lead, -1) for y in done))


def waited(x: jax.Array, *, interpret: bool) -> jax.Array:
    """The same array, read by a kernel of ours: whoever reads it then need not wait as ours do."""
    rows = x.reshape(1, -1, x.shape[-1])
    nothing = jnp.zeros(x.shape[-1:], x.dtype)
    return joined(rows, None, nothing, offset=0.0, interpret=interpret)[0].reshape(x.shape)
