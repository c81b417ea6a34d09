r"""A threshold among floats, found by bisection of their bits.

    threshold = max { t : mass_above(t) >= target }

`mass_above(t)`, a count or a mass of the logits at or above t, falls as t rises. Each float has a
key, an integer in the order of the floats. So a search ends after at most as many halvings as a
float has bits. `search` halves a bracket, and clamps it to the logits inside it, so that it ends
once one value is left. `search_by_pivots` divides it at several pivots at once: fewer passes over
the logits, each of which costs more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    "pivot_keys",
    "search",
    "search_by_pivots",
    "shorten_key",
    "unused_key_bits",
    "value_midpoint",
    "widen_key",
]

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


def unused_key_bits(dtype: Any) -> int:
    """Returns how many low bits of a key do not tell logits of a dtype apart: bf16 16, f16 13."""
    return {"bfloat16": 16, "float16": 13}.get(jnp.dtype(dtype).name, 0)


def shorten_key(key: jax.Array, unused_bits: int) -> jax.Array:
    """Returns a key i32 without its low bits."""
    return jax.lax.shift_right_arithmetic(key, jnp.int32(unused_bits))


def widen_key(key: jax.Array, unused_bits: int) -> jax.Array:
    """Returns the whole key i32 of the one logit that has a shortened one."""
    # The low bits of a negative float's key are inverted: all are 1.
    low_bits = jnp.where(key < 0, jnp.int32((1 << unused_bits) - 1), jnp.int32(0))
    return jax.lax.shift_left(key, jnp.int32(unused_bits)) | low_bits


def pivot_keys(
    bracket: Bracket, num_pivots: int, by_value: jax.Array, unused_bits: int = 0
) -> jax.Array:
    """Returns keys i32[num_pivots] that divide a bracket evenly; each above `low`, at most `high`.

    Args:
      bracket: i32[], of shortened keys.
      num_pivots: P, a power of two; as keys they divide the bracket into P + 1 parts, as values
        into P - 1 parts and a half at each end.
      by_value: bool[], whether the parts are equal as values, or else as keys: `value_midpoint`
        says why a search alternates. A bracket of few keys is divided as keys.
      unused_bits: by which the keys are shortened.

    Returns:
      i32[P], shortened keys.
    """
    one, parts = jnp.int32(1), jnp.int32(num_pivots + 1)
    index = jax.lax.iota(jnp.int32, num_pivots)
    # Each end is divided: high - low overflows where zero lies far inside.
    step = jnp.maximum(jax.lax.div(bracket.high, parts) - jax.lax.div(bracket.low, parts), one)
    last = jnp.maximum(bracket.high - one, bracket.low)
    start, end = (key_value(widen_key(key, unused_bits)) for key in (bracket.low, last))
    values = _divide_by_halves(start, end, index, num_pivots)
    by_values = shorten_key(ordered_key(values), unused_bits)
    keys = jnp.where(by_value & (step > one), by_values, bracket.low + step * (index + one))
    return jnp.minimum(jnp.maximum(keys, bracket.low + one), bracket.high)


def _divide_by_halves(
    start: jax.Array, end: jax.Array, index: jax.Array, num_parts: int
) -> jax.Array:
    """Returns the middles f32[P] of the parts `index` of `num_parts` equal ones, a power of two.

    Halves are exact, so that a compiler which computes them twice, once with fused multiply-adds,
    gets the same pivots: one that was compared is the one that the bracket then ends at.
    """
    half, zero = jnp.float32(0.5), index.astype(jnp.float32) * jnp.float32(0)
    start, end = start + zero, end + zero
    place = index * 2 + 1
    for level in reversed(range(num_parts.bit_length())):
        middle = half * start + half * end
        is_upper = jax.lax.shift_right_logical(place, jnp.int32(level)) % 2 == 1
        start, end = jnp.where(is_upper, middle, start), jnp.where(is_upper, end, middle)
    return start


def search_by_pivots(
    bracket: Bracket,
    target: jax.Array,
    masses_above: Callable[[jax.Array, jax.Array], jax.Array],
    num_pivots: int,
    unused_bits: int = 0,
) -> Bracket:
    """Divides the bracket of one row at several pivots in each pass, until it is closed.

    Args:
      bracket: i32[].
      target: f32[], positive.
      masses_above: function of the number i32[] of a pass and of pivots f32[P]; the mass or the
        count at or above each pivot, f32[P].
      num_pivots: P, a power of two.
      unused_bits: low bits in which keys of the row's logits do not differ (`unused_key_bits`).

    Returns:
      i32[], closed: no logit lies between `low` and the threshold.
    """

    def divide(state: tuple[jax.Array, Bracket]) -> tuple[jax.Array, Bracket]:
        number, (low, high) = state
        keys = pivot_keys(Bracket(low, high), num_pivots, number % 2 == 0, unused_bits)
        enough = masses_above(number, key_value(widen_key(keys, unused_bits))) >= target
        return number + 1, Bracket(
            jnp.max(jnp.where(enough, keys, low)), jnp.min(jnp.where(enough, high, keys))
        )

    last = bracket.high - jnp.int32(1)
    first = Bracket(
        shorten_key(bracket.low, unused_bits), shorten_key(last, unused_bits) + jnp.int32(1)
    )
    _, (low, _) = jax.lax.while_loop(
        lambda state: ~is_closed(state[1]), divide, (jnp.int32(0), first)
    )
    low = widen_key(low, unused_bits)
    return Bracket(low, low + jnp.int32(1))
