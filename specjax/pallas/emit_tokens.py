"""The last launches of `rejection_sample`: accepted tokens, and the recovered or bonus token.

A rejected sampled draft needs the masses of its residual max(p - q, 0), which no earlier launch has
computed. In a small batch each program draws a token from its tile of the residual. The last
program to arrive compares the tiles' winners, so one launch suffices. In a large batch, or with a
rule, programs store block masses, and one program per request draws in a second launch. If greedy
requests get no log-probabilities, the last program draws instead. One-hot drafts without a rule,
greedy requests and bonus tokens need only the partials of the rows. Block verification has already
summed its residuals, and launches only the draw (`draw_next`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.call_arrays import FlatBatch
from specjax.core.temperature import parse_temperature
from specjax.pallas.gumbel_max import Draw
from specjax.pallas.launch import cond_or, divmod_i32, is_last_arrival
from specjax.pallas.load_request import Schedule
from specjax.pallas.next_token import (
    AcceptedPrefix,
    LoadPrefix,
    draw_row,
    load_accepted_prefix,
    next_noise,
    write_result,
)
from specjax.pallas.reduce_rows import ReducedRows
from specjax.pallas.residual import (
    choose_winner,
    draw_by_rule,
    draw_residual,
    draw_tile,
    masses_shape,
    store_log_masses,
    winners_shape,
)
from specjax.pallas.target_rows import VerifiedRows
from specjax.types import Verification

# The call's arrays, its reduced rows, and `masses_shape` of residuals or None.
DrawOperands = tuple[FlatBatch, Any, Any]


class _ResidualOutputs(NamedTuple):
    """The result, results of tiles (`TileWinners` or `masses_shape`), and counters."""

    verification: Verification
    tile_results: Any
    counters: Any


def emit_tokens(
    arrays: FlatBatch, rows: ReducedRows | VerifiedRows, schedule: Schedule
) -> Verification:
    """Launches the draws of recovered and bonus tokens, and returns the call's result.

    Args:
      arrays: the call's arrays.
      rows: the target rows as earlier launches stored them.
      schedule: its tile is that of residuals, for a target and a draft row.
    """
    has_residual = arrays.draft_logits is not None or schedule.log_weights is not None
    if not has_residual:
        return draw_next((arrays, rows, None), schedule)
    vocab_size, num_tiles = arrays.target_logits.shape[1], schedule.num_tiles(arrays)
    masses = masses_shape(vocab_size, schedule)

    def launch_tiles(kernel: Callable[..., None], outputs: Any) -> Any:
        num_programs = schedule.num_requests * num_tiles
        return schedule.launch(kernel, (arrays, rows), outputs, num_programs)

    by_tile = isinstance(rows, ReducedRows)
    if not by_tile and not schedule.options.skips_greedy_sums:
        return draw_next((arrays, rows, launch_tiles(residual_mass_kernel, masses)), schedule)
    winners = winners_shape((schedule.num_requests, num_tiles), schedule)
    kernel: Callable[..., None] = residual_draw_kernel if by_tile else residual_last_draw_kernel
    results = winners if by_tile else masses
    outputs = _ResidualOutputs(schedule.verification_shape(), results, rows.counters)
    return launch_tiles(kernel, outputs).verification


def draw_next(
    operands: DrawOperands, schedule: Schedule, load_prefix: LoadPrefix = load_accepted_prefix
) -> Verification:
    """Launches the draw after each request's accepted prefix, and returns the call's result."""
    return schedule.launch(
        verify_draw_kernel,
        operands,
        schedule.verification_shape(),
        num_programs=schedule.num_requests,
        num_warps=schedule.config.num_draw_warps,
        load_prefix=load_prefix,
    )


def residual_mass_kernel(
    operands: tuple[FlatBatch, VerifiedRows], out: Any, *, schedule: Schedule
) -> None:
    """Writes log sum max(p - q, 0), or (m, l) of a rule's weights, per block of a residual's tile.

    Grid: B * tiles programs of 8 warps; one owns a tile of 16384 tokens, of the target row that
    rejected and of its draft row. With a rule and a small batch as in `residual_draw_kernel`.
    Bytes per request that rejected a sampled draft, or by a rule a draft of either kind:
    2 V * itemsize read, half without draft logits; V / 128 * 4 written, with a rule V / 128 * 8.
    Other requests: scalars.
    Why tiles: one program per request could not read 2 V logits at the memory's full rate.
    Memory order: it begins to load after `verify_accept_kernel` has ended, and reads the counters
    and normalizers of that launch. The programs of this launch do not wait for one another.
    References: Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    arrays, rows = operands
    b, tile_index = divmod_i32(pl.program_id(0), schedule.num_tiles(arrays))
    prefix = load_accepted_prefix(arrays, rows, b, schedule)
    pl.when(prefix.from_residual)(lambda: store_log_masses(prefix, tile_index, out))


