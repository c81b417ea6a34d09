"""The outcome of every request: its kept drafts, and the token drawn after them.

Where a drawn draft was rejected, the programs of a small batch draw from their tiles of the
residual, and the last of them compares what they drew. Those of a large batch left masses, which is
lighter work, and one program draws. One-hot drafts, greedy requests and bonus tokens need no mass
that the rows' partials do not hold.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.arrays import VerifyArrays
from specjax.core.gumbel_max import first_argmax
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_logprobs
from specjax.pallas.blocks import load_line
from specjax.pallas.gumbel_max import Drawn, draw_noise, draw_token, whole_noise
from specjax.pallas.inputs import Plan
from specjax.pallas.launch import arrive, divide, launch, like, only, value_when
from specjax.pallas.next_token import (
    Ending,
    draft_logprobs,
    draw_residual,
    draw_row,
    finish,
    next_address,
    read_ending,
    reduce_masses,
    store_masses,
)
from specjax.pallas.target_rows import Judged, Reduced
from specjax.typing import Verification

__all__ = ["resample"]


class _Operands(NamedTuple):
    arrays: VerifyArrays
    rows: Reduced | Judged
    masses: Any = None


class _Masses(NamedTuple):
    """Log-masses f32[B, blocks] of the blocks of residuals."""

    weights: Any


class _Left(NamedTuple):
    """What the programs of requests [B] leave of the tiles of their residuals, each [B, tiles].

    Attributes:
      mass: f32, of the tile's residual.
      score: f, of the block drawn from.
      token: i32, drawn from that block.
      logit: f32, the token's.
    """

    mass: Any
    score: Any
    token: Any
    logit: Any


# What stands for a tile where there is none.
_NO_TILE = _Left(mass=0, score=-jnp.inf, token=0, logit=0)


class _Outcome(NamedTuple):
    verification: Verification
    left: _Left
    counters: Any


def resample(arrays: VerifyArrays, rows: Reduced | Judged, plan: Plan) -> Verification:
    """Ends every request.

    Args:
      arrays: the call's arrays.
      rows: what is known of the target rows.
      plan: whose tile cuts the pair of rows of a residual.

    Returns:
      `Verification`.
    """
    size, shape = plan.size, (plan.size, plan.num_rows)
    outcome = Verification(
        token_ids=like(shape, jnp.int32),
        num_accepted=like((size,), jnp.int32),
        num_emitted=like((size,), jnp.int32),
        logprobs=like(shape),
    )
    if arrays.draft_logits is not None and plan.small:
        return _draw_tiles(arrays, rows, outcome, plan)
    masses = None if arrays.draft_logits is None else _reduce_masses(arrays, rows, plan)
    return launch(
        functools.partial(_draw_kernel, plan),
        _Operands(arrays, rows, masses),
        outcome,
        num_programs=size,
        num_warps=plan.config.draw_warps,
        interpret=plan.interpret,
    )


def _reduce_masses(arrays: VerifyArrays, rows: Reduced | Judged, plan: Plan) -> jax.Array:
    """The residuals of a large batch."""
    count = plan.tile.count(arrays.target_logits.shape[1])

    def masses_kernel(operands: _Operands, out: _Masses) -> None:
        b, number = divide(pl.program_id(0), count)
        ending = read_ending(operands.arrays, operands.rows, b, plan)

        @pl.when(ending.drawn)
        def _() -> None:
            store_masses(operands.arrays, ending, number, out.weights, plan)

    return launch(
        masses_kernel,
        _Operands(arrays, rows),
        _Masses(like((plan.size, count * plan.tile.blocks))),
        num_programs=plan.size * count,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
    ).weights


def _draw_kernel(plan: Plan, operands: _Operands, out: Verification) -> None:
    arrays, rows, masses = operands
    b = pl.program_id(0)
    ending = read_ending(arrays, rows, b, plan)
    noise = whole_noise(
        next_address(arrays, ending, plan), arrays.target_logits.shape[1], plan.noise_dtype
    )

    def row() -> Drawn:
        return draw_row(arrays, rows, ending, noise, plan)

    def draw() -> Drawn:
        if masses is None:
            return row()

        def residual() -> Drawn:
            return draw_residual(arrays, rows, masses, ending, noise, plan)

        return jax.lax.cond(ending.drawn, residual, row)

    finish(arrays, ending, draw, out, plan)


def _draw_tiles(
    arrays: VerifyArrays, rows: Reduced | Judged, outcome: Verification, plan: Plan
) -> Verification:
    """The end of a small batch in one launch."""
    tiles = (plan.size, plan.tile.count(arrays.target_logits.shape[1]))
    left = _Left(like(tiles), like(tiles, plan.noise_dtype), like(tiles, jnp.int32), like(tiles))
    return launch(
        functools.partial(_residual_kernel, plan),
        _Operands(arrays, rows),
        _Outcome(outcome, left, like(rows.counters.shape, jnp.uint32)),
        num_programs=tiles[0] * tiles[1],
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": rows.counters},
    ).verification


def _residual_kernel(plan: Plan, operands: _Operands, out: _Outcome) -> None:
    arrays = operands.arrays
    count = plan.tile.count(arrays.target_logits.shape[1])
    b, number = divide(pl.program_id(0), count)
    ending = read_ending(arrays, operands.rows, b, plan)

    def reduce() -> jax.Array:
        _draw_tile(arrays, ending, number, out.left, plan)
        return arrive(out.counters, (b,), count, plan.interpret)

    last = value_when(ending.drawn, reduce, number == 0)

    @pl.when(last)
    def _() -> None:
        def draw() -> Drawn:
            return _compare(operands, ending, out.left, plan)

        finish(arrays, ending, draw, out.verification, plan)


def _draw_tile(
    arrays: VerifyArrays, ending: Ending, number: jax.Array, out: _Left, plan: Plan
) -> None:
    """Draws from one tile of a residual the token that is the request's if the tile wins."""
    b = ending.request.b
    # Noise waits for no logit: it is made while they are on their way.
    at, first = next_address(arrays, ending, plan), number * plan.tile.blocks
    noise = draw_noise(at, first, plan.tile.blocks, plan.noise_dtype)
    masses = reduce_masses(arrays, ending, number, plan)

    def token_weights(index: jax.Array, logprobs: jax.Array) -> jax.Array:
        return residual_logprobs(
            logprobs, draft_logprobs(arrays.draft_logits, ending.drafted, index)
        )

    drawn = draw_token(ending.row, jnp.log(masses), noise, token_weights)
    out.mass[b, number] = jnp.sum(masses)
    out.score[b, number] = drawn.score
    out.token[b, number] = drawn.token
    out.logit[b, number] = drawn.logit


def _compare(operands: _Operands, ending: Ending, left: _Left, plan: Plan) -> Drawn:
    """The best of a residual's tiles; a draw from the row where there is no residual."""
    (arrays, rows, _), b = operands, ending.request.b
    masses, scores, tokens, logits = [
        load_line(values, b, other) for values, other in zip(left, _NO_TILE, strict=True)
    ]
    best = jax.lax.iota(jnp.int32, scores.shape[0]) == first_argmax(scores)
    drawn = Drawn(only(tokens, best), only(logits, best), jnp.max(scores))

    def row() -> Drawn:
        at = next_address(arrays, ending, plan)
        noise = whole_noise(at, arrays.target_logits.shape[1], plan.noise_dtype)
        return draw_row(arrays, rows, ending, noise, plan)

    return jax.lax.cond(ending.drawn & (jnp.sum(masses) > MIN_RESIDUAL_MASS), lambda: drawn, row)
