"""Quarters of blocks, 32 tokens each, and the bound that they give a row's cutoff from below.

The largest logit and the sum of every quarter say how much of a row lies at or above a logit at
least: each quarter that reaches it does so by one token.
Axes: `R` rows, `V` vocabulary, `N` quarters.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.bisection import key_value, ordered_key
from specjax.core.logsumexp import BlockPartials, merge_partials, reduce_blocks
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.subnormal import smallest_equal
from specjax.core.temperature import parse_temperature
from specjax.core.truncation import (
    BOUND_SLACK,
    Filters,
    mass_above,
    mass_bound,
    min_p_threshold,
    required_mass,
    top_k_active,
    top_p_active,
)
from specjax.pallas.blocks import load_line, load_row
from specjax.pallas.launch import fast_exp2, like, value_when
from specjax.pallas.tiles import Tile

__all__ = [
    "QUARTER",
    "Quarters",
    "Row",
    "Rows",
    "asks_anything",
    "bound_low",
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
    scale = parse_temperature(rows.temperature[b]).scale
    x = load_row(rows.logits, b, token)
    reduced = reduce_blocks(x, scale[None], None, fast_exp2(interpret))
    plgpu.store(out.max.at[b, quarter], reduced.max)
    plgpu.store(out.sum.at[b, quarter], reduced.sum)


def asks_anything(rows: Rows, b: jax.Array) -> jax.Array:
    """Whether a row is cut if it is a law, bool[]."""
    filters = _filters(rows, b)
    temperature = parse_temperature(rows.temperature[b])
    asks = temperature.scale < 0  # never, as a value that Triton can branch on
    if filters.top_k is not None:
        asks |= top_k_active(filters.top_k, rows.logits.shape[1])
    if filters.top_p is not None:
        asks |= top_p_active(filters.top_p)
    if filters.min_p is not None:
        asks |= filters.min_p > 0
    return asks & temperature.valid & ~temperature.greedy


def load_quarters(quarters: Quarters, b: jax.Array) -> BlockPartials:
    """The quarters of row b."""
    return BlockPartials(load_line(quarters.max, b, -jnp.inf), load_line(quarters.sum, b, 0))


def read_row(rows: Rows, b: jax.Array, partials: BlockPartials, interpret: bool) -> Row:
    """What the quarters of row b tell."""
    vocab_size = rows.logits.shape[1]
    filters, scale = _filters(rows, b), parse_temperature(rows.temperature[b]).scale
    whole = merge_partials(partials, scale, fast_exp2(interpret))
    asks = asks_anything(rows, b) & jnp.isfinite(whole.max) & jnp.isfinite(whole.sum)
    cuts_k = None if filters.top_k is None else asks & top_k_active(filters.top_k, vocab_size)
    cuts_p = None if filters.top_p is None else asks & top_p_active(filters.top_p)
    return Row(filters, scale, whole.max, whole.sum, asks, cuts_k, cuts_p, partials)


def _filters(rows: Rows, b: jax.Array) -> Filters:
    return Filters(*[None if x is None else x[b] for x in rows.filters])


# Halvings of the distance from the largest logit, in octaves, and where they begin.
_HALVINGS = 7
_NEAREST = 1 / 4
_MOST = float(jnp.finfo(jnp.float32).max)


def bound_low(row: Row, interpret: bool) -> jax.Array:
    """A logit f32 below which the cutoff does not lie; -inf where there is no telling."""
    filters, low = row.filters, row.anchor
    if filters.min_p is not None:
        # The comparison that decides is made on the logit itself, so that this stays below it.
        relative = min_p_threshold(filters.min_p) - jnp.float32(BOUND_SLACK)
        low = row.anchor + relative / row.scale
    else:
        low = jnp.minimum(row.anchor, -jnp.inf)
    of_all = row.cuts_p
    if row.cuts_k is not None and filters.top_k is not None:
        # What top-p weighs is what top-k kept, down to top-k's own threshold.
        of_all = None if row.cuts_p is None else row.cuts_p & ~row.cuts_k
        target, largest = filters.top_k.astype(jnp.float32), row.quarters.max
        low = value_when(
            row.cuts_k, lambda: _highest(row, target, lambda t: mass_above(largest, None, t)), low
        )
    if of_all is not None and filters.top_p is not None:
        target = required_mass(filters.top_p, row.mass) * jnp.float32(1 + BOUND_SLACK)

        def weigh(t: jax.Array) -> jax.Array:
            return mass_bound(
                row.quarters, t, row.anchor, row.scale, fast_exp2(interpret), size=QUARTER
            )

        found = value_when(of_all, lambda: _highest(row, target, weigh), low)
        low = jnp.where(of_all, jnp.maximum(low, found), low)
    return smallest_equal(low)


def _highest(row: Row, target: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """About the highest logit at or above which `weigh` finds the target; -inf if none is known.

    It is looked for by its distance from the largest one, whose magnitude nobody knows: masked
    logits can be finite.
    """
    exists = row.quarters.max > -jnp.inf
    least = jnp.min(jnp.where(exists, row.quarters.max, jnp.inf))
    distance = jnp.minimum(row.anchor - least, jnp.float32(_MOST))
    far = ordered_key(distance)
    near = ordered_key(jnp.minimum(distance * jnp.float32(_NEAREST), jnp.float32(_NEAREST)))

    def halve(_: Any, keys: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        near, far = keys
        middle = near + jax.lax.shift_right_arithmetic(far - near, jnp.int32(1))
        enough = weigh(row.anchor - key_value(middle)) >= target
        return jnp.where(enough, near, middle), jnp.where(enough, middle, far)

    _, far = jax.lax.fori_loop(jnp.int32(0), jnp.int32(_HALVINGS), halve, (near, far))
    low = row.anchor - key_value(far)
    return jnp.where(weigh(low) >= target, low, -jnp.inf)
