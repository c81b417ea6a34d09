"""The reference of block verification: the longest prefix that its uniform accepts.

The drafted tokens' probabilities come first, one number per target row. Then prefixes are tried
from the longest down; a residual is summed only where the uniform is below rho. Requests that are
greedy, and those whose drafts are all one-hot, are verified token by token.

References:
  Sun et al., 2024, arXiv:2403.10444.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.acceptance import log_ratio
from specjax.core.block_acceptance import accept_block, cap_ratios
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import MaxSum, RowStatistics
from specjax.core.noise import Stream, uniform_at_once
from specjax.core.temperature import parse_temperature
from specjax.devices.placement import pvary_like
from specjax.devices.rows import LogitRows
from specjax.samplers.reference.next_token import AcceptedPrefix, is_active, residual_mass
from specjax.samplers.reference.request import DraftedToken, Request, RequestRows, drafted_token

_ReadRow = Callable[[jax.Array], tuple[MaxSum, RowStatistics]]


class _Judged(NamedTuple):
    """Values that decide the length of the accepted prefix.

    Attributes:
      length: i32, drafted tokens before the first target row that is not a distribution.
      logprobs: f32[K], log p of the drafted tokens.
      log_rhos: f32[K + 1].
      uniforms: f32[K + 1] or f64, of prefixes; that of the empty one is 0.
    """

    length: jax.Array
    logprobs: jax.Array
    log_rhos: jax.Array
    uniforms: jax.Array


def drafted_tokens(rows: RequestRows) -> DraftedToken:
    """Returns all drafted tokens of a request that has draft logits, arrays of a leading axis K."""
    request = rows.request
    index = pvary_like(jnp.arange(request.token_ids.shape[0], dtype=jnp.int32), request)
    assert rows.draft is not None
    return _for_each(lambda i: drafted_token(rows, i), index, rows.draft.rows)


def _for_each(function: Callable[[jax.Array], Any], index: jax.Array, rows: LogitRows) -> Any:
    """Returns the function's results for each index, in turn or at once as rows are read."""
    return rows.read(lambda: jax.lax.map(function, index), lambda: jax.vmap(function)(index))


def is_block_request(request: Request, drafted: DraftedToken) -> jax.Array:
    """Returns whether a request is verified as a block: it draws, and a draft was sampled."""
    index = jnp.arange(request.token_ids.shape[0], dtype=jnp.int32)
    has_sampled = jnp.any((index < request.num_tokens) & ~drafted.one_hot)
    return ~parse_temperature(request.temperature).greedy & has_sampled


def accept_block_prefix(
    rows: RequestRows, drafted: DraftedToken
) -> tuple[AcceptedPrefix, jax.Array]:
    """Returns the accepted prefix of a request, and log p of its drafted tokens, f32[K].

    Args:
      rows: one request and its rows.
      drafted: its drafted tokens.
    """
    request, read = rows.request, _row_reader(rows)
    judged = _judge(rows, drafted, read)

    def prefix_of(length: jax.Array) -> AcceptedPrefix:
        last = jnp.minimum(length, request.token_ids.shape[0] - 1)
        partials, row = read(length)
        at_row = jax.tree.map(lambda x: x[last], drafted)
        return AcceptedPrefix(length, partials, row, at_row, judged.log_rhos[length])

    def is_accepted(length: jax.Array) -> jax.Array:
        u, log_rho = judged.uniforms[length], judged.log_rhos[length]

        def is_below() -> jax.Array:
            mass = residual_mass(rows, prefix_of(length))
            return accept_block(u, log_rho, mass)

        is_whole = length == judged.length
        below_rho = jnp.log(u) < log_rho.astype(u.dtype)
        sums = below_rho & ~is_whole & (length > 0)
        return (length == 0) | (below_rho & jax.lax.cond(sums, is_below, lambda: is_whole))

    def shorten(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        length = state[0] - 1
        return pvary_like((length, is_accepted(length)), state)

    first = jnp.where(is_active(request), judged.length, jnp.int32(0))

    def try_in_turn() -> jax.Array:
        start = pvary_like((first, is_accepted(first)), request, rows.target, rows.draft)
        num_accepted, _ = jax.lax.while_loop(lambda state: ~state[1], shorten, start)
        return num_accepted

    def try_at_once() -> jax.Array:
        lengths = _target_rows(request)
        accepted = jax.vmap(is_accepted)(lengths) & (lengths <= first)
        return jnp.max(jnp.where(accepted, lengths, jnp.int32(0)))

    return prefix_of(rows.target.read(try_in_turn, try_at_once)), judged.logprobs


def _judge(rows: RequestRows, drafted: DraftedToken, read: _ReadRow) -> _Judged:
    request, k = rows.request, rows.request.token_ids.shape[0]
    index = pvary_like(jnp.arange(k, dtype=jnp.int32), request)

    def judge_token(i: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, logit = read(i)[1], rows.target_row(i).take(request.token_ids[i])
        return token_logprobs(logit, row.normalizer, rows.temperature.scale), row.valid

    logprobs, valid = _for_each(judge_token, index, rows.target)
    is_end = (index >= request.num_tokens) | ~valid
    length = jnp.min(jnp.where(is_end, index, jnp.int32(k)))
    log_rhos = cap_ratios(list(log_ratio(logprobs, drafted.logprob)))

    def draw_uniform(i: jax.Array) -> jax.Array:
        return uniform_at_once(rows.address(i, Stream.accept(i)), rows.noise_dtype)

    uniforms = jax.vmap(draw_uniform)(index)
    return _Judged(length, logprobs, jnp.stack(log_rhos), jnp.pad(uniforms, (1, 0)))


def _target_rows(request: Request) -> jax.Array:
    """Returns the indices i32[K + 1] of a request's target rows; inside shard_map they vary."""
    index = jnp.arange(request.token_ids.shape[0] + 1, dtype=jnp.int32)
    varying: jax.Array = pvary_like(index, request)
    return varying


def _row_reader(rows: RequestRows) -> _ReadRow:
    """Returns a function that reads a target row; rows over devices are read once, all of them."""

    def read(index: jax.Array) -> tuple[MaxSum, RowStatistics]:
        return rows.target_row(index).statistics(rows.temperature.scale)

    def read_all() -> _ReadRow:
        every = jax.vmap(read)(_target_rows(rows.request))
        return lambda index: jax.tree.map(lambda x: x[index], every)

    return rows.target.read(lambda: read, read_all)
