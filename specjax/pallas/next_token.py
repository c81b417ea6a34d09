"""The token after the accepted drafted tokens: its row, its draw and the output.

With n drafted tokens accepted, target row n decides the next token:

    n = num_draft_tokens                      bonus token, drawn from p
    n < num_draft_tokens, sampled draft       recovered token, from norm(max(p - q, 0))
    n < num_draft_tokens, one-hot draft x     recovered token, from p without x
    greedy request                            the argmax of row n

Three calls draw differently after a rejection. In block verification the residual is
norm(max(rho p - q, 0)). A rule has its own weights, for one-hot drafts too. In coupled sampling
row n has already drawn its token.

These functions run inside the kernels of `emit_tokens` and of its callers.

References:
  Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import VerifyArrays
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import LogNormalizer, block_logprobs, exp_scaled
from specjax.core.noise import Stream, Words
from specjax.pallas.blocks import load_blocks, load_maxima
from specjax.pallas.gumbel_max import BlockNoise, Draw, SamplingRow, draw_token, exclude_token
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import cond_or, reduce_where
from specjax.pallas.load_request import (
    DraftedToken,
    RequestScalars,
    Schedule,
    load_drafted,
    load_masked,
    load_request,
)
from specjax.pallas.reduce_rows import ReducedRows
from specjax.pallas.split.shared_rows import load_first_token, unpadded
from specjax.pallas.target_rows import VerifiedRows, evaluate_acceptance
from specjax.types import Verification

__all__ = [
    "AcceptedPrefix",
    "LoadPrefix",
    "draw_row",
    "has_given_bonus",
    "load_accepted_prefix",
    "next_address",
    "row_block_logprobs",
    "verification_of",
    "write_result",
]


class AcceptedPrefix(NamedTuple):
    """A request's accepted drafted tokens and the target row that decides the next token.

    Attributes:
      request: the request.
      num_accepted: i32, accepted drafted tokens, which is also the index of the row; 0 for an
        inactive request.
      row: that row of target logits.
      valid: bool, whether the row is a distribution and the request active.
      rejected: bool, whether the row rejected a drafted token.
      drafted: the drafted token at the row; arbitrary if there is none; None where K is 0.
      from_residual: bool, whether residual masses draw the next token: after the rejection of a
        sampled draft, with a rule of any draft.
      argmax: i32, of the row, where the request is greedy; in coupled sampling the row's draw.
      logprobs: f32[N], log p of the first `num_accepted` drafted tokens.
      log_rho: f32, log of the factor of p in the residual of block verification; None is 0.
    """

    request: RequestScalars
    num_accepted: jax.Array
    row: SamplingRow
    valid: jax.Array
    rejected: jax.Array
    drafted: DraftedToken | None
    from_residual: jax.Array
    argmax: jax.Array
    logprobs: jax.Array
    log_rho: jax.Array | None = None


# Returns the accepted prefix of a request from the call's arrays, its rows and its index.
LoadPrefix = Callable[[VerifyArrays, Any, jax.Array, Schedule], AcceptedPrefix]


def load_accepted_prefix(
    arrays: VerifyArrays, rows: ReducedRows | VerifiedRows, b: jax.Array, schedule: Schedule
) -> AcceptedPrefix:
    """Returns the accepted prefix of request b.

    `ReducedRows` are evaluated here, by every program of the request. `VerifiedRows` hold the
    results of `verify_accept_kernel`.
    """
    request = load_request(arrays, b, schedule)
    i = jax.lax.iota(jnp.int32, next_power_of_2(schedule.rows_per_request))
    if isinstance(rows, ReducedRows):
        result = evaluate_acceptance(arrays, request, i, rows.partials, schedule)
        is_end = ~result.accepted & (i <= request.num_draft_tokens)
        num_accepted = jnp.min(jnp.where(is_end, i, jnp.int32(schedule.rows_per_request)))
        num_accepted = jnp.where(request.active, num_accepted, jnp.int32(0))
        mask = i == num_accepted
        normalizer = LogNormalizer(*[reduce_where(x, mask) for x in result.normalizer])
        argmax = reduce_where(result.argmax, mask)
        logprobs = result.logprobs
        drafted = None if result.drafted is None else result.drafted.select(mask)
    else:
        # The stop, as `VerifiedRows.counters` holds it.
        num_accepted = schedule.rows_per_request - rows.counters[
            b, jnp.int32(schedule.rows_per_request)
        ].astype(jnp.int32)
        if schedule.options.skips_greedy_sums:
            # No program publishes the bonus row of a greedy request as the stop.
            num_accepted = jnp.minimum(num_accepted, request.num_draft_tokens)
        num_accepted = jnp.where(request.active, num_accepted, jnp.int32(0))
        index = b * schedule.rows_per_request + num_accepted
        normalizer, argmax = _deciding_row(rows, index, request, schedule)
        logprobs = load_masked(rows.logprobs, b * schedule.rows_per_request + i, i < num_accepted)
        drafted = None
        if schedule.max_draft_tokens:
            has_draft = num_accepted < request.num_draft_tokens
            drafted = load_drafted(arrays, request, num_accepted, has_draft, schedule)
    valid = request.active & jnp.isfinite(normalizer.log_sum)
    rejected = num_accepted < request.num_draft_tokens
    from_residual = num_accepted < 0  # False, as a computed value that Triton can branch on
    if schedule.log_weights is not None and drafted is not None:
        from_residual = rejected & valid & ~request.temperature.greedy
    elif arrays.draft_logits is not None and drafted is not None:
        from_residual = rejected & valid & ~request.temperature.greedy & ~drafted.one_hot
    row = SamplingRow(
        unpadded(arrays.target_logits, arrays),
        request.first_target_row + num_accepted,
        request.temperature.scale,
        request.cutoff(arrays, num_accepted, request.active),
        normalizer,
        load_first_token(arrays),
    )
    return AcceptedPrefix(
        request, num_accepted, row, valid, rejected, drafted, from_residual, argmax, logprobs
    )


def _deciding_row(
    rows: VerifiedRows, index: jax.Array, request: RequestScalars, schedule: Schedule
) -> tuple[LogNormalizer, jax.Array]:
    """Returns the normalizer and the argmax of a row that `verify_accept_kernel` has read."""

    def load() -> tuple[LogNormalizer, jax.Array]:
        return LogNormalizer(rows.shift[index], rows.log_sum[index]), rows.argmax[index]

    if not schedule.options.skips_greedy_sums:
        return load()
    is_greedy = request.temperature.greedy
    return jax.lax.cond(is_greedy, lambda: load_maxima(rows.partials, index), load)


def next_address(arrays: VerifyArrays, prefix: AcceptedPrefix, schedule: Schedule) -> Words:
    """Returns the address of the draw of the token after the accepted drafted tokens."""
    return prefix.request.address(arrays, prefix.num_accepted, Stream.TARGET, schedule)


def write_result(
    arrays: VerifyArrays,
    prefix: AcceptedPrefix,
    draw: Callable[[], Draw] | None,
    out: Any,
    schedule: Schedule,
) -> None:
    """Writes a request's accepted drafted tokens and the token after them, if one is emitted.

    Args:
      arrays: the call's arrays.
      prefix: the accepted prefix.
      draw: draws the token after it; None where the request is known to be greedy.
      out: references of the `Verification`.
      schedule: of the launch.
    """
    result, b = verification_of(arrays, prefix, draw, schedule), prefix.request.b
    i = jax.lax.iota(jnp.int32, result.token_ids.shape[0])
    inside = i < schedule.rows_per_request
    plgpu.store(out.token_ids.at[b, i], result.token_ids, mask=inside)
    plgpu.store(out.logprobs.at[b, i], result.logprobs, mask=inside)
    out.num_accepted[b] = result.num_accepted
    out.num_emitted[b] = result.num_emitted


def verification_of(
    arrays: VerifyArrays,
    prefix: AcceptedPrefix,
    draw: Callable[[], Draw] | None,
    schedule: Schedule,
) -> Verification:
    """Returns a request's `Verification`, its tokens padded to a power of two."""
    token, logprob, is_emitted = _next_token(arrays, prefix, draw, schedule)
    request, num_accepted = prefix.request, prefix.num_accepted
    is_emitted &= request.active
    i = jax.lax.iota(jnp.int32, next_power_of_2(schedule.rows_per_request))
    is_next = is_emitted & (i == num_accepted)
    token_ids = jnp.where(is_next, token, jnp.int32(-1))
    logprobs = jnp.where(is_next, logprob, jnp.float32(0))
    if schedule.max_draft_tokens:
        is_accepted = i < num_accepted
        draft_ids = load_masked(arrays.token_ids, request.first_draft + i, is_accepted)
        token_ids = jnp.where(is_accepted, draft_ids, token_ids)
        logprobs = jnp.where(is_accepted, prefix.logprobs, logprobs)
    if not schedule.options.greedy_logprobs:
        logprobs = jnp.where(request.temperature.greedy, jnp.float32(0), logprobs)
    num_emitted = num_accepted + is_emitted.astype(jnp.int32)
    return Verification(token_ids, num_accepted, num_emitted, logprobs)


