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

from specjax.call_arrays import FlatBatch
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import LogNormalizer, block_logprobs, exp_scaled
from specjax.core.noise import Stream, Words
from specjax.pallas.blocks import load_blocks, load_maxima
from specjax.pallas.gumbel_max import (
    BlockNoise,
    Draw,
    SamplingRow,
    draw_row_noise,
    draw_token,
    exclude_token,
)
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import cond_or, reduce_where
from specjax.pallas.load_request import (
    DraftedToken,
    Request,
    Schedule,
    load_drafted,
    load_masked,
    load_request,
)
from specjax.pallas.reduce_rows import ReducedRows
from specjax.pallas.target_rows import VerifiedRows, evaluate_acceptance
from specjax.types import Verification


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

    request: Request
    num_accepted: jax.Array
    row: SamplingRow
    valid: jax.Array
    rejected: jax.Array
    drafted: DraftedToken | None
    from_residual: jax.Array
    argmax: jax.Array
    logprobs: jax.Array
    log_rho: jax.Array | None = None

    @classmethod
    def from_row(
        cls, request: Request, num_accepted: jax.Array, normalizer: LogNormalizer, **fields: Any
    ) -> "AcceptedPrefix":
        """Returns the prefix of `num_accepted` tokens, without a residual; `fields` are others."""
        return cls(
            request=request,
            num_accepted=num_accepted,
            row=request.row(num_accepted, normalizer),
            valid=request.active & jnp.isfinite(normalizer.log_sum),
            rejected=num_accepted < request.num_draft_tokens,
            from_residual=num_accepted < 0,  # False, as a computed value that Triton can branch on
            **fields,
        )

    def times_rho(self, is_block: jax.Array, log_rho: jax.Array) -> "AcceptedPrefix":
        """Returns the prefix in block verification; a request's that is none has rho 1."""
        return self._replace(
            from_residual=self.rejected & self.valid & is_block,
            log_rho=jnp.where(is_block, log_rho, jnp.float32(0)),
        )


# Returns the accepted prefix of a request from the call's arrays, its rows and its index.
LoadPrefix = Callable[[FlatBatch, Any, jax.Array, Schedule], AcceptedPrefix]


def load_accepted_prefix(
    arrays: FlatBatch, rows: ReducedRows | VerifiedRows, b: jax.Array, schedule: Schedule
) -> AcceptedPrefix:
    """Returns the accepted prefix of request b.

    `ReducedRows` are evaluated here, by every program of the request. `VerifiedRows` hold the
    results of `verify_accept_kernel`.
    """
    request = load_request(arrays, b, schedule)
    i = jax.lax.iota(jnp.int32, next_power_of_2(schedule.rows_per_request))
    if isinstance(rows, ReducedRows):
        result = evaluate_acceptance(request, i, rows.partials)
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
        index = request.row_index(num_accepted)
        normalizer, argmax = _deciding_row(rows, index, request)
        logprobs = load_masked(rows.logprobs, request.row_index(i), i < num_accepted)
        drafted = None
        if schedule.max_draft_tokens:
            has_draft = num_accepted < request.num_draft_tokens
            drafted = load_drafted(request, num_accepted, has_draft)
    prefix = AcceptedPrefix.from_row(
        request, num_accepted, normalizer, drafted=drafted, argmax=argmax, logprobs=logprobs
    )
    if drafted is None or (schedule.log_weights is None and arrays.draft_logits is None):
        return prefix
    from_residual = prefix.rejected & prefix.valid & ~request.temperature.greedy
    if schedule.log_weights is None:
        from_residual &= ~drafted.one_hot
    return prefix._replace(from_residual=from_residual)


def _deciding_row(
    rows: VerifiedRows, index: jax.Array, request: Request
) -> tuple[LogNormalizer, jax.Array]:
    """Returns the normalizer and the argmax of a row that `verify_accept_kernel` has read."""

    def load() -> tuple[LogNormalizer, jax.Array]:
        return LogNormalizer(rows.shift[index], rows.log_sum[index]), rows.argmax[index]

    if not request.schedule.options.skips_greedy_sums:
        return load()
    is_greedy = request.temperature.greedy
    return jax.lax.cond(is_greedy, lambda: load_maxima(rows.partials, index), load)


def next_address(prefix: AcceptedPrefix) -> Words:
    """Returns the address of the draw of the token after the accepted drafted tokens."""
    return prefix.request.address(prefix.num_accepted, Stream.TARGET)


def next_noise(prefix: AcceptedPrefix) -> BlockNoise:
    """Returns the noise of that draw among all blocks of a row."""
    schedule, vocab_size = prefix.request.schedule, prefix.request.arrays.target_logits.shape[1]
    address = next_address(prefix)
    return draw_row_noise(address, vocab_size, schedule.noise_dtype, schedule.threefry)


