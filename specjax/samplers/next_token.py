"""The token after the kept drafts: recovered from the residual, or the bonus.

One-hot drafts need no second pass over the target row: only the block of the drafted
token changes its mass. Drawn drafts read the target's and the draft's row once more.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.gumbel_max import argmax_token, gather_logits, gumbel_max_token, token_logprobs
from specjax.core.logsumexp import BlockPartials, RowStatistics, block_logprobs, mask_below_cutoff
from specjax.core.noise import SAMPLING_BLOCK, address
from specjax.core.residual import MIN_RESIDUAL_MASS, block_residual_weights, residual_logprobs
from specjax.core.temperature import parse_temperature
from specjax.samplers.request import DraftedToken, LogitRows, Request, draft_row, take_row
from specjax.typing import Stream

__all__ = ["Ending", "next_token"]


class Ending(NamedTuple):
    """Where the kept drafts end, and what is known of that row.

    Attributes:
      num_kept: i32, number of kept drafts: the deciding row's place among the request's.
      partials: of the deciding target row.
      row: statistics of the deciding target row.
      drafted: the rejected token; of no meaning when every draft was kept.
    """

    num_kept: jax.Array
    partials: BlockPartials
    row: RowStatistics
    drafted: DraftedToken


def next_token(
    request: Request,
    ending: Ending,
    target: LogitRows,
    draft_logits: jax.Array | None,
    noise_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Draws the token that follows the kept drafts.

    Args:
      request: one request.
      ending: where its drafts end.
      target: rows of target logits.
      draft_logits: [M, V_d] or None.
      noise_dtype: float32 or float64.

    Returns:
      Its id i32[] and its log-probability under the target f32[].
    """
    scaling = parse_temperature(request.temperature)
    logits, cutoff = take_row(target, request.target_row + ending.num_kept)
    drafted = ending.drafted
    rejected = ending.num_kept < request.num_tokens
    whole = block_logprobs(ending.partials, ending.row.normalizer, scaling.scale)

    def target_logprobs(index: jax.Array) -> jax.Array:
        return token_logprobs(
            gather_logits(logits, index, cutoff), ending.row.normalizer, scaling.scale
        )

    def one_hot_logprobs(index: jax.Array) -> jax.Array:
        return jnp.where(rejected & (index == drafted.token_id), jnp.inf, -jnp.inf)

    def without_token() -> jax.Array:
        block = jnp.clip(drafted.token_id, 0, logits.shape[0] - 1) // SAMPLING_BLOCK
        index = block * SAMPLING_BLOCK + jnp.arange(SAMPLING_BLOCK, dtype=jnp.int32)
        left = jnp.exp(residual_logprobs(target_logprobs(index), one_hot_logprobs(index)))
        return jnp.where(rejected, whole.at[block].set(jnp.log(jnp.sum(left))), whole)

    if draft_logits is None:
        weights, draft_logprobs = without_token(), one_hot_logprobs
        rounding = jnp.float32(0)
    else:
        drawn = rejected & ~drafted.one_hot & ~scaling.greedy
        masses, drawn_logprobs = _drawn_residual(
            request, ending, LogitRows(logits, cutoff), draft_logits, drawn
        )
        weights = jax.lax.cond(drawn, masses, without_token)
        rounding = jnp.where(drawn, jnp.float32(MIN_RESIDUAL_MASS), jnp.float32(0))

        def draft_logprobs(index: jax.Array) -> jax.Array:
            return jnp.where(drawn, drawn_logprobs(index), one_hot_logprobs(index))

    empty = jnp.sum(jnp.exp(weights)) <= rounding

    def token_weights(index: jax.Array) -> jax.Array:
        logprobs = target_logprobs(index)
        return jnp.where(empty, logprobs, residual_logprobs(logprobs, draft_logprobs(index)))

    at = address(request.key, request.position + ending.num_kept, Stream.TARGET)
    drawn_token = gumbel_max_token(jnp.where(empty, whole, weights), token_weights, at, noise_dtype)
    best_token = argmax_token(logits, ending.partials, cutoff)
    token = jnp.where(scaling.greedy, best_token, drawn_token)
    return token, target_logprobs(token)


def _drawn_residual(
    request: Request,
    ending: Ending,
    target: LogitRows,
    draft_logits: jax.Array,
    drawn: jax.Array,
) -> tuple[Callable[[], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Log-masses of the blocks of `max(p - q, 0)`, lazily, and log q by token id."""
    i = jnp.minimum(ending.num_kept, request.token_ids.shape[0] - 1)
    row, cutoff = draft_row(request, draft_logits, i)
    normalizer = ending.drafted.normalizer
    scale = parse_temperature(request.draft_temperature).scale

    def logprobs(index: jax.Array) -> jax.Array:
        return token_logprobs(gather_logits(row, index, cutoff), normalizer, scale)

    def masses() -> jax.Array:
        size = target.logits.shape[0]
        q = token_logprobs(mask_below_cutoff(row[:size], cutoff), normalizer, scale)
        q = jnp.pad(q, (0, size - q.shape[0]), constant_values=-jnp.inf)
        target_scale = parse_temperature(request.temperature).scale
        p = token_logprobs(
            mask_below_cutoff(target.logits, target.cutoff), ending.row.normalizer, target_scale
        )
        return block_residual_weights(p, q)

    return masses, logprobs
