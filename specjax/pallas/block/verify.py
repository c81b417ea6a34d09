"""The launches of block verification: judge rows, sum residuals, draw tokens.

    verify_reduce_kernel      partials of target rows, in a large batch without bonus rows
    block_judge_kernel        which prefixes may be accepted
    block_residual_kernel     residuals max(rho_j p_j - q_j, 0) of those, summed by blocks; in a
                              large batch partials of the bonus rows that decide
    verify_draw_kernel        the longest accepted prefix, and the draw after it

`block` explains the symbols. Bounds of Z_j decide most prefixes before their residual is read. So
most requests have one residual to read: that of the accepted prefix, from which the next token is
drawn.

References:
  Sun et al., 2024, arXiv:2403.10444.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import FlatBatch
from specjax.core.block_acceptance import ACCEPTED, OPEN, accept_block
from specjax.core.logsumexp import block_logprobs, exp_scaled
from specjax.core.noise import SAMPLING_BLOCK
from specjax.pallas.block.bonus_row import add_bonus_row, reduce_bonus_row
from specjax.pallas.block.bounds import bound_open
from specjax.pallas.block.judge import judge_request, longest_below, needs_residual
from specjax.pallas.block.request_status import (
    JudgedArrays,
    judged_shape,
    load_prefix,
    load_status,
    store_judged,
)
from specjax.pallas.blocks import Partials, load_padded, load_some_blocks
from specjax.pallas.emit_tokens import draw_next
from specjax.pallas.gumbel_max import block_token_ids
from specjax.pallas.kernel_config import Tile, next_power_of_2
from specjax.pallas.launch import cond_or, divmod_i32, launch_dependents, output, reduce_where
from specjax.pallas.load_request import Schedule, load_request
from specjax.pallas.next_token import AcceptedPrefix
from specjax.pallas.reduce_rows import reduce_rows
from specjax.pallas.residual import reduce_masses
from specjax.types import Verification


class _BlockRows(NamedTuple):
    """Target rows [B * (K + 1)], judged, and log-masses f32[B * K, blocks] of residuals."""

    partials: Partials
    judged: JudgedArrays
    log_masses: Any


class _Residuals(NamedTuple):
    """Log-masses f32[B * K, blocks], and in a large batch partials with those of bonus rows."""

    log_masses: Any
    partials: Partials | None


def verify_block(arrays: FlatBatch, schedule: Schedule, residual_tile: Tile) -> Verification:
    """Verifies a batch with sampled drafts, K >= 1.

    Args:
      arrays: the call's arrays, with the statistics of the drafts.
      schedule: its tile is that of target rows.
      residual_tile: cuts a target and a draft row alike.

    Returns:
      `Verification`.
    """
    size = schedule.num_requests
    k = schedule.max_draft_tokens
    vocab_size = arrays.target_logits.shape[1]
    schedule = schedule._replace(has_bonus_rows=schedule.is_small_batch)
    partials = reduce_rows(arrays, schedule).partials
    triggers = (
        schedule.is_small_batch and schedule.options.implementation.device_facts().supports_pdl
    )
    num_programs = schedule.config.judge_programs(size, k, schedule.is_small_batch)
    judged = schedule.launch(
        block_judge_kernel,
        (arrays, partials),
        judged_shape(schedule),
        num_programs=size * num_programs,
        num_warps=schedule.config.judge_warps(schedule.is_small_batch),
        programs_per_request=num_programs,
        triggers=triggers,
    )
    row_tile, schedule = schedule.tile, schedule._replace(tile=residual_tile)
    num_tiles = residual_tile.num_tiles(vocab_size)
    log_masses, with_bonus_rows = schedule.launch(
        block_residual_kernel,
        (arrays, partials, judged),
        _Residuals(
            output((size * k, num_tiles * residual_tile.num_blocks)),
            None if schedule.is_small_batch else partials,
        ),
        num_programs=(size * k if schedule.is_small_batch else size) * num_tiles,
        row_tile=row_tile,
        triggers=triggers,
    )
    verified = _BlockRows(with_bonus_rows or partials, judged, log_masses)
    return draw_next((arrays, verified, log_masses), schedule, _load_accepted)


def block_judge_kernel(
    operands: tuple[FlatBatch, Partials],
    out: JudgedArrays,
    *,
    schedule: Schedule,
    programs_per_request: int,
    triggers: bool,
) -> None:
    """Writes rho_j = min(1, rho_{j-1} p(x_j) / q(x_j)), and which prefixes u_j < h_j accepts.

    Formula: Z_j is bounded by p and q of the next drafted token (`judge`), in a large batch also by
    the heaviest blocks (`bounds`). Where u_j lies between the bounds of h_j, prefix j stays open.
    Grid: in a small batch B programs of 1 warp; one owns a request. In a large one B * P programs
    of 8 warps, P = 256 / B, at least 1 and at most K. Each of the P judges its request, and owns
    every P-th prefix of it.
    Bytes per program: the (m, l) of all tiles of its rows. In a large batch an open prefix adds
    V / 128 * 8 of its row's blocks, and 8192 * itemsize of the heaviest (`bounds`).
    Why a launch of its own: otherwise each program of the next launch, one per tile, would judge
    all rows of its request. The last program of a request's rows could judge it, but its registers
    would leave room for half as many programs that read. Why a small batch has no bounds by
    blocks: a round takes longer than the reads that it saves.
    Memory order: it begins to load after `verify_reduce_kernel` has ended. In a small batch it
    triggers the next launch on Hopper (PDL) at once: its own programs are few, and all are
    resident.
    Reference: Sun et al., 2024, arXiv:2403.10444.
    """
    (arrays, partials), program = operands, pl.program_id(0)
    if triggers and not schedule.interpret:
        program = launch_dependents(program)
    b, share = divmod_i32(program, programs_per_request)
    judged = judge_request(load_request(arrays, b, schedule), partials)
    i = jax.lax.iota(jnp.int32, judged.status.shape[0])
    is_own = divmod_i32(i, programs_per_request)[1] == share
    if not schedule.is_small_batch:
        judged = bound_open(judged, partials, is_own)
    store_judged(judged, out, is_own)


def block_residual_kernel(
    operands: tuple[FlatBatch, Partials, JudgedArrays],
    out: _Residuals,
    *,
    schedule: Schedule,
    row_tile: Tile,
    triggers: bool,
) -> None:
    """Writes log sum max(rho_j p_j - q_j, 0) of the blocks of a tile, for the prefixes to read.

    Grid: B * tiles programs of 8 warps; one owns a tile of the rows of its request. In a small
    batch K * B * tiles programs of 4 or 8 warps; one owns a tile of the rows of one prefix.
    Bytes per request: 2 V * itemsize read and V / 128 * 4 written for the longest accepted prefix.
    Each longer open prefix adds as much. If all drafts are accepted, in a large batch V * itemsize
    of the bonus row (`bonus_row`), in a small one scalars alone.
    Why all prefixes by one program: most requests have one to read, and a program without work
    still costs its start. In a small batch the prefixes are read in parallel.
    Memory order: it begins to load after `block_judge_kernel` has ended. In a small batch it
    triggers the next launch on Hopper (PDL) at once. In a large batch the waiting programs of that
    launch would be spread unevenly over the multiprocessors. The stores to partials of bonus rows,
    which no program of this launch loads, are read by the next.
    Reference: Sun et al., 2024, arXiv:2403.10444.
    """
    (arrays, partials, judged), k = operands, schedule.max_draft_tokens
    num_tiles = schedule.num_tiles(arrays)
    program = pl.program_id(0)
    if triggers and not schedule.interpret:
        program = launch_dependents(program)
    index, tile_index = divmod_i32(program, num_tiles)
    # In a large batch the prefix index is 0 and unused: a program serves all prefixes.
    prefix_index, b = divmod_i32(index, schedule.num_requests)
    i = jax.lax.iota(jnp.int32, next_power_of_2(k))
    reads = needs_residual(load_status(judged, b, i), i)

    def prefix_of(j: jax.Array) -> AcceptedPrefix:
        return load_prefix(judged, load_request(arrays, b, schedule), j)

    def store_masses(prefix: AcceptedPrefix) -> None:
        _store_masses(prefix, partials, tile_index, out.log_masses)

    if schedule.is_small_batch:
        # Loaded early, so that the load does not wait for `is_needed`.
        prefix = prefix_of(prefix_index)
        is_needed = reduce_where(reads.astype(jnp.int32), i == prefix_index) > 0
        pl.when(is_needed)(lambda: store_masses(prefix))
        return
    bonus_partials = out.partials
    assert bonus_partials is not None

    def store_and_shorten(j: jax.Array) -> jax.Array:
        store_masses(prefix_of(j))
        return longest_below(reads, i, j)

    jax.lax.while_loop(lambda j: j >= 0, store_and_shorten, longest_below(reads, i, jnp.int32(k)))

    request = load_request(arrays, b, schedule)

    @pl.when(request.active & (judged.num_accepted[b] == request.num_draft_tokens))
    def _() -> None:
        reduce_bonus_row(request, bonus_partials, tile_index, num_tiles, row_tile)


def _store_masses(
    prefix: AcceptedPrefix, partials: Partials, tile_index: jax.Array, out: Any
) -> None:
    """Stores the log-masses of the blocks of a tile of a prefix's residual."""
    drafted, log_rho = prefix.drafted, prefix.log_rho
    assert drafted is not None
    assert log_rho is not None
    request, n = prefix.request, prefix.num_accepted
    num_blocks = request.schedule.tile.num_blocks
    block = tile_index * num_blocks + jax.lax.iota(jnp.int32, num_blocks)
    # Read outside of a branch: a second path through it would take twice the registers.
    sampled_log_masses = jnp.log(reduce_masses(prefix, tile_index))

    def exclude_draft() -> jax.Array:
        vocab_size = request.arrays.target_logits.shape[1]
        blocks = load_some_blocks(partials, request.row_index(n), block, vocab_size)
        masses = exp_scaled(block_logprobs(blocks, prefix.row.normalizer, prefix.row.scale))
        drafted_block, _ = divmod_i32(jnp.maximum(drafted.token_id, 0), SAMPLING_BLOCK)
        token_id = block_token_ids(drafted_block)
        probs = exp_scaled(prefix.row.logprobs(token_id))
        undrafted_mass = jnp.sum(jnp.where(token_id == drafted.token_id, 0, probs))
        return jnp.log(jnp.where(block == drafted_block, undrafted_mass, masses)) + log_rho

    # With a one-hot draft, or a draft row that is not a distribution: rho p without the token.
    log_masses = jax.lax.cond(drafted.one_hot, exclude_draft, lambda: sampled_log_masses)
    plgpu.store(out.at[request.b * request.schedule.max_draft_tokens + n, block], log_masses)


