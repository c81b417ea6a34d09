r"""Two-level Gumbel-max: a token from V log-weights with V / 128 + 128 noises.

Let :math:`L_b` be the logsumexp of block b of `SAMPLING_BLOCK` tokens. The drawn block is
:math:`\arg\max_b (L_b + G^1_b)`, and its token :math:`\arg\max_{v \in b} (w_v + G^0_v)`.
The draw is exact: the maximum of a block's Gumbels is itself a Gumbel, located at :math:`L_b`. It
is independent of the token that attains it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.logsumexp import LogNormalizer, MaxSum, mask_below_cutoff
from specjax.core.noise import BLOCK_LEVEL, SAMPLING_BLOCK, TOKEN_LEVEL, Words, gumbel
from specjax.core.subnormal import flush_subnormals

_OfTokens = Callable[[jax.Array], jax.Array]


def gather_logits(row: jax.Array, index: jax.Array, cutoff: jax.Array | None) -> jax.Array:
    """Returns the kept logits of a row at token ids: f32, -inf for ids outside the row.

    Args:
      row: [V].
      index: i32 of any shape; may lie outside [0, V).
      cutoff: f32[] or None.

    Returns:
      f32 of the index's shape.
    """
    inside = (index >= 0) & (index < row.shape[0])
    x = mask_below_cutoff(jnp.take(row, index, mode="clip"), cutoff)
    return jnp.where(inside, x, -jnp.inf)


def token_logprobs(logits: jax.Array, normalizer: LogNormalizer, scale: jax.Array) -> jax.Array:
    """Returns the log-probabilities of kept logits of a row, given its normalizer."""
    return (logits - normalizer.shift) * scale - normalizer.log_sum


def first_argmax(scores: jax.Array) -> jax.Array:
    """Returns the index i32[...] of the largest of scores f[..., N], the lowest of equals.

    The index is 0 if all scores are NaN. A max and a masked min of the index vectorise, which an
    argmax does not.
    """
    last = jnp.int32(scores.shape[-1])
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    best = jnp.max(scores, axis=-1)
    first = jnp.min(jnp.where(scores == best[..., None], index, last), axis=-1, initial=last)
    return jnp.where(first == last, jnp.int32(0), first)


def two_level_argmax(
    block_scores: jax.Array, token_scores: _OfTokens
) -> tuple[jax.Array, jax.Array]:
    """Returns the best block and its best token; ties go to the lowest id.

    Args:
      block_scores: f[N].
      token_scores: maps token ids i32[SAMPLING_BLOCK], some of them past the
        vocabulary's end, to scores, -inf there.

    Returns:
      The block and the token, i32[].
    """
    # The barriers keep XLA from computing the noise in the scores once per reduction.
    block = first_argmax(jax.lax.optimization_barrier(block_scores))
    index = block * SAMPLING_BLOCK + jnp.arange(SAMPLING_BLOCK, dtype=jnp.int32)
    scores = jax.lax.optimization_barrier(token_scores(index))
    return block, index[first_argmax(scores)]


def argmax_token(partials: MaxSum, kept_logits: _OfTokens) -> jax.Array:
    """Returns the row's argmax, i32[]; ties go to the lowest id.

    Args:
      partials: of the row's blocks.
      kept_logits: maps token ids i32[SAMPLING_BLOCK] to the row's logits f32, -inf for those that
        the cutoff leaves out and past the vocabulary's end.
    """

    def logits(index: jax.Array) -> jax.Array:
        return flush_subnormals(kept_logits(index))

    return two_level_argmax(flush_subnormals(partials.max), logits)[1]


def gumbel_max_token(
    block_log_masses: jax.Array, token_log_weights: _OfTokens, at: Words, noise_dtype: Any
) -> jax.Array:
    """Draws a token by two-level Gumbel-max.

    Args:
      block_log_masses: f32[N], log-masses of the blocks.
      token_log_weights: maps token ids i32[SAMPLING_BLOCK] to log-weights f32, -inf
        for those that must not be drawn.
      at: the address of the draw.
      noise_dtype: float32 or float64.

    Returns:
      The token's id, i32[].
    """
    blocks = jnp.arange(block_log_masses.shape[0], dtype=jnp.uint32)
    scores = block_log_masses.astype(noise_dtype) + gumbel(at, BLOCK_LEVEL, blocks, noise_dtype)

    def token_scores(index: jax.Array) -> jax.Array:
        noise = gumbel(at, TOKEN_LEVEL, index.astype(jnp.uint32), noise_dtype)
        return token_log_weights(index).astype(noise_dtype) + noise

    return two_level_argmax(scores, token_scores)[1]
