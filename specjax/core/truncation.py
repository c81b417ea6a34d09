r"""Top-k, top-p and min-p as thresholds of logits, found without a sort.

    top-k: the largest t that k logits reach
    top-p: the largest t at or above which lies top_p of the mass that top-k kept
    min-p: exp((t - max) * scale) = min_p

`specjax.core.bisection` finds the first two. Ties at a threshold are kept.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.bisection import HALVINGS, Bracket, Extremes, initial_bracket, key_value, search
from specjax.core.logsumexp import Exp2, MaxSum, exp_scaled
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.subnormal import smallest_equal

# Slack of a bound against rounding: a share of a mass, and of an exponent.
BOUND_SLACK = 1e-4
_TINY = float(jnp.finfo(jnp.float32).tiny)


def mass_weights(
    x: jax.Array, anchor: jax.Array, scale: jax.Array, exp2: Exp2 = jnp.exp2
) -> jax.Array:
    """Returns exp((x - anchor) * scale): probabilities relative to that of a token at the anchor.

    Args:
      x: f32.
      anchor: f32, a logit, of a shape that broadcasts against x: the row's largest, or in
        `compact_candidates` each sub-block's.
      scale: f32, one over the temperature, of a shape that broadcasts against x.
      exp2: of f32; kernels have a faster one.

    Returns:
      f32 of the shape of x.
    """
    return exp_scaled(x - anchor, scale, exp2)


def mass_above(blocks: jax.Array, weights: jax.Array | None, pivot: jax.Array) -> jax.Array:
    """Returns the mass, or the count, of logits at or above a pivot, in blocks laid out as rows.

    Args:
      blocks: f32[..., N], raw logits; -inf where there are none.
      weights: f32[..., N], not negative. None counts instead, exactly up to 2^24.
      pivot: f32, finite, of a shape that broadcasts against [...].

    Returns:
      f32[...].
    """
    weights = jnp.float32(1) if weights is None else weights
    return jnp.sum(jnp.where(blocks >= pivot[..., None], weights, jnp.float32(0)), axis=-1)


def extremes_blocks(blocks: jax.Array, bracket: Bracket) -> Extremes:
    """Returns the extreme logits inside a bracket, of blocks laid out as rows.

    Args:
      blocks: f32[..., N], raw logits; -inf where there are none.
      bracket: i32, of a shape that broadcasts against [...].

    Returns:
      Extremes f32[...].
    """
    # Up to the last and not below `high`: where a machine takes subnormal numbers for zeros, zero
    # is not below the key after it.
    low, last = key_value(bracket.low), key_value(bracket.high - jnp.int32(1))
    inside = (blocks >= low[..., None]) & (blocks <= last[..., None])
    return Extremes(
        jnp.min(jnp.where(inside, blocks, jnp.float32(jnp.inf)), axis=-1),
        jnp.max(jnp.where(inside, blocks, jnp.float32(-jnp.inf)), axis=-1),
    )


def top_k_active(top_k: jax.Array, vocab_size: int) -> jax.Array:
    """Returns whether i32 `top_k` cuts."""
    return (top_k > 0) & (top_k < vocab_size)


def top_p_active(top_p: jax.Array) -> jax.Array:
    """Returns whether f32 `top_p` cuts."""
    return top_p < 1


def required_mass(top_p: jax.Array, mass: jax.Array) -> jax.Array:
    """Returns the mass that the kept tokens need, from the mass of those that top-k kept.

    It is positive: at 0 and below `top_p` keeps the likeliest token alone.
    """
    return jnp.maximum(top_p * mass, jnp.float32(_TINY))


def mass_bound(
    partials: MaxSum,
    pivot: jax.Array,
    anchor: jax.Array,
    scale: jax.Array,
    exp2: Exp2 = jnp.exp2,
    size: int = SAMPLING_BLOCK,
) -> jax.Array:
    """Returns a lower bound of a row's mass at or above a pivot, from its blocks alone.

    A block whose largest logit m reaches the pivot has at least m's mass there. It also has at
    least its own mass less (size - 1) times the mass of a token at the pivot.

    Args:
      partials: f32[..., N], of blocks of at most `size` tokens, relative to their own
        largest logits.
      pivot: f32, finite, of a shape that broadcasts against [...].
      anchor: f32, the row's largest logit, of such a shape.
      scale: f32, one over the temperature, of such a shape.
      exp2: of f32; kernels have a faster one.
      size: of a block.

    Returns:
      f32[...].
    """
    largest = mass_weights(partials.max, anchor[..., None], scale[..., None], exp2)
    pivot_mass = mass_weights(pivot[..., None], anchor[..., None], scale[..., None], exp2)
    other_mass = largest * partials.sum - jnp.float32(size - 1) * pivot_mass
    reached = partials.max >= pivot[..., None]
    return jnp.sum(jnp.where(reached, jnp.maximum(largest, other_mass), jnp.float32(0)), axis=-1)


def min_p_threshold(min_p: jax.Array) -> jax.Array:
    """Returns the smallest `(x - anchor) * scale` that min-p keeps; -inf where it keeps all.

    The likeliest token is kept at any `min_p`.
    """
    return jnp.log(jnp.minimum(jnp.maximum(min_p, jnp.float32(0)), jnp.float32(1)))


def min_kept(
    blocks: jax.Array,
    low: jax.Array,
    anchor: jax.Array | None = None,
    scale: jax.Array | None = None,
    min_p: jax.Array | None = None,
) -> jax.Array:
    """Returns the smallest logit at or above a threshold that min-p keeps, too.

    Args:
      blocks: f32[..., N], raw logits; -inf where there are none.
      low: f32, finite, of a shape that broadcasts against [...].
      anchor: f32, the row's largest logit, of such a shape; read with `min_p` only.
      scale: f32, one over the temperature, of such a shape.
      min_p: f32, of such a shape. None is no min-p.

    Returns:
      f32[...]; +inf where nothing is kept.
    """
    is_kept = blocks >= low[..., None]
    if anchor is not None and scale is not None and min_p is not None:
        relative = (blocks - anchor[..., None]) * scale[..., None]
        is_kept &= relative >= min_p_threshold(min_p)[..., None]
    return jnp.min(jnp.where(is_kept, blocks, jnp.float32(jnp.inf)), axis=-1)


class Filters(NamedTuple):
    """Filters of rows [...]; None is a filter that no row has.

    Attributes:
      top_k: i32[...] or None; cuts from 1 to below V.
      top_p: f32[...] or None; cuts below 1.
      min_p: f32[...] or None; cuts above 0.
    """

    top_k: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None


class RowQueries(NamedTuple):
    """Queries that `search_cutoff` makes of the logits of rows [...].

    Attributes:
      count_above: how many logits lie at or above f32[...], as f32[...].
      mass_above: their mass f32[...].
      extremes_inside: the `Extremes` of a `Bracket`.
      min_kept: the smallest at or above f32[...] that min-p keeps, too; +inf for none.
      halvings: of a bracket between two clamps to the logits inside it.
    """

    count_above: Callable[[jax.Array], jax.Array]
    mass_above: Callable[[jax.Array], jax.Array]
    extremes_inside: Callable[[Bracket], Extremes]
    min_kept: Callable[[jax.Array], jax.Array]
    halvings: int = HALVINGS


class RowBounds(NamedTuple):
    """Bounds of rows [...], known before they are searched.

    Attributes:
      anchor: f32, the largest logit.
      mass: f32, of all tokens, relative to the largest logit, as in `RowQueries.mass_above`.
      cuts_k: bool, whether top-k cuts; None where no row has it.
      cuts_p: bool, whether top-p cuts; None where no row has it.
      low: f32, a bound below every threshold of the filters; -inf for none.
    """

    anchor: jax.Array
    mass: jax.Array
    cuts_k: jax.Array | None
    cuts_p: jax.Array | None
    low: jax.Array


def search_cutoff(queries: RowQueries, filters: Filters, rows: RowBounds) -> jax.Array:
    """Returns the smallest logits f32[...] that all filters keep."""
    low, mass = rows.low, rows.mass
    inside = (queries.extremes_inside, queries.halvings)
    if rows.cuts_k is not None and filters.top_k is not None:
        bracket = initial_bracket(low, rows.anchor, rows.cuts_k)
        target = filters.top_k.astype(jnp.float32)
        low = key_value(search(bracket, target, queries.count_above, *inside).low)
        # Ties with the threshold are kept, and count in the mass.
        low = smallest_equal(low)
        if rows.cuts_p is not None:
            mass = jnp.where(rows.cuts_k, queries.mass_above(low), mass)
    if rows.cuts_p is not None and filters.top_p is not None:
        bracket = initial_bracket(low, rows.anchor, rows.cuts_p)
        target = required_mass(filters.top_p, mass)
        low = key_value(search(bracket, target, queries.mass_above, *inside).low)
    return queries.min_kept(jnp.maximum(low, jnp.float32(jnp.finfo(jnp.float32).min)))


def refuse_nan(cutoff: jax.Array, filters: Filters) -> jax.Array:
    """Returns +inf where a filter is NaN: nothing is kept, so the samplers get an invalid row."""
    for value in (filters.top_p, filters.min_p):
        if value is not None:
            cutoff = jnp.where(jnp.isnan(value), jnp.inf, cutoff)
    return cutoff
