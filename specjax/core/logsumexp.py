"""Partials of the blocks of a row, and their merge into the row's log-normalizer.

    m_b = max x, s_b = sum exp((x - m_b) * scale)            over the tokens of block b
    m = max m_b, s = sum s_b * exp((m_b - m) * scale)        over the blocks
    logsumexp = m * scale + log s

From the partials of the blocks also follow the masses that choose a block in sampling, and the
argmax.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.subnormal import smallest_equal

Exp2 = Callable[[jax.Array], jax.Array]

_LOG2_E = math.log2(math.e)


class MaxSum(NamedTuple):
    """(m, l) of N blocks, tiles, sub-blocks or rows.

    Attributes:
      max: f32[..., N], largest kept raw logit.
      sum: f32[..., N], of `exp((x - max) * scale)`.
    """

    max: jax.Array
    sum: jax.Array


class LogNormalizer(NamedTuple):
    """Makes log-probabilities of raw logits x: `log p = (x - shift) * scale - log_sum`.

    Attributes:
      shift: f32[...], the row's largest raw logit, so that huge rows do not overflow. In a draft
        row with carried statistics the drafted token's, or 0 (`normalizer_from_statistics`).
      log_sum: f32[...], log of the sum of `exp((x - shift) * scale)`.
    """

    shift: jax.Array
    log_sum: jax.Array


class RowStatistics(NamedTuple):
    """Statistics of a row.

    Attributes:
      normalizer: its shift is the largest kept raw logit.
      valid: bool[...], whether the row is a distribution: no NaN, no +inf, not -inf everywhere.
    """

    normalizer: LogNormalizer
    valid: jax.Array


def mask_below_cutoff(logits: jax.Array, cutoff: jax.Array | None) -> jax.Array:
    """Returns logits in f32 with -inf below the cutoff; NaN stays, so that the row is invalid.

    Subnormal numbers count as zero: the cutoff is moved, which is done once per row.
    """
    x = logits.astype(jnp.float32)
    return x if cutoff is None else jnp.where(x < smallest_equal(cutoff), -jnp.inf, x)


def nan_to_inf(logits: jax.Array) -> jax.Array:
    """Returns logits of any dtype with +inf for NaN, which makes a row as invalid."""
    return jnp.where(jnp.isnan(logits), jnp.asarray(jnp.inf, logits.dtype), logits)


def split_blocks(row: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Cuts the last axis into whole blocks `[..., n, SAMPLING_BLOCK]` and a tail.

    The blocks are a view and no padded copy. The tail is shorter than a block, and None where the
    axis is a multiple of the block.
    """
    num_whole, num_left = divmod(row.shape[-1], SAMPLING_BLOCK)
    edge = num_whole * SAMPLING_BLOCK
    body = row[..., :edge].reshape(*row.shape[:-1], num_whole, SAMPLING_BLOCK)
    return body, (row[..., None, edge:] if num_left else None)


def exp_scaled(x: jax.Array, scale: Any = 1.0, exp2: Exp2 = jnp.exp2) -> jax.Array:
    """Returns `exp(x * scale)` as a power of two, which a GPU has an instruction for."""
    return exp2(x * (scale * jnp.float32(_LOG2_E)))


def reduce_blocks(
    blocks: jax.Array,
    scale: jax.Array,
    cutoff: jax.Array | None = None,
    exp2: Exp2 = jnp.exp2,
    only_maxima: jax.Array | None = None,
    nan_to_inf: Callable[[jax.Array], jax.Array] = nan_to_inf,
) -> MaxSum:
    """Returns the partials of blocks that are laid out as rows.

    Args:
      blocks: [..., N], bf16, f16 or f32; -inf where a block is shorter than N.
      scale: f32, one over the temperature, of a shape that broadcasts against [...].
      cutoff: f32, of a shape that broadcasts against [..., N]. None keeps all.
      exp2: of f32; kernels have a faster one.
      only_maxima: bool[], whether the maxima say all that is asked of the row: sums are 1, and no
        logit is exponentiated. None is False. Where it is given, NaN counts as +inf in a maximum,
        which makes a row as invalid: a GPU's maximum of NaN and a number is the number.
      nan_to_inf: of logits; kernels have a faster one.

    Returns:
      Partials f32[...].
    """
    x = mask_below_cutoff(blocks, cutoff)
    # The sums read the logits as they are: values that both branches share would fill twice the
    # registers of a kernel.
    numbers = x if only_maxima is None else mask_below_cutoff(nan_to_inf(blocks), cutoff)
    m = jnp.max(numbers, axis=-1)

    def add_up() -> jax.Array:
        # An empty block has max -inf; shifting it by 0 instead leaves exp(-inf) = 0.
        shift = jnp.where(m == -jnp.inf, jnp.float32(0), m)
        return jnp.sum(exp_scaled(x - shift[..., None], scale[..., None], exp2), axis=-1)

    if only_maxima is None:
        return MaxSum(m, add_up())
    return MaxSum(m, jax.lax.cond(only_maxima, lambda: jnp.ones_like(m), add_up))


