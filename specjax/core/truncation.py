r"""Top-k, top-p and min-p on blocks of logits: what a filter counts, weighs and asks for.

Top-k keeps the logits at or above the largest t that k of them reach; top-p those at or
above the largest t whose probability reaches its share of what top-k kept. One search
finds either (`specjax.core.bisection`): no sort. What lies at an edge is kept with its equals.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.bisection import HALVINGS, Bracket, Extremes, initial_bracket, key_value, search
from specjax.core.logsumexp import BlockPartials, Exp2, exp_scaled
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.subnormal import smallest_equal

__all__ = [
    "BOUND_SLACK",
    "Filters",
    "RowBounds",
    "RowQueries",
    "extremes_blocks",
    "mass_above",
    "mass_bound",
    "mass_weights",
    "min_kept",
    "min_p_threshold",
    "required_mass",
    "search_cutoff",
    "top_k_active",
    "top_p_active",
]

# What a bound leaves to rounding: a share of a mass, and of an exponent.
BOUND_SLACK = 1e-4
_TINY = float(jnp.finfo(jnp.float32).tiny)


def mass_weights(
    x: jax.Array, anchor: jax.Array, scale: jax.Array, exp2: Exp2 = jnp.exp2
) -> jax.Array:
    """Probabilities of f32 logits, times the same factor: 1 at the anchor, 0 at -inf.

    Args:
      x: f32.
      anchor: f32, the row's largest logit, of a shape that broadcasts against x.
      scale: f32, one over the temperature, of a shape that broadcasts against x.
      exp2: of f32; kernels have a faster one.

    Returns:
      f32 of the shape of x.
    """
    return exp_scaled(x - anchor, scale, exp2)


def mass_above(blocks: jax.Array, weights: jax.Array | None, pivot: jax.Array) -> jax.Array:
    """What of blocks laid out as rows lies at or above a pivot.

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
    """What of blocks laid out as rows lies inside a bracket.

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
    """Whether i32 `top_k` cuts; its target is `top_k` itself, in f32."""
    return (top_k > 0) & (top_k < vocab_size)


def top_p_active(top_p: jax.Array) -> jax.Array:
    """Whether f32 `top_p` cuts."""
    return top_p < 1


def required_mass(top_p: jax.Array, mass: jax.Array) -> jax.Array:
    """What the kept tokens have to weigh, given the weight of those that top-k kept.

    Positive: at 0 and below `top_p` keeps the likeliest alone.
    """
    return jnp.maximum(top_p * mass, jnp.float32(_TINY))


def mass_bound(
    partials: BlockPartials,
    pivot: jax.Array,
    anchor: jax.Array,
    scale: jax.Array,
    exp2: Exp2 = jnp.exp2,
    size: int = SAMPLING_BLOCK,
) -> jax.Array:
    """A lower bound of what of a row lies at or above a pivot, from its blocks alone.

    A block whose largest logit reaches the pivot holds that one at least; and all it weighs
    but what its other tokens can weigh below the pivot.

    Args:
      partials: f32[..., N], of blocks of at most `size` tokens, in `mass_weights`' scale.
      pivot: f32, finite, of a shape that broadcasts against [...].
      anchor: f32, the row's largest logit, likewise.
      scale: f32, likewise.
      exp2: of f32; kernels have a faster one.
      size: of a block.

    Returns:
      f32[...].
    """
    largest = mass_weights(partials.max, anchor[..., None], scale[..., None], exp2)
    below = mass_weights(pivot[..., None], anchor[..., None], scale[..., None], exp2)
    others = largest * partials.sum - jnp.float32(size - 1) * below
    reached = partials.max >= pivot[..., None]
    return jnp.sum(jnp.where(reached, jnp.maximum(largest, others), jnp.float32(0)), axis=-1)


def min_p_threshold(min_p: jax.Array) -> jax.Array:
    """What `(x - anchor) * scale` is at least where min-p keeps x; -inf where it keeps all.

    The likeliest token is kept whatever `min_p` is.
    """
    return jnp.log(jnp.minimum(jnp.maximum(min_p, jnp.float32(0)), jnp.float32(1)))


def min_kept(
    blocks: jax.Array,
    low: jax.Array,
    anchor: jax.Array | None = None,
    scale: jax.Array | None = None,
    min_p: jax.Array | None = None,
) -> jax.Array:
    """The smallest logit at or above a threshold that min-p keeps as well.

    Args:
      blocks: f32[..., N], raw logits; -inf where there are none.
      low: f32, finite, of a shape that broadcasts against [...].
      anchor: f32, the row's largest logit, likewise; read with `min_p` only.
      scale: f32, one over the temperature, likewise.
      min_p: f32, likewise. None is no min-p.

    Returns:
      f32[...]; +inf where nothing is kept.
    """
    kept = blocks >= low[..., None]
    if anchor is not None and scale is not None and min_p is not None:
        relative = (blocks - anchor[..., None]) * scale[..., None]
        kept &= relative >= min_p_threshold(min_p)[..., None]
    return jnp.min(jnp.where(kept, blocks, jnp.float32(jnp.inf)), axis=-1)


class Filters(NamedTuple):
    """What to keep of rows [...]; None is a filter that no row asks for.

    Attributes:
      top_k: i32[...] or None; cuts from 1 to below V.
      top_p: f32[...] or None; cuts below 1.
      min_p: f32[...] or None; cuts above 0.
    """

    top_k: jax.Array | None
    top_p: jax.Array | None
    min_p: jax.Array | None


class RowQueries(NamedTuple):
    """What a search asks of the logits of rows [...].

    Attributes:
      count_above: how many lie at or above f32[...], as f32[...].
      mass_above: what they weigh, f32[...].
      extremes_inside: those inside a `Bracket`.
      min_kept: the smallest at or above f32[...] that min-p keeps as well; +inf for none.
      halvings: of a bracket before the next look into it.
    """

    count_above: Callable[[jax.Array], jax.Array]
    mass_above: Callable[[jax.Array], jax.Array]
    extremes_inside: Callable[[Bracket], Extremes]
    min_kept: Callable[[jax.Array], jax.Array]
    halvings: int = HALVINGS


class RowBounds(NamedTuple):
    """What is known of rows [...] before they are searched.

    Attributes:
      anchor: f32, the largest logit.
      mass: f32, of all tokens, in the scale of `RowQueries.mass_above`.
      cuts_k: bool, top-k cuts; None where no row asks for it.
      cuts_p: bool, likewise top-p.
      low: f32, a bound of what the filters keep, and of what tells them; -inf for none.
    """

    anchor: jax.Array
    mass: jax.Array
    cuts_k: jax.Array | None
    cuts_p: jax.Array | None
    low: jax.Array


def search_cutoff(queries: RowQueries, filters: Filters, rows: RowBounds) -> jax.Array:
    """The smallest logits f32[...] that all filters keep."""
    low, mass = rows.low, rows.mass
    if rows.cuts_k is not None and filters.top_k is not None:
        bracket = initial_bracket(low, rows.anchor, rows.cuts_k)
        target = filters.top_k.astype(jnp.float32)
        low = key_value(
            search(
                bracket, target, queries.count_above, queries.extremes_inside, queries.halvings
            ).low
        )
        # What ties with it is kept, and weighs.
        low = smallest_equal(low)
        if rows.cuts_p is not None:
            mass = jnp.where(rows.cuts_k, queries.mass_above(low), mass)
    if rows.cuts_p is not None and filters.top_p is not None:
        bracket = initial_bracket(low, rows.anchor, rows.cuts_p)
        target = required_mass(filters.top_p, mass)
        low = key_value(
            search(
                bracket, target, queries.mass_above, queries.extremes_inside, queries.halvings
            ).low
        )
    return queries.min_kept(jnp.maximum(low, jnp.float32(jnp.finfo(jnp.float32).min)))
