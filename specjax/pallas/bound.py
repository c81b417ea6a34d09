"""A logit below which a row's cutoff cannot lie.

The largest logit and the sum of every quarter bound from below what of a row lies at or above a
logit: the quarters that reach it do so by one token at least.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.bisection import key_value, ordered_key
from specjax.core.subnormal import smallest_equal
from specjax.core.truncation import MARGIN, mass_above, mass_bound, mass_target, min_p_threshold
from specjax.pallas.launch import fast_exp2, value_when
from specjax.pallas.quarters import QUARTER, Row

__all__ = ["bound_low"]

# Halvings of the distance from the largest logit, in octaves, and where they begin.
_HALVINGS = 7
_NEAREST = 1 / 4
_MOST = float(jnp.finfo(jnp.float32).max)


def bound_low(row: Row, interpret: bool) -> jax.Array:
    """A logit f32 below which the cutoff does not lie; -inf where there is no telling."""
    filters, low = row.filters, row.anchor
    if filters.min_p is not None:
        # The comparison that decides is made on the logit itself, so that this stays below it.
        relative = min_p_threshold(filters.min_p) - jnp.float32(MARGIN)
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
        target = mass_target(filters.top_p, row.mass) * jnp.float32(1 + MARGIN)

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
