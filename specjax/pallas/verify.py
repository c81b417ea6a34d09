"""The verifiers on the kernels: the launches of a call, and the acceptance test of a custom `Rule`.

| the first case that applies | launches |
|---|---|
| rules.coupled(), K > 0 | `coupled`; of a vocabulary over devices, `split.sample` |
| a vocabulary over devices | `split.verify` |
| rules.block(), drafts with logits | `block` |
| a `Rule`, K > 0 | `accept_rows`, by the rule, in a batch of any size; `emit_tokens` |
| a small batch | `reduce_rows`, `emit_tokens` |
| a large batch | `accept_rows`, `emit_tokens` |

Where drafts have logits without statistics, `draft_statistics` comes before all but the first.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import FlatBatch, VerifyInputs
from specjax.call_options import CallOptions
from specjax.core.logsumexp import LogNormalizer
from specjax.core.noise import Stream, uniform
from specjax.core.rule import BLOCK, COUPLED, RowValues, Rule, accepts, log_weights
from specjax.pallas.block.verify import verify_block
from specjax.pallas.blocks import Partials, tile_token_ids
from specjax.pallas.coupled import verify_coupled
from specjax.pallas.draft_statistics import add_draft_statistics
from specjax.pallas.emit_tokens import emit_tokens
from specjax.pallas.gumbel_max import SamplingRow
from specjax.pallas.kernel_config import KernelConfig
from specjax.pallas.load_request import Request, Schedule
from specjax.pallas.next_token import AcceptedPrefix
from specjax.pallas.reduce_rows import ReducedRows, reduce_rows
from specjax.pallas.residual import load_draft_logprobs
from specjax.pallas.split.sample import compare_draws, sample_split, target_samples
from specjax.pallas.split.verify import verify_split
from specjax.pallas.target_rows import (
    AcceptanceResult,
    VerifiedRows,
    accept_rows,
    evaluate_acceptance,
)
from specjax.types import Verification


def verify_rows(inputs: VerifyInputs, options: CallOptions) -> Verification:
    """Verifies a batch.

    Args:
      inputs: from `once_per_request`.
      options: static.

    Returns:
      `Verification`.
    """
    config = options.implementation.config(KernelConfig)
    num_requests, vocab_size = inputs.temperature.shape[0], inputs.target_logits.shape[-1]
    # A schedule is of one launch: each later launch replaces what differs, such as the tile.
    num_rows = num_requests * (options.max_draft_tokens + 1)
    tile = config.target_tile(num_rows, vocab_size)
    is_small_batch = config.is_small_batch(
        num_rows * tile.num_tiles(vocab_size), not options.skips_greedy_sums
    )
    schedule = Schedule(num_requests, options, tile, is_small_batch)
    size = (num_requests, vocab_size, is_small_batch)
    split = options.split
    # With K = 0 a request has one row. Every rule draws from it, by the standard rule's launches.
    arrays = FlatBatch.from_inputs(inputs)
    if options.rule == COUPLED and options.max_draft_tokens:
        if split is None:
            return verify_coupled(arrays, schedule)
        samples = target_samples(inputs, options.max_draft_tokens)
        return compare_draws(inputs, sample_split(samples, options, split), options)
    has_statistics = arrays.draft_logprobs is not None and arrays.draft_logsumexp is not None
    if arrays.draft_logits is not None and not has_statistics:
        tile = config.reduce_tile(
            num_requests * options.max_draft_tokens, arrays.draft_logits.shape[1]
        )
        arrays = add_draft_statistics(arrays, schedule._replace(tile=tile))
    if split is not None:
        tile = config.split_residual_tile(*size)
        return verify_split(arrays, schedule, split, tile)
    # Without logits drafts are one-hot: block verification accepts them as the standard rule does.
    if options.rule == BLOCK and arrays.draft_logits is not None:
        return verify_block(arrays, schedule, config.block_residual_tile(*size))
    rows: ReducedRows | VerifiedRows
    if options.custom_rule is not None:  # A `Rule` of functions, and K > 0.
        rows = accept_rows(arrays, schedule, evaluate_by_rule)
        schedule = schedule._replace(log_weights=log_weights_by_rule)
    else:
        rows = (reduce_rows if schedule.is_small_batch else accept_rows)(arrays, schedule)
    tile = config.residual_tile(*size)
    return emit_tokens(arrays, rows, schedule._replace(tile=tile))


def evaluate_by_rule(request: Request, i: jax.Array, partials: Partials) -> AcceptanceResult:
    """Evaluates target row `i`, i32[1], of a request by the call's custom rule."""
    schedule = request.schedule
    result, rule = evaluate_acceptance(request, i, partials), _rule_of(schedule)
    drafted = result.drafted
    assert drafted is not None
    address = request.address(i, Stream.accept(i))
    u = uniform(address, jnp.zeros_like(i, jnp.uint32), schedule.noise_dtype, schedule.threefry)
    # A kernel has no indexing of a value: the sum of an array of one entry is its scalar.
    index = jnp.sum(i, dtype=i.dtype)
    row = request.row(index, LogNormalizer(*[jnp.sum(x) for x in result.normalizer]))
    values = _row_values(row, result.logprobs, schedule, u.dtype)
    accepted = accepts(rule, result.logprobs, drafted.logprob, u, values)
    accepted &= (i < request.num_draft_tokens) & jnp.isfinite(result.normalizer.log_sum)
    if schedule.options.greedy_is_argmax:
        accepted = jnp.where(request.temperature.greedy, result.accepted, accepted)
    return result._replace(accepted=accepted)