def merge_partials(partials: MaxSum, scale: jax.Array, exp2: Exp2 = jnp.exp2) -> MaxSum:
    """Merges partials into one; another order changes its rounding alone.

    Args:
      partials: f32[..., N]; max -inf and sum 0 where there is no block.
      scale: f32, of a shape that broadcasts against [...].
      exp2: of f32; kernels have a faster one.

    Returns:
      f32[...].
    """
    m = jnp.max(partials.max, axis=-1)
    shift = jnp.where(m == -jnp.inf, jnp.float32(0), m)
    weights = exp_scaled(partials.max - shift[..., None], scale[..., None], exp2)
    return MaxSum(m, jnp.sum(partials.sum * weights, axis=-1))


def row_statistics(partials: MaxSum, scale: jax.Array) -> RowStatistics:
    """Returns the statistics [...] of rows from their partials f32[..., N] and scales f32[...]."""
    whole = merge_partials(partials, scale)
    valid = jnp.isfinite(whole.sum) & jnp.isfinite(whole.max)
    return RowStatistics(LogNormalizer(whole.max, jnp.log(whole.sum)), valid)


def block_partials(
    logits: jax.Array,
    scale: jax.Array,
    cutoff: jax.Array | None = None,
    only_maxima: jax.Array | None = None,
) -> MaxSum:
    """Returns the partials of every block of a row, in one pass over the logits.

    Args:
      logits: [..., V], bf16, f16 or f32.
      scale: f32[...], one over the temperature, applied inside the exponent.
      cutoff: f32[...], logits below it are left out. None keeps all.
      only_maxima: as in `reduce_blocks`.

    Returns:
      Partials f32[..., ceil(V / SAMPLING_BLOCK)].
    """
    c = None if cutoff is None else cutoff[..., None, None]

    def reduce(blocks: jax.Array) -> MaxSum:
        return reduce_blocks(blocks, scale[..., None], c, only_maxima=only_maxima)

    body, tail = split_blocks(logits)
    partials = reduce(body)
    if tail is not None:
        last = reduce(tail)
        partials = MaxSum(
            jnp.concatenate([partials.max, last.max], axis=-1),
            jnp.concatenate([partials.sum, last.sum], axis=-1),
        )
    # Without the barrier XLA turns the max of block maxima into another pass over the row.
    return jax.lax.optimization_barrier(partials)


def row_statistics_once(partials: MaxSum, scale: jax.Array) -> RowStatistics:
    """Returns `row_statistics` computed once: all uses have equal bits, so p == q is exact."""
    return jax.lax.optimization_barrier(row_statistics(partials, scale))


def row_logsumexp(normalizer: LogNormalizer, scale: jax.Array) -> jax.Array:
    """Returns the logsumexp f32[...] of the kept logits times `scale`."""
    return normalizer.shift * scale + normalizer.log_sum


def block_logprobs(partials: MaxSum, normalizer: LogNormalizer, scale: jax.Array) -> jax.Array:
    """Returns the log-probability of each block; -inf for an empty one.

    Args:
      partials: f32[..., N].
      normalizer: f32[...], of the row the blocks belong to.
      scale: f32[...].

    Returns:
      f32[..., N].
    """
    relative = (partials.max - normalizer.shift[..., None]) * scale[..., None] - normalizer.log_sum[
        ..., None
    ]
    return relative + jnp.log(partials.sum)


def normalizer_from_statistics(
    logit: jax.Array, logprob: jax.Array, logsumexp: jax.Array
) -> LogNormalizer:
    """Returns the normalizer of a draft row, from a token's raw logit and carried statistics.

    The token's log-probability is small and exact. A logsumexp of hundreds, as low temperatures
    make it, is rounded in the fourth decimal: it is used only for a token of q = 0.
    """
    known = jnp.isfinite(logit) & jnp.isfinite(logprob)
    zero = jnp.float32(0)
    return LogNormalizer(jnp.where(known, logit, zero), jnp.where(known, -logprob, logsumexp))
