"""A row in quarters of blocks, 32 tokens each: what its programs leave of them.

Axes: `R` rows, `V` vocabulary, `N` quarters.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.filters import Filters
from specjax.core.logsumexp import BlockPartials, combine_blocks, reduce_blocks
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.temperature import read_temperature
from specjax.core.truncation import keeps_top_k, keeps_top_p
from specjax.pallas.blocks import load_line, load_row
from specjax.pallas.launch import fast_exp2, like
from specjax.pallas.tiles import Tile

__all__ = [
    "QUARTER",
    "Quarters",
    "Row",
    "Rows",
    "asks_anything",
    "load_quarters",
    "quarters_like",
    "read_row",
    "store_tile",
]

# Tokens of a quarter of a block.
QUARTER = SAMPLING_BLOCK // 4


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
      quarters: f32[N], partials of the quarters of the row's blocks.
    """

    filters: Filters
    scale: jax.Array
    anchor: jax.Array
    mass: jax.Array
    asks: jax.Array
    cuts_k: jax.Array | None
    cuts_p: jax.Array | None
    quarters: BlockPartials


class Quarters(NamedTuple):
    """What the programs of R rows leave of the quarters of their blocks, each f32[R, N].

    Attributes:
      max: the largest logit.
      sum: of `exp((x - max) * scale)`.
    """

    max: Any
    sum: Any


def quarters_like(num_rows: int, vocab_size: int, tile: Tile) -> Quarters:
    """The shapes of `Quarters`."""
    shape = (num_rows, tile.count(vocab_size) * tile.size // QUARTER)
    return Quarters(like(shape), like(shape))


def store_tile(
    rows: Rows, b: jax.Array, number: jax.Array, out: Quarters, tile: Tile, interpret: bool
) -> None:
    """Reduces one tile of row b."""
    count = tile.size // QUARTER
    quarter = number * count + jax.lax.iota(jnp.int32, count)
    token = quarter[:, None] * QUARTER + jax.lax.iota(jnp.int32, QUARTER)[None]
    scale = read_temperature(rows.temperature[b]).scale
    x = load_row(rows.logits, b, token)
    reduced = reduce_blocks(x, scale[None], None, fast_exp2(interpret))
    plgpu.store(out.max.at[b, quarter], reduced.max)
    plgpu.store(out.sum.at[b, quarter], reduced.sum)


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


def load_quarters(quarters: Quarters, b: jax.Array) -> BlockPartials:
    """The quarters of row b."""
    return BlockPartials(load_line(quarters.max, b, -jnp.inf), load_line(quarters.sum, b, 0))


def read_row(rows: Rows, b: jax.Array, partials: BlockPartials, interpret: bool) -> Row:
    """What the quarters of row b tell."""
    vocab_size = rows.logits.shape[1]
    filters, scale = _filters(rows, b), read_temperature(rows.temperature[b]).scale
    whole = combine_blocks(partials, scale, fast_exp2(interpret))
    asks = asks_anything(rows, b) & jnp.isfinite(whole.max) & jnp.isfinite(whole.sum)
    cuts_k = None if filters.top_k is None else asks & keeps_top_k(filters.top_k, vocab_size)
    cuts_p = None if filters.top_p is None else asks & keeps_top_p(filters.top_p)
    return Row(filters, scale, whole.max, whole.sum, asks, cuts_k, cuts_p, partials)


def _filters(rows: Rows, b: jax.Array) -> Filters:
    return Filters(*[None if x is None else x[b] for x in rows.filters])
