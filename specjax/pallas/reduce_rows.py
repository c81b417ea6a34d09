"""The launch that reduces every target row to partials.

References:
  Milakov and Gimelshein, 2018, arXiv:1805.02867.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import FlatBatch
from specjax.core.noise import Stream
from specjax.pallas.blocks import Partials, load_logits, partials_shape, store_partials
from specjax.pallas.gumbel_max import draw_noise, num_padded_blocks
from specjax.pallas.launch import divmod_i32, launch_dependents, output
from specjax.pallas.load_request import (
    Request,
    Schedule,
    load_masked,
    load_request,
    locate_draft_row,
)
from specjax.pallas.split.shared_rows import SharedRows, shared_shape, unpadded, with_shared_tiles


class ReducedRows(NamedTuple):
    """Target rows [B * (K + 1)], reduced where `Schedule.is_reduced`.

    Attributes:
      partials: of these rows.
      counters: u32[B], zeros, for the arrivals of the next launch.
      gumbels: noise_dtype[B * (K + 1), N] of the rows' blocks, on the target's stream; None where
        the draw makes them.
      shared: `SharedRows` f32[B * (K + 1), columns] of this device, where a vocabulary is split:
        the partials of tiles, which `partials` then lacks, and the drafted tokens' logits.
    """

    partials: Partials
    counters: Any
    gumbels: Any = None
    shared: Any = None


def reduce_rows(
    arrays: FlatBatch, schedule: Schedule, every_row_draws: bool = False
) -> ReducedRows:
    """Launches the reduction of every target row.

    Args:
      arrays: the call's arrays.
      schedule: of the launch.
      every_row_draws: whether the next launch draws from each row, in one program per row. If so,
        this launch makes the noise and, from Hopper on, triggers the next one early.
    """
    vocab_size = arrays.target_logits.shape[1]
    num_rows = schedule.num_requests * schedule.rows_per_request
    num_splits, num_blocks = 0, num_padded_blocks(vocab_size)
    if every_row_draws:
        num_splits = schedule.config.noise_splits(num_rows, num_blocks)
    is_split = arrays.first_token is not None
    triggers = every_row_draws and schedule.options.implementation.device_facts().supports_pdl
    return schedule.launch(
        verify_reduce_kernel,
        arrays,
        ReducedRows(
            partials_shape(num_rows, vocab_size, schedule.tile, has_tiles=not is_split),
            output((schedule.num_requests,), jnp.uint32),
            output((num_rows, num_blocks), schedule.noise_dtype) if num_splits else None,
            shared_shape(num_rows, schedule.tile.num_tiles(vocab_size)) if is_split else None,
        ),
        num_programs=num_rows * (num_splits + schedule.tile.num_tiles(vocab_size)),
        num_splits=num_splits,
        triggers=triggers,
    )


def verify_reduce_kernel(
    arrays: FlatBatch, out: ReducedRows, *, schedule: Schedule, num_splits: int, triggers: bool
) -> None:
    """Writes m_i = max x and l_i = sum exp((x - m_i) / τ) of every block of a tile of a target row.

    Grid: B * (K + 1) * tiles programs of 8 warps, of 4 if there are many; one owns a tile of 8192
    logits of one row. For coupled sampling B * (K + 1) * num_splits more come first; one makes the
    Gumbels of a share of a row's blocks.
    Bytes per row: V * itemsize read; V / 128 * 8 + tiles * 12 written, and V / 128 * 4 or 8 of
    Gumbels. Rows past a request's bonus row are not read. Block verification of a large batch does
    not read the bonus row either (`block.bonus_row`).
    Why all other rows: in a small batch all rows run at about the same time, and a rejection would
    come too late to save a read. Block verification needs every row with a draft.
    Memory order: the programs of this launch do not wait for one another. The first program of a
    request zeroes the counter of the next launch, which begins to load after this one has ended.
    For coupled sampling on Hopper every program first triggers that launch (PDL): its programs are
    few, and become resident next to those of this launch.
    Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867: (m, l).
    """
    program = pl.program_id(0)
    num_noise = schedule.num_requests * schedule.rows_per_request * num_splits
    if triggers and not schedule.interpret:
        program = launch_dependents(program)
    if not num_splits:
        _reduce_tile(arrays, out, program, schedule)
        return

    @pl.when(program < num_noise)
    def _() -> None:
        _store_noise(arrays, out, program, num_splits, schedule)

    @pl.when(program >= num_noise)
    def _() -> None:
        _reduce_tile(arrays, out, program - num_noise, schedule)


def _reduce_tile(
    arrays: FlatBatch, out: ReducedRows, program: jax.Array, schedule: Schedule
) -> None:
    """Reduces the tile of a program; a request's first program zeroes its counter."""
    num_tiles = schedule.num_tiles(arrays)
    index, tile_index = divmod_i32(program, num_tiles)
    b, i = divmod_i32(index, schedule.rows_per_request)
    request = load_request(arrays, b, schedule)

    @pl.when((i == 0) & (tile_index == 0))
    def _() -> None:
        out.counters[b] = jnp.uint32(0)

    @pl.when(request.active & schedule.is_reduced(request, i))
    def _() -> None:
        row_tile = request.row_tile(i, tile_index)
        only_maxima = row_tile.greedy if schedule.options.skips_greedy_sums else None
        partials = out.partials
        if out.shared is not None:
            partials = with_shared_tiles(partials, out.shared, arrays)
            pl.when(tile_index == 0)(lambda: _store_drafted(request, i, out.shared))
        store_partials(row_tile, partials, index, only_maxima)


def _store_drafted(request: Request, i: jax.Array, shared: SharedRows) -> None:
    """Stores the logits of the drafted token at row i, -inf where another device has it."""
    arrays = request.arrays
    if arrays.token_ids is None:
        return
    index, column = request.row_index(i), jax.lax.iota(jnp.int32, 1)
    i += column
    has_draft = i < request.num_draft_tokens
    token_id = load_masked(arrays.token_ids, request.first_draft + i, has_draft)
    token_id -= arrays.first_token[0]
    row, cutoff = request.first_target_row + i, request.cutoff(i, has_draft)
    logits = unpadded(arrays.target_logits, arrays)
    logit = load_logits(logits, row, token_id, cutoff, has_draft)
    plgpu.store(shared.target_logit_at(index, column), logit)
    if arrays.draft_logits is not None:
        draft = locate_draft_row(request, i, has_draft)
        logits = unpadded(arrays.draft_logits, arrays)
        logit = load_logits(logits, draft.row_index, token_id, draft.cutoff, has_draft)
        plgpu.store(shared.draft_logit_at(index, column), logit)


def _store_noise(
    arrays: FlatBatch, out: ReducedRows, program: jax.Array, num_splits: int, schedule: Schedule
) -> None:
    """Stores the Gumbels of a share of a row's blocks, unless the row's request is greedy."""
    index, split = divmod_i32(program, num_splits)
    b, i = divmod_i32(index, schedule.rows_per_request)
    request, count = load_request(arrays, b, schedule), out.gumbels.shape[1] // num_splits
    exists = request.active & (i <= request.num_draft_tokens)

    @pl.when(exists & ~request.temperature.greedy)
    def _() -> None:
        address = request.address(i, Stream.TARGET)
        noise = draw_noise(address, split * count, count, schedule.noise_dtype, schedule.threefry)
        block = noise.first_block + jax.lax.iota(jnp.int32, count)
        plgpu.store(out.gumbels.at[index, block], noise.gumbels)
