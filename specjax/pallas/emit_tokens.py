"""The last launches of `rejection_sample`: accepted drafted tokens, and the recovered or bonus one.

A rejected sampled draft needs the masses of its residual max(p - q, 0), which no earlier launch has
computed. In a small batch each program draws a token from its tile of the residual. The last
program to arrive compares the tiles' winners, so one launch suffices. In a large batch, or with a
rule, programs store block masses, and in a second launch one program per request draws. One-hot
drafts without a rule, greedy requests and bonus tokens need only the partials of the rows. Block
verification has summed its residuals before, and launches the draw alone (`draw_next`).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.call_arrays import VerifyArrays
from specjax.core.gumbel_max import first_argmax
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_logprobs
from specjax.pallas.blocks import load_padded
from specjax.pallas.gumbel_max import Draw, draw_noise, draw_row_noise, draw_token
from specjax.pallas.launch import cond_or, divmod_i32, is_last_arrival, launch, output, select_one
from specjax.pallas.load_request import Plan
from specjax.pallas.next_token import (
    AcceptedPrefix,
    LoadPrefix,
    draw_row,
    load_accepted_prefix,
    next_address,
    write_result,
)
from specjax.pallas.reduce_rows import ReducedRows
from specjax.pallas.residual import (
    draw_residual,
    load_draft_logprobs,
    reduce_masses,
    store_log_masses,
)
from specjax.pallas.target_rows import VerifiedRows
from specjax.verification import Verification

__all__ = [
    "DrawOperands",
    "draw_next",
    "emit_tokens",
    "residual_draw_kernel",
    "residual_mass_kernel",
    "verify_draw_kernel",
]


class DrawOperands(NamedTuple):
    """The call's arrays, its reduced rows, and log-masses [B, blocks] of residuals or None."""

    arrays: VerifyArrays
    rows: Any
    log_masses: Any = None


class _ResidualLogMasses(NamedTuple):
    """Log-masses f32[B, blocks] of the blocks of residuals: log sum max(p - q, 0)."""

    log_masses: Any


class _TileWinners(NamedTuple):
    """The token drawn from each tile of the residual of requests [B], each [B, tiles].

    Attributes:
      mass: f32, of the tile.
      score: noise_dtype, of the block that was drawn: its log-mass plus its Gumbel.
      token: i32, drawn from that block.
      logit: f32, the token's.
    """

    mass: Any
    score: Any
    token: Any
    logit: Any


# What a row of tiles is padded by.
_EMPTY_TILE = _TileWinners(mass=0, score=-jnp.inf, token=0, logit=0)


class _ResidualOutputs(NamedTuple):
    verification: Verification
    winners: _TileWinners
    counters: Any


def emit_tokens(arrays: VerifyArrays, rows: ReducedRows | VerifiedRows, plan: Plan) -> Verification:
    """Launches what draws each request's recovered or bonus token, and returns the call's result.

    Args:
      arrays: the call's arrays.
      rows: what the launches before stored of the target rows.
      plan: its tile is that of residuals, which cuts a target and a draft row alike.
    """
    has_residual = arrays.draft_logits is not None or plan.log_weights is not None
    if has_residual and isinstance(rows, ReducedRows):
        return _draw_from_tiles(arrays, rows, plan.verification_shape(), plan)
    log_masses = _reduce_residuals(arrays, rows, plan) if has_residual else None
    return draw_next(DrawOperands(arrays, rows, log_masses), plan)


def draw_next(
    operands: DrawOperands, plan: Plan, load_prefix: LoadPrefix = load_accepted_prefix
) -> Verification:
    """Launches the draw after each request's accepted prefix, and returns the call's result."""
    return launch(
        functools.partial(verify_draw_kernel, plan=plan, load_prefix=load_prefix),
        operands,
        plan.verification_shape(),
        num_programs=plan.num_requests,
        num_warps=plan.config.num_draw_warps,
        interpret=plan.interpret,
    )


def _reduce_residuals(
    arrays: VerifyArrays, rows: ReducedRows | VerifiedRows, plan: Plan
) -> jax.Array:
    """Launches the reduction of a large batch's residuals, and returns their log-masses."""
    num_tiles = plan.tile.num_tiles(arrays.target_logits.shape[1])
    return launch(
        functools.partial(residual_mass_kernel, plan=plan),
        DrawOperands(arrays, rows),
        _ResidualLogMasses(output((plan.num_requests, num_tiles * plan.tile.num_blocks))),
        num_programs=plan.num_requests * num_tiles,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
    ).log_masses