def write_result(prefix: AcceptedPrefix, draw: Callable[[], Draw] | None, out: Any) -> None:
    """Writes a request's accepted drafted tokens and the token after them, if one is emitted.

    Args:
      prefix: the accepted prefix.
      draw: draws the token after it; None where the request is known to be greedy.
      out: references of the `Verification`.
    """
    result, b = verification_of(prefix, draw), prefix.request.b
    i = jax.lax.iota(jnp.int32, result.token_ids.shape[0])
    inside = i < prefix.request.schedule.rows_per_request
    plgpu.store(out.token_ids.at[b, i], result.token_ids, mask=inside)
    plgpu.store(out.logprobs.at[b, i], result.logprobs, mask=inside)
    out.num_accepted[b] = result.num_accepted
    out.num_emitted[b] = result.num_emitted


def verification_of(prefix: AcceptedPrefix, draw: Callable[[], Draw] | None) -> Verification:
    """Returns a request's `Verification`, its tokens padded to a power of two."""
    token, logprob, is_emitted = _next_token(prefix, draw)
    request, num_accepted = prefix.request, prefix.num_accepted
    schedule = request.schedule
    is_emitted &= request.active
    i = jax.lax.iota(jnp.int32, next_power_of_2(schedule.rows_per_request))
    is_next = is_emitted & (i == num_accepted)
    token_ids = jnp.where(is_next, token, jnp.int32(-1))
    logprobs = jnp.where(is_next, logprob, jnp.float32(0))
    if schedule.max_draft_tokens:
        is_accepted = i < num_accepted
        draft_ids = load_masked(request.arrays.token_ids, request.first_draft + i, is_accepted)
        token_ids = jnp.where(is_accepted, draft_ids, token_ids)
        logprobs = jnp.where(is_accepted, prefix.logprobs, logprobs)
    if not schedule.options.greedy_logprobs:
        logprobs = jnp.where(request.temperature.greedy, jnp.float32(0), logprobs)
    num_emitted = num_accepted + is_emitted.astype(jnp.int32)
    return Verification(token_ids, num_accepted, num_emitted, logprobs)


def has_given_bonus(prefix: AcceptedPrefix) -> jax.Array:
    """Returns whether a request's next token is the caller's bonus token, bool[]."""
    arrays, schedule = prefix.request.arrays, prefix.request.schedule
    bonus = arrays.bonus_token_ids[prefix.request.b]
    return (bonus >= 0) & (bonus < schedule.vocab_size(arrays)) & ~prefix.rejected


def _next_token(
    prefix: AcceptedPrefix, draw: Callable[[], Draw] | None
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
    bonus_token_ids = prefix.request.arrays.bonus_token_ids
    if bonus_token_ids is None:
        return token, logprob, prefix.valid
    bonus = bonus_token_ids[prefix.request.b]
    is_given = has_given_bonus(prefix)
    bonus_logprob = prefix.row.logprobs(jnp.maximum(bonus, 0))
    # An invalid row gives a caller's bonus token no probability.
    bonus_logprob = jnp.where(prefix.valid, bonus_logprob, -jnp.inf)
    logprob = jnp.where(is_given, bonus_logprob, logprob)
    return jnp.where(is_given, bonus, token), logprob, prefix.valid | is_given


def draw_row(rows: ReducedRows | VerifiedRows, prefix: AcceptedPrefix, noise: BlockNoise) -> Draw:
    """Draws from the deciding row, without a one-hot draft that it rejected.

    If no other token has mass, the draw is from the row as it is.
    """
    schedule, row_log_masses = prefix.request.schedule, row_block_logprobs(rows, prefix)
    if prefix.drafted is None:
        return draw_token(prefix.row, row_log_masses, noise, lambda _, logprobs: logprobs)
    log_masses, exclude_draft = exclude_token(
        prefix.row,
        row_log_masses,
        prefix.drafted.token_id,
        prefix.rejected & ~prefix.from_residual,
        schedule.vocab_size(prefix.request.arrays),
    )
    is_empty = jnp.sum(exp_scaled(log_masses)) <= 0

    def token_log_weights(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        return jnp.where(is_empty, logprobs, exclude_draft(token_id, logprobs))

    return draw_token(
        prefix.row, jnp.where(is_empty, row_log_masses, log_masses), noise, token_log_weights
    )


def row_block_logprobs(rows: ReducedRows | VerifiedRows, prefix: AcceptedPrefix) -> jax.Array:
    """Returns the log-masses of the blocks of the deciding row, f32[N]."""
    index = prefix.request.row_index(prefix.num_accepted)
    blocks = load_blocks(rows.partials, index, prefix.request.arrays.target_logits.shape[1])
    return block_logprobs(blocks, prefix.row.normalizer, prefix.row.scale)
