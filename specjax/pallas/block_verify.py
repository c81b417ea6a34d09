"""`block_rejection_sample` on the kernels: rows are reduced and judged, residuals summed, a draw.

    verify_reduce_kernel      partials of all target rows
    block_judge_kernel        rho_1, ..., rho_K, and whether all drafts are accepted
    block_residual_kernel     residuals max(rho_j p_j - q_j, 0), from the longest prefix j down
    verify_draw_kernel        the draw after the accepted prefix

The programs of prefix K - 1 of all requests come first, then those of K - 2, and so on. A row is
read only where its uniform is below rho_j, and the last program of a row to arrive decides whether
prefix j is accepted. It publishes that, and programs of shorter prefixes that start afterwards
return without reading. No row waits for another. A prefix of all drafts is decided by rho_K alone.

References:
  Sun et al., 2024, arXiv:2403.10444.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import VerifyArrays
from specjax.core.acceptance import log_ratio
from specjax.core.block_acceptance import accept_block, cap_ratios
from specjax.core.logsumexp import LogNormalizer, exp_scaled
from specjax.core.noise import Stream, uniform
from specjax.pallas.blocks import Partials, load_padded
from specjax.pallas.emit_tokens import DrawOperands, draw_next
from specjax.pallas.gumbel_max import SamplingRow
from specjax.pallas.kernel_config import Tile, next_power_of_2
from specjax.pallas.launch import divmod_i32, is_last_arrival, launch, output
from specjax.pallas.load_request import (
    Plan,
    RequestScalars,
    load_drafted,
    load_masked,
    load_request,
)
from specjax.pallas.next_token import AcceptedPrefix
from specjax.pallas.reduce_rows import ReducedRows, reduce_rows
from specjax.pallas.residual import store_log_masses
from specjax.pallas.target_rows import evaluate_acceptance
from specjax.verification import Verification

__all__ = ["block_judge_kernel", "block_residual_kernel", "verify_block"]

_JUDGE_WARPS = 2


class _Judged(NamedTuple):
    """Requests [B] and what decides the lengths of their accepted prefixes.

    Attributes:
      num_accepted: i32, accepted tokens where no residual decides; -1 where one does.
      is_block: i32, 1 if a prefix is accepted as a whole: the request draws, and a draft was
        sampled. Other requests are verified token by token.
      length: i32, drafted tokens before the first target row that is not a distribution.
      log_rhos: f32[B, K], of the prefixes that end with each token.
      uniforms: f32[B, K] or f64, of these prefixes.
      shift: f32[B, K + 1], of each target row's normalizer.
      log_sum: f32[B, K + 1], of the normalizer; NaN where the row is not a distribution.
      logprobs: f32[B, K + 1], log p of the drafted tokens.
      argmax: i32[B, K + 1], of the rows, where the request is greedy.
      counters: u32[B, K + 1]. `[:, j]` counts the programs that are done with residual j;
        `[:, K]` is 1 + j for the longest prefix j known to be accepted, 0 while none is.
    """

    num_accepted: Any
    is_block: Any
    length: Any
    log_rhos: Any
    uniforms: Any
    shift: Any
    log_sum: Any
    logprobs: Any
    argmax: Any
    counters: Any


class _BlockRows(NamedTuple):
    """Target rows [B * (K + 1)], judged; what is published of them is in the counters."""

    partials: Partials
    judged: _Judged


class _Operands(NamedTuple):
    arrays: VerifyArrays
    rows: ReducedRows


class _JudgedOperands(NamedTuple):
    arrays: VerifyArrays
    judged: _Judged


class _Residuals(NamedTuple):
    """Log-masses f32[B * K, blocks] of the residuals, and the counters of `_Judged`."""

    log_masses: Any
    counters: Any


def verify_block(arrays: VerifyArrays, plan: Plan, residual_tile: Tile) -> Verification:
    """Verifies a batch with sampled drafts, K >= 1.

    Args:
      arrays: the call's arrays, with the statistics of the drafts.
      plan: its tile is that of target rows.
      residual_tile: cuts a target and a draft row alike.

    Returns:
      `Verification`.
    """
    size, k = plan.num_requests, plan.max_draft_tokens
    rows = reduce_rows(arrays, plan)
    tokens, of_rows = (size, k), (size, k + 1)
    judged = launch(
        functools.partial(block_judge_kernel, plan=plan),
        _Operands(arrays, rows),
        _Judged(
            num_accepted=output((size,), jnp.int32),
            is_block=output((size,), jnp.int32),
            length=output((size,), jnp.int32),
            log_rhos=output(tokens),
            uniforms=output(tokens, plan.noise_dtype),
            shift=output(of_rows),
            log_sum=output(of_rows),
            logprobs=output(of_rows),
            argmax=output(of_rows, jnp.int32),
            counters=output(of_rows, jnp.uint32),
        ),
        num_programs=size,
        num_warps=_JUDGE_WARPS,
        interpret=plan.interpret,
    )
    plan = plan._replace(tile=residual_tile)
    num_tiles = residual_tile.num_tiles(arrays.target_logits.shape[1])
    residuals = launch(
        functools.partial(block_residual_kernel, plan=plan),
        _JudgedOperands(arrays, judged),
        _Residuals(
            output((size * k, num_tiles * residual_tile.num_blocks)), output(of_rows, jnp.uint32)
        ),
        num_programs=size * k * num_tiles,
        num_warps=residual_tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": judged.counters},
    )
    verified = _BlockRows(rows.partials, judged._replace(counters=residuals.counters))
    return draw_next(DrawOperands(arrays, verified, residuals.log_masses), plan, _load_prefix)


def block_judge_kernel(operands: _Operands, out: _Judged, *, plan: Plan) -> None:
    """Writes rho_j = min(1, rho_{j-1} p(x_j) / q(x_j)) of a request's prefixes, and their uniforms.

    Grid: B programs of 2 warps; one owns a request.
    Bytes per request: the (m, l) of all tiles of K + 1 rows read, a few scalars per row written.
    Why a launch of its own: K * tiles programs read what it writes; each would judge all rows.
    Memory order: it begins to load after `verify_reduce_kernel` has ended. It zeroes the counters
    of the next launch. Reference: Sun et al., 2024, arXiv:2403.10444.
    """
    arrays, b = operands.arrays, pl.program_id(0)
    request = load_request(arrays, b, plan)
    i = jax.lax.iota(jnp.int32, next_power_of_2(plan.rows_per_request))
    result = evaluate_acceptance(arrays, request, i, operands.rows.partials, plan)
    drafted = result.drafted
    assert drafted is not None
    has_draft = i < request.num_draft_tokens
    is_sampled = (has_draft & ~drafted.one_hot).astype(jnp.int32)
    is_block = (jnp.sum(is_sampled, dtype=jnp.int32) > 0) & ~request.temperature.greedy
    end = jnp.int32(plan.max_draft_tokens)
    is_distribution = jnp.isfinite(result.normalizer.log_sum)
    length = jnp.min(jnp.where(has_draft & is_distribution, end, i))
    ratios = log_ratio(result.logprobs, drafted.logprob)
    # One after another, each of its rounding: sums of a prefix would round otherwise.
    log_rhos = jnp.zeros_like(ratios)
    capped = cap_ratios(
        [jnp.sum(jnp.where(i == n, ratios, 0.0)) for n in range(plan.max_draft_tokens)]
    )
    for n, log_rho in enumerate(capped[1:]):
        log_rhos = jnp.where(i == n, log_rho, log_rhos)
    at = request.address(arrays, i, Stream.accept(i), plan)
    u = uniform(at, jnp.zeros_like(i, jnp.uint32), plan.noise_dtype, plan.threefry)
    is_below = (jnp.log(u) < log_rhos.astype(u.dtype)) & (i == length - 1)
    is_whole = (jnp.sum(is_below.astype(jnp.int32), dtype=jnp.int32) > 0) | (length == 0)
    ends = ~result.accepted & (i <= request.num_draft_tokens)
    by_token = jnp.min(jnp.where(ends, i, jnp.int32(plan.rows_per_request)))
    of_block = jnp.where(is_whole, length, jnp.int32(-1))
    num_accepted = jnp.where(is_block, of_block, by_token)
    out.num_accepted[b] = jnp.where(request.active, num_accepted, jnp.int32(0))
    out.is_block[b] = is_block.astype(jnp.int32)
    out.length[b] = length
    of_tokens = {"log_rhos": log_rhos, "uniforms": u}
    of_rows = {
        "shift": result.normalizer.shift,
        "log_sum": result.normalizer.log_sum,
        "logprobs": result.logprobs,
        "argmax": result.argmax,
        "counters": jnp.zeros_like(i, jnp.uint32),
    }
    for name, values in (of_tokens | of_rows).items():
        array = getattr(out, name)
        plgpu.store(array.at[b, i], values, mask=i < array.shape[1])


def block_residual_kernel(operands: _JudgedOperands, out: _Residuals, *, plan: Plan) -> None:
    """Writes log sum max(rho_j p_j - q_j, 0) of every block of a tile of a prefix's rows.

    Formula: Z_j is the sum over the row; prefix j is accepted if u < Z_j / (Z_j + 1 - rho_j).
    Grid: B * K * tiles programs, j from K - 1 down to 0; one owns a tile of one target row and of
    its draft row.
    Bytes per request: of a prefix whose uniform is below rho_j, and of the empty one if no other
    was accepted before, 2 V * itemsize read, V / 128 * 4 written and read once more. Scalars alone
    if all drafts are accepted.
    Why from the longest down: the longest accepted prefix counts, so that none before it is read.
    Memory order: `is_last_arrival` on `counters[b, j]`, which `block_judge_kernel` zeroed, before
    the masses of the row's other programs are read. `counters[b, K]` only saves reading.
    Reference: Sun et al., 2024, arXiv:2403.10444.
    """
    (arrays, judged), k = operands, plan.max_draft_tokens
    num_tiles = plan.tile.num_tiles(arrays.target_logits.shape[1])
    index, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    order, b = divmod_i32(index, plan.num_requests)
    j = jnp.int32(k - 1) - order
    stop_at = (b, jnp.int32(k))

    @pl.when((judged.num_accepted[b] < 0) & (j < judged.length[b]))
    def _() -> None:
        token = jnp.maximum(j - 1, 0)
        u, log_rho = judged.uniforms[b, token], judged.log_rhos[b, token]
        log_rho = jnp.where(j == 0, jnp.float32(0), log_rho)
        may_accept = (j == 0) | (jnp.log(u) < log_rho.astype(u.dtype))
        # Atomic, because the threads of a program must all take one branch.
        longer = plgpu.atomic_max(out.counters, stop_at, jnp.uint32(0)).astype(jnp.int32) > j

        @pl.when(may_accept & ~longer)
        def _() -> None:
            prefix = _prefix_of(arrays, judged, load_request(arrays, b, plan), j, plan)
            row = b * k + j
            store_log_masses(arrays, prefix, tile_index, out.log_masses, row, plan)

            @pl.when(is_last_arrival(out.counters, (b, j), num_tiles, plan.interpret))
            def _() -> None:
                mass = jnp.sum(exp_scaled(load_padded(out.log_masses, row, -jnp.inf)))

                @pl.when((j == 0) | accept_block(u, log_rho, mass))
                def _() -> None:
                    plgpu.atomic_max(out.counters, stop_at, (j + 1).astype(jnp.uint32))


def _prefix_of(
    arrays: VerifyArrays, judged: _Judged, request: RequestScalars, n: jax.Array, plan: Plan
) -> AcceptedPrefix:
    """Returns the prefix of n tokens, and the row that decides the next token."""
    b, k = request.b, plan.max_draft_tokens
    i = jax.lax.iota(jnp.int32, next_power_of_2(plan.rows_per_request))
    normalizer = LogNormalizer(judged.shift[b, n], judged.log_sum[b, n])
    valid = request.active & jnp.isfinite(normalizer.log_sum)
    rejected = n < request.num_draft_tokens
    is_block = judged.is_block[b] > 0
    row = SamplingRow(
        arrays.target_logits,
        request.first_target_row + n,
        request.temperature.scale,
        request.cutoff(arrays, n, request.active),
        normalizer,
    )
    # Token by token, rho is 1.
    log_rho = judged.log_rhos[b, jnp.clip(n - 1, 0, k - 1)]
    return AcceptedPrefix(
        request=request,
        num_accepted=n,
        row=row,
        valid=valid,
        rejected=rejected,
        drafted=load_drafted(arrays, request, n, rejected, plan),
        from_residual=rejected & valid & is_block,
        argmax=judged.argmax[b, n],
        logprobs=load_masked(judged.logprobs, (b, i), i < n),
        log_rho=jnp.where((n > 0) & is_block, log_rho, jnp.float32(0)),
    )


def _load_prefix(
    arrays: VerifyArrays, rows: _BlockRows, b: jax.Array, plan: Plan
) -> AcceptedPrefix:
    """Returns the accepted prefix of request b."""
    judged = rows.judged
    published = judged.counters[b, jnp.int32(plan.max_draft_tokens)].astype(jnp.int32) - 1
    num_accepted = judged.num_accepted[b]
    num_accepted = jnp.where(num_accepted < 0, published, num_accepted)
    return _prefix_of(arrays, judged, load_request(arrays, b, plan), num_accepted, plan)