def verify_draw_kernel(
    operands: DrawOperands, out: Verification, *, schedule: Schedule, load_prefix: LoadPrefix
) -> None:
    """Writes a request's accepted drafted tokens, and the next one, drawn by two-level Gumbel-max.

    Formula: block = argmax_i (log mass_i + g_i), token = argmax_{j in block} (log weight_j + g_j).
    The masses are those of the residual if a sampled draft was rejected, else of the row
    (`next_token`).
    Grid: B programs of 8 warps; one owns a request.
    Bytes per request: V / 128 * 8 of partials read, and V / 128 * 4 of masses for a residual. Two
    blocks of logits: the drawn block, and the draft row's (residual) or the drafted token's (row).
    A small batch adds 8 for each tile of K + 1 rows. (K + 1) * 8 + 8 written.
    Why one program: about a thousand blocks are four per thread, and the argmax needs them all.
    Memory order: earlier launches have ended when it begins to load. It triggers no launch early.
    References: those of `next_token`; Maddison et al., 2014, arXiv:1411.0030: Gumbel-max.
    """
    arrays, rows, log_masses = operands
    prefix = load_prefix(arrays, rows, pl.program_id(0), schedule)
    _write_drawn(rows, log_masses, prefix, out)


def _write_drawn(rows: Any, log_masses: Any, prefix: AcceptedPrefix, out: Verification) -> None:
    """Draws the token after an accepted prefix from its row or residual, and writes both."""
    noise, log_weights = next_noise(prefix), prefix.request.schedule.log_weights

    def draw_from_row() -> Draw:
        return draw_row(rows, prefix, noise)

    def draw() -> Draw:
        if log_masses is None:
            return draw_from_row()

        def draw_from_residual() -> Draw:
            draw_weights = draw_residual if log_weights is None else draw_by_rule
            return draw_weights(rows, log_masses, prefix, noise)

        return jax.lax.cond(prefix.from_residual, draw_from_residual, draw_from_row)

    write_result(prefix, draw, out)


def residual_last_draw_kernel(
    operands: tuple[FlatBatch, VerifiedRows], out: _ResidualOutputs, *, schedule: Schedule
) -> None:
    """Reduces a tile of a residual; the request's last program draws, and writes the result.

    Formula: that of `residual_mass_kernel`, then that of `verify_draw_kernel`.
    Grid: B * tiles programs of 8 warps; one owns a tile of 16384 tokens, of the target row that
    rejected and of its draft row. With a rule and a small batch as in `residual_draw_kernel`.
    Bytes per request: those of the two kernels. A greedy request's program 0 reads the maxima of
    its deciding row's tiles, and the others read its temperature alone.
    Why one launch: calls without greedy log-probabilities are mostly of greedy requests. These have
    no residual, and saving a launch saves a tenth of their time.
    Memory order: `is_last_arrival` on `counters[b, K + 2]`, which no earlier launch uses.
    References: Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    arrays, rows = operands
    num_tiles = schedule.num_tiles(arrays)
    b, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    is_greedy = parse_temperature(arrays.temperature[b]).greedy

    @pl.when(is_greedy & (tile_index == 0))
    def _() -> None:
        prefix = load_accepted_prefix(arrays, rows, b, schedule)
        write_result(prefix, None, out.verification)

    @pl.when(~is_greedy)
    def _() -> None:
        prefix = load_accepted_prefix(arrays, rows, b, schedule)

        def reduce_and_arrive() -> jax.Array:
            store_log_masses(prefix, tile_index, out.tile_results)
            at = (b, jnp.int32(schedule.rows_per_request + 1))
            return is_last_arrival(out.counters, at, num_tiles, schedule.interpret)

        is_last = cond_or(prefix.from_residual, reduce_and_arrive, tile_index == 0)

        @pl.when(is_last)
        def _() -> None:
            _write_drawn(rows, out.tile_results, prefix, out.verification)


def residual_draw_kernel(
    operands: tuple[FlatBatch, ReducedRows], out: _ResidualOutputs, *, schedule: Schedule
) -> None:
    """Draws a token from each tile of a residual; the last program writes the request's result.

    Formula: that of `verify_draw_kernel`, in each tile. A tile's score is max_i (log mass_i + g_i)
    over its blocks, and the tile with the best score wins: its best block is the row's.
    Grid: B * tiles programs of 4 or 8 warps; one owns a tile of 4096 or 8192 tokens of the target
    row that rejected and of its draft row. It evaluates its request's K + 1 rows first.
    Bytes per request: each program reads the (m, l) of all tiles of K + 1 rows, 8 for each tile of
    `verify_reduce_kernel`. A rejected sampled draft adds 2 V * itemsize read in all, and 16 or 20
    (float64 noise) written per tile of this launch. The result has (K + 1) * 8 + 8.
    Why draw in each tile: it saves the second of the two launches that a large batch has after its
    rows (`residual_mass_kernel`, `verify_draw_kernel`).
    Memory order: `is_last_arrival` on `counters[b]`, which `verify_reduce_kernel` zeroed. Where no
    residual is needed, program 0 of the request writes the result, and no program counts itself.
    References: Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    arrays, rows = operands
    num_tiles = schedule.num_tiles(arrays)
    b, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    prefix = load_accepted_prefix(arrays, rows, b, schedule)

    def draw_and_arrive() -> jax.Array:
        draw_tile(prefix, tile_index, out.tile_results)
        return is_last_arrival(out.counters, (b,), num_tiles, schedule.interpret)

    is_last = cond_or(prefix.from_residual, draw_and_arrive, tile_index == 0)

    @pl.when(is_last)
    def _() -> None:
        write_result(
            prefix, lambda: choose_winner(rows, prefix, out.tile_results), out.verification
        )
