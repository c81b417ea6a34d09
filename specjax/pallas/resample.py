"""The outcome of every request: its kept drafts, and the token drawn after them.

Where a drawn draft was rejected, many programs reduce the residual to block masses first. One-hot
drafts, greedy requests and bonus tokens need no mass that the rows' partials do not hold.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.logsumexp import block_weights, exp_scaled, keep
from specjax.noise import SAMPLING_BLOCK
from specjax.pallas.accept import Judged, Reduced
from specjax.pallas.ending import Ending, ending_noise, read_ending
from specjax.pallas.inputs import DraftedToken, Inputs, Plan, fetch
from specjax.pallas.launch import arrive, divide, fast_exp2, launch, like, value_when
from specjax.pallas.logsumexp import load_blocks, load_row, tile_index
from specjax.pallas.pick import Noise, block_index, draw_token
from specjax.pallas.tiles import DRAW_WARPS, power_of_two
from specjax.residual import ROUNDING, residual_logprobs, residual_probs
from specjax.sampling import token_logprobs
from specjax.typing import Verification

__all__ = ["resample"]


class _Operands(NamedTuple):
    inputs: Inputs
    rows: Reduced | Judged
    weights: Any


class _Pair(NamedTuple):
    """Log-probabilities under the target and the draft, of one tile."""

    target: jax.Array
    draft: jax.Array


class _Masses(NamedTuple):
    weights: Any


class _Outcome(NamedTuple):
    verification: Verification
    weights: Any
    counters: Any


def resample(inputs: Inputs, rows: Reduced | Judged, plan: Plan) -> Verification:
    """Ends every request.

    Args:
      inputs: the call's arrays.
      rows: what is known of the target rows.
      plan: whose tile cuts the pair of rows of a residual. Of a small batch one launch reduces
        residuals, and the last program of each request draws; of a large one a second draws.

    Returns:
      `Verification`.
    """
    size, shape = plan.size, (plan.size, plan.num_rows)
    count = plan.tile.count(inputs.target.shape[1])
    weights = like((size, count * plan.tile.blocks))
    outcome = Verification(
        token_ids=like(shape, jnp.int32),
        num_accepted=like((size,), jnp.int32),
        num_emitted=like((size,), jnp.int32),
        logprobs=like(shape),
    )
    shares = functools.partial(
        launch,
        operands=_Operands(inputs, rows, None),
        num_programs=size * count,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
    )
    if inputs.draft is not None and plan.small:
        return shares(
            functools.partial(_residual_kernel, plan),
            outputs=_Outcome(outcome, weights, like((size,), jnp.uint32)),
            in_place={"counters": rows.counters},
        ).verification
    masses = None
    if inputs.draft is not None:
        masses = shares(functools.partial(_masses_kernel, plan), outputs=_Masses(weights)).weights
    return launch(
        functools.partial(_draw_kernel, plan),
        _Operands(inputs, rows, masses),
        outcome,
        num_programs=size,
        num_warps=DRAW_WARPS,
        interpret=plan.interpret,
    )


def _masses_kernel(plan: Plan, operands: _Operands, out: _Masses) -> None:
    inputs = operands.inputs
    b, number = divide(pl.program_id(0), plan.tile.count(inputs.target.shape[1]))
    ending = read_ending(inputs, operands.rows, b, plan)

    @pl.when(ending.drawn)
    def _() -> None:
        pair = _load_pair(ending, inputs.draft, number, plan)
        _store_masses(pair, ending, number, out.weights, plan)


def _residual_kernel(plan: Plan, operands: _Operands, out: _Outcome) -> None:
    inputs = operands.inputs
    count = plan.tile.count(inputs.target.shape[1])
    b, number = divide(pl.program_id(0), count)
    ending = read_ending(inputs, operands.rows, b, plan)

    def reduce() -> tuple[jax.Array, Noise]:
        pair = _load_pair(ending, inputs.draft, number, plan)
        # Every program draws the noise that one will use: the loads take as long.
        noise = ending_noise(inputs, ending, plan)
        _store_masses(pair, ending, number, out.weights, plan)
        return arrive(out.counters, (b,), count, plan.interpret), noise

    def leave() -> tuple[jax.Array, Noise]:
        return number == 0, ending_noise(inputs, ending, plan)

    last, noise = jax.lax.cond(ending.drawn, reduce, leave)

    @pl.when(last)
    def _() -> None:
        weights = operands._replace(weights=out.weights)
        _finish(weights, ending, noise, out.verification, plan)


def _draw_kernel(plan: Plan, operands: _Operands, out: Verification) -> None:
    ending = read_ending(operands.inputs, operands.rows, pl.program_id(0), plan)
    _finish(operands, ending, ending_noise(operands.inputs, ending, plan), out, plan)


def _load_pair(ending: Ending, draft: Any, number: jax.Array, plan: Plan) -> _Pair:
    """Log p and log q of one tile of the deciding rows."""
    index = tile_index(plan.tile, number)
    return _Pair(ending.row.logprobs(index), _draft_logprobs(draft, ending.drafted, index))


def _store_masses(pair: _Pair, ending: Ending, number: jax.Array, weights: Any, plan: Plan) -> None:
    """Log-masses of the residual in the blocks of one tile."""
    left = residual_probs(pair.target, pair.draft, fast_exp2(plan.interpret))
    where = number * plan.tile.blocks + jax.lax.iota(jnp.int32, plan.tile.blocks)
    plgpu.store(weights.at[ending.request.b, where], jnp.log(jnp.sum(left, axis=-1)))


def _draft_logprobs(draft: Any, drafted: DraftedToken | None, index: jax.Array) -> jax.Array:
    """Log q at token ids >= 0 of the target's vocabulary; -inf past the draft's."""
    assert drafted is not None
    place = drafted.place
    x = keep(load_row(draft, place.row, index), place.cutoff)
    return token_logprobs(x, drafted.law, place.scaling.scale)


def _finish(operands: _Operands, ending: Ending, noise: Noise, out: Any, plan: Plan) -> None:
    """Writes a request's kept drafts and the token after them, if there is one."""
    token, logprob, emits = _next_token(operands, ending, noise, plan)
    request, end = ending.request, ending.end
    emits &= request.active
    lane = jax.lax.iota(jnp.int32, power_of_two(plan.num_rows))
    here = emits & (lane == end)
    token_ids = jnp.where(here, token, jnp.int32(-1))
    logprobs = jnp.where(here, logprob, jnp.float32(0))
    if plan.num_drafts:
        is_kept = lane < end
        drafted = fetch(operands.inputs.token_ids, request.first + lane, is_kept)
        token_ids = jnp.where(is_kept, drafted, token_ids)
        logprobs = jnp.where(is_kept, ending.logprobs, logprobs)
    inside = lane < plan.num_rows
    plgpu.store(out.token_ids.at[request.b, lane], token_ids, mask=inside)
    plgpu.store(out.logprobs.at[request.b, lane], logprobs, mask=inside)
    out.num_accepted[request.b] = end
    out.num_emitted[request.b] = end + emits.astype(jnp.int32)


