"""Top-k, top-p and min-p in their order, over whatever answers for a row's logits."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.bisection import HALVINGS, Bracket, Extremes, key_value, open_bracket, search
from specjax.core.subnormal import smallest_equal
from specjax.core.truncation import mass_target

__all__ = ["Filters", "Searched", "Source", "search_cutoff"]


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


class Source(NamedTuple):
    """What a search asks of the logits of rows [...].

    Attributes:
      number: how many lie at or above f32[...], as f32[...].
      weigh: what they weigh, f32[...].
      look: those inside a `Bracket`.
      least: the smallest at or above f32[...] that min-p keeps as well; +inf for none.
      halvings: of a bracket before the next look into it.
    """

    number: Callable[[jax.Array], jax.Array]
    weigh: Callable[[jax.Array], jax.Array]
    look: Callable[[Bracket], Extremes]
    least: Callable[[jax.Array], jax.Array]
    halvings: int = HALVINGS


class Searched(NamedTuple):
    """What is known of rows [...] before they are searched.

    Attributes:
      anchor: f32, the largest logit.
      mass: f32, of all tokens, in the scale of `Source.weigh`.
      cuts_k: bool, top-k cuts; None where no row asks for it.
      cuts_p: bool, likewise top-p.
      low: f32, a bound of what the filters keep, and of what tells them; -inf for none.
    """

    anchor: jax.Array
    mass: jax.Array
    cuts_k: jax.Array | None
    cuts_p: jax.Array | None
    low: jax.Array


def search_cutoff(source: Source, filters: Filters, rows: Searched) -> jax.Array:
    """The smallest logits f32[...] that all filters keep."""
    low, mass = rows.low, rows.mass
    if rows.cuts_k is not None and filters.top_k is not None:
        bracket = open_bracket(low, rows.anchor, rows.cuts_k)
        target = filters.top_k.astype(jnp.float32)
        low = key_value(search(bracket, target, source.number, source.look, source.halvings).low)
        # What ties with it is kept, and weighs.
        low = smallest_equal(low)
        if rows.cuts_p is not None:
            mass = jnp.where(rows.cuts_k, source.weigh(low), mass)
    if rows.cuts_p is not None and filters.top_p is not None:
        bracket = open_bracket(low, rows.anchor, rows.cuts_p)
        target = mass_target(filters.top_p, mass)
        low = key_value(search(bracket, target, source.weigh, source.look, source.halvings).low)
    return source.least(jnp.maximum(low, jnp.float32(jnp.finfo(jnp.float32).min)))
