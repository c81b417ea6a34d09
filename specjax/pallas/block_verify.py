"""`block_rejection_sample` on the kernels: rows are reduced, prefixes tried, the next token drawn.

    verify_reduce_kernel      partials of all target rows
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
from specjax.pallas.launch import cond_or, divmod_i32, is_last_arrival, launch, output, select_one
from specjax.pallas.load_request import Plan, RequestScalars, load_request
from specjax.pallas.next_token import AcceptedPrefix
from specjax.pallas.reduce_rows import ReducedRows, reduce_rows
from specjax.pallas.residual import store_log_masses
from specjax.pallas.target_rows import AcceptanceResult, evaluate_acceptance
from specjax.verification import Verification

__all__ = ["block_residual_kernel", "verify_block"]


class _Judged(NamedTuple):
    """A request and what decides the length of its accepted prefix; arrays [N] are by token.

    Attributes:
      request: the request.
      result: of its target rows.
      log_rhos: f32[N], log rho of the prefix that ends with the token.
      uniforms: f32[N] or f64.
      length: i32, drafted tokens before the first target row that is not a distribution.
      is_block: bool, whether the prefix is accepted as a whole: the request draws, and a draft was
        sampled. Other requests are verified token by token.
      num_accepted: i32, accepted tokens where no residual decides; -1 where one does.
    """

    request: RequestScalars
    result: AcceptanceResult
    log_rhos: jax.Array
    uniforms: jax.Array
    length: jax.Array
    is_block: jax.Array
    num_accepted: jax.Array


class _BlockRows(NamedTuple):
    """Target rows [B * (K + 1)] and residuals.

    Attributes:
      partials: of the rows up to each request's bonus row.
      counters: u32[B, K + 1]. `[:, j]` counts the programs that are done with residual j;
        `[:, K]` is 1 + j for the longest prefix j known to be accepted, 0 while none is.
    """

    partials: Partials
    counters: Any


class _Operands(NamedTuple):
    arrays: VerifyArrays
    rows: ReducedRows


class _Residuals(NamedTuple):
    """Log-masses f32[B * K, blocks] of the residuals, and the counters of `_BlockRows`."""

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
    rows = reduce_rows(arrays, plan, counters=(size, k + 1))
    plan = plan._replace(tile=residual_tile)
    num_tiles = residual_tile.num_tiles(arrays.target_logits.shape[1])
    residuals = launch(
        functools.partial(block_residual_kernel, plan=plan),
        _Operands(arrays, rows),
        _Residuals(
            output((size * k, num_tiles * residual_tile.num_blocks)),
            output(rows.counters.shape, jnp.uint32),
        ),
        num_programs=size * k * num_tiles,
        num_warps=residual_tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": rows.counters},
    )
    verified = _BlockRows(rows.partials, residuals.counters)
    return draw_next(DrawOperands(arrays, verified, residuals.log_masses), plan, _load_prefix)


def block_residual_kernel(operands: _Operands, out: _Residuals, *, plan: Plan) -> None:
    """Writes log sum max(rho_j p_j - q_j, 0) of every block of a tile of a prefix's rows.

    Formula: Z_j is the sum over the row; prefix j is accepted if u < Z_j / (Z_j + 1 - rho_j).
    Grid: B * K * tiles programs, j from K - 1 down to 0; one owns a tile of one target row and of
    its draft row. It judges its request's K + 1 rows first.
    Bytes per request: each program reads the (m, l) of all tiles of K + 1 rows. A prefix whose
    uniform is below rho_j, and the empty one if no other was accepted before: 2 V * itemsize read,
    V / 128 * 4 written and read once more. Nothing if all drafts are accepted.
    Why from the longest down: the longest accepted prefix counts, so that none before it is read.
    Memory order: `is_last_arrival` on `counters[b, j]`, which `verify_reduce_kernel` zeroed, before
    the masses of the row's other programs are read. `counters[b, K]` only saves reading.
    Reference: Sun et al., 2024, arXiv:2403.10444.
    """
    arrays, k = operands.arrays, plan.max_draft_tokens
    num_tiles = plan.tile.num_tiles(arrays.target_logits.shape[1])
    index, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    order, b = divmod_i32(index, plan.num_requests)
    j = jnp.int32(k - 1) - order
    judged = _judge(arrays, load_request(arrays, b, plan), operands.rows.partials, plan)
    at_token = _tokens(plan) == j - 1
    u, log_rho = select_one(judged.uniforms, at_token), select_one(judged.log_rhos, at_token)
    may_accept = (j == 0) | (jnp.log(u) < log_rho.astype(u.dtype))
    stop_at = (b, jnp.int32(k))

    def load_published() -> jax.Array:
        # Atomic, because the threads of a program must all take one branch.
        return plgpu.atomic_max(out.counters, stop_at, jnp.uint32(0)).astype(jnp.int32)

    is_wanted = judged.request.active & judged.is_block & (judged.num_accepted < 0)
    is_wanted &= may_accept & (j < judged.length)
    longer = cond_or(is_wanted, load_published, jnp.int32(0)) > j

    @pl.when(is_wanted & ~longer)
    def _() -> None:
        prefix = _prefix_of(arrays, judged, j, plan)
        row = b * k + j
        store_log_masses(arrays, prefix, tile_index, out.log_masses, row, plan)

        @pl.when(is_last_arrival(out.counters, (b, j), num_tiles, plan.interpret))
        def _() -> None:
            mass = jnp.sum(exp_scaled(load_padded(out.log_masses, row, -jnp.inf)))

            @pl.when((j == 0) | accept_block(u, log_rho, mass))
            def _() -> None:
                plgpu.atomic_max(out.counters, stop_at, (j + 1).astype(jnp.uint32))


def _tokens(plan: Plan) -> jax.Array:
    return jax.lax.iota(jnp.int32, next_power_of_2(plan.rows_per_request))


def _judge(
    arrays: VerifyArrays, request: RequestScalars, partials: Partials, plan: Plan
) -> _Judged:
    i = _tokens(plan)
    result = evaluate_acceptance(arrays, request, i, partials, plan)
    drafted = result.drafted
    assert drafted is not None
    has_draft = i < request.num_draft_tokens
    is_sampled = (has_draft & ~drafted.one_hot).astype(jnp.int32)
    is_block = (jnp.sum(is_sampled, dtype=jnp.int32) > 0) & ~request.temperature.greedy
    end = jnp.int32(plan.max_draft_tokens)
    is_distribution = jnp.isfinite(result.normalizer.log_sum)
    length = jnp.min(jnp.where(has_draft & is_distribution, end, i))
    ratios = log_ratio(result.logprobs, drafted.logprob)
    capped = cap_ratios([select_one(ratios, i == n) for n in range(plan.max_draft_tokens)])
    log_rhos = jnp.zeros_like(ratios)
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
    num_accepted = jnp.where(request.active, num_accepted, jnp.int32(0))
    return _Judged(request, result, log_rhos, u, length, is_block, num_accepted)


def _prefix_of(
    arrays: VerifyArrays, judged: _Judged, num_accepted: jax.Array, plan: Plan
) -> AcceptedPrefix:
    """Returns the prefix of a length, and the row that decides the next token."""
    request, result, i = judged.request, judged.result, _tokens(plan)
    mask = i == num_accepted
    normalizer = LogNormalizer(*[select_one(x, mask) for x in result.normalizer])
    valid = request.active & jnp.isfinite(normalizer.log_sum)
    rejected = num_accepted < request.num_draft_tokens
    assert result.drafted is not None
    row = SamplingRow(
        arrays.target_logits,
        request.first_target_row + num_accepted,
        request.temperature.scale,
        request.cutoff(arrays, num_accepted, request.active),
        normalizer,
    )
    # Token by token, rho is 1.
    log_rho = select_one(judged.log_rhos, (i == num_accepted - 1) & judged.is_block)
    return AcceptedPrefix(
        request=request,
        num_accepted=num_accepted,
        row=row,
        valid=valid,
        rejected=rejected,
        drafted=result.drafted.select(mask),
        from_residual=rejected & valid & judged.is_block,
        argmax=select_one(result.argmax, mask),
        logprobs=result.logprobs,
        log_rho=log_rho,
    )


def _load_prefix(
    arrays: VerifyArrays, rows: _BlockRows, b: jax.Array, plan: Plan
) -> AcceptedPrefix:
    """Returns the accepted prefix of request b."""
    judged = _judge(arrays, load_request(arrays, b, plan), rows.partials, plan)
    published = rows.counters[b, jnp.int32(plan.max_draft_tokens)].astype(jnp.int32) - 1
    num_accepted = jnp.where(judged.num_accepted < 0, published, judged.num_accepted)
    return _prefix_of(arrays, judged, num_accepted, plan)
