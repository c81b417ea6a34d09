"""Judges a request: rho of its prefixes, their uniforms, and the residuals to read.

A prefix of j drafted tokens is accepted if its uniform is below h_j = Z_j / (Z_j + 1 - rho_j)
(`block`). Z_j sums the residual max(rho_j p_j - q_j, 0) over a row. p and q of the next drafted
token x bound Z_j without reading the row:

    d = max(rho p(x) - q(x), 0)
    d + max(rho (1 - p(x)) - (1 - q(x)), 0) <= Z <= d + rho (1 - p(x))

A prefix that no bound decides is open. The residuals of the longest accepted prefix and of longer
open ones are read. The empty prefix is always accepted.

References:
  Sun et al., 2024, arXiv:2403.10444.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.acceptance import log_ratio
from specjax.core.block_acceptance import ACCEPTED, REJECTED, accept_by_bounds, cap_ratios
from specjax.core.logsumexp import LogNormalizer, exp_scaled
from specjax.core.noise import Stream, uniform
from specjax.pallas.blocks import Partials
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import reduce_where
from specjax.pallas.load_request import DraftedToken, Request, Schedule
from specjax.pallas.next_token import AcceptedPrefix
from specjax.pallas.target_rows import AcceptanceResult, evaluate_acceptance


class JudgedRequest(NamedTuple):
    """The tests of a request's prefixes; arrays [N] over its prefixes and rows.

    Attributes:
      request: its scalars.
      is_block: bool[], whether a prefix is accepted as a whole: the request is not greedy, and a
        draft was sampled. Other requests are verified token by token.
      num_accepted: i32[], accepted tokens; -1 if the statuses decide.
      log_rho: f32, of the prefix of i tokens.
      uniform: f32 or f64, of that prefix; arbitrary at the empty one.
      status: i32, `REJECTED`, `OPEN` or `ACCEPTED`; all rejected where no residual is needed.
      result: of target row i and of the drafted token at it.
    """

    request: Request
    is_block: jax.Array
    num_accepted: jax.Array
    log_rho: jax.Array
    uniform: jax.Array
    status: jax.Array
    result: AcceptanceResult

    def prefix(self, n: jax.Array) -> AcceptedPrefix:
        """Returns the prefix of n tokens, and the row that decides the next token."""
        drafted = self.result.drafted
        assert drafted is not None
        mask = jax.lax.iota(jnp.int32, self.status.shape[0]) == n
        normalizer = LogNormalizer(*[reduce_where(x, mask) for x in self.result.normalizer])
        prefix = AcceptedPrefix.from_row(
            self.request,
            n,
            normalizer,
            drafted=drafted.select(mask),
            argmax=reduce_where(self.result.argmax, mask),
            logprobs=self.result.logprobs,
        )
        return prefix.times_rho(self.is_block, reduce_where(self.log_rho, mask))


def judge_request(request: Request, partials: Partials) -> JudgedRequest:
    """Returns a request judged by the partials of its target rows."""
    schedule = request.schedule
    i = jax.lax.iota(jnp.int32, next_power_of_2(schedule.rows_per_request))
    result = evaluate_acceptance(request, i, partials)
    drafted = result.drafted
    assert drafted is not None
    has_draft = i < request.num_draft_tokens
    is_sampled = (has_draft & ~drafted.one_hot).astype(jnp.int32)
    is_block = (jnp.sum(is_sampled, dtype=jnp.int32) > 0) & ~request.temperature.greedy
    is_distribution = jnp.isfinite(result.normalizer.log_sum)
    end = jnp.int32(schedule.max_draft_tokens)
    # The longest prefix that may be accepted ends at the first row that is not a distribution.
    length = jnp.min(jnp.where(has_draft & is_distribution, end, i))
    log_rho = _log_rhos(log_ratio(result.logprobs, drafted.logprob), i, schedule)
    # The uniform of a prefix is its last token's.
    at = request.address(i - 1, Stream.accept(i - 1))
    u = uniform(at, jnp.zeros_like(i, jnp.uint32), schedule.noise_dtype, schedule.threefry)
    is_below_rho = (i == 0) | (jnp.log(u) < log_rho.astype(u.dtype))
    # The longest prefix needs no residual: it is accepted if u < rho.
    is_whole = jnp.sum((is_below_rho & (i == length)).astype(jnp.int32), dtype=jnp.int32) > 0
    is_end = ~result.accepted & (i <= request.num_draft_tokens)
    num_by_token = jnp.min(jnp.where(is_end, i, jnp.int32(schedule.rows_per_request)))
    num_accepted = jnp.where(is_block, jnp.where(is_whole, length, jnp.int32(-1)), num_by_token)
    status = accept_by_bounds(u, log_rho, *_bounds(result, drafted, log_rho))
    status = jnp.where(is_below_rho & (i < length), status, jnp.int32(REJECTED))
    status = jnp.where(i == 0, jnp.int32(ACCEPTED), status)
    num_accepted = jnp.where(request.active, num_accepted, jnp.int32(0))
    status = jnp.where(num_accepted < 0, status, jnp.int32(REJECTED))
    return JudgedRequest(request, is_block, num_accepted, log_rho, u, status, result)


def _log_rhos(ratios: jax.Array, i: jax.Array, schedule: Schedule) -> jax.Array:
    # Added in the order of plain JAX: a cumulative sum would round differently.
    token_ratios = [
        jnp.sum(jnp.where(i == n, ratios, 0.0)) for n in range(schedule.max_draft_tokens)
    ]
    log_rho = jnp.zeros_like(ratios)
    for n, value in enumerate(cap_ratios(token_ratios)):
        log_rho = jnp.where(i == n, value, log_rho)
    return log_rho


def _bounds(
    result: AcceptanceResult, drafted: DraftedToken, log_rho: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns bounds of Z by the next drafted token's p and q, f32[N] each."""
    rho, p, q = [exp_scaled(x) for x in (log_rho, result.logprobs, drafted.logprob)]
    at_token = jnp.maximum(rho * p - q, 0)
    least = at_token + jnp.maximum(rho * (1 - p) - (1 - q), 0)
    return least, at_token + rho * (1 - p)


def needs_residual(status: jax.Array, i: jax.Array) -> jax.Array:
    """Returns which prefixes' residuals are read, bool[N]: the longest accepted and open ones."""
    longest = jnp.max(jnp.where(status == ACCEPTED, i, jnp.int32(0)))
    return (status != REJECTED) & (i >= longest)


def longest_below(mask: jax.Array, i: jax.Array, end: jax.Array) -> jax.Array:
    """Returns the largest index i32[] below `end` where bool[N] is True; -1 if there is none."""
    return jnp.max(jnp.where(mask & (i < end), i, jnp.int32(-1)))