def has_given_bonus(arrays: VerifyArrays, prefix: AcceptedPrefix, schedule: Schedule) -> jax.Array:
    """Returns whether a request's next token is the caller's bonus token, bool[]."""
    bonus = arrays.bonus_token_ids[prefix.request.b]
    return (bonus >= 0) & (bonus < schedule.vocab_size(arrays)) & ~prefix.rejected


def _next_token(
    arrays: VerifyArrays,
    prefix: AcceptedPrefix,
    draw: Callable[[], Draw] | None,
    schedule: Schedule,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the token after the accepted ones, its log-probability and whether it is emitted."""

    def take_argmax() -> tuple[jax.Array, jax.Array]:
        # The shift of the row's normalizer is the argmax's logit.
        return prefix.argmax, -prefix.row.normalizer.log_sum

    def draw_random() -> tuple[jax.Array, jax.Array]:
        assert draw is not None
        sample = draw()
        return sample.token, token_logprobs(sample.logit, prefix.row.normalizer, prefix.row.scale)

    def choose() -> tuple[jax.Array, jax.Array]:
        if draw is None:
            return take_argmax()
        return jax.lax.cond(prefix.request.temperature.greedy, take_argmax, draw_random)

    token, logprob = cond_or(prefix.valid, choose, (jnp.int32(-1), jnp.float32(0)))
    if arrays.bonus_token_ids is None:
        return token, logprob, prefix.valid
    bonus = arrays.bonus_token_ids[prefix.request.b]
    is_given = has_given_bonus(arrays, prefix, schedule)
    bonus_logprob = prefix.row.logprobs(jnp.maximum(bonus, 0))
    # An invalid row gives a caller's bonus token no probability.
    bonus_logprob = jnp.where(prefix.valid, bonus_logprob, -jnp.inf)
    logprob = jnp.where(is_given, bonus_logprob, logprob)
    return jnp.where(is_given, bonus, token), logprob, prefix.valid | is_given


def draw_row(
    arrays: VerifyArrays,
    rows: ReducedRows | VerifiedRows,
    prefix: AcceptedPrefix,
    noise: BlockNoise,
    schedule: Schedule,
) -> Draw:
    """Draws from the deciding row, without a one-hot draft that it rejected.

    If no other token has mass, the draw is from the row as it is.
    """
    row_log_masses = row_block_logprobs(arrays, rows, prefix, schedule)
    if prefix.drafted is None:
        return draw_token(prefix.row, row_log_masses, noise, lambda _, logprobs: logprobs)
    log_masses, exclude_draft = exclude_token(
        prefix.row,
        row_log_masses,
        prefix.drafted.token_id,
        prefix.rejected & ~prefix.from_residual,
        schedule.vocab_size(arrays),
    )
    is_empty = jnp.sum(exp_scaled(log_masses)) <= 0

    def token_log_weights(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        return jnp.where(is_empty, logprobs, exclude_draft(token_id, logprobs))

    return draw_token(
        prefix.row, jnp.where(is_empty, row_log_masses, log_masses), noise, token_log_weights
    )


def row_block_logprobs(
    arrays: VerifyArrays,
    rows: ReducedRows | VerifiedRows,
    prefix: AcceptedPrefix,
    schedule: Schedule,
) -> jax.Array:
    """Returns the log-masses of the blocks of the deciding row, f32[N]."""
    index = prefix.request.b * schedule.rows_per_request + prefix.num_accepted
    blocks = load_blocks(rows.partials, index, arrays.target_logits.shape[1])
    return block_logprobs(blocks, prefix.row.normalizer, prefix.row.scale)
