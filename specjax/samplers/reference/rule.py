"""The reference of a rule: its test of a drafted token, and the token drawn in place of one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.acceptance import accept_greedy
from specjax.core.gumbel_max import gather_logits, gumbel_max_token, token_logprobs
from specjax.core.logsumexp import RowStatistics, block_partials
from specjax.core.noise import Stream, uniform
from specjax.core.rule import RowValues, Rule, accepts, log_weights
from specjax.core.temperature import parse_temperature
from specjax.samplers.reference.next_token import AcceptedPrefix
from specjax.samplers.reference.request import RequestRows


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
    rule: Rule,
    rows: RequestRows,
    i: jax.Array,
    prefix: AcceptedPrefix,
    logprob: jax.Array,
    best: jax.Array,
) -> jax.Array:
    """Returns whether a rule accepts drafted token i.

    Args:
      rule: the rule.
      rows: one request and its rows.
      i: i32, the index of the token.
      prefix: the tokens before it and its target row; `drafted` is the token.
      logprob: f32[], log p of the token.
      best: i32[], the target's argmax, which a greedy request accepts unless the rule is for those.
    """
    temperature, drafted, row = rows.temperature, prefix.drafted, prefix.row
    u = uniform(rows.address(i, Stream.accept(i)), jnp.uint32(0), rows.noise_dtype)
    kept_logits = rows.target_row(prefix.num_accepted).kept_logits()
    p = token_logprobs(kept_logits, row.normalizer, temperature.scale)
    values = row_values(rule, p, row, logprob, rows.noise_dtype)
    accepted = accepts(rule, logprob, drafted.logprob, u, values)
    if rule.greedy:
        return accepted
    return jnp.where(temperature.greedy, accept_greedy(drafted.token_id, best), accepted)


def next_token_by_rule(
    rule: Rule, rows: RequestRows, prefix: AcceptedPrefix
) -> tuple[jax.Array, jax.Array]:
    """Draws the token after the accepted ones, by a rule's residual after a rejection.

    Args:
      rule: the rule.
      rows: one request and its rows.
      prefix: its accepted tokens.

    Returns:
      Its id i32[] and its log-probability under the target f32[].
    """
    temperature, drafted = rows.temperature, prefix.drafted
    target = rows.target_row(prefix.num_accepted)
    size = target.vocab_size
    p = token_logprobs(target.kept_logits(), prefix.row.normalizer, temperature.scale)
    q = _draft_logprobs(rows, prefix, size)
    inside = (drafted.token_id >= 0) & (drafted.token_id < size)
    logprob = jnp.where(inside, jnp.take(p, drafted.token_id, mode="clip"), -jnp.inf)
    values = row_values(rule, p, prefix.row, logprob, jnp.float32)
    weights = log_weights(rule, p, q, values)
    largest = jnp.max(weights)
    has_residual = (prefix.num_accepted < rows.request.num_tokens) & (largest > -jnp.inf)
    weights = jnp.where(has_residual, weights, p) - jnp.where(has_residual, largest, 0.0)
    blocks = block_partials(weights, jnp.ones((1,), jnp.float32)[0])
    at = rows.address(prefix.num_accepted, Stream.TARGET)
    weights_at = functools.partial(gather_logits, weights, cutoff=None)
    random = gumbel_max_token(blocks.max + jnp.log(blocks.sum), weights_at, at, rows.noise_dtype)
    best = target.argmax(prefix.partials)
    token = jnp.where(temperature.greedy, best, random)
    return token, token_logprobs(target.take(token), prefix.row.normalizer, temperature.scale)


def _draft_logprobs(rows: RequestRows, prefix: AcceptedPrefix, size: int) -> jax.Array:
    """Returns log q f32[size] of the draft row at the stop; 0 at the token of a one-hot draft."""
    request, drafted = rows.request, prefix.drafted
    is_drafted = jnp.arange(size, dtype=jnp.int32) == drafted.token_id
    one_hot = jnp.where(is_drafted, jnp.float32(0), -jnp.inf)
    if rows.draft is None:
        return one_hot
    i = jnp.minimum(prefix.num_accepted, request.token_ids.shape[0] - 1)
    row = rows.draft_row(i).kept_row(size)
    scale = parse_temperature(request.draft_temperature).scale
    q = token_logprobs(row, drafted.normalizer, scale)
    q = jnp.pad(q, (0, size - q.shape[0]), constant_values=-jnp.inf)
    return jnp.where(drafted.one_hot, one_hot, q)
