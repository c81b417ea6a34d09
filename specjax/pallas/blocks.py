"""Partials of a row by many programs: of its sampling blocks, and of each program's tile.

A row of V logits is cut into tiles, one per program, and each tile into blocks of 128 tokens. A
program stores the largest logit m_i and the sum l_i = sum exp((x - m_i) / τ) of every block. They
give the row's logsumexp, the probability of each block and the row's argmax:

    m = max m_i        l = sum_i exp((m_i - m) / τ) l_i        logsumexp = m / τ + log l

References:
  Milakov and Gimelshein, 2018, arXiv:1805.02867: online softmax, the associative merge of (m, l).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.core.gumbel_max import first_argmax
from specjax.core.logsumexp import (
    LogNormalizer,
    MaxSum,
    mask_below_cutoff,
    merge_partials,
    reduce_blocks,
)
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.subnormal import flush_subnormals
from specjax.pallas.kernel_config import Tile, next_power_of_2
from specjax.pallas.launch import make_exp2, make_nan_to_inf, output


class Partials(NamedTuple):
    """References to the partials of rows, [rows, blocks] or [rows, tiles].

    Attributes:
      block_max: f32, largest kept logit of each sampling block.
      block_sum: f32, sum of `exp((x - max) * scale)` over each block.
      tile_max: f32, largest kept logit of each program's tile; None where only blocks are merged.
      tile_sum: f32, sum over each program's tile; None where only blocks are merged.
      tile_argmax: i32, token of the tile's largest logit, written for greedy requests only; None
        where only blocks are merged.
    """

    block_max: Any
    block_sum: Any
    tile_max: Any
    tile_sum: Any
    tile_argmax: Any


class RowTile(NamedTuple):
    """One program's tile of a row.

    Attributes:
      logits: reference [R, V].
      row_index: i32, the row.
      tile_index: i32, which tile of the row.
      scale: f32, one over the temperature, 1 where greedy.
      cutoff: f32, or None.
      tile: its size.
      interpret: whether in Pallas' interpreter.
      greedy: bool, whether the tile's argmax is stored; None where no row's is.
    """

    logits: Any
    row_index: jax.Array
    tile_index: jax.Array
    scale: jax.Array
    cutoff: jax.Array | None
    tile: Tile
    interpret: bool
    greedy: jax.Array | None = None


def partials_shape(num_rows: int, vocab_size: int, tile: Tile, has_tiles: bool = True) -> Partials:
    """Returns the shapes of `Partials`; those of tiles are None without `has_tiles`."""
    tiles = (num_rows, tile.num_tiles(vocab_size))
    blocks = (num_rows, tiles[1] * tile.num_blocks)
    if not has_tiles:
        return Partials(output(blocks), output(blocks), None, None, None)
    return Partials(
        output(blocks), output(blocks), output(tiles), output(tiles), output(tiles, jnp.int32)
    )


def tile_token_ids(tile: Tile, tile_index: Any) -> jax.Array:
    """Returns the token ids i32[blocks, SAMPLING_BLOCK] of tile `tile_index` of a row."""
    shape = (tile.num_blocks, SAMPLING_BLOCK)
    block = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    token = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return tile_index * tile.size + block * SAMPLING_BLOCK + token


def load_raw_logits(logits: Any, row: Any, token_id: jax.Array) -> jax.Array:
    """Loads logits of a row at token ids >= 0, without its cutoff; -inf past the row's end."""
    other = jnp.asarray(-jnp.inf, logits.dtype)
    inside = token_id < logits.shape[1]
    return plgpu.load(logits.at[row, token_id], mask=inside, other=other)


def load_first_values(values: Any, row: jax.Array, size: int, count: jax.Array) -> jax.Array:
    """Loads the first values f32[size] of a row; -inf from `count` on."""
    column = jax.lax.iota(jnp.int32, size)
    inside = column < jnp.minimum(count, values.shape[1])
    return plgpu.load(values.at[row, column], mask=inside, other=jnp.float32(-jnp.inf))


def load_logits(
    logits: Any, row: jax.Array, token_id: jax.Array, cutoff: jax.Array | None, mask: jax.Array
) -> jax.Array:
    """Loads kept logits f32; -inf below the cutoff, outside the row, or where `mask` is False."""
    inside = mask & (token_id >= 0) & (token_id < logits.shape[1])
    other = jnp.asarray(-jnp.inf, logits.dtype)
    return mask_below_cutoff(plgpu.load(logits.at[row, token_id], mask=inside, other=other), cutoff)


def reduce_tile(row_tile: RowTile, only_maxima: jax.Array | None = None) -> MaxSum:
    """Loads and reduces one tile of a row, to partials of its blocks."""
    token_id = tile_token_ids(row_tile.tile, row_tile.tile_index)
    x = load_raw_logits(row_tile.logits, row_tile.row_index, token_id)
    exp2, nan_to_inf = make_exp2(row_tile.interpret), make_nan_to_inf(row_tile.interpret)
    return reduce_blocks(x, row_tile.scale[None], row_tile.cutoff, exp2, only_maxima, nan_to_inf)


