"""Token-level verification of one request in plain JAX: the reference.

Target rows are read in order and only while drafts are kept: each pass reduces one row
to block partials, from which follow the drafted token's log-probability, the argmax
and, at the row where the kept drafts end, the masses that choose the next token's block.
A batch is a map over requests on a CPU, where that skips the rows nobody needs, and a
`vmap` elsewhere.

References:
  Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.arrays import CallOptions, VerifyArrays
from specjax.core.acceptance import accept_greedy, accept_random, accept_synthetic
from specjax.core.gumbel_max import argmax_token, gather_logits, token_logprobs
from specjax.core.logsumexp import (
    BlockPartials,
    LogNormalizer,
    RowStatistics,
    block_partials,
    row_statistics_once,
)
from specjax.core.noise import SAMPLING_BLOCK, address, uniform
from specjax.core.temperature import parse_temperature
from specjax.mesh import pvary_like
from specjax.samplers.next_token import Ending, next_token
from specjax.samplers.request import DraftedToken, LogitRows, Request, drafted_token, take_row
from specjax.typing import Stream, Verification

__all__ = ["verify_batch", "verify_request"]


class _Walk(NamedTuple):
    """A walk along the drafted tokens: where it stands and whether it goes on."""

    ending: Ending
    going: jax.Array
    logprobs: jax.Array


def verify_request(
    request: Request, target: LogitRows, draft_logits: jax.Array | None, noise_dtype: Any
) -> Verification:
    """Verifies the drafts of one request.

    Args:
      request: without a batch axis.
      target: rows of every request; this one's begin at `request.target_row`.
      draft_logits: [M, V_d], or None where every draft is one-hot.
      noise_dtype: float32 or float64.

    Returns:
      `Verification` without a batch axis.
    """
    walk = _follow(request, target, draft_logits, noise_dtype)
    num_kept = walk.ending.num_kept
    token, logprob = next_token(request, walk.ending, target, draft_logits, noise_dtype)
    active = _is_active(request)
    emits = active & walk.ending.row.valid
    if request.bonus_token_id is not None:
        bonus = request.bonus_token_id
        known = (bonus >= 0) & (bonus < target.logits.shape[1])
        given = active & known & (num_kept == request.num_tokens)
        token = jnp.where(given, bonus, token)
        bonus_logprob = _logprob(request, walk.ending, target, bonus)
        # A row that is no law gives the token that was handed in no probability.
        bonus_logprob = jnp.where(walk.ending.row.valid, bonus_logprob, -jnp.inf)
        logprob = jnp.where(given, bonus_logprob, logprob)
        emits |= given
    place = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
    is_kept = place < num_kept
    is_next = emits & (place == num_kept)
    token_ids = jnp.where(is_next, token, jnp.int32(-1))
    logprobs = jnp.where(is_next, logprob, jnp.float32(0))
    return Verification(
        token_ids=jnp.where(is_kept, jnp.pad(request.token_ids, (0, 1)), token_ids),
        num_accepted=num_kept,
        num_emitted=num_kept + emits.astype(jnp.int32),
        logprobs=jnp.where(is_kept, jnp.pad(walk.logprobs, (0, 1)), logprobs),
    )


def _is_active(request: Request) -> jax.Array:
    return (request.num_tokens >= 0) & parse_temperature(request.temperature).valid


def _logprob(request: Request, ending: Ending, target: LogitRows, token_id: jax.Array) -> jax.Array:
    logits, cutoff = take_row(target, request.target_row + ending.num_kept)
    scale = parse_temperature(request.temperature).scale
    return token_logprobs(gather_logits(logits, token_id, cutoff), ending.row.normalizer, scale)


def _follow(
    request: Request, target: LogitRows, draft_logits: jax.Array | None, dtype: Any
) -> _Walk:
    """Reads target rows in order until a drafted token is not kept, or none is left."""
    k = request.token_ids.shape[0]
    scale = parse_temperature(request.temperature).scale

    def step(walk: _Walk) -> _Walk:
        index = walk.ending.num_kept
        i = jnp.minimum(index, k - 1)
        logits, cutoff = take_row(target, request.target_row + index)
        partials = block_partials(logits, scale, cutoff)
        row = row_statistics_once(partials, scale)
        drafted = drafted_token(request, draft_logits, i)
        logprob = token_logprobs(
            gather_logits(logits, drafted.token_id, cutoff), row.normalizer, scale
        )
        best = argmax_token(logits, partials, cutoff)
        kept = _judge(request, i, drafted, logprob, best, logits.shape[0], dtype)
        kept &= (index < request.num_tokens) & row.valid
        logprobs = walk.logprobs.at[i].set(jnp.where(kept, logprob, walk.logprobs[i]))
        ending = Ending(index + kept.astype(jnp.int32), partials, row, drafted)
        return pvary_like(_Walk(ending, kept, logprobs), walk)

    blocks = jnp.full((-(-target.logits.shape[1] // SAMPLING_BLOCK),), -jnp.inf, jnp.float32)
    zero = jnp.float32(0)
    nothing = Ending(
        num_kept=jnp.int32(0),
        partials=BlockPartials(blocks, jnp.zeros_like(blocks)),
        row=RowStatistics(LogNormalizer(zero, zero), jnp.bool_(False)),
        drafted=DraftedToken(jnp.int32(-1), zero, LogNormalizer(zero, zero), jnp.bool_(True)),
    )
    start = _Walk(nothing, _is_active(request), jnp.zeros((k,), jnp.float32))
    start = pvary_like(start, request, target, draft_logits)
    return jax.lax.while_loop(lambda walk: walk.going, step, start)


def _judge(
    request: Request,
    i: jax.Array,
    drafted: DraftedToken,
    logprob: jax.Array,
    best: jax.Array,
    vocab_size: int,
    noise_dtype: Any,
) -> jax.Array:
    """Whether drafted token i, of target log-probability `logprob`, is kept; bool[]."""
    at = address(request.key, request.position + i, Stream.accept(i))
    coin = uniform(at, jnp.uint32(0), noise_dtype)
    if request.rates is not None:
        known = (drafted.token_id >= 0) & (drafted.token_id < vocab_size)
        return known & accept_synthetic(coin, request.rates[i])
    return jnp.where(
        parse_temperature(request.temperature).greedy,
        accept_greedy(drafted.token_id, best),
        accept_random(coin, logprob, drafted.logprob),
    )


def verify_batch(arrays: VerifyArrays, options: CallOptions) -> Verification:
    """Verifies a batch: `verify_request` for each of its requests.

    Args:
      arrays: rows of logits flat, options once per request.
      options: static.

    Returns:
      `Verification`, of one drafted token at least.
    """
    target = LogitRows(arrays.target_logits, arrays.target_cutoff)
    requests = Request.from_arrays(arrays, options.num_drafts)

    def one(request: Request) -> Verification:
        return verify_request(request, target, arrays.draft_logits, options.noise_dtype)

    return jax.lax.platform_dependent(
        requests, cpu=lambda r: jax.lax.map(one, r), default=lambda r: jax.vmap(one)(r)
    )
