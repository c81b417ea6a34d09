"""Adds a product to the residual stream, and begins the next RMSNorm, which is deferred.

A product of normed rows with a matrix W needs 1 / rms(x), and so the whole row. This factor is one
number per row, so it can follow the product as well as precede it:

    ((x * w) / rms(x)) @ W = ((x * w) @ W) / rms(x)      rms(x) = sqrt(mean(x^2) + eps)

with w the norm's weight. So `add_rms_norm_kernel` stores x * w and sums of x^2 by tiles, and its
programs do not wait. The reader of the product divides (`load_squares`, `inv_rms`).
Axes: `R` rows, `E` hidden, `Q` split-K parts of the product, `n` tiles of E.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.decoder.shared_math import NormSpec
from specjax.pallas.kernel_config import Tile
from specjax.pallas.launch import divmod_i32, launch, output


class AddNormOperands(NamedTuple):
    """References.

    Attributes:
      x: [R, E], the residual stream.
      parts: [Q, R, E], split-K partial sums of the added product; None adds nothing.
      weight: [E], of the norm, without its offset.
      bias: [E], of the added product, or None.
      added_weight: [E], of the added product's own norm, or None.
    """

    x: Any
    parts: Any
    weight: Any
    bias: Any = None
    added_weight: Any = None


class AddNormOutputs(NamedTuple):
    """The residual stream after the addition, and its deferred norm.

    Attributes:
      x: [R, E], the residual stream.
      weighted_rows: [R, E], the residual stream times the norm's weight.
      squares: f32[R, n], sums of x^2 by tiles.
    """

    x: Any
    weighted_rows: Any
    squares: Any


def add_rms_norm_kernel(
    operands: AddNormOperands,
    out: AddNormOutputs,
    *,
    offset: float,
    tile: Tile,
    added_norm: NormSpec | None,
) -> None:
    """Writes one tile of s = x + sum_q parts[q], of s * (offset + weight), and its sum of s^2.

    A bias is added to the product, and its own norm follows, where the model has them.

    Grid: R * n programs of 8 warps; one owns 1024 elements of one row. Or R programs of up to 32
    warps, of which each owns a row (`tilings.norm_tile`).
    Bytes per row: E (Q * 4 + itemsize) read, 2 E * itemsize + 4 n written.
    Why tiles: a program per row would leave most of the GPU idle at 8 rows. The deferred norm needs
    no reduction over the row here. Why whole rows: many rows fill the GPU.
    Memory order: loads begin after the launch that wrote `parts` has ended. It does not trigger the
    next launch early, because XLA's kernels may read the residual stream.
    Reference: Zhang and Sennrich, 2019, arXiv:1910.07467: RMSNorm.

    Args:
      operands: references.
      out: references.
      offset: added to the weight.
      tile: of a row; the whole row if the added product has a norm.
      added_norm: of the added product; None if it has none.
    """
    size = out.x.shape[1]
    row, tile_index = divmod_i32(pl.program_id(0), tile.num_tiles(size))
    index, inside = _columns(tile_index, tile.size, size)
    x, weight = _load(operands.x, (row, index), inside), _load(operands.weight, (index,), inside)
    if operands.parts is not None:
        num_parts = operands.parts.shape[0]
        parts = [_load(operands.parts, (q, row, index), inside) for q in range(num_parts)]
        added = sum(parts[1:], parts[0])
        if operands.bias is not None:
            added += _load(operands.bias, (index,), inside)
        # The sum is rounded like a product in plain JAX; the residual stream is rounded below.
        added = added.astype(out.x.dtype).astype(jnp.float32)
        if added_norm is not None:
            scale = _load(operands.added_weight, (index,), inside) + added_norm.offset
            factor = jax.lax.rsqrt(jnp.sum(added * added) / added_norm.size + added_norm.eps)
            added = scale_norm(added * factor, scale, added_norm, out.x.dtype)
        x += added
    stream = x.astype(out.x.dtype)
    x = stream.astype(jnp.float32)
    plgpu.store(out.x.at[row, index], stream, mask=inside)
    weighted_row = (x * (weight + offset)).astype(out.weighted_rows.dtype)
    plgpu.store(out.weighted_rows.at[row, index], weighted_row, mask=inside)
    out.squares[row, tile_index] = jnp.sum(x * x)


def load_squares(squares: Any, *row: Any) -> list[jax.Array]:
    """Returns the sums of squares of rows by tiles, n arrays f32[...].

    Args:
      squares: reference f32[..., n].
      *row: leading indices, scalars or arrays [...] of one shape.
    """
    return [plgpu.load(squares.at[(*row, jnp.int32(i))]) for i in range(squares.shape[-1])]


def inv_rms(squares: Sequence[jax.Array], norm: NormSpec) -> jax.Array:
    """Returns rsqrt(sum(squares) / size + eps), the factor of a deferred norm.

    A chain of additions has one order for any number of rows.

    Args:
      squares: n arrays f32[...], from `load_squares`.
      norm: size and eps.
    """
    return jax.lax.rsqrt(functools.reduce(jnp.add, squares) / norm.size + norm.eps)


def add_rms_norm(
    operands: AddNormOperands,
    *,
    offset: float,
    tile: Tile,
    added_norm: NormSpec | None,
    interpret: bool,
) -> AddNormOutputs:
    """Returns the residual stream with a product added, and its deferred norm.

    Args:
      operands: arrays, whose rows have the axes [B, T'].
      offset: added to the weight.
      tile: of a row, from `tilings.norm_tile`.
      added_norm: as in `add_rms_norm_kernel`.
      interpret: run in Pallas' interpreter.

    Returns:
      `AddNormOutputs` of [B, T', E], [B, T', E] and f32[B, T', n].
    """
    (*lead, size), parts = operands.x.shape, operands.parts
    num_rows, num_tiles = math.prod(lead), tile.num_tiles(size)
    x = operands.x.reshape(num_rows, size)
    parts = None if parts is None else parts.reshape(-1, num_rows, size)
    outputs = launch(
        functools.partial(add_rms_norm_kernel, offset=offset, tile=tile, added_norm=added_norm),
        operands._replace(x=x, parts=parts),
        AddNormOutputs(
            output((num_rows, size), x.dtype),
            output((num_rows, size), x.dtype),
            output((num_rows, num_tiles)),
        ),
        num_programs=num_rows * num_tiles,
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    return AddNormOutputs(*(y.reshape(*lead, -1) for y in outputs))


def scale_norm(x: jax.Array, scale: jax.Array, norm: NormSpec, dtype: Any) -> jax.Array:
    """Returns f32 rows of a norm times its weight, rounded as in `layers.rms_norm`.

    Args:
      x: f32[..., n], rows over their root mean square.
      scale: f32[..., n], the weight with its offset.
      norm: of which the offset says whether rows are rounded before they are scaled.
      dtype: of the model.
    """
    x = x if norm.offset else x.astype(dtype).astype(jnp.float32)
    return (x * scale).astype(dtype).astype(jnp.float32)


def _columns(tile_index: jax.Array, width: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the columns i32[width] of a tile, and a mask of those in a row of `size`."""
    index = tile_index * width + jax.lax.iota(jnp.int32, width)
    return index, index < size


def _load(reference: Any, at: Any, mask: jax.Array) -> jax.Array:
    x = plgpu.load(reference.at[at], mask=mask, other=jnp.zeros((), reference.dtype))
    return x.astype(jnp.float32)
