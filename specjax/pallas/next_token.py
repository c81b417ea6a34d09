"""The token after the accepted drafts of a request: what decides it, its draw, and the output."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.arrays import VerifyArrays
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import LogNormalizer, block_logprobs, exp_scaled, mask_below_cutoff
from specjax.core.noise import SAMPLING_BLOCK, Words
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_logprobs, residual_probs
from specjax.pallas.blocks import load_blocks, load_row, tile_index
from specjax.pallas.gumbel_max import Drawn, Noise, Row, block_index, draw_token
from specjax.pallas.inputs import (
    DraftedToken,
    Plan,
    RequestScalars,
    load_drafted,
    load_masked,
    load_request,
)
from specjax.pallas.launch import divide, fast_exp2, only, value_when
from specjax.pallas.target_rows import Judged, Reduced, judge_rows
from specjax.pallas.tiles import power_of_two
from specjax.typing import Stream

__all__ = [
    "Ending",
    "draft_logprobs",
    "draw_residual",
    "draw_row",
    "finish",
    "next_address",
    "read_ending",
    "reduce_masses",
    "store_masses",
]


class Ending(NamedTuple):
    """The end of a request's kept drafts; of an inactive one 0, decided by no law.

    Attributes:
      request: the request.
      end: i32, how many drafts are kept: the place of the row that decides.
      row: that row of target logits.
      valid: bool, it is a distribution.
      rejected: bool, it rejected a drafted token.
      drafted: that token; any, where none was rejected; None where K is 0.
      drawn: bool, the residual of a drawn draft is what the next token comes from.
      best: i32, the row's argmax where the request is greedy.
      logprobs: f32[N], log p of the drafted tokens up to `end`.
    """

    request: RequestScalars
    end: jax.Array
    row: Row
    valid: jax.Array
    rejected: jax.Array
    drafted: DraftedToken | None
    drawn: jax.Array
    best: jax.Array
    logprobs: jax.Array


def read_ending(arrays: VerifyArrays, rows: Reduced | Judged, b: jax.Array, plan: Plan) -> Ending:
    """Judges the rows of a small batch's request, or reads how a large one's were judged."""
    request = load_request(arrays, b, plan)
    lane = jax.lax.iota(jnp.int32, power_of_two(plan.num_rows))
    if isinstance(rows, Reduced):
        verdict = judge_rows(arrays, request, lane, rows.partials, plan)
        ends = ~verdict.kept & (lane <= request.num_tokens)
        end = jnp.min(jnp.where(ends, lane, jnp.int32(plan.num_rows)))
        end = jnp.where(request.active, end, jnp.int32(0))
        here = lane == end
        normalizer, best = (
            LogNormalizer(*[only(x, here) for x in verdict.normalizer]),
            only(verdict.best, here),
        )
        logprobs, drafted = verdict.logprobs, verdict.drafted and verdict.drafted.only(here)
    else:
        end = plan.num_rows - rows.counters[b, jnp.int32(plan.num_rows)].astype(jnp.int32)
        end = jnp.where(request.active, end, jnp.int32(0))
        place = b * plan.num_rows + end
        normalizer, best = LogNormalizer(rows.shift[place], rows.log_sum[place]), rows.best[place]
        logprobs = load_masked(rows.logprobs, b * plan.num_rows + lane, lane < end)
        drafted = None
        if plan.num_drafts:
            drafted = load_drafted(arrays, request, end, end < request.num_tokens, plan)
    valid = request.active & jnp.isfinite(normalizer.log_sum)
    rejected = end < request.num_tokens
    drawn = end < 0  # never, as a value that Triton can branch on
    if arrays.draft_logits is not None and drafted is not None:
        drawn = rejected & valid & ~request.temperature.greedy & ~drafted.one_hot
    row = Row(
        arrays.target_logits,
        request.target_row + end,
        request.temperature.scale,
        request.cutoff(arrays, end, request.active),
        normalizer,
    )
    return Ending(request, end, row, valid, rejected, drafted, drawn, best, logprobs)


def next_address(arrays: VerifyArrays, ending: Ending, plan: Plan) -> Words:
    """The address of the draw of the token after the kept drafts."""
    return ending.request.address(arrays, ending.end, Stream.TARGET, plan)


def draft_logprobs(draft: Any, drafted: DraftedToken | None, index: jax.Array) -> jax.Array:
    """Log q at token ids >= 0 of the target's vocabulary; -inf past the draft's."""
    assert drafted is not None
    row = drafted.row
    x = mask_below_cutoff(load_row(draft, row.row_index, index), row.cutoff)
    return token_logprobs(x, drafted.normalizer, row.temperature.scale)


def reduce_masses(arrays: VerifyArrays, ending: Ending, number: jax.Array, plan: Plan) -> jax.Array:
    """Masses f32[blocks] of the residual in tile `number`."""
    index = tile_index(plan.tile, number)
    p, q = ending.row.logprobs(index), draft_logprobs(arrays.draft_logits, ending.drafted, index)
    return jnp.sum(residual_probs(p, q, fast_exp2(plan.interpret)), axis=-1)


def store_masses(
    arrays: VerifyArrays, ending: Ending, number: jax.Array, out: Any, plan: Plan
) -> None:
    """Stores the log-masses of tile `number` into row b of `out` [B, blocks]."""
    masses = reduce_masses(arrays, ending, number, plan)
    where = number * plan.tile.blocks + jax.lax.iota(jnp.int32, plan.tile.blocks)
    plgpu.store(out.at[ending.request.b, where], jnp.log(masses))


def finish(
    arrays: VerifyArrays, ending: Ending, draw: Callable[[], Drawn], out: Any, plan: Plan
) -> None:
    """Writes a request's kept drafts and the token after them, if there is one."""
    token, logprob, emits = _next_token(arrays, ending, draw)
    request, end = ending.request, ending.end
    emits &= request.active
    lane = jax.lax.iota(jnp.int32, power_of_two(plan.num_rows))
    here = emits & (lane == end)
    token_ids = jnp.where(here, token, jnp.int32(-1))
    logprobs = jnp.where(here, logprob, jnp.float32(0))
    if plan.num_drafts:
        is_kept = lane < end
        drafted = load_masked(arrays.token_ids, request.first + lane, is_kept)
        token_ids = jnp.where(is_kept, drafted, token_ids)
        logprobs = jnp.where(is_kept, ending.logprobs, logprobs)
    inside = lane < plan.num_rows
    plgpu.store(out.token_ids.at[request.b, lane], token_ids, mask=inside)
    plgpu.store(out.logprobs.at[request.b, lane], logprobs, mask=inside)
    out.num_accepted[request.b] = end
    out.num_emitted[request.b] = end + emits.astype(jnp.int32)