def _next_token(
    operands: _Operands, ending: Ending, noise: Noise, plan: Plan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The token after the kept drafts, its log-probability, and whether there is one."""
    inputs = operands.inputs

    def greedy() -> tuple[jax.Array, jax.Array]:
        return ending.best, -ending.row.law.log_sum

    def random() -> tuple[jax.Array, jax.Array]:
        return _draw(operands, ending, noise, plan)

    def draw() -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(ending.request.scaling.greedy, greedy, random)

    token, logprob = value_when(ending.finite, draw, (jnp.int32(-1), jnp.float32(0)))
    if inputs.bonus_token_id is None:
        return token, logprob, ending.finite
    bonus = inputs.bonus_token_id[ending.request.b]
    given = (bonus >= 0) & (bonus < inputs.target.shape[1]) & ~ending.rejected
    bonus_logprob = ending.row.logprobs(jnp.maximum(bonus, 0))
    # A row that is no law gives the token that was handed in no probability.
    bonus_logprob = jnp.where(ending.finite, bonus_logprob, -jnp.inf)
    logprob = jnp.where(given, bonus_logprob, logprob)
    return jnp.where(given, bonus, token), logprob, ending.finite | given


def _draw(
    operands: _Operands, ending: Ending, noise: Noise, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """Draws from what the rejected draft leaves of the deciding row, or from the row."""
    inputs, row, drafted = operands.inputs, ending.row, ending.drafted
    b, vocab_size = ending.request.b, inputs.target.shape[1]
    blocks = load_blocks(operands.rows.partials, b * plan.num_rows + ending.end, vocab_size)
    whole = block_weights(blocks, row.law, row.scale)
    if drafted is None:
        return draw_token(row, whole, noise, lambda _, logprobs: logprobs)
    one_hot = ending.rejected & ~ending.drawn

    def draft_logprobs(index: jax.Array) -> jax.Array:
        removed = jnp.where(one_hot & (index == drafted.token_id), jnp.inf, -jnp.inf)
        if inputs.draft is None:
            return removed
        return jnp.where(ending.drawn, _draft_logprobs(inputs.draft, drafted, index), removed)

    lane = jax.lax.iota(jnp.int32, whole.shape[0])
    block, _ = divide(jnp.clip(drafted.token_id, 0, vocab_size - 1), SAMPLING_BLOCK)
    index = block_index(block)
    left = jnp.sum(jnp.exp(residual_logprobs(row.logprobs(index), draft_logprobs(index))))
    weights = jnp.where(one_hot & (lane == block), jnp.log(left), whole)
    rounding = jnp.float32(0)
    if inputs.draft is not None:
        inside = ending.drawn & (lane * SAMPLING_BLOCK < vocab_size)
        other = jnp.float32(-jnp.inf)
        masses = plgpu.load(operands.weights.at[b, lane], mask=inside, other=other)
        weights = jnp.where(ending.drawn, masses, weights)
        rounding = jnp.where(ending.drawn, jnp.float32(ROUNDING), rounding)
    empty = jnp.sum(exp_scaled(weights)) <= rounding

    def token_weights(index: jax.Array, logprobs: jax.Array) -> jax.Array:
        return jnp.where(empty, logprobs, residual_logprobs(logprobs, draft_logprobs(index)))

    return draw_token(row, jnp.where(empty, whole, weights), noise, token_weights)
