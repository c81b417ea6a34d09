r"""The threshold of top-k and top-p, narrowed by halving: no sort.

What lies at or above t, counted or weighed, falls as t rises; the threshold is the largest
t at which it still reaches a target: k tokens, or a share of the mass. Floats are searched
through integers in the same order, their keys, so that a search ends after at most as many
halvings as a float has bits. A probe also names the nearest logits on either side of its
pivot, and the bracket shrinks to those: it ends as soon as one value is left.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.logsumexp import Exp2, Law, exp_scaled

__all__ = [
    "Bracket",
    "Reach",
    "combine_reaches",
    "is_found",
    "keeps_top_k",
    "keeps_top_p",
    "key_value",
    "least_kept",
    "mass_floor",
    "mass_target",
    "mass_weights",
    "narrow",
    "open_bracket",
    "ordered_key",
    "pivot_keys",
    "reach_blocks",
]

_MOST = float(jnp.finfo(jnp.float32).max)
_TINY = float(jnp.finfo(jnp.float32).tiny)


class Bracket(NamedTuple):
    """Where a threshold can still be.

    Attributes:
      low: i32, a key; what lies at or above it reaches the target.
      high: i32, a key above `low`; what lies at or above it does not.
    """

    low: jax.Array
    high: jax.Array


class Reach(NamedTuple):
    """How logits lie about a pivot.

    Attributes:
      mass: f32, the weight of those at or above it.
      least: f32, the smallest at or above it; +inf where there is none.
      most: f32, the largest below it; -inf where there is none.
    """

    mass: jax.Array
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


def open_bracket(low: jax.Array, largest: jax.Array, search: jax.Array) -> Bracket:
    """From a lower bound f32 of the threshold to the row's largest logit.

    Closed on `low` where there is nothing to `search`. A bound of -inf stands for none.
    """
    start = ordered_key(jnp.maximum(low, jnp.float32(-_MOST)))
    end = ordered_key(jnp.where(search, largest, jnp.float32(0)))
    return Bracket(start, jnp.where(search, end, start) + jnp.int32(1))


def is_found(bracket: Bracket) -> jax.Array:
    """Whether one key is left, `low`: the threshold, or no more than a bound below it.

    What is kept is then what lies at or above `key_value(low)`.
    """
    return bracket.low + jnp.int32(1) >= bracket.high


def pivot_keys(bracket: Bracket, num: int = 1) -> tuple[jax.Array, ...]:
    """Keys that cut a bracket into `num + 1` equal parts, all above `low`.

    Args:
      bracket: i32[...].
      num: one less than a power of two.

    Returns:
      `num` arrays i32[...], rising; `high` where nothing is left to cut.
    """
    bits = num.bit_length()
    assert num + 1 == 1 << bits
    # high - low overflows where zero lies far inside; sums of parts do not.
    start, end = (jax.lax.shift_right_arithmetic(key, jnp.int32(bits)) for key in bracket)
    left, right = (key & jnp.int32(num) for key in bracket)
    cuts = []
    for i in range(1, num + 1):
        j = num + 1 - i
        rest = jax.lax.shift_right_arithmetic(left * j + right * i, jnp.int32(bits))
        cut = start * j + end * i + rest
        cuts.append(jnp.minimum(jnp.maximum(cut, bracket.low + jnp.int32(1)), bracket.high))
    return tuple(cuts)


def mass_weights(x: jax.Array, law: Law, scale: jax.Array, exp2: Exp2 = jnp.exp2) -> jax.Array:
    """Probabilities of f32 logits, times the same factor: 1 at the anchor, 0 at -inf.

    Args:
      x: f32.
      law: of the row, of a shape that broadcasts against x; the anchor is what is read.
      scale: f32, one over the temperature, of a shape that broadcasts against x.
      exp2: of f32; kernels have a faster one.

    Returns:
      f32 of the shape of x.
    """
    return exp_scaled(x - law.anchor, scale, exp2)


def reach_blocks(blocks: jax.Array, weights: jax.Array | None, pivot: jax.Array) -> Reach:
    """How blocks laid out as rows lie about a pivot.

    Args:
      blocks: f32[..., N], raw logits; -inf where there are none.
      weights: f32[..., N], not negative. None counts instead, exactly up to 2^24.
      pivot: f32, finite, of a shape that broadcasts against [...].

    Returns:
      Reach f32[...].
    """
    above = blocks >= pivot[..., None]
    weights = jnp.float32(1) if weights is None else weights
    return Reach(
        jnp.sum(jnp.where(above, weights, jnp.float32(0)), axis=-1),
        jnp.min(jnp.where(above, blocks, jnp.float32(jnp.inf)), axis=-1),
        jnp.max(jnp.where(above, jnp.float32(-jnp.inf), blocks), axis=-1),
    )


def combine_reaches(reach: Reach) -> Reach:
    """One reach f32[...] of many, f32[..., N]."""
    return Reach(
        jnp.sum(reach.mass, axis=-1),
        jnp.min(reach.least, axis=-1),
        jnp.max(reach.most, axis=-1),
    )


def narrow(bracket: Bracket, pivot: jax.Array, reach: Reach, target: jax.Array) -> Bracket:
    """A bracket after a probe, never wider than before.

    Args:
      bracket: i32[...]; a found one stays.
      pivot: i32[...], a key above `low`.
      reach: f32[...], of the whole row about `key_value(pivot)`.
      target: f32[...], positive.

    Returns:
      i32[...].
    """
    enough = reach.mass >= target
    # Beside the pivot itself, because a machine may take subnormal numbers for zeros.
    low = jnp.maximum(ordered_key(reach.least), pivot)
    high = jnp.minimum(ordered_key(reach.most) + jnp.int32(1), pivot)
    open_ = ~is_found(bracket)
    return Bracket(
        jnp.where(open_ & enough, jnp.maximum(bracket.low, low), bracket.low),
        jnp.where(open_ & ~enough, jnp.minimum(bracket.high, high), bracket.high),
    )


def keeps_top_k(top_k: jax.Array, vocab_size: int) -> jax.Array:
    """Whether i32 `top_k` cuts; its target is `top_k` itself, in f32."""
    return (top_k > 0) & (top_k < vocab_size)


def keeps_top_p(top_p: jax.Array) -> jax.Array:
    """Whether f32 `top_p` cuts."""
    return top_p < 1


def mass_target(top_p: jax.Array, mass: jax.Array) -> jax.Array:
    """What the kept tokens have to weigh, given the weight of those that top-k kept.

    Positive: at 0 and below `top_p` keeps the likeliest alone.
    """
    return jnp.maximum(top_p * mass, jnp.float32(_TINY))


def mass_floor(
    top_p: jax.Array, mass: jax.Array, law: Law, scale: jax.Array, num: int
) -> jax.Array:
    r"""A logit f32 that top-p's threshold is not below.

    All `num` tokens below :math:`t` together weigh less than :math:`num \, e^{(t - anchor) scale}`,
    and no more than :math:`(1 - top_p) mass` may go. Half of that, so that rounding is no matter.
    """
    spare = jnp.maximum(jnp.float32(1) - jnp.maximum(top_p, jnp.float32(0)), jnp.float32(0))
    share = jnp.log(spare * mass * jnp.float32(0.5 / num))
    return law.anchor + jnp.minimum(share, jnp.float32(0)) / scale


def least_kept(
    blocks: jax.Array,
    low: jax.Array,
    law: Law | None = None,
    scale: jax.Array | None = None,
    min_p: jax.Array | None = None,
) -> jax.Array:
    """The smallest logit at or above a threshold that min-p keeps as well.

    Args:
      blocks: f32[..., N], raw logits; -inf where there are none.
      low: f32, finite, of a shape that broadcasts against [...].
      law: of the row; its anchor is the largest logit. Read with `min_p` only.
      scale: f32, one over the temperature, likewise.
      min_p: f32, likewise; at 0 and below it keeps all, above 1 it keeps what 1 does. None
        is no min-p.

    Returns:
      f32[...]; +inf where nothing is kept.
    """
    kept = blocks >= low[..., None]
    if law is not None and scale is not None and min_p is not None:
        relative = (blocks - law.anchor[..., None]) * scale[..., None]
        share = jnp.minimum(jnp.maximum(min_p, jnp.float32(0)), jnp.float32(1))
        kept &= relative >= jnp.log(share)[..., None]
    return jnp.min(jnp.where(kept, blocks, jnp.float32(jnp.inf)), axis=-1)
