"""The reference: the token after the accepted ones, recovered from the residual or a bonus token.

A one-hot draft needs no second pass over the target row: only the block of the drafted token
changes its mass. A sampled draft needs one more pass over the target's row and the draft's.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.gumbel_max import gumbel_max_token, token_logprobs
from specjax.core.logsumexp import MaxSum, RowStatistics, block_logprobs
from specjax.core.noise import SAMPLING_BLOCK, Stream
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_logprobs
from specjax.core.temperature import parse_temperature
from specjax.samplers.reference.request import DraftedToken, Request, RequestRows
from specjax.types import Verification


class AcceptedPrefix(NamedTuple):
    """The accepted drafted tokens of a request, and the target row that decides the next token.

    Attributes:
      num_accepted: i32, the accepted tokens; index of the deciding row among the request's.
      partials: of the deciding row.
      row: statistics of the deciding row.
      drafted: the rejected token; arbitrary where every token was accepted.
      log_rho: f32 <= 0, log of what multiplies p in the residual of block verification; None is 0.
    """

    num_accepted: jax.Array
    partials: MaxSum
    row: RowStatistics
    drafted: DraftedToken
    log_rho: jax.Array | None = None


def next_token(rows: RequestRows, prefix: AcceptedPrefix) -> tuple[jax.Array, jax.Array]:
    """Draws the token after the accepted ones.

    Args:
      rows: one request and its rows.
      prefix: its accepted tokens.

    Returns:
      Its id i32[] and its log-probability under the target f32[].
    """
    temperature, drafted = rows.temperature, prefix.drafted
    target = rows.target_row(prefix.num_accepted)
    rejected = prefix.num_accepted < rows.request.num_tokens
    row_log_masses = block_logprobs(prefix.partials, prefix.row.normalizer, temperature.scale)

    def target_logprobs(index: jax.Array) -> jax.Array:
        return token_logprobs(target.take(index), prefix.row.normalizer, temperature.scale)

    def one_hot_logprobs(index: jax.Array) -> jax.Array:
        return jnp.where(rejected & (index == drafted.token_id), jnp.inf, -jnp.inf)

    def one_hot_log_masses() -> jax.Array:
        block = jnp.clip(drafted.token_id, 0, target.vocab_size - 1) // SAMPLING_BLOCK
        index = block * SAMPLING_BLOCK + jnp.arange(SAMPLING_BLOCK, dtype=jnp.int32)
        residual = jnp.exp(residual_logprobs(target_logprobs(index), one_hot_logprobs(index)))
        return jnp.where(
            rejected, row_log_masses.at[block].set(jnp.log(jnp.sum(residual))), row_log_masses
        )

    if rows.draft is None:
        log_masses, draft_logprobs = one_hot_log_masses(), one_hot_logprobs
        max_empty_mass = jnp.float32(0)
    else:
        sampled = rejected & ~drafted.one_hot & ~temperature.greedy
        sampled_log_masses, sampled_logprobs = _sampled_residual(rows, prefix)
        log_masses = jax.lax.cond(sampled, sampled_log_masses, one_hot_log_masses)
        max_empty_mass = jnp.where(sampled, jnp.float32(MIN_RESIDUAL_MASS), jnp.float32(0))
        if prefix.log_rho is not None:
            max_empty_mass = max_empty_mass * jnp.exp(prefix.log_rho)

        def draft_logprobs(index: jax.Array) -> jax.Array:
            return jnp.where(sampled, sampled_logprobs(index), one_hot_logprobs(index))

    empty = jnp.sum(jnp.exp(log_masses)) <= max_empty_mass

    def token_log_weights(index: jax.Array) -> jax.Array:
        logprobs = target_logprobs(index)
        scaled = logprobs if prefix.log_rho is None else logprobs + prefix.log_rho
        return jnp.where(empty, logprobs, residual_logprobs(scaled, draft_logprobs(index)))

    at = rows.address(prefix.num_accepted, Stream.TARGET)
    random_token = gumbel_max_token(
        jnp.where(empty, row_log_masses, log_masses), token_log_weights, at, rows.noise_dtype
    )
    best_token = target.argmax(prefix.partials)
    token = jnp.where(temperature.greedy, best_token, random_token)
    return token, target_logprobs(token)


def _sampled_residual(
    rows: RequestRows, prefix: AcceptedPrefix
) -> tuple[Callable[[], jax.Array], Callable[[jax.Array], jax.Array]]:
    """Returns two functions: log-masses of the blocks of `max(p - q, 0)`, and log q by token id."""
    request, target = rows.request, rows.target_row(prefix.num_accepted)
    row = rows.draft_row(jnp.minimum(prefix.num_accepted, request.token_ids.shape[0] - 1))
    normalizer = prefix.drafted.normalizer
    scale = parse_temperature(request.draft_temperature).scale

    def logprobs(index: jax.Array) -> jax.Array:
        return token_logprobs(row.kept_logits(index), normalizer, scale)

    def sampled_log_masses() -> jax.Array:
        size = target.logits.shape[0]
        q = token_logprobs(row.kept_row(size), normalizer, scale)
        q = jnp.pad(q, (0, size - q.shape[0]), constant_values=-jnp.inf)
        p = token_logprobs(target.kept_logits(), prefix.row.normalizer, rows.temperature.scale)
        if prefix.log_rho is not None:
            p = p + prefix.log_rho
        return target.residual_log_masses(p, q)

    return sampled_log_masses, logprobs


def residual_mass(rows: RequestRows, prefix: AcceptedPrefix) -> jax.Array:
    """Returns sum max(rho p - q, 0) of the row after a prefix, f32[]; q is 1 at a one-hot draft."""
    masses, _ = _sampled_residual(rows, prefix)
    scale, log_rho = rows.temperature.scale, prefix.log_rho
    assert log_rho is not None
    drafted_logit = rows.target_row(prefix.num_accepted).take(prefix.drafted.token_id)
    p = jnp.exp(token_logprobs(drafted_logit, prefix.row.normalizer, scale))
    one_hot_mass = jnp.exp(log_rho) * (1 - p)
    return jnp.where(prefix.drafted.one_hot, one_hot_mass, jnp.sum(jnp.exp(masses())))


def is_active(request: Request) -> jax.Array:
    """Returns whether a request may emit tokens."""
    return (request.num_tokens >= 0) & parse_temperature(request.temperature).valid


def emit(
    rows: RequestRows,
    num_accepted: jax.Array,
    row: RowStatistics,
    token: jax.Array,
    logprob: jax.Array,
    accepted_logprobs: jax.Array,
) -> Verification:
    """Returns the emitted tokens of a request: accepted drafted tokens and the one after them.

    Args:
      rows: one request and its rows.
      num_accepted: i32, its accepted tokens; index of the deciding row among the request's.
      row: statistics of the deciding row.
      token: i32[], of the deciding row.
      logprob: f32[], log p of it.
      accepted_logprobs: f32[K], log p of the accepted tokens.

    Returns:
      `Verification` without a batch axis.
    """
    request, active = rows.request, is_active(rows.request)
    emits = active & row.valid
    if request.bonus_token_id is not None:
        bonus = request.bonus_token_id
        in_vocabulary = (bonus >= 0) & (bonus < rows.target.vocab_size)
        is_given = active & in_vocabulary & (num_accepted == request.num_tokens)
        token = jnp.where(is_given, bonus, token)
        bonus_logit = rows.target_row(num_accepted).take(bonus)
        bonus_logprob = token_logprobs(bonus_logit, row.normalizer, rows.temperature.scale)
        # An invalid row gives the bonus token that was passed no probability.
        bonus_logprob = jnp.where(row.valid, bonus_logprob, -jnp.inf)
        logprob = jnp.where(is_given, bonus_logprob, logprob)
        emits |= is_given
    index = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
    is_accepted = index < num_accepted
    is_next = emits & (index == num_accepted)
    token_ids = jnp.where(is_next, token, jnp.int32(-1))
    logprobs = jnp.where(is_next, logprob, jnp.float32(0))
    return Verification(
        token_ids=jnp.where(is_accepted, jnp.pad(request.token_ids, (0, 1)), token_ids),
        num_accepted=num_accepted,
        num_emitted=num_accepted + emits.astype(jnp.int32),
        logprobs=jnp.where(is_accepted, jnp.pad(accepted_logprobs, (0, 1)), logprobs),
    )