def store_blocks(
    block_partials: MaxSum, row_tile: RowTile, partials: Partials, index: Any
) -> jax.Array:
    """Stores partials of a tile's blocks and of the tile; returns its largest kept logit, f32[]."""
    tile_index, num_blocks = row_tile.tile_index, row_tile.tile.num_blocks
    blocks = tile_index * num_blocks + jax.lax.iota(jnp.int32, num_blocks)
    plgpu.store(partials.block_max.at[index, blocks], block_partials.max)
    plgpu.store(partials.block_sum.at[index, blocks], block_partials.sum)
    tile_partial = merge_partials(block_partials, row_tile.scale, make_exp2(row_tile.interpret))
    if partials.tile_max is not None:
        partials.tile_max[index, tile_index] = tile_partial.max
        partials.tile_sum[index, tile_index] = tile_partial.sum
    return tile_partial.max


def store_partials(
    row_tile: RowTile, partials: Partials, index: Any, only_maxima: jax.Array | None = None
) -> jax.Array:
    """Reduces one tile of a row, and stores its partials at `index`, their row in `partials`.

    Args:
      row_tile: the tile.
      partials: references to what is stored.
      index: their row.
      only_maxima: as in `reduce_blocks`.

    Returns:
      f32[], the largest kept logit of the tile.
    """
    block_partials = reduce_tile(row_tile, only_maxima)
    tile_max = store_blocks(block_partials, row_tile, partials, index)
    if row_tile.greedy is not None:

        @pl.when(row_tile.greedy)
        def _() -> None:
            token = tile_argmax(row_tile, block_partials.max)
            partials.tile_argmax[index, row_tile.tile_index] = token

    return tile_max


def tile_argmax(row_tile: RowTile, block_max: jax.Array) -> jax.Array:
    """Returns the token i32 of a tile's largest logit, from the maxima of its blocks."""
    first_block = row_tile.tile_index * row_tile.tile.num_blocks
    block = first_block + first_argmax(flush_subnormals(block_max))
    return block_argmax(row_tile.logits, row_tile.row_index, row_tile.cutoff, block)


def block_argmax(
    logits: Any, row: jax.Array, cutoff: jax.Array | None, block: jax.Array
) -> jax.Array:
    """Returns the token i32 of a row's largest logit in a block; ties go to the lowest id."""
    # The block is reread from the L2 cache: an argmax over the whole tile would be no faster.
    token_id = block * SAMPLING_BLOCK + jax.lax.iota(jnp.int32, SAMPLING_BLOCK)
    raw_logits = load_raw_logits(logits, row, token_id)
    kept_logits = flush_subnormals(mask_below_cutoff(raw_logits, cutoff))
    return block * SAMPLING_BLOCK + first_argmax(kept_logits)


def load_blocks(partials: Partials, index: jax.Array, vocab_size: int) -> MaxSum:
    """Loads the partials of the blocks of rows [...], f32[..., N]; N is a power of two."""
    num_blocks = -(-vocab_size // SAMPLING_BLOCK)
    return _load_partials(partials.block_max, partials.block_sum, index, index >= 0, num_blocks)


def load_some_blocks(
    partials: Partials, index: jax.Array, block: jax.Array, vocab_size: int
) -> MaxSum:
    """Loads the partials of some blocks i32[...] of a row i32[]; empty past the row's end."""
    inside, row = block * SAMPLING_BLOCK < vocab_size, jnp.broadcast_to(index, block.shape)
    return MaxSum(
        plgpu.load(partials.block_max.at[row, block], mask=inside, other=jnp.float32(-jnp.inf)),
        plgpu.load(partials.block_sum.at[row, block], mask=inside, other=jnp.float32(0)),
    )


def load_tiles(partials: Partials, index: jax.Array, mask: jax.Array) -> MaxSum:
    """Loads the partials of the tiles of rows [...], f32[..., N]; empty where `mask` is False."""
    num_tiles = partials.tile_max.shape[1]
    return _load_partials(partials.tile_max, partials.tile_sum, index, mask, num_tiles)


def load_maxima(partials: Partials, index: jax.Array) -> tuple[LogNormalizer, jax.Array]:
    """Loads the largest logit and the argmax of a row whose logits were not exponentiated.

    Returns:
      `LogNormalizer` and the argmax, i32[]. Its shift is the largest logit. Its `log_sum` is not
      the row's: it is 0, or NaN where the row is not a distribution.
    """
    maxima = load_padded(partials.tile_max, index, -jnp.inf)
    shift, best = jnp.max(maxima), first_argmax(flush_subnormals(maxima))
    log_sum = jnp.where(jnp.isfinite(shift), jnp.float32(0), jnp.nan)
    return LogNormalizer(shift, log_sum), partials.tile_argmax[index, best]


def load_padded(values: Any, index: jax.Array, other: Any) -> jax.Array:
    """Loads row `index` of a reference [rows, N], padded by `other` to a power of two."""
    column = jax.lax.iota(jnp.int32, next_power_of_2(values.shape[1]))
    inside = column < values.shape[1]
    return plgpu.load(values.at[index, column], mask=inside, other=jnp.asarray(other, values.dtype))


def _load_partials(maxima: Any, sums: Any, index: jax.Array, mask: jax.Array, count: int) -> MaxSum:
    shape = (*index.shape, next_power_of_2(count))
    column = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    row = jnp.broadcast_to(index[..., None], shape)
    inside = jnp.broadcast_to(mask[..., None], shape) & (column < count)
    return MaxSum(
        plgpu.load(maxima.at[row, column], mask=inside, other=jnp.float32(-jnp.inf)),
        plgpu.load(sums.at[row, column], mask=inside, other=jnp.float32(0)),
    )
