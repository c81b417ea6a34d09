"""Partials of a row by many programs: of its sampling blocks, and of each program's tile."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.core.gumbel_max import first_argmax
from specjax.core.logsumexp import BlockPartials, mask_below_cutoff, merge_partials, reduce_blocks
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.subnormal import flush_subnormals
from specjax.pallas.launch import fast_exp2, like
from specjax.pallas.tiles import Tile, power_of_two

__all__ = [
    "Partials",
    "Share",
    "block_argmax",
    "load_blocks",
    "load_line",
    "load_row",
    "load_some",
    "load_tiles",
    "load_token",
    "partials_like",
    "store_partials",
    "tile_index",
]


class Partials(NamedTuple):
    """What the programs of P rows leave of them.

    Attributes:
      block_max: f32[P, blocks], largest kept logit of each sampling block.
      block_sum: f32[P, blocks], of `exp((x - max) * scale)`.
      tile_max: f32[P, tiles], of each program's tile, and `tile_sum` likewise; None where a row's
        blocks are merged once only.
      tile_best: i32[P, tiles], the tile's argmax where the request is greedy; or None.
    """

    block_max: Any
    block_sum: Any
    tile_max: Any
    tile_sum: Any
    tile_best: Any


class Share(NamedTuple):
    """One program's share of a row: tile `tile` of row `row` of `logits` [R, V].

    `greedy` bool says that its argmax is wanted; None where no row's is.
    """

    logits: Any
    row: jax.Array
    tile: jax.Array
    scale: jax.Array
    cutoff: jax.Array | None
    greedy: jax.Array | None


def partials_like(num_rows: int, vocab_size: int, tile: Tile, tiles: bool = True) -> Partials:
    """The shapes of `Partials`, with those of tiles or without."""
    count = tile.count(vocab_size)
    each, blocks = (num_rows, count), (num_rows, count * tile.blocks)
    if not tiles:
        return Partials(like(blocks), like(blocks), None, None, None)
    return Partials(like(blocks), like(blocks), like(each), like(each), like(each, jnp.int32))


def tile_index(tile: Tile, number: Any) -> jax.Array:
    """Token ids i32[blocks, SAMPLING_BLOCK] of one tile of a row."""
    shape = (tile.blocks, SAMPLING_BLOCK)
    block = jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    token = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    return number * tile.size + block * SAMPLING_BLOCK + token


def load_row(logits: Any, row: Any, index: jax.Array) -> jax.Array:
    """Raw logits of a row at token ids >= 0; -inf past its end."""
    other = jnp.asarray(-jnp.inf, logits.dtype)
    return plgpu.load(logits.at[row, index], mask=index < logits.shape[1], other=other)


def load_some(values: Any, row: jax.Array, size: int, count: jax.Array) -> jax.Array:
    """The first values f32[size] of a row; -inf from `count` on."""
    lane = jax.lax.iota(jnp.int32, size)
    inside = lane < jnp.minimum(count, values.shape[1])
    return plgpu.load(values.at[row, lane], mask=inside, other=jnp.float32(-jnp.inf))


def load_token(
    logits: Any, row: jax.Array, token_id: jax.Array, cutoff: jax.Array | None, wanted: jax.Array
) -> jax.Array:
    """Kept logits of tokens, f32 of their shape; -inf for ids outside the row and unwanted ones."""
    inside = wanted & (token_id >= 0) & (token_id < logits.shape[1])
    other = jnp.asarray(-jnp.inf, logits.dtype)
    return mask_below_cutoff(plgpu.load(logits.at[row, token_id], mask=inside, other=other), cutoff)


def store_partials(
    share: Share, partials: Partials, place: Any, tile: Tile, interpret: bool
) -> jax.Array:
    """Reduces one program's share of a row, which is row `place` of the partials.

    Returns:
      f32[], the largest kept logit of the share.
    """
    exp2, number = fast_exp2(interpret), share.tile
    x = load_row(share.logits, share.row, tile_index(tile, number))
    reduced = reduce_blocks(x, share.scale[None], share.cutoff, exp2)
    where = number * tile.blocks + jax.lax.iota(jnp.int32, tile.blocks)
    plgpu.store(partials.block_max.at[place, where], reduced.max)
    plgpu.store(partials.block_sum.at[place, where], reduced.sum)
    whole = merge_partials(reduced, share.scale, exp2)
    if partials.tile_max is not None:
        partials.tile_max[place, number] = whole.max
        partials.tile_sum[place, number] = whole.sum
    if share.greedy is not None:

        @pl.when(share.greedy)
        def _() -> None:
            block = number * tile.blocks + first_argmax(flush_subnormals(reduced.max))
            best = block_argmax(share.logits, share.row, share.cutoff, block)
            partials.tile_best[place, number] = best

    return whole.max


def block_argmax(
    logits: Any, row: jax.Array, cutoff: jax.Array | None, block: jax.Array
) -> jax.Array:
    """The token i32 of a row's largest logit in a block; ties go to the lowest id."""
    # The block once more, from the cache: comparing every logit of a tile would take as long.
    index = block * SAMPLING_BLOCK + jax.lax.iota(jnp.int32, SAMPLING_BLOCK)
    kept = flush_subnormals(mask_below_cutoff(load_row(logits, row, index), cutoff))
    return block * SAMPLING_BLOCK + first_argmax(kept)


def load_blocks(partials: Partials, place: jax.Array, vocab_size: int) -> BlockPartials:
    """The partials of the blocks of rows [...], f32[..., N]; N is a power of two."""
    num_blocks = -(-vocab_size // SAMPLING_BLOCK)
    return _load(partials.block_max, partials.block_sum, place, place >= 0, num_blocks)


def load_tiles(partials: Partials, place: jax.Array, wanted: jax.Array) -> BlockPartials:
    """The partials of the tiles of rows [...], f32[..., N]; of rows not wanted, empty ones."""
    count = partials.tile_max.shape[1]
    return _load(partials.tile_max, partials.tile_sum, place, wanted, count)


def load_line(values: Any, place: jax.Array, other: Any) -> jax.Array:
    """Row `place` of a reference [P, N], padded by `other` to a power of two."""
    lane = jax.lax.iota(jnp.int32, power_of_two(values.shape[1]))
    inside = lane < values.shape[1]
    return plgpu.load(values.at[place, lane], mask=inside, other=jnp.asarray(other, values.dtype))


def _load(maxima: Any, sums: Any, place: jax.Array, wanted: jax.Array, count: int) -> BlockPartials:
    shape = (*place.shape, power_of_two(count))
    lane = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    row = jnp.broadcast_to(place[..., None], shape)
    inside = jnp.broadcast_to(wanted[..., None], shape) & (lane < count)
    return BlockPartials(
        plgpu.load(maxima.at[row, lane], mask=inside, other=jnp.float32(-jnp.inf)),
        plgpu.load(sums.at[row, lane], mask=inside, other=jnp.float32(0)),
    )
