"""Products of few rows with a matrix that is read once: a program to a tile of its columns.

A matrix of few columns is shared out by its rows, too: each part of the sum is left apart, for
whoever reads it to add.
Axes: `R` rows, `M` these and padding, `E` summed over, `N` columns, `C` of them to a tile, `Q`
parts of the sum.
"""

import functools
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.pallas.add_rms_norm import load_squares, scale_of
from specjax.models.pallas.tiles import (
    Cut,
    at_least_dot,
)
from specjax.pallas.launch import divide, dot, launch, like, start_next

__all__ = [
    "Block",
    "Factors",
    "Gated",
    "Multiplied",
    "gate",
    "gated",
    "multiplied",
    "multiply",
]


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


class Factors(NamedTuple):
    """References.

    Attributes:
      rows: [R, E].
      matrix: [E, N].
      squares: f32[R, n], by whose root mean the gate's product is divided; None where it is.
    """

    rows: Any
    matrix: Any
    squares: Any = None


class Multiplied(NamedTuple):
    """`parts` f32[Q, R, N], of a sum."""

    parts: Any


class Gated(NamedTuple):
    """`y` [R, N / 2]."""

    y: Any


def multiply(factors: Factors, out: Multiplied, *, cut: Cut, early: bool) -> None:
    """One tile of one part of the sum.

    Args:
      factors: references.
      out: references.
      cut: how it is shared out.
      early: whether the kernel behind may start now, as `start_next` says.
    """
    tiles = factors.matrix.shape[1] // cut.columns
    part, tile = divide(pl.program_id(0), tiles)
    begin, end = (_share(factors, part + k, cut) for k in (0, 1))
    (total,) = _sums(factors, [tile * cut.columns], begin, end, cut)
    part = start_next(part) if early else part
    _store(out.parts, (part,), tile * cut.columns, total, cut)


def gate(factors: Factors, out: Gated, *, cut: Cut, block: Block, early: bool) -> None:
    """One tile of `activation(gate) * up`, of a matrix in which `up` stands behind `gate`.

    Args:
      factors: references.
      out: references.
      cut: how it is shared out.
      block: whose gate it is.
      early: whether the kernel behind may start now, as `start_next` says.
    """
    num_rows, size = factors.rows.shape
    tile, inner = pl.program_id(0), out.y.shape[1]
    # Asked for before the matrix, and looked at behind it.
    squares = None if factors.squares is None else load_squares(factors.squares, _rows(num_rows))
    starts = [tile * cut.columns, tile * cut.columns + inner]
    steps = jnp.int32(size // cut.depth)
    gates, ups = _sums(factors, starts, jnp.int32(0), steps, cut)
    if squares is not None:
        scale = scale_of(squares, block)
        scale = scale[None] if cut.turned else scale[:, None]
        gates, ups = gates * scale, ups * scale
    tile = start_next(tile) if early else tile
    _store(out.y, (), tile * cut.columns, block.activation(gates) * ups, cut)


def _rows(num_rows: int) -> jax.Array:
    """Of M: padding reads a row again, so that no load needs a mask."""
    return jax.lax.rem(jax.lax.iota(jnp.int32, at_least_dot(num_rows)), jnp.int32(num_rows))


def _share(factors: Factors, part: jax.Array, cut: Cut) -> jax.Array:
    """The first step of a part."""
    return divide(part * (factors.rows.shape[1] // cut.depth), cut.parts)[0]


def _sums(
    factors: Factors, starts: list[jax.Array], begin: jax.Array, end: jax.Array, cut: Cut
) -> list[jax.Array]:
    """Sums over the steps from `begin` to `end`, f32[M, C], for tiles of columns; or turned."""
    row = _rows(factors.rows.shape[0])
    column, within = jax.lax.iota(jnp.int32, cut.columns), jax.lax.iota(jnp.int32, cut.depth)
    shape = (row.shape[0], cut.columns)

    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        at = i * cut.depth + within
        rows = plgpu.load(factors.rows.at[row[:, None], at[None]])
        tiles = [plgpu.load(factors.matrix.at[at[:, None], (s + column)[None]]) for s in starts]
        return [x + _product(rows, tile, cut) for x, tile in zip(totals, tiles, strict=True)]

    zeros = jnp.zeros(shape[::-1] if cut.turned else shape, jnp.float32)
    return jax.lax.fori_loop(begin, end, step, [zeros for _ in starts])


def _product(rows: jax.Array, tile: jax.Array, cut: Cut) -> jax.Array:
    return dot(tile, rows, (0, 1)) if cut.turned else dot(rows, tile, (1, 0))


def _store(reference: Any, lead: tuple[Any, ...], start: jax.Array, x: jax.Array, cut: Cut) -> None:
    num_rows = reference.shape[-2]
    row = jax.lax.iota(jnp.int32, at_least_dot(num_rows))
    column = start + jax.lax.iota(jnp.int32, cut.columns)
    if cut.turned:
        row, column = row[None], column[:, None]
    else:
        row, column = row[:, None], column[None]
    inside = jnp.broadcast_to(row < num_rows, x.shape)
    plgpu.store(reference.at[(*lead, row, column)], x.astype(reference.dtype), mask=inside)


def multiplied(
    x: jax.Array, matrix: jax.Array, *, cut: Cut, early: bool, interpret: bool
) -> jax.Array:
    """A product, as parts of a sum.

    Args:
      x: [B, T, E].
      matrix: [E, N].
      cut: how it is shared out.
      early: whether the kernel behind may start before the end, as `start_next` says.
      interpret: run in Pallas' interpreter.

    Returns:
      f32[Q, B, T, N].
    """
    *lead, size = x.shape
    rows, width = math.prod(lead), matrix.shape[1]
    parts = launch(
        functools.partial(multiply, cut=cut, early=early and not interpret),
        Factors(x.reshape(rows, size), matrix),
        Multiplied(like((cut.parts, rows, width))),
        num_programs=width // cut.columns * cut.parts,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        interpret=interpret,
    ).parts
    return parts.reshape(cut.parts, *lead, width)


def gated(
    x: jax.Array,
    squares: jax.Array | None,
    matrix: jax.Array,
    *,
    mlp: Block,
    cut: Cut,
    early: bool,
    interpret: bool,
) -> jax.Array:
    """`activation(gate) * up` of products with a matrix that is both.

    Args:
      x: [B, T, E].
      squares: f32[B, T, n], sums of squares of the rows by whose root mean they are to be divided;
        None where they are.
      matrix: [E, 2 * I], the gate beside what it gates.
      mlp: whose gate it is.
      cut: how it is shared out.
      early: as of `multiplied`.
      interpret: run in Pallas' interpreter.

    Returns:
      [B, T, I].
    """
    *lead, size = x.shape
    inner, rows = matrix.shape[1] // 2, math.prod(lead)
    squares = None if squares is None else squares.reshape(rows, -1)
    y = launch(
        functools.partial(gate, cut=cut, block=mlp, early=early and not interpret),
        Factors(x.reshape(rows, size), matrix, squares),
        Gated(like((rows, inner), x.dtype)),
        num_programs=inner // cut.columns,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        interpret=interpret,
    ).y
    return y.reshape(*lead, inner)