def _load_accepted(
    arrays: FlatBatch, rows: _BlockRows, b: jax.Array, schedule: Schedule
) -> AcceptedPrefix:
    """Returns the accepted prefix of request b; the summed residuals decide open prefixes."""
    judged, num_accepted = rows.judged, rows.judged.num_accepted[b]
    num_accepted = cond_or(
        num_accepted < 0, lambda: _find_longest(judged, rows.log_masses, b, schedule), num_accepted
    )
    prefix = load_prefix(judged, load_request(arrays, b, schedule), num_accepted)
    return prefix if schedule.is_small_batch else add_bonus_row(prefix, rows.partials)


def _find_longest(
    judged: JudgedArrays, log_masses: Any, b: jax.Array, schedule: Schedule
) -> jax.Array:
    """Returns the length i32 of the longest accepted prefix; Z decides the open ones."""
    k = schedule.max_draft_tokens
    i = jax.lax.iota(jnp.int32, next_power_of_2(k))
    status = load_status(judged, b, i)
    is_open = needs_residual(status, i) & (status == OPEN)
    accepted = jnp.max(jnp.where(status == ACCEPTED, i, jnp.int32(0)))

    def test(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        j, longest = state
        mass = jnp.sum(exp_scaled(load_padded(log_masses, b * k + j, -jnp.inf)))
        is_accepted = accept_block(judged.uniform[b, j], judged.log_rho[b, j], mass)
        following = jnp.where(is_accepted, jnp.int32(-1), longest_below(is_open, i, j))
        return following, jnp.where(is_accepted, j, longest)

    state = (longest_below(is_open, i, jnp.int32(k)), accepted)
    return jax.lax.while_loop(lambda state: state[0] >= 0, test, state)[1]
