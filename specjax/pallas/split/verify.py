"""`rejection_sample` of a split vocabulary: two launches on every device, a message after each.

A residual's block is drawn by masses, as in a large batch of whole rows. Devices have disjoint
blocks, so a row's best block is the best of the devices' best ones:

    argmax_i (log mass_i + g_i) = argmax_d max_{i of device d} (log mass_i + g_i)

The device that has the block draws the token within it. So no masses are exchanged: a device sends
the token of its best block, and that block's score.
"""

from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from specjax.call_arrays import FlatBatch
from specjax.devices.placement import pvary_like
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.pallas.kernel_config import Tile
from specjax.pallas.launch import cond_or, divmod_i32, is_last_arrival, output
from specjax.pallas.load_request import Schedule
from specjax.pallas.next_token import load_accepted_prefix
from specjax.pallas.reduce_rows import ReducedRows, reduce_rows
from specjax.pallas.residual import store_log_masses
from specjax.pallas.split.proposals import choose, proposal_shape, store_proposal
from specjax.pallas.split.shared_rows import SharedRows, first_token_of, with_shared_tiles
from specjax.types import Verification


class _Proposed(NamedTuple):
    """A device's proposals, log-masses f32[B, blocks] of residuals or None, and counters."""

    proposals: Any
    log_masses: Any
    counters: Any


def verify_split(
    arrays: FlatBatch, schedule: Schedule, split: VocabularySplit, tile: Tile
) -> Verification:
    """Verifies a batch whose vocabulary lies over a mesh axis, token by token.

    Args:
      arrays: this device's columns of the rows, and drafted tokens with their statistics.
      schedule: its tile is that of target rows.
      split: of the vocabulary.
      tile: that of residuals.
    """
    width = arrays.target_logits.shape[1]
    arrays = arrays._replace(first_token=first_token_of(width, split))
    # All operands of a kernel must vary over the same axes.
    arrays = pvary_like(arrays, arrays)
    rows = reduce_rows(arrays, schedule)
    gathered = jax.lax.all_gather(rows.shared.values, split.axis_name)
    arrays = arrays._replace(shared=SharedRows(gathered))
    schedule = schedule._replace(tile=tile)
    proposals = _draw(arrays, rows._replace(shared=None), schedule)
    gathered = jax.lax.all_gather(proposals, split.axis_name, to="invarying")
    return choose(gathered, schedule)


def _draw(arrays: FlatBatch, rows: ReducedRows, schedule: Schedule) -> jax.Array:
    """Launches `split_draw_kernel`, and returns this device's proposals."""
    num_requests, num_tiles = schedule.num_requests, _num_tiles(arrays, schedule)
    has_residual = arrays.draft_logits is not None
    num_blocks = num_tiles * schedule.tile.num_blocks
    return schedule.launch(
        split_draw_kernel,
        (arrays, rows),
        _Proposed(
            proposal_shape(schedule),
            output((num_requests, num_blocks)) if has_residual else None,
            rows.counters,
        ),
        num_programs=num_requests * num_tiles,
    ).proposals


def _num_tiles(arrays: FlatBatch, schedule: Schedule) -> int:
    """Returns the number of programs per request: one if no draft has logits."""
    if arrays.draft_logits is None:
        return 1
    return schedule.num_tiles(arrays)


def split_draw_kernel(
    operands: tuple[FlatBatch, ReducedRows], out: _Proposed, *, schedule: Schedule
) -> None:
    """Reduces a tile of a residual; a request's last program draws, and proposes the token.

    Formula: that of `residual_mass_kernel`, then that of `verify_draw_kernel`, over this device's
    blocks. Masses and noise are those of whole rows, so the best device's score is the row's.
    Grid: B * tiles programs of 4 or 8 warps; one owns a tile of this device's share of the target
    row that rejected and of its draft row. Without draft logits B programs.
    Bytes per request: each program reads the (m, l) of all devices' tiles of K + 1 rows. A rejected
    sampled draft adds 2 width * itemsize, width / 128 * 4 written and read, and two blocks of
    logits. Other requests add 8 for each of this device's blocks of the row, and two blocks of
    logits. 32 + 8 (K + 1) are written.
    Why masses: a draw in each tile is a chain of reductions, noise and loads, which most programs
    would run for nothing. Here one of a request's tiles runs it, while others still read.
    Why every program evaluates: all of a row's tiles are a few hundred numbers. A separate launch
    that evaluates them would take longer.
    Memory order: `is_last_arrival` on `counters[b]`, which `verify_reduce_kernel` zeroed.
    References: Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318;
    Maddison et al., 2014, arXiv:1411.0030: Gumbel-max.
    """
    arrays, rows = operands
    num_tiles = _num_tiles(arrays, schedule)
    b, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    partials = with_shared_tiles(rows.partials, arrays.shared, arrays)
    prefix = load_accepted_prefix(arrays, rows._replace(partials=partials), b, schedule)
    is_last = tile_index == 0
    if out.log_masses is not None:

        def reduce_and_arrive() -> jax.Array:
            store_log_masses(prefix, tile_index, out.log_masses)
            return is_last_arrival(out.counters, (b,), num_tiles, schedule.interpret)

        is_last = cond_or(prefix.from_residual, reduce_and_arrive, is_last)

    @pl.when(is_last)
    def _() -> None:
        store_proposal(rows, prefix, out.log_masses, out.proposals)
