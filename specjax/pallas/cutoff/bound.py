"""Sub-blocks of 32 tokens, and the lower bound of a row's cutoff that follows from them.

The first launch of `logit_cutoff` stores two numbers of every sub-block i: its largest logit m_i
and its sum of exponentials l_i. They bound, for any threshold t,

    number of logits >= t   is at least   #{i : m_i >= t}
    mass of logits >= t     is at least   sum over {i : m_i >= t} of max(w_i, w_i l_i - 31 w(t))

with w(x) = exp((x - anchor) * scale), w_i = w(m_i) and anchor the row's largest logit. If these
bounds give a threshold k logits, or the required mass, it lies at or below the cutoff. Logits below
it never matter.
Axes: `R` rows, `V` vocabulary, `N` sub-blocks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.bisection import key_value, ordered_key
from specjax.core.logsumexp import MaxSum, merge_partials, reduce_blocks
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.subnormal import smallest_equal
from specjax.core.temperature import parse_temperature
from specjax.core.truncation import (
    BOUND_SLACK,
    Filters,
    RowBounds,
    mass_above,
    mass_bound,
    min_p_threshold,
    required_mass,
    top_k_active,
    top_p_active,
)
from specjax.pallas.blocks import load_padded, load_raw_logits
from specjax.pallas.kernel_config import KernelConfig, Tile
from specjax.pallas.launch import cond_or, make_exp2, output

# Tokens of a sub-block.
SUB_BLOCK = SAMPLING_BLOCK // 4


class CutoffRows(NamedTuple):
    """References to rows of logits [R, V], their temperatures and their filters [R]."""

    logits: Any
    temperature: Any
    filters: Filters


class RowSummary(NamedTuple):
    """A row before its cutoff is searched, and its statistics; scalars except `sub_blocks`.

    Attributes:
      rows: all rows.
      b: i32, its index.
      config: sizes of the kernel.
      interpret: whether the kernel runs in Pallas' interpreter.
      filters: those of the row.
      scale: f32, one over the temperature, 1 where greedy.
      anchor: f32, the largest logit.
      mass: f32, sum of `exp((x - anchor) * scale)` over the row.
      is_cut: bool, whether the row is a distribution and a filter cuts it.
      cuts_k: bool, top-k cuts it; None where no row has top-k.
      cuts_p: bool, top-p cuts it; None where no row has top-p.
      sub_blocks: f32[N], partials of the row's sub-blocks.
    """

    rows: CutoffRows
    b: jax.Array
    config: KernelConfig
    interpret: bool
    filters: Filters
    scale: jax.Array
    anchor: jax.Array
    mass: jax.Array
    is_cut: jax.Array
    cuts_k: jax.Array | None
    cuts_p: jax.Array | None
    sub_blocks: MaxSum

    def bounds(self, low: jax.Array) -> RowBounds:
        """Returns the bounds of a search from a lower bound f32 of the cutoff."""
        return RowBounds(self.anchor, self.mass, self.cuts_k, self.cuts_p, low)


class SubBlocks(NamedTuple):
    """References to the partials of R rows' sub-blocks, each f32[R, N].

    Attributes:
      max: the largest logit.
      sum: of `exp((x - max) * scale)`.
    """

    max: Any
    sum: Any


def sub_blocks_shape(num_rows: int, vocab_size: int, tile: Tile) -> SubBlocks:
    """Returns the shapes of `SubBlocks`, rows padded to whole tiles."""
    shape = (num_rows, tile.num_tiles(vocab_size) * tile.size // SUB_BLOCK)
    return SubBlocks(output(shape), output(shape))


def store_sub_blocks(
    rows: CutoffRows,
    b: jax.Array,
    tile_index: jax.Array,
    out: SubBlocks,
    tile: Tile,
    interpret: bool,
) -> None:
    """Reduces tile `tile_index` of row b to the partials of its sub-blocks."""
    num_sub_blocks = tile.size // SUB_BLOCK
    sub_block = tile_index * num_sub_blocks + jax.lax.iota(jnp.int32, num_sub_blocks)
    token_id = sub_block[:, None] * SUB_BLOCK + jax.lax.iota(jnp.int32, SUB_BLOCK)[None]
    scale = parse_temperature(rows.temperature[b]).scale
    x = load_raw_logits(rows.logits, b, token_id)
    partials = reduce_blocks(x, scale[None], None, make_exp2(interpret))
    plgpu.store(out.max.at[b, sub_block], partials.max)
    plgpu.store(out.sum.at[b, sub_block], partials.sum)


def any_filter_active(rows: CutoffRows, b: jax.Array) -> jax.Array:
    """Returns whether a filter cuts row b, provided that the row is a distribution, bool[]."""
    filters = load_filters(rows, b)
    temperature = parse_temperature(rows.temperature[b])
    is_cut = temperature.scale < 0  # False, as a computed value that Triton can branch on
    if filters.top_k is not None:
        is_cut |= top_k_active(filters.top_k, rows.logits.shape[1])
    if filters.top_p is not None:
        is_cut |= top_p_active(filters.top_p)
    if filters.min_p is not None:
        is_cut |= filters.min_p > 0
    return is_cut & temperature.valid & ~temperature.greedy


def load_sub_blocks(sub_blocks: SubBlocks, b: jax.Array) -> MaxSum:
    """Loads the partials of row b, padded to a power of two."""
    return MaxSum(load_padded(sub_blocks.max, b, -jnp.inf), load_padded(sub_blocks.sum, b, 0))


def summarize_row(
    rows: CutoffRows, b: jax.Array, partials: MaxSum, config: KernelConfig, interpret: bool
) -> RowSummary:
    """Merges the partials of row b, and reads which filters cut it."""
    vocab_size = rows.logits.shape[1]
    filters, scale = load_filters(rows, b), parse_temperature(rows.temperature[b]).scale
    row_partial = merge_partials(partials, scale, make_exp2(interpret))
    is_cut = (
        any_filter_active(rows, b) & jnp.isfinite(row_partial.max) & jnp.isfinite(row_partial.sum)
    )
    cuts_k = None if filters.top_k is None else is_cut & top_k_active(filters.top_k, vocab_size)
    cuts_p = None if filters.top_p is None else is_cut & top_p_active(filters.top_p)
    where, sums = (rows, b, config, interpret), (row_partial.max, row_partial.sum)
    return RowSummary(*where, filters, scale, *sums, is_cut, cuts_k, cuts_p, partials)


def load_filters(rows: CutoffRows, b: jax.Array) -> Filters:
    """Loads the filters of row b."""
    return Filters(*[None if x is None else x[b] for x in rows.filters])


_NUM_HALVINGS = 7
# The near end of the bracket is min(_NEAR_SHARE * distance, _MAX_NEAR_DISTANCE) from the largest
# logit. It is taken to miss the target without a test. If it does not, the bound is only looser.
_NEAR_SHARE = 1 / 4
_MAX_NEAR_DISTANCE = 1 / 4
_MAX_FLOAT = float(jnp.finfo(jnp.float32).max)


def bound_cutoff(row: RowSummary) -> jax.Array:
    """Returns a logit f32 at or below the cutoff; -inf where no bound is known."""
    filters, low = row.filters, row.anchor
    if filters.min_p is not None:
        # The slack keeps the bound below the deciding comparison, which rounds differently.
        threshold = min_p_threshold(filters.min_p) - jnp.float32(BOUND_SLACK)
        low = row.anchor + threshold / row.scale
    else:
        low = jnp.minimum(row.anchor, -jnp.inf)  # -inf, as a computed value
    uses_mass = row.cuts_p
    if row.cuts_k is not None and filters.top_k is not None:
        # Top-p is a share of the mass that top-k keeps: where top-k cuts, the count alone bounds.
        uses_mass = None if row.cuts_p is None else row.cuts_p & ~row.cuts_k
        target, largest = filters.top_k.astype(jnp.float32), row.sub_blocks.max
        low = cond_or(
            row.cuts_k,
            lambda: _bisect_distance(row, target, lambda t: mass_above(largest, None, t)),
            low,
        )
    if uses_mass is not None and filters.top_p is not None:
        target = required_mass(filters.top_p, row.mass) * jnp.float32(1 + BOUND_SLACK)

        def least_mass(t: jax.Array) -> jax.Array:
            exp2 = make_exp2(row.interpret)
            return mass_bound(row.sub_blocks, t, row.anchor, row.scale, exp2, size=SUB_BLOCK)

        bound = cond_or(uses_mass, lambda: _bisect_distance(row, target, least_mass), low)
        top_p = filters.top_p
        bound = cond_or(bound == -jnp.inf, lambda: _bound_by_remainder(row, top_p), bound)
        low = jnp.where(uses_mass, jnp.maximum(low, bound), low)
    return smallest_equal(low)


def _bound_by_remainder(row: RowSummary, top_p: jax.Array) -> jax.Array:
    """Returns a logit below which less than 1 - top_p of the mass can lie, f32.

    If all V logits lay just below t, they would weigh V w(t). With w(t) = (1 - p) mass / V that
    is the mass that top-p may drop. The bound is loose, but exists for every row.
    """
    num_logits = jnp.float32(row.sub_blocks.max.shape[0] * SUB_BLOCK)
    share = (jnp.float32(1) - jnp.maximum(top_p, jnp.float32(0))) * jnp.float32(1 - BOUND_SLACK)
    return row.anchor + jnp.log(share * row.mass / num_logits) / row.scale


def _bisect_distance(
    row: RowSummary, target: jax.Array, lower_bound: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Returns nearly the highest threshold t with lower_bound(t) >= target; -inf if none is known.

    `lower_bound(t)` bounds the count, or the mass, of the logits >= t from below, from the
    sub-blocks alone. The search bisects the distance from the largest logit by its bit pattern,
    that is geometrically. The scale of that distance is unknown, because masked logits can be
    finite.
    """
    exists = row.sub_blocks.max > -jnp.inf
    smallest = jnp.min(jnp.where(exists, row.sub_blocks.max, jnp.inf))
    distance = jnp.minimum(row.anchor - smallest, jnp.float32(_MAX_FLOAT))
    farthest_key = ordered_key(distance)
    near_key = ordered_key(
        jnp.minimum(distance * jnp.float32(_NEAR_SHARE), jnp.float32(_MAX_NEAR_DISTANCE))
    )

    def bisect(_: Any, keys: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        near_key, far_key = keys
        middle_key = near_key + jax.lax.shift_right_arithmetic(far_key - near_key, jnp.int32(1))
        is_reached = lower_bound(row.anchor - key_value(middle_key)) >= target
        near_key = jnp.where(is_reached, near_key, middle_key)
        return near_key, jnp.where(is_reached, middle_key, far_key)

    _, far_key = jax.lax.fori_loop(
        jnp.int32(0), jnp.int32(_NUM_HALVINGS), bisect, (near_key, farthest_key)
    )
    low = row.anchor - key_value(far_key)
    # A halving sets the far end only where the test holds, so it is a valid bound.
    is_tested = far_key != farthest_key
    is_bound = cond_or(~is_tested, lambda: lower_bound(low) >= target, is_tested)
    return jnp.where(is_bound, low, -jnp.inf)
