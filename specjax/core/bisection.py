r"""A threshold among floats, narrowed by halving a bracket of their keys.

What lies at or above t, counted or weighed, falls as t rises; the threshold is the largest
t at which it still reaches a target. Floats are searched through integers in the same
order, their keys, so that a search ends after at most as many halvings as a float has
bits; and a bracket shrinks to the logits inside it, so that it ends once one value is left.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
    "Bracket",
    "Extremes",
    "HALVINGS",
    "bisect",
    "clamp_to_logits",
    "initial_bracket",
    "is_closed",
    "key_midpoint",
    "key_value",
    "ordered_key",
    "search",
    "value_midpoint",
]

# Halvings between two looks at what is left inside: a look costs as much as two of them.
HALVINGS = 6
_MOST = float(jnp.finfo(jnp.float32).max)


class Bracket(NamedTuple):
    """Where a threshold can still be.

    Attributes:
      low: i32, a key; what lies at or above it reaches the target.
      high: i32, a key above `low`; what lies at or above it does not.
    """

    low: jax.Array
    high: jax.Array


class Extremes(NamedTuple):
    """The logits of a row that lie inside a bracket.

    Attributes:
      least: f32, the smallest; +inf where there is none.
      most: f32, the largest; -inf where there is none.
    """

    least: jax.Array
    most: jax.Array


def ordered_key(x: jax.Array) -> jax.Array:
    """An i32 in the order of f32; both zeros are 0. Not for NaN."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.float32(0), x), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def key_value(key: jax.Array) -> jax.Array:
    """The f32 of which `key` is the key."""
    bits = jnp.where(key < 0, key ^ jnp.int32(0x7FFFFFFF), key)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def initial_bracket(low: jax.Array, largest: jax.Array, search: jax.Array) -> Bracket:
    """From a lower bound f32 of the threshold to the row's largest logit.

    Closed on `low` where there is nothing to `search`. A bound of -inf stands for none.
    """
    start = ordered_key(jnp.maximum(low, jnp.float32(-_MOST)))
    end = ordered_key(jnp.where(search, largest, jnp.float32(0)))
    return Bracket(start, jnp.where(search, end, start) + jnp.int32(1))


def is_closed(bracket: Bracket) -> jax.Array:
    """Whether one key is left, `low`: the threshold, or no more than a bound below it.

    What is kept is then what lies at or above `key_value(low)`.
    """
    return bracket.low + jnp.int32(1) >= bracket.high


def key_midpoint(bracket: Bracket) -> jax.Array:
    """The key that cuts a bracket in half, above `low`; `high` where nothing is left to cut."""
    # high - low overflows where zero lies far inside; the sum of halves does not.
    start, end = (jax.lax.shift_right_arithmetic(key, jnp.int32(1)) for key in bracket)
    left, right = (key & jnp.int32(1) for key in bracket)
    rest = jax.lax.shift_right_arithmetic(left + right, jnp.int32(1))
    return jnp.minimum(jnp.maximum(start + end + rest, bracket.low + jnp.int32(1)), bracket.high)


def value_midpoint(bracket: Bracket) -> jax.Array:
    """The key halfway between a bracket's values, above `low`; `high` where nothing is left.

    Halfway between keys is halfway between exponents: a bracket from -8 to 0 would be cut at
    1e-19. Where logits are spread over exponents, this one in turn hardly cuts; so take turns.
    """
    half = jnp.float32(0.5)
    last = jnp.maximum(bracket.high - jnp.int32(1), bracket.low)
    middle = ordered_key(half * key_value(bracket.low) + half * key_value(last))
    return jnp.minimum(jnp.maximum(middle, bracket.low + jnp.int32(1)), bracket.high)


def bisect(bracket: Bracket, pivot: jax.Array, mass: jax.Array, target: jax.Array) -> Bracket:
    """A bracket after a probe; a found one stays.

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
    """A bracket that ends at the logits inside it, of the whole row; a found one stays.

    Neither end moves outwards, whatever a machine takes subnormal numbers for. A bracket
    with nothing inside closes on `low`.
    """
    open_ = ~is_closed(bracket)
    none = extremes.least > extremes.most
    low = jnp.maximum(ordered_key(extremes.least), bracket.low)
    high = jnp.minimum(ordered_key(extremes.most) + jnp.int32(1), bracket.high)
    return Bracket(
        jnp.where(open_ & ~none, low, bracket.low),
        jnp.where(open_, jnp.where(none, bracket.low + jnp.int32(1), high), bracket.high),
    )


def search(
    bracket: Bracket,
    target: jax.Array,
    mass_above: Callable[[jax.Array], jax.Array],
    extremes_inside: Callable[[Bracket], Extremes] | None,
    halvings: int = HALVINGS,
) -> Bracket:
    """Halves brackets until all are found.

    Args:
      bracket: i32[...].
      target: f32[...], positive.
      mass_above: what of each row lies at or above f32[...].
      extremes_inside: what of each row lies inside its bracket; None goes on to the last bit.
      halvings: between two looks.

    Returns:
      i32[...], `low` the threshold or no logit away from it.
    """

    def halving(turn: jax.Array, bracket: Bracket) -> Bracket:
        pivot = key_midpoint(bracket)
        pivot = jnp.where(turn % 2 == 0, value_midpoint(bracket), pivot)
        return bisect(bracket, pivot, mass_above(key_value(pivot)), target)

    def go_on(bracket: Bracket) -> Bracket:
        bracket = jax.lax.fori_loop(jnp.int32(0), jnp.int32(halvings), halving, bracket)
        return (
            bracket
            if extremes_inside is None
            else clamp_to_logits(bracket, extremes_inside(bracket))
        )

    def is_open(bracket: Bracket) -> jax.Array:
        found = is_closed(bracket)
        return ~(jnp.all(found) if found.ndim else found)

    return jax.lax.while_loop(is_open, go_on, bracket)
