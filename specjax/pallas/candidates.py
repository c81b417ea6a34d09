"""The logits of a row that can be its cutoff, gathered by the program that searches them.

A row's block partials tell where its cutoff probably lies, and a little below begins what is
gathered: the few hundred quarters of blocks whose largest logit reaches that far, which one program
holds in its registers. Whether it was enough is certain afterwards.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.bracket import even_pivots
from specjax.filters import Filters
from specjax.logits import read_temperature
from specjax.logsumexp import BlockPartials, combine_blocks, reduce_blocks
from specjax.noise import SAMPLING_BLOCK
from specjax.pallas.launch import fast_exp2, like, only
from specjax.pallas.logsumexp import (
    Partials,
    load_blocks,
    load_line,
    load_row,
    partials_like,
    tile_index,
)
from specjax.pallas.tiles import Tile
from specjax.truncation import (
    MARGIN,
    keeps_top_k,
    keeps_top_p,
    mass_above,
    mass_weights,
    min_p_threshold,
)

__all__ = [
    "MOST_QUARTERS",
    "Reduced",
    "Row",
    "Rows",
    "asks_anything",
    "gather",
    "guess_low",
    "read_row",
    "reduced_like",
    "store_tile",
]

# Tokens of a quarter of a block, and quarters that a program can hold.
_QUARTER = SAMPLING_BLOCK // 4
MOST_QUARTERS = 512

# Places between the smallest and the largest of the blocks' maxima at which the blocks are asked.
_PIVOTS = 32
# Of what top-p leaves out, the share that a guess adds to be safe.
_SPARE_SHARE = 0.3


class Rows(NamedTuple):
    """Rows of logits [R, V], and what is asked of each, as references [R]."""

    logits: Any
    temperature: Any
    filters: Filters


class Row(NamedTuple):
    """What is known of a row before it is searched: scalars.

    Attributes:
      filters: what is asked, scalars.
      scale: f32, one over the temperature.
      anchor: f32, the largest logit.
      mass: f32, of all tokens, in the scale of `mass_weights`.
      asks: bool, the row is a law and some filter cuts it.
      cuts_k: bool, top-k does; None where no row asks for it.
      cuts_p: bool, likewise top-p.
      blocks: f32[N], partials of the row's blocks.
    """

    filters: Filters
    scale: jax.Array
    anchor: jax.Array
    mass: jax.Array
    asks: jax.Array
    cuts_k: jax.Array | None
    cuts_p: jax.Array | None
    blocks: BlockPartials


class Reduced(NamedTuple):
    """What the programs of R rows leave of them.

    Attributes:
      blocks: of each sampling block.
      quarter_max: f32[R, 4 * blocks], largest logit of each quarter of a block.
    """

    blocks: Partials
    quarter_max: Any


def reduced_like(num_rows: int, vocab_size: int, tile: Tile) -> Reduced:
    """The shapes of `Reduced`."""
    blocks = partials_like(num_rows, vocab_size, tile, tiles=False)
    return Reduced(blocks, like((num_rows, 4 * blocks.block_max.shape[1])))


def store_tile(
    rows: Rows, b: jax.Array, number: jax.Array, out: Reduced, tile: Tile, interpret: bool
) -> None:
    """Reduces one tile of row b."""
    x = load_row(rows.logits, b, tile_index(tile, number))
    scale = read_temperature(rows.temperature[b]).scale
    reduced = reduce_blocks(x, scale[None], None, fast_exp2(interpret))
    block = number * tile.blocks + jax.lax.iota(jnp.int32, tile.blocks)
    plgpu.store(out.blocks.block_max.at[b, block], reduced.max)
    plgpu.store(out.blocks.block_sum.at[b, block], reduced.sum)
    quarters = x.astype(jnp.float32).reshape(4 * tile.blocks, _QUARTER)
    quarter = 4 * number * tile.blocks + jax.lax.iota(jnp.int32, 4 * tile.blocks)
    plgpu.store(out.quarter_max.at[b, quarter], jnp.max(quarters, axis=1))


def asks_anything(rows: Rows, b: jax.Array) -> jax.Array:
    """Whether a row is cut if it is a law, bool[]."""
    filters = _filters(rows, b)
    scaling = read_temperature(rows.temperature[b])
    asks = scaling.scale < 0  # never, as a value that Triton can branch on
    if filters.top_k is not None:
        asks |= keeps_top_k(filters.top_k, rows.logits.shape[1])
    if filters.top_p is not None:
        asks |= keeps_top_p(filters.top_p)
    if filters.min_p is not None:
        asks |= filters.min_p > 0
    return asks & scaling.valid & ~scaling.greedy


def read_row(rows: Rows, reduced: Reduced, b: jax.Array, interpret: bool) -> Row:
    """Reads what the blocks of a row tell."""
    vocab_size = rows.logits.shape[1]
    filters, scale = _filters(rows, b), read_temperature(rows.temperature[b]).scale
    blocks = load_blocks(reduced.blocks, b, vocab_size)
    whole = combine_blocks(blocks, scale, fast_exp2(interpret))
    asks = asks_anything(rows, b) & jnp.isfinite(whole.max) & jnp.isfinite(whole.sum)
    cuts_k = None if filters.top_k is None else asks & keeps_top_k(filters.top_k, vocab_size)
    cuts_p = None if filters.top_p is None else asks & keeps_top_p(filters.top_p)
    return Row(filters, scale, whole.max, whole.sum, asks, cuts_k, cuts_p, blocks)


def _filters(rows: Rows, b: jax.Array) -> Filters:
    return Filters(*[None if x is None else x[b] for x in rows.filters])


def guess_low(row: Row, interpret: bool) -> jax.Array:
    """A logit f32 a little below where the cutoff is expected; -inf where there is no telling.

    Of top-k and min-p it is a bound. Of top-p it is a guess.
    """
    filters, low = row.filters, row.anchor
    if filters.min_p is not None:
        # The comparison that decides is made on the logit itself, so that this stays below it.
        relative = min_p_threshold(filters.min_p) - jnp.float32(MARGIN)
        low = row.anchor + relative / row.scale
    elif row.cuts_k is not None or row.cuts_p is not None:
        low = jnp.minimum(row.anchor, -jnp.inf)
    if row.cuts_k is None and row.cuts_p is None:
        return low
    exists = row.blocks.max > -jnp.inf
    least = jnp.min(jnp.where(exists, row.blocks.max, jnp.inf))
    pivots, maxima = even_pivots(least, row.anchor, _PIVOTS), row.blocks.max[None]
    reaching = mass_above(maxima, None, pivots)
    if row.cuts_p is not None and filters.top_p is not None:
        mass = _expected_mass(row, pivots, reaching, interpret)
        share = filters.top_p + jnp.float32(_SPARE_SHARE) * (1 - filters.top_p)
        guess = jnp.max(jnp.where(mass >= share * row.mass, pivots, least))
        low = jnp.where(row.cuts_p, jnp.maximum(low, guess), low)
    if row.cuts_k is not None and filters.top_k is not None:
        enough = reaching >= filters.top_k.astype(jnp.float32)
        # What top-p weighs is what top-k kept, down to top-k's own threshold.
        bound = jnp.max(jnp.where(enough, pivots, -jnp.inf))
        low = jnp.where(row.cuts_k, bound, low)
    return low


def _expected_mass(row: Row, pivots: jax.Array, reaching: jax.Array, interpret: bool) -> jax.Array:
    """What of a row lies above each of its pivots, by what its blocks tell, f32[_PIVOTS].

    The blocks' maxima are known. If tokens fall into blocks at random and a share g of N blocks
    has no logit above t, about -N log(g) tokens lie there: the others are spread between pivots.
    """
    exp2 = fast_exp2(interpret)
    weights = mass_weights(row.blocks.max, row.anchor, row.scale, exp2)
    known = mass_above(row.blocks.max[None], weights[None], pivots)
    num = jnp.sum((row.blocks.max > -jnp.inf).astype(jnp.float32))
    number = num * jnp.log(num / jnp.maximum(num - reaching, jnp.float32(0.5)))
    hidden = jnp.maximum(number - reaching, 0)
    at = mass_weights(pivots, row.anchor, row.scale, exp2)
    lane = jax.lax.iota(jnp.int32, _PIVOTS)
    step = (only(pivots, lane == 1) - only(pivots, lane == 0)) * row.scale
    growth = jnp.exp(jnp.minimum(step, jnp.float32(10)))
    between = at * (jnp.float32(0.5) + jnp.float32(0.5) * growth)
    # Sums over the pivots above, by parts: those that lie beyond i are not known at i.
    more = hidden * between * (1 - 1 / growth)
    return known + hidden * between + jnp.sum(more) - jnp.cumsum(more)


def gather(
    rows: Rows, quarter_max: Any, b: jax.Array, low: jax.Array, found: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The logits f32[N] of the quarters of row b that reach `low`, and how many quarters do.

    Args:
      rows: all rows.
      quarter_max: as in `Reduced`.
      b: the row.
      low: f32.
      found: reference i32[R, MOST_QUARTERS + M], to note them in, for M quarters and more.
      interpret: run in Pallas' interpreter.
    """
    largest = load_line(quarter_max, b, -jnp.inf)
    lane = jax.lax.iota(jnp.int32, largest.shape[0])
    reaches = (largest >= low) & (largest > -jnp.inf)
    place = jnp.cumsum(reaches.astype(jnp.int32), dtype=jnp.int32) - 1
    count = jnp.sum(reaches.astype(jnp.int32), dtype=jnp.int32)
    kept = reaches & (place < MOST_QUARTERS)
    # The interpreter writes back what a mask leaves out: each to a place of its own.
    plgpu.store(found.at[b, jnp.where(kept, place, MOST_QUARTERS + lane)], lane, mask=kept)
    if not interpret:
        plgpu.debug_barrier()
    slot = jax.lax.iota(jnp.int32, MOST_QUARTERS)
    quarter = plgpu.load(found.at[b, slot], mask=slot < count, other=jnp.int32(0))
    token = quarter[:, None] * _QUARTER + jax.lax.iota(jnp.int32, _QUARTER)[None]
    vocab_size = rows.logits.shape[1]
    token = jnp.where((slot < count)[:, None], token, jnp.int32(vocab_size))
    return load_row(rows.logits, b, token).astype(jnp.float32).reshape(-1), count
