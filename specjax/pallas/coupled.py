"""Coupled sampling on the kernels: every row draws, and drafted tokens are compared.

    small batch    verify_reduce_kernel     partials of all target rows
                   coupled_draw_kernel      a draw of each row; a request's last program writes
    large batch    verify_accept_kernel     a row's last program draws from it
                   coupled_write_kernel     the draws up to the stop

The stop is the first row whose draw is not the drafted token, or the bonus row. A large batch does
not read the rows after it.

References:
  Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.call_arrays import FlatBatch
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import LogNormalizer
from specjax.core.noise import Stream
from specjax.pallas.blocks import Partials, load_blocks, load_maxima, load_padded, load_tiles
from specjax.pallas.gumbel_max import BlockNoise, Draw, draw_row_noise, draw_row_token
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import divmod_i32, is_last_arrival, output, reduce_where
from specjax.pallas.load_request import Request, Schedule, load_masked, load_request
from specjax.pallas.next_token import AcceptedPrefix, load_accepted_prefix, write_result
from specjax.pallas.reduce_rows import ReducedRows, reduce_rows
from specjax.pallas.target_rows import AcceptanceResult, VerifiedRows, accept_rows, normalize
from specjax.types import Verification


class _Drawn(NamedTuple):
    """Draws of rows [B, K + 1], the result, and the counters of `ReducedRows`.

    Attributes:
      shift: f32, of the normalizer.
      log_sum: f32, of the normalizer; NaN where the row is not a distribution.
      token: i32, drawn.
      logit: f32, of the token.
      verification: the result.
      counters: u32[B].
    """

    shift: Any
    log_sum: Any
    token: Any
    logit: Any
    verification: Verification
    counters: Any


def verify_coupled(arrays: FlatBatch, schedule: Schedule) -> Verification:
    """Verifies a batch by coupled sampling, K >= 1, and returns the call's result."""
    if not schedule.is_small_batch:
        return schedule.launch(
            coupled_write_kernel,
            (arrays, accept_rows(arrays, schedule, draw_and_compare)),
            schedule.verification_shape(),
            num_programs=schedule.num_requests,
            num_warps=1,
        )
    rows = reduce_rows(arrays, schedule, every_row_draws=True)
    rows_shape = (schedule.num_requests, schedule.rows_per_request)
    return schedule.launch(
        coupled_draw_kernel,
        (arrays, rows),
        _Drawn(
            shift=output(rows_shape),
            log_sum=output(rows_shape),
            token=output(rows_shape, jnp.int32),
            logit=output(rows_shape),
            verification=schedule.verification_shape(),
            counters=rows.counters,
        ),
        num_programs=schedule.num_requests * schedule.rows_per_request,
        num_warps=schedule.config.num_draw_warps,
    ).verification


def draw_and_compare(request: Request, i: jax.Array, partials: Partials) -> AcceptanceResult:
    """Draws from target row `i`, i32[1], of a request, and compares with its drafted token.

    The draw is two-level Gumbel-max on the target's stream, equal to that of `gumbel_sample`. It is
    `argmax` of the result, and its log-probability is `logprobs`.
    """
    index, scale = jnp.sum(i, dtype=i.dtype), request.temperature.scale
    normalizer, token, logit = _draw_row(request, index, partials)
    has_draft = i < request.num_draft_tokens
    token_id = load_masked(request.arrays.token_ids, request.first_draft + i, has_draft)
    shift, log_sum, logprob, token = (
        jnp.broadcast_to(x, i.shape)
        for x in (*normalizer, token_logprobs(logit, normalizer, scale), token)
    )
    accepted = has_draft & (token_id == token) & jnp.isfinite(log_sum)
    return AcceptanceResult(LogNormalizer(shift, log_sum), logprob, token, accepted, None)


def _draw_row(
    request: Request, i: jax.Array, partials: Partials, gumbels: Any = None
) -> tuple[LogNormalizer, jax.Array, jax.Array]:
    """Returns the normalizer of target row i, i32[], the token drawn from it and its logit.

    The noise of its blocks is `gumbels` of the row, or is computed here.
    """
    schedule, vocab_size = request.schedule, request.arrays.target_logits.shape[1]
    index, greedy = request.row_index(i), request.temperature.greedy

    def draw() -> tuple[LogNormalizer, jax.Array, jax.Array]:
        address = request.address(i, Stream.TARGET)
        blocks = load_blocks(partials, index, vocab_size)
        if gumbels is None:
            noise = draw_row_noise(address, vocab_size, schedule.noise_dtype, schedule.threefry)
        else:
            noise = BlockNoise(
                address, jnp.int32(0), load_padded(gumbels, index, 0), schedule.threefry
            )
        if schedule.config.normalizes_by_tiles:
            tiles = load_tiles(partials, jnp.reshape(index, (1,)), jnp.ones((1,), bool))
            normalizer = jax.tree.map(jnp.sum, normalize(tiles, request.temperature.scale)[0])
        else:
            normalizer, _ = normalize(blocks, request.temperature.scale)
        row = request.row(i, normalizer)
        return normalizer, *draw_row_token(row, blocks, greedy, noise)

    def take_argmax() -> tuple[LogNormalizer, jax.Array, jax.Array]:
        normalizer, token = load_maxima(partials, index)
        return normalizer, token, normalizer.shift

    if schedule.options.skips_greedy_sums:
        return jax.lax.cond(greedy, take_argmax, draw)
    return draw()


