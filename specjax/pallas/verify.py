"""`rejection_sample` and `coupled_sample` on the kernels.

    rejection_sample     rows are reduced and evaluated, then the next token is drawn
    coupled_sample       rows are reduced and each draws its token, then tokens are written

Coupled sampling draws in `verify_accept_kernel`: the last program of a row to arrive draws from it.
Its stop is the first row that draws another token than the drafted one, or the bonus row.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import LogNormalizer, row_statistics
from specjax.core.noise import Stream
from specjax.pallas.blocks import Partials, load_blocks
from specjax.pallas.draft_statistics import add_draft_statistics
from specjax.pallas.emit_tokens import emit_tokens
from specjax.pallas.gumbel_max import (
    BlockNoise,
    Draw,
    SamplingRow,
    draw_row_noise,
    draw_row_token,
)
from specjax.pallas.kernel_config import KernelConfig
from specjax.pallas.launch import launch
from specjax.pallas.load_request import Plan, RequestScalars, load_masked
from specjax.pallas.next_token import load_accepted_prefix, write_result
from specjax.pallas.target_rows import AcceptanceResult, VerifiedRows, accept_rows, reduce_rows
from specjax.verification import Verification

__all__ = ["coupled_write_kernel", "draw_and_compare", "verify_rows"]


class _Operands(NamedTuple):
    """The call's arrays and its evaluated rows."""

    arrays: VerifyArrays
    rows: VerifiedRows


def verify_rows(arrays: VerifyArrays, options: CallOptions) -> Verification:
    """Verifies a batch.

    Args:
      arrays: flat rows of logits; one key, position and temperature per request.
      options: static.

    Returns:
      `Verification`.
    """
    config = options.implementation.config(KernelConfig)
    num_requests, vocab_size = arrays.temperature.shape[0], arrays.target_logits.shape[1]
    arrays = _flatten_drafts(arrays)
    plan = Plan(num_requests, options, config.target_tile(num_requests, vocab_size))
    # Without drafts both rules draw from the first row.
    if options.method == "coupled" and options.max_draft_tokens:
        return _verify_coupled(arrays, plan)
    has_statistics = arrays.draft_logprobs is not None and arrays.draft_logsumexp is not None
    if arrays.draft_logits is not None and not has_statistics:
        tile = config.reduce_tile(
            num_requests * options.max_draft_tokens, arrays.draft_logits.shape[1]
        )
        arrays = add_draft_statistics(arrays, plan._replace(tile=tile))
    rows = (reduce_rows if plan.is_small else accept_rows)(arrays, plan)
    tile = config.residual_tile(num_requests, vocab_size)
    return emit_tokens(arrays, rows, plan._replace(tile=tile))


def _flatten_drafts(arrays: VerifyArrays) -> VerifyArrays:
    """Returns the arrays with those of drafted tokens, [B, K], laid end to end."""
    names = ("token_ids", "draft_logprobs", "draft_logsumexp", "draft_cutoff")
    token_arrays = {name: getattr(arrays, name) for name in names}
    return arrays._replace(**{k: x.reshape(-1) for k, x in token_arrays.items() if x is not None})


def _verify_coupled(arrays: VerifyArrays, plan: Plan) -> Verification:
    rows = accept_rows(arrays, plan, draw_and_compare)
    return launch(
        functools.partial(coupled_write_kernel, plan=plan),
        _Operands(arrays, rows),
        plan.verification_shape(),
        num_programs=plan.num_requests,
        num_warps=1,
        interpret=plan.interpret,
    )


def draw_and_compare(
    arrays: VerifyArrays, request: RequestScalars, i: jax.Array, partials: Partials, plan: Plan
) -> AcceptanceResult:
    """Draws from target row `i`, i32[1], of a request, and compares with its drafted token.

    The draw, two-level Gumbel-max on the target's stream, is `gumbel_sample`'s of this row. It
    stands in `argmax` of the result, and its log-probability in `logprobs`.
    """
    index, scale = jnp.sum(i, dtype=i.dtype), request.temperature.scale
    blocks = load_blocks(
        partials, request.b * plan.rows_per_request + index, arrays.target_logits.shape[1]
    )
    statistics = row_statistics(blocks, scale)
    log_sum = jnp.where(statistics.valid, statistics.normalizer.log_sum, jnp.nan)
    normalizer = statistics.normalizer._replace(log_sum=log_sum)
    cutoff = request.cutoff(arrays, index, request.active)
    target_row = request.first_target_row + index
    row = SamplingRow(arrays.target_logits, target_row, scale, cutoff, normalizer)

    def make_noise() -> BlockNoise:
        address = request.address(arrays, index, Stream.TARGET, plan)
        vocab_size = arrays.target_logits.shape[1]
        return draw_row_noise(address, vocab_size, plan.noise_dtype, plan.threefry)

    token, logit = draw_row_token(row, blocks, request.temperature.greedy, make_noise)
    has_draft = i < request.num_draft_tokens
    token_id = load_masked(arrays.token_ids, request.first_draft + i, has_draft)
    shift, log_sum, logprob, token = (
        jnp.broadcast_to(x, i.shape)
        for x in (*normalizer, token_logprobs(logit, normalizer, scale), token)
    )
    accepted = has_draft & (token_id == token) & statistics.valid
    return AcceptanceResult(LogNormalizer(shift, log_sum), logprob, token, accepted, None)


def coupled_write_kernel(operands: _Operands, out: Verification, *, plan: Plan) -> None:
    """Writes a request's accepted drafted tokens and what its deciding row has drawn.

    Formula: y_0, ..., y_n with y_i the target's draw from row i, and n the first row whose draw is
    not the drafted token, or the bonus row.
    Grid: B programs of 1 warp; one owns a request.
    Bytes per request: (K + 1) * 8 read, and one logit; (K + 1) * 8 + 8 written.
    Why a launch of its own: rows are evaluated in no fixed order, and the first that ends the
    accepted prefix is known once all are.
    Memory order: the launch before has ended when it begins to load. It does not trigger the next
    launch early. Reference: Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
    """
    arrays, rows = operands
    prefix = load_accepted_prefix(arrays, rows, pl.program_id(0), plan)

    def take_drawn() -> Draw:
        # `argmax` holds the row's draw.
        token = prefix.argmax
        return Draw(token, prefix.row.kept_logits(token), jnp.float32(0))

    write_result(arrays, prefix, take_drawn, out, plan)
