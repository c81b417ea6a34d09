r"""A threshold among floats, found by bisection of their bits.

    threshold = max { t : mass_above(t) >= target }

`mass_above(t)`, a count or a mass of the logits at or above t, falls as t rises. Each float has a
key, an integer in the order of the floats. So a search ends after at most as many halvings as a
float has bits. `search` halves a bracket, and clamps it to the logits inside it, so that it ends
once one value is left. `specjax.core.pivot_search` divides it at several pivots at once.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Halvings between two clamps to the logits inside: a clamp costs as much as two halvings.
HALVINGS = 6
_MOST = float(jnp.finfo(jnp.float32).max)


class Bracket(NamedTuple):
    """Keys between which a threshold lies.

    Attributes:
      low: i32, a key; the mass at or above it reaches the target.
      high: i32, a key above `low`; the mass at or above it does not.
    """

    low: jax.Array
    high: jax.Array


class Extremes(NamedTuple):
    """The smallest and the largest logit of a row inside a bracket.

    Attributes:
      least: f32, the smallest; +inf where there is none.
      most: f32, the largest; -inf where there is none.
    """

    least: jax.Array
    most: jax.Array


def ordered_key(x: jax.Array) -> jax.Array:
    """Returns the key of a float: an i32 in the order of f32; both zeros are 0. Not for NaN."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def key_value(key: jax.Array) -> jax.Array:
    """Returns the f32 that `key` is the key of."""
    bits = jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def initial_bracket(low: jax.Array, largest: jax.Array, search: jax.Array) -> Bracket:
    """Returns the bracket from a lower bound f32 of the threshold to the row's largest logit.

    The bracket is closed on `low` where `search` is False. A bound of -inf stands for none.
    """
    start = ordered_key(jnp.maximum(low, jnp.float32(-_MOST)))
    end = ordered_key(jnp.where(search, largest, jnp.float32(0)))
    return Bracket(start, jnp.where(search, end, start) + jnp.int32(1))


def is_closed(bracket: Bracket) -> jax.Array:
    """Returns whether one key is left, `low`: the threshold, or a bound below it.

    The kept logits are then those at or above `key_value(low)`.
    """
    return bracket.low + jnp.int32(1) >= bracket.high


def key_midpoint(bracket: Bracket) -> jax.Array:
    """Returns the key halfway between a bracket's keys, above `low`; `high` if it is closed."""
    # high - low overflows where zero lies far inside; the sum of halves does not.
    start, end = (jax.lax.shift_right_arithmetic(key, jnp.int32(1)) for key in bracket)
    low_bit, high_bit = (key & jnp.int32(1) for key in bracket)
    carry = jax.lax.shift_right_arithmetic(low_bit + high_bit, jnp.int32(1))
    return jnp.minimum(jnp.maximum(start + end + carry, bracket.low + jnp.int32(1)), bracket.high)


def value_midpoint(bracket: Bracket) -> jax.Array:
    """Returns the key halfway between a bracket's values, above `low`; `high` if it is closed.

    Halfway between keys is halfway between exponents: it cuts a bracket from -8 to 0 at 1e-19.
    Halfway between values hardly cuts logits that are spread over exponents. A search alternates.
    """
    half = jnp.float32(0.5)
    last = jnp.maximum(bracket.high - jnp.int32(1), bracket.low)
    middle = ordered_key(half * key_value(bracket.low) + half * key_value(last))
    return jnp.minimum(jnp.maximum(middle, bracket.low + jnp.int32(1)), bracket.high)


def bisect(bracket: Bracket, pivot: jax.Array, mass: jax.Array, target: jax.Array) -> Bracket:
    """Returns the half of a bracket that holds the threshold; a closed one stays.

    Args:
      bracket: i32[...].
      pivot: i32[...], a key above `low`.
      mass: f32[...], of the whole row at or above `key_value(pivot)`.
      target: f32[...], positive.

    Returns:
      i32[...].
    """
    open_, enough = ~is_closed(bracket), mass >= target
    low = jnp.where(open_ & enough, jnp.maximum(bracket.low, pivot), bracket.low)
    high = jnp.where(open_ & ~enough, jnp.minimum(bracket.high, pivot), bracket.high)
    return Bracket(low, high)


def clamp_to_logits(bracket: Bracket, extremes: Extremes) -> Bracket:
    """Returns a bracket that ends at the logits inside it; a closed one stays.

    Neither end moves outwards, however a machine compares subnormal numbers. A bracket without
    logits inside closes on `low`.
    """
    open_ = ~is_closed(bracket)
    is_empty = extremes.least > extremes.most
    low = jnp.maximum(ordered_key(extremes.least), bracket.low)
    high = jnp.minimum(ordered_key(extremes.most) + jnp.int32(1), bracket.high)
    return Bracket(
        jnp.where(open_ & ~is_empty, low, bracket.low),
        jnp.where(open_, jnp.where(is_empty, bracket.low + jnp.int32(1), high), bracket.high),
    )


def search(
    bracket: Bracket,
    target: jax.Array,
    mass_above: Callable[[jax.Array], jax.Array],
    extremes_inside: Callable[[Bracket], Extremes] | None,
    halvings: int = HALVINGS,
) -> Bracket:
    """Bisects brackets until all are closed.

    Args:
      bracket: i32[...].
      target: f32[...], positive.
      mass_above: the mass or the count of each row at or above f32[...].
      extremes_inside: the extreme logits of each row inside its bracket; None searches to the
        last bit.
      halvings: between two clamps.

    Returns:
      i32[...], closed: no logit lies between `low` and the threshold.
    """

    def halving(iteration: jax.Array, bracket: Bracket) -> Bracket:
        pivot = key_midpoint(bracket)
        pivot = jnp.where(iteration % 2 == 0, value_midpoint(bracket), pivot)
        return bisect(bracket, pivot, mass_above(key_value(pivot)), target)

    def narrow(bracket: Bracket) -> Bracket:
        bracket = jax.lax.fori_loop(jnp.int32(0), jnp.int32(halvings), halving, bracket)
        return (
            bracket
            if extremes_inside is None
            else clamp_to_logits(bracket, extremes_inside(bracket))
        )

    def is_open(bracket: Bracket) -> jax.Array:
        closed = is_closed(bracket)
        return ~(jnp.all(closed) if closed.ndim else closed)

    return jax.lax.while_loop(is_open, narrow, bracket)
