"""A cutoff found in few passes over a row: each compares all its logits with several pivots.

    masses above P pivots   ->   a bracket between two neighbours, a (P + 1)-th as wide

`specjax.core.bisection` halves a bracket instead: more passes, each of which costs less. One loop
has three stages: the search by top-k, the mass of the tokens that it keeps, the search by top-p. So
a kernel holds the code of a pass once. A Triton kernel that held it three times compiled for half a
minute.

Axes: `P` pivots.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.bisection import Bracket, initial_bracket, is_closed, key_value, ordered_key
from specjax.core.subnormal import smallest_equal
from specjax.core.truncation import Filters, RowBounds, required_mass

# Stages of a search: the count of top-k, the mass of what top-k keeps, the mass of top-p, none.
_COUNT, _KEPT_MASS, _MASS, _DONE = range(4)


class Pass(NamedTuple):
    """Sums over a row that one pass computes.

    Attributes:
      number: i32[], how many passes came before.
      counts: whether logits are counted, or their masses added up; bool or bool[].
      pivots: f32[P], at or above which they lie.
    """

    number: jax.Array
    counts: jax.Array | bool
    pivots: jax.Array


class _State(NamedTuple):
    """The next pass' number, the stage, a bracket of shortened keys, and the target in it."""

    number: jax.Array
    stage: jax.Array
    bracket: Bracket
    target: jax.Array


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
    sums_above: Callable[[Pass], jax.Array],
    filters: Filters,
    row: RowBounds,
    num_pivots: int,
    unused_bits: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Returns where top-k and top-p cut a row, f32[], and whether it is one of the logits, bool[].

    Args:
      sums_above: counts or masses f32[P] of the whole row.
      filters: of the row, [].
      row: its bounds, [].
      num_pivots: P, a power of two.
      unused_bits: low bits in which keys of the row's logits do not differ (`unused_key_bits`).

    Returns:
      The smallest logit that both keep. Two results are no logits: the row's lower bound, where
      neither cuts, and a bound below all kept logits. Rounding that keeps a mass below its target
      leads to the latter.
    """
    may_cut_k, may_cut_p = row.cuts_k is not None, row.cuts_p is not None
    if not (may_cut_k or may_cut_p):
        return row.low, row.anchor != row.anchor

    def divide(state: _State) -> _State:
        number, stage, bracket, target = state
        keys = pivot_keys(bracket, num_pivots, number % 2 == 0, unused_bits)
        pivots = key_value(widen_key(keys, unused_bits))
        # Ties with the threshold are kept, and count in the mass.
        kept = smallest_equal(_threshold(bracket, unused_bits))
        is_kept_mass = stage == _KEPT_MASS
        pivots = jnp.where(is_kept_mass, kept, pivots)
        counts = stage == _COUNT if may_cut_k and may_cut_p else may_cut_k
        sums = sums_above(Pass(number, counts, pivots))
        enough = sums >= target
        low = jnp.max(jnp.where(enough, keys, bracket.low))
        high = jnp.min(jnp.where(enough, bracket.high, keys))
        divided = Bracket(low, high)
        stage = jnp.where(is_closed(divided), _next_stage(stage, row), stage)
        state = _State(number + 1, stage, divided, target)
        if not (may_cut_k and may_cut_p):
            return state
        start = _shortened(kept, row, unused_bits)
        of_mass = _State(number + 1, jnp.int32(_MASS), start, _target(filters, jnp.max(sums)))
        return jax.tree.map(lambda x, y: jnp.where(is_kept_mass, x, y), of_mass, state)

    stage, target = jnp.full_like(row.anchor, _DONE, jnp.int32), _target(filters, row.mass)
    if row.cuts_p is not None:
        stage = jnp.where(row.cuts_p, jnp.int32(_MASS), stage)
    if row.cuts_k is not None and filters.top_k is not None:
        stage = jnp.where(row.cuts_k, jnp.int32(_COUNT), stage)
        target = jnp.where(row.cuts_k, filters.top_k.astype(jnp.float32), target)
    state = _State(jnp.zeros_like(stage), stage, _shortened(row.low, row, unused_bits), target)
    bracket = jax.lax.while_loop(lambda state: state.stage < _DONE, divide, state).bracket
    low = jnp.where(stage == _DONE, row.low, _threshold(bracket, unused_bits))
    # The largest float that enough logits reach is a logit, unless it is the end of the bracket.
    return low, bracket.low > state.bracket.low


def _next_stage(stage: jax.Array, row: RowBounds) -> jax.Array:
    """Returns the stage after one whose bracket is closed."""
    done = jnp.full_like(stage, _DONE)
    if row.cuts_p is None:
        return done
    return jnp.where((stage == _COUNT) & row.cuts_p, jnp.int32(_KEPT_MASS), done)


def _target(filters: Filters, mass: jax.Array) -> jax.Array:
    """Returns the least mass of the tokens that top-p keeps, from the mass before top-p."""
    return mass if filters.top_p is None else required_mass(filters.top_p, mass)


def _shortened(low: jax.Array, row: RowBounds, unused_bits: int) -> Bracket:
    """Returns the bracket of shortened keys from a bound f32 to the row's largest logit."""
    bracket = initial_bracket(low, row.anchor, jnp.ones_like(row.anchor, jnp.bool_))
    last = shorten_key(bracket.high - jnp.int32(1), unused_bits)
    return Bracket(shorten_key(bracket.low, unused_bits), last + jnp.int32(1))


def _threshold(bracket: Bracket, unused_bits: int) -> jax.Array:
    """Returns the f32 that a bracket of shortened keys begins at."""
    return key_value(widen_key(bracket.low, unused_bits))
