"""The reference of a rule: its test of a drafted token, and the token drawn in place of one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.acceptance import accept_greedy
from specjax.core.gumbel_max import gather_logits, gumbel_max_token, token_logprobs
from specjax.core.logsumexp import RowStatistics, block_partials
from specjax.core.noise import Stream, address, uniform
from specjax.core.rule import RowValues, Rule, accepts, log_weights
from specjax.core.temperature import parse_temperature
from specjax.devices.rows import LogitRows
from specjax.samplers.reference.next_token import AcceptedPrefix
from specjax.samplers.reference.request import (
    DraftedToken,
    DraftRows,
    Request,
    draft_row,
)

__all__ = ["accepts_by_rule", "next_token_by_rule", "row_values"]


def row_values(
    rule: Rule, logprobs: jax.Array, row: RowStatistics, logprob: jax.Array, dtype: Any
) -> RowValues:
    """Returns the statistics of a target row that a rule names, computed where it reads them.

    Args:
      rule: the rule.
      logprobs: f32[V], of the row.
      row: its statistics.
      logprob: f32[], log p of the drafted token.
      dtype: of the values, float32 or float64.
    """

    def entropy() -> jax.Array:
        terms = jnp.where(logprobs > -jnp.inf, jnp.exp(logprobs) * logprobs, jnp.float32(0))
        return -jnp.sum(terms).astype(dtype)

    return RowValues(
        rule.statistics,
        # The shift of the normalizer is the largest logit.
        max_logprob=lambda: -row.normalizer.log_sum.astype(dtype),
        entropy=entropy,
        rank=lambda: jnp.sum(logprobs > logprob, dtype=jnp.int32).astype(dtype),
    )


def accepts_by_rule(
    request: Request,
    i: jax.Array,
    drafted: DraftedToken,
    logprob: jax.Array,
    best: jax.Array,
    target: LogitRows,
    row: RowStatistics,
    rule: Rule,
    noise_dtype: Any,
) -> jax.Array:
    """Returns whether a rule accepts drafted token i.

    Args:
      request: one request.
      i: i32, the index of the token.
      drafted: the token.
      logprob: f32[], log p of it.
      best: i32[], the target's argmax, which a greedy request accepts unless the rule is for those.
      target: the target row, [V].
      row: its statistics.
      rule: the rule.
      noise_dtype: float32 or float64.
    """
    temperature = parse_temperature(request.temperature)
    at = address(request.key, request.position + i, Stream.accept(i))
    u = uniform(at, jnp.uint32(0), noise_dtype)
    p = token_logprobs(target.kept_logits(), row.normalizer, temperature.scale)
    accepted = accepts(
        rule, logprob, drafted.logprob, u, row_values(rule, p, row, logprob, noise_dtype)
    )
    if rule.greedy:
        return accepted
    return jnp.where(temperature.greedy, accept_greedy(drafted.token_id, best), accepted)


def next_token_by_rule(
    rule: Rule,
    request: Request,
    prefix: AcceptedPrefix,
    target: LogitRows,
    draft: DraftRows | None,
    noise_dtype: Any,
) -> tuple[jax.Array, jax.Array]:
    """Draws the token after the accepted ones, by a rule's residual after a rejection.

    Args:
      rule: the rule.
      request: one request.
      prefix: its accepted tokens.
      target: rows of target logits.
      draft: rows of draft logits, or None.
      noise_dtype: float32 or float64.

    Returns:
      Its id i32[] and its log-probability under the target f32[].
    """
    temperature, drafted = parse_temperature(request.temperature), prefix.drafted
    target = target.row(request.target_row + prefix.num_accepted)
    size = target.vocab_size
    p = token_logprobs(target.kept_logits(), prefix.row.normalizer, temperature.scale)
    q = _draft_logprobs(request, prefix, draft, size)
    inside = (drafted.token_id >= 0) & (drafted.token_id < size)
    logprob = jnp.where(inside, jnp.take(p, drafted.token_id, mode="clip"), -jnp.inf)
    values = row_values(rule, p, prefix.row, logprob, jnp.float32)
    weights = log_weights(rule, p, q, values)
    largest = jnp.max(weights)
    has_residual = (prefix.num_accepted < request.num_tokens) & (largest > -jnp.inf)
    weights = jnp.where(has_residual, weights, p) - jnp.where(has_residual, largest, 0.0)
    blocks = block_partials(weights, jnp.ones((1,), jnp.float32)[0])
    at = address(request.key, request.position + prefix.num_accepted, Stream.TARGET)
    weights_at = functools.partial(gather_logits, weights, cutoff=None)
    random = gumbel_max_token(blocks.max + jnp.log(blocks.sum), weights_at, at, noise_dtype)
    best = target.argmax(prefix.partials)
    token = jnp.where(temperature.greedy, best, random)
    return token, token_logprobs(target.take(token), prefix.row.normalizer, temperature.scale)


def _draft_logprobs(
    request: Request, prefix: AcceptedPrefix, draft: DraftRows | None, size: int
) -> jax.Array:
    """Returns log q f32[size] of the draft row at the stop; 0 at the token of a one-hot draft."""
    drafted: DraftedToken = prefix.drafted
    is_drafted = jnp.arange(size, dtype=jnp.int32) == drafted.token_id
    one_hot = jnp.where(is_drafted, jnp.float32(0), -jnp.inf)
    if draft is None:
        return one_hot
    i = jnp.minimum(prefix.num_accepted, request.token_ids.shape[0] - 1)
    row = draft_row(request, draft, i).kept_row(size)
    scale = parse_temperature(request.draft_temperature).scale
    q = token_logprobs(row, drafted.normalizer, scale)
    q = jnp.pad(q, (0, size - q.shape[0]), constant_values=-jnp.inf)
    return jnp.where(drafted.one_hot, one_hot, q)