def log_weights_by_rule(
    prefix: AcceptedPrefix, token_id: jax.Array, logprobs: jax.Array
) -> jax.Array:
    """Returns a rule's log-weights of the token in place of a rejected one.

    Args:
      prefix: the accepted prefix, which a rejection ends.
      token_id: i32 of any shape, tokens of the deciding row.
      logprobs: f32, log p of them.
    """
    drafted, schedule = prefix.drafted, prefix.request.schedule
    assert drafted is not None
    is_drafted = token_id == drafted.token_id
    draft_logprobs = jnp.where(is_drafted, jnp.float32(0), -jnp.inf)
    if prefix.request.arrays.draft_logits is not None:
        sampled = load_draft_logprobs(prefix, token_id)
        draft_logprobs = jnp.where(drafted.one_hot, draft_logprobs, sampled)
    # An id below 0 is no token, and would be read before the row. The largest id is past the row's
    # end instead, where log p is -inf.
    drafted_id = jnp.where(drafted.token_id >= 0, drafted.token_id, jnp.int32(2**31 - 1))
    logprob = prefix.row.logprobs(drafted_id)
    values = _row_values(prefix.row, logprob, schedule, jnp.dtype(jnp.float32))
    return log_weights(_rule_of(schedule), logprobs, draft_logprobs, values)


def _rule_of(schedule: Schedule) -> Rule:
    """Returns the custom rule of a call that has one."""
    rule = schedule.options.custom_rule
    assert rule is not None
    return rule


def _row_values(row: SamplingRow, logprob: jax.Array, schedule: Schedule, dtype: Any) -> RowValues:
    """Returns the statistics of a target row; each is computed where the rule reads it.

    Its entropy and a token's rank take another pass over the row, by the calling program.
    """

    def over_tiles(term: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def add(tile_index: jax.Array, total: jax.Array) -> jax.Array:
            return total + jnp.sum(term(row.logprobs(tile_token_ids(schedule.tile, tile_index))))

        num_tiles = schedule.tile.num_tiles(row.logits.shape[1])
        return jax.lax.fori_loop(0, num_tiles, add, jnp.float32(0)).astype(dtype)

    def entropy(lp: jax.Array) -> jax.Array:
        return jnp.where(lp > -jnp.inf, -jnp.exp(lp) * lp, jnp.float32(0))

    def is_likelier(lp: jax.Array) -> jax.Array:
        return (lp > jnp.max(logprob)).astype(jnp.float32)

    return RowValues(
        _rule_of(schedule).statistics,
        # The shift of the normalizer is the largest logit.
        max_logprob=lambda: -row.normalizer.log_sum.astype(dtype),
        entropy=lambda: over_tiles(entropy),
        rank=lambda: over_tiles(is_likelier),
    )