def _next_token(
    arrays: VerifyArrays, ending: Ending, draw: Callable[[], Drawn]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The token after the kept drafts, its log-probability, and whether there is one."""

    def greedy() -> tuple[jax.Array, jax.Array]:
        return ending.best, -ending.row.normalizer.log_sum

    def random() -> tuple[jax.Array, jax.Array]:
        drawn = draw()
        return drawn.token, token_logprobs(drawn.logit, ending.row.normalizer, ending.row.scale)

    def either() -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(ending.request.temperature.greedy, greedy, random)

    token, logprob = value_when(ending.valid, either, (jnp.int32(-1), jnp.float32(0)))
    if arrays.bonus_token_ids is None:
        return token, logprob, ending.valid
    bonus = arrays.bonus_token_ids[ending.request.b]
    given = (bonus >= 0) & (bonus < arrays.target_logits.shape[1]) & ~ending.rejected
    bonus_logprob = ending.row.logprobs(jnp.maximum(bonus, 0))
    # A row that is no law gives the token that was handed in no probability.
    bonus_logprob = jnp.where(ending.valid, bonus_logprob, -jnp.inf)
    logprob = jnp.where(given, bonus_logprob, logprob)
    return jnp.where(given, bonus, token), logprob, ending.valid | given


def draw_row(
    arrays: VerifyArrays, rows: Reduced | Judged, ending: Ending, noise: Noise, plan: Plan
) -> Drawn:
    """Draws from the deciding row, less a one-hot draft that it rejected."""
    row, drafted, vocab_size = ending.row, ending.drafted, arrays.target_logits.shape[1]
    whole = _whole_weights(arrays, rows, ending, plan)
    if drafted is None:
        return draw_token(row, whole, noise, lambda _, logprobs: logprobs)
    one_hot = ending.rejected & ~ending.drawn

    def left(index: jax.Array, logprobs: jax.Array) -> jax.Array:
        return jnp.where(one_hot & (index == drafted.token_id), -jnp.inf, logprobs)

    lane = jax.lax.iota(jnp.int32, whole.shape[0])
    block, _ = divide(jnp.clip(drafted.token_id, 0, vocab_size - 1), SAMPLING_BLOCK)
    index = block_index(block)
    mass = jnp.sum(jnp.exp(left(index, row.logprobs(index))))
    weights = jnp.where(one_hot & (lane == block), jnp.log(mass), whole)
    empty = jnp.sum(exp_scaled(weights)) <= 0

    def token_weights(index: jax.Array, logprobs: jax.Array) -> jax.Array:
        return jnp.where(empty, logprobs, left(index, logprobs))

    return draw_token(row, jnp.where(empty, whole, weights), noise, token_weights)


def draw_residual(
    arrays: VerifyArrays,
    rows: Reduced | Judged,
    weights: Any,
    ending: Ending,
    noise: Noise,
    plan: Plan,
) -> Drawn:
    """Draws from a residual by the log-masses f32[B, N] of its blocks, or else from the row."""
    drafted = ending.drafted
    lane = jax.lax.iota(jnp.int32, noise.blocks.shape[0])
    inside = lane * SAMPLING_BLOCK < arrays.target_logits.shape[1]
    place, other = (ending.request.b, lane), jnp.float32(-jnp.inf)
    masses = plgpu.load(weights.at[place], mask=inside, other=other)
    empty = jnp.sum(exp_scaled(masses)) <= MIN_RESIDUAL_MASS
    whole = _whole_weights(arrays, rows, ending, plan)

    def token_weights(index: jax.Array, logprobs: jax.Array) -> jax.Array:
        left = residual_logprobs(logprobs, draft_logprobs(arrays.draft_logits, drafted, index))
        return jnp.where(empty, logprobs, left)

    return draw_token(ending.row, jnp.where(empty, whole, masses), noise, token_weights)


def _whole_weights(
    arrays: VerifyArrays, rows: Reduced | Judged, ending: Ending, plan: Plan
) -> jax.Array:
    place = ending.request.b * plan.num_rows + ending.end
    blocks = load_blocks(rows.partials, place, arrays.target_logits.shape[1])
    return block_logprobs(blocks, ending.row.normalizer, ending.row.scale)
