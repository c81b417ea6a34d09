"""The end of a request by one program: the token after its kept drafts, and the writing."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import block_weights, exp_scaled
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.residual import ROUNDING, residual_logprobs
from specjax.pallas.blocks import load_blocks
from specjax.pallas.ending import Ending
from specjax.pallas.gumbel_max import Drawn, Noise, block_index, draw_token
from specjax.pallas.inputs import Inputs, Plan, fetch
from specjax.pallas.launch import divide, value_when
from specjax.pallas.residual import draft_logprobs
from specjax.pallas.rows import Judged, Reduced
from specjax.pallas.tiles import power_of_two

__all__ = ["draw_residual", "draw_row", "finish"]


def finish(inputs: Inputs, ending: Ending, draw: Callable[[], Drawn], out: Any, plan: Plan) -> None:
    """Writes a request's kept drafts and the token after them, if there is one."""
    token, logprob, emits = _next_token(inputs, ending, draw)
    request, end = ending.request, ending.end
    emits &= request.active
    lane = jax.lax.iota(jnp.int32, power_of_two(plan.num_rows))
    here = emits & (lane == end)
    token_ids = jnp.where(here, token, jnp.int32(-1))
    logprobs = jnp.where(here, logprob, jnp.float32(0))
    if plan.num_drafts:
        is_kept = lane < end
        drafted = fetch(inputs.token_ids, request.first + lane, is_kept)
        token_ids = jnp.where(is_kept, drafted, token_ids)
        logprobs = jnp.where(is_kept, ending.logprobs, logprobs)
    inside = lane < plan.num_rows
    plgpu.store(out.token_ids.at[request.b, lane], token_ids, mask=inside)
    plgpu.store(out.logprobs.at[request.b, lane], logprobs, mask=inside)
    out.num_accepted[request.b] = end
    out.num_emitted[request.b] = end + emits.astype(jnp.int32)


def _next_token(
    inputs: Inputs, ending: Ending, draw: Callable[[], Drawn]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The token after the kept drafts, its log-probability, and whether there is one."""

    def greedy() -> tuple[jax.Array, jax.Array]:
        return ending.best, -ending.row.law.log_sum

    def random() -> tuple[jax.Array, jax.Array]:
        drawn = draw()
        return drawn.token, token_logprobs(drawn.logit, ending.row.law, ending.row.scale)

    def either() -> tuple[jax.Array, jax.Array]:
        return jax.lax.cond(ending.request.scaling.greedy, greedy, random)

    token, logprob = value_when(ending.finite, either, (jnp.int32(-1), jnp.float32(0)))
    if inputs.bonus_token_id is None:
        return token, logprob, ending.finite
    bonus = inputs.bonus_token_id[ending.request.b]
    given = (bonus >= 0) & (bonus < inputs.target.shape[1]) & ~ending.rejected
    bonus_logprob = ending.row.logprobs(jnp.maximum(bonus, 0))
    # A row that is no law gives the token that was handed in no probability.
    bonus_logprob = jnp.where(ending.finite, bonus_logprob, -jnp.inf)
    logprob = jnp.where(given, bonus_logprob, logprob)
    return jnp.where(given, bonus, token), logprob, ending.finite | given


def draw_row(
    inputs: Inputs, rows: Reduced | Judged, ending: Ending, noise: Noise, plan: Plan
) -> Drawn:
    """Draws from the deciding row, less a one-hot draft that it rejected."""
    row, drafted, vocab_size = ending.row, ending.drafted, inputs.target.shape[1]
    whole = _whole_weights(inputs, rows, ending, plan)
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
    inputs: Inputs,
    rows: Reduced | Judged,
    weights: Any,
    ending: Ending,
    noise: Noise,
    plan: Plan,
) -> Drawn:
    """Draws from a residual by the log-masses f32[B, N] of its blocks, or else from the row."""
    drafted = ending.drafted
    lane = jax.lax.iota(jnp.int32, noise.blocks.shape[0])
    inside = lane * SAMPLING_BLOCK < inputs.target.shape[1]
    place, other = (ending.request.b, lane), jnp.float32(-jnp.inf)
    masses = plgpu.load(weights.at[place], mask=inside, other=other)
    empty = jnp.sum(exp_scaled(masses)) <= ROUNDING
    whole = _whole_weights(inputs, rows, ending, plan)

    def token_weights(index: jax.Array, logprobs: jax.Array) -> jax.Array:
        left = residual_logprobs(logprobs, draft_logprobs(inputs.draft, drafted, index))
        return jnp.where(empty, logprobs, left)

    return draw_token(ending.row, jnp.where(empty, whole, masses), noise, token_weights)


def _whole_weights(inputs: Inputs, rows: Reduced | Judged, ending: Ending, plan: Plan) -> jax.Array:
    place = ending.request.b * plan.num_rows + ending.end
    blocks = load_blocks(rows.partials, place, inputs.target.shape[1])
    return block_weights(blocks, ending.row.law, ending.row.scale)