def residual_mass_kernel(operands: DrawOperands, out: _ResidualLogMasses, *, plan: Plan) -> None:
    """Writes log sum max(p - q, 0), or of a rule's weights, for every block of a residual's tile.

    Grid: B * tiles programs of 8 warps; one owns a tile of 16384 tokens, of the target row that
    rejected and of its draft row. With a rule and B <= 16 tiles are `residual_draw_kernel`'s.
    Bytes per request with a rejected sampled draft, with a rule any: 2 V * itemsize read, half of
    it without draft logits; V / 128 * 4 written. Other requests: scalars.
    Why tiles: one program per request could not read 2 V logits at the memory's full rate.
    Memory order: it begins to load after `verify_accept_kernel` has ended, whose counters and
    normalizers it reads. The programs of this launch do not wait for one another.
    References: Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    num_tiles = plan.tile.num_tiles(operands.arrays.target_logits.shape[1])
    b, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    prefix = load_accepted_prefix(operands.arrays, operands.rows, b, plan)

    @pl.when(prefix.from_residual)
    def _() -> None:
        store_log_masses(operands.arrays, prefix, tile_index, out.log_masses, b, plan)


def verify_draw_kernel(
    operands: DrawOperands,
    out: Verification,
    *,
    plan: Plan,
    load_prefix: LoadPrefix,
) -> None:
    """Writes a request's accepted drafted tokens, and the next one, drawn by two-level Gumbel-max.

    Formula: block = argmax_i (log mass_i + g_i), token = argmax_{j in block} (log weight_j + g_j),
    of the residual where a sampled draft was rejected, else of the row (`next_token`).
    Grid: B programs of 8 warps; one owns a request.
    Bytes per request: V / 128 * 8 of partials read, and V / 128 * 4 of masses for a residual. The
    logits of the drawn block; and of the same block of the draft row for a residual, else of the
    drafted token's block. In a small batch 8 for each tile of K + 1 rows. (K + 1) * 8 + 8 written.
    Why one program: about a thousand blocks are four to a thread, and the argmax needs them all.
    Memory order: the launches before have ended when it begins to load. It does not trigger the
    next launch early.
    """
    arrays, rows, log_masses = operands
    b = pl.program_id(0)
    prefix = load_prefix(arrays, rows, b, plan)
    address, vocab_size = next_address(arrays, prefix, plan), arrays.target_logits.shape[1]
    noise = draw_row_noise(address, vocab_size, plan.noise_dtype, plan.threefry)

    def draw_from_row() -> Draw:
        return draw_row(arrays, rows, prefix, noise, plan)

    def draw() -> Draw:
        if log_masses is None:
            return draw_from_row()

        def draw_from_residual() -> Draw:
            return draw_residual(arrays, rows, log_masses, prefix, noise, plan)

        return jax.lax.cond(prefix.from_residual, draw_from_residual, draw_from_row)

    write_result(arrays, prefix, draw, out, plan)


def _draw_from_tiles(
    arrays: VerifyArrays,
    rows: ReducedRows | VerifiedRows,
    verification: Verification,
    plan: Plan,
) -> Verification:
    """Launches `residual_draw_kernel` for a small batch, and returns the call's result."""
    tiles = (plan.num_requests, plan.tile.num_tiles(arrays.target_logits.shape[1]))
    winners = _TileWinners(
        output(tiles), output(tiles, plan.noise_dtype), output(tiles, jnp.int32), output(tiles)
    )
    return launch(
        functools.partial(residual_draw_kernel, plan=plan),
        DrawOperands(arrays, rows),
        _ResidualOutputs(verification, winners, output(rows.counters.shape, jnp.uint32)),
        num_programs=tiles[0] * tiles[1],
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": rows.counters},
    ).verification


def residual_draw_kernel(operands: DrawOperands, out: _ResidualOutputs, *, plan: Plan) -> None:
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
    arrays = operands.arrays
    num_tiles = plan.tile.num_tiles(arrays.target_logits.shape[1])
    b, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    prefix = load_accepted_prefix(arrays, operands.rows, b, plan)

    def draw_and_arrive() -> jax.Array:
        _draw_tile(arrays, prefix, tile_index, out.winners, plan)
        return is_last_arrival(out.counters, (b,), num_tiles, plan.interpret)

    is_last = cond_or(prefix.from_residual, draw_and_arrive, tile_index == 0)

    @pl.when(is_last)
    def _() -> None:
        def draw() -> Draw:
            return _best_tile(operands, prefix, out.winners, plan)

        write_result(arrays, prefix, draw, out.verification, plan)


def _draw_tile(
    arrays: VerifyArrays,
    prefix: AcceptedPrefix,
    tile_index: jax.Array,
    out: _TileWinners,
    plan: Plan,
) -> None:
    """Draws a token from one tile of a residual, and stores it as the tile's winner."""
    b = prefix.request.b
    # The noise depends on no logit: it is computed while the logits are being loaded.
    address, first_block = next_address(arrays, prefix, plan), tile_index * plan.tile.num_blocks
    num_blocks = plan.tile.num_blocks
    noise = draw_noise(address, first_block, num_blocks, plan.noise_dtype, plan.threefry)
    masses = reduce_masses(arrays, prefix, tile_index, plan)

    def token_log_weights(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        draft_logprobs = load_draft_logprobs(arrays, prefix.drafted, token_id)
        return residual_logprobs(logprobs, draft_logprobs)

    winner = draw_token(prefix.row, jnp.log(masses), noise, token_log_weights)
    out.mass[b, tile_index] = jnp.sum(masses)
    out.score[b, tile_index] = winner.score
    out.token[b, tile_index] = winner.token
    out.logit[b, tile_index] = winner.logit


def _best_tile(
    operands: DrawOperands, prefix: AcceptedPrefix, winners: _TileWinners, plan: Plan
) -> Draw:
    """Returns the winner of a residual's best tile, or a draw from the row if it is empty."""
    arrays, rows, b = operands.arrays, operands.rows, prefix.request.b
    masses, scores, tokens, logits = [
        load_padded(values, b, other) for values, other in zip(winners, _EMPTY_TILE, strict=True)
    ]
    mask = jax.lax.iota(jnp.int32, scores.shape[0]) == first_argmax(scores)
    winner = Draw(select_one(tokens, mask), select_one(logits, mask), jnp.max(scores))

    def draw_from_row() -> Draw:
        address, vocab_size = next_address(arrays, prefix, plan), arrays.target_logits.shape[1]
        noise = draw_row_noise(address, vocab_size, plan.noise_dtype, plan.threefry)
        return draw_row(arrays, rows, prefix, noise, plan)

    has_residual = prefix.from_residual & (jnp.sum(masses) > MIN_RESIDUAL_MASS)
    return jax.lax.cond(has_residual, lambda: winner, draw_from_row)