def coupled_draw_kernel(
    operands: tuple[FlatBatch, ReducedRows], out: _Drawn, *, schedule: Schedule
) -> None:
    """Draws the token of a target row; the last program of a request writes its result.

    Formula: y_0, ..., y_n, where y_i is the target's draw from row i. Row n is the first whose draw
    is not the drafted token, or the bonus row.
    Grid: B * (K + 1) programs of 8 warps; one owns a row.
    Bytes per row: V / 128 * 8 of partials, V / 128 * 4 or 8 of Gumbels and the logits of the drawn
    block read. 16 are written and read once more, and 8 of the result written.
    Why a program for each row: about a thousand blocks are four per thread, and rows draw in
    parallel.
    Memory order: `is_last_arrival` on `counters[b]`, which `verify_reduce_kernel` zeroed.
    Reference: Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
    """
    arrays, rows = operands
    b, row = divmod_i32(pl.program_id(0), schedule.rows_per_request)
    request = load_request(arrays, b, schedule)
    exists = request.active & (row <= request.num_draft_tokens)

    @pl.when(exists)
    def _() -> None:
        normalizer, token, logit = _draw_row(request, row, rows.partials, rows.gumbels)
        out.shift[b, row], out.log_sum[b, row] = normalizer
        out.token[b, row], out.logit[b, row] = token, logit

    # Rows past the bonus row draw nothing, but are counted too.
    @pl.when(is_last_arrival(out.counters, (b,), schedule.rows_per_request, schedule.interpret))
    def _() -> None:
        prefix, drawn = _drawn_prefix(request, out)
        write_result(prefix, lambda: drawn, out.verification)


def _drawn_prefix(request: Request, drawn: _Drawn) -> tuple[AcceptedPrefix, Draw]:
    """Returns the accepted prefix of a request by its rows' draws, and the deciding row's draw."""
    b, rows_per_request = request.b, request.schedule.rows_per_request
    i = jax.lax.iota(jnp.int32, next_power_of_2(rows_per_request))
    exists = request.active & (i <= request.num_draft_tokens)
    # All rows are loaded at once: their tokens decide which row counts.
    shift, log_sum, token, logit = (load_masked(x, (b, i), exists) for x in drawn[:4])
    has_draft = request.active & (i < request.num_draft_tokens)
    token_id = load_masked(request.arrays.token_ids, request.first_draft + i, has_draft)
    accepted = has_draft & (token_id == token) & jnp.isfinite(log_sum)
    n = jnp.min(jnp.where(accepted, jnp.int32(rows_per_request), i))
    mask = i == n
    normalizer = LogNormalizer(reduce_where(shift, mask), reduce_where(log_sum, mask))
    logprobs = token_logprobs(logit, LogNormalizer(shift, log_sum), request.temperature.scale)
    argmax = reduce_where(token, mask)
    prefix = AcceptedPrefix.from_row(
        request, n, normalizer, drafted=None, argmax=argmax, logprobs=logprobs
    )
    return prefix, Draw(prefix.argmax, reduce_where(logit, mask), jnp.float32(0))


def coupled_write_kernel(
    operands: tuple[FlatBatch, VerifiedRows], out: Verification, *, schedule: Schedule
) -> None:
    """Writes a request's accepted drafted tokens and the draw of its deciding row.

    Formula: that of `coupled_draw_kernel`.
    Grid: B programs of 1 warp; one owns a request.
    Bytes per request: (K + 1) * 8 read, and one logit; (K + 1) * 8 + 8 written.
    Why a separate launch: rows are evaluated in no fixed order. The first row that ends the
    accepted prefix is known only after all of them.
    Memory order: the previous launch has ended when it begins to load. It does not trigger the next
    launch early. Reference: Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
    """
    arrays, rows = operands
    prefix = load_accepted_prefix(arrays, rows, pl.program_id(0), schedule)

    def take_drawn() -> Draw:
        # `argmax` holds the row's draw.
        token = prefix.argmax
        return Draw(token, prefix.row.kept_logits(token), jnp.float32(0))

    write_result(prefix, take_drawn, out)
