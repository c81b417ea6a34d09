"""Where a request's kept drafts end, and what decides the token after them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.logsumexp import Law
from specjax.core.noise import Words
from specjax.pallas.gumbel_max import Row
from specjax.pallas.inputs import (
    DraftedToken,
    Inputs,
    Plan,
    Request,
    fetch,
    read_drafted,
    read_request,
)
from specjax.pallas.judge import judge_rows
from specjax.pallas.launch import only
from specjax.pallas.rows import Judged, Reduced
from specjax.pallas.tiles import power_of_two
from specjax.typing import Stream

__all__ = ["Ending", "next_address", "read_ending"]


class Ending(NamedTuple):
    """The end of a request's kept drafts; of an inactive one 0, decided by no law.

    Attributes:
      request: the request.
      end: i32, how many drafts are kept: the place of the row that decides.
      row: that row of target logits.
      finite: bool, it is a law.
      rejected: bool, it rejected a drafted token.
      drafted: that token; any, where none was rejected; None where K is 0.
      drawn: bool, the residual of a drawn draft is what the next token comes from.
      best: i32, the row's argmax where the request is greedy.
      logprobs: f32[N], log p of the drafted tokens up to `end`.
    """

    request: Request
    end: jax.Array
    row: Row
    finite: jax.Array
    rejected: jax.Array
    drafted: DraftedToken | None
    drawn: jax.Array
    best: jax.Array
    logprobs: jax.Array


def read_ending(inputs: Inputs, rows: Reduced | Judged, b: jax.Array, plan: Plan) -> Ending:
    """Judges the rows of a small batch's request, or reads how a large one's were judged."""
    request = read_request(inputs, b, plan)
    lane = jax.lax.iota(jnp.int32, power_of_two(plan.num_rows))
    if isinstance(rows, Reduced):
        verdict = judge_rows(inputs, request, lane, rows.partials, plan)
        ends = ~verdict.kept & (lane <= request.num_tokens)
        end = jnp.min(jnp.where(ends, lane, jnp.int32(plan.num_rows)))
        end = jnp.where(request.active, end, jnp.int32(0))
        here = lane == end
        law, best = Law(*[only(x, here) for x in verdict.law]), only(verdict.best, here)
        logprobs, drafted = verdict.logprobs, verdict.drafted and verdict.drafted.only(here)
    else:
        end = plan.num_rows - rows.counters[b, jnp.int32(plan.num_rows)].astype(jnp.int32)
        end = jnp.where(request.active, end, jnp.int32(0))
        place = b * plan.num_rows + end
        law, best = Law(rows.anchor[place], rows.log_sum[place]), rows.best[place]
        logprobs = fetch(rows.logprobs, b * plan.num_rows + lane, lane < end)
        drafted = None
        if plan.num_drafts:
            drafted = read_drafted(inputs, request, end, end < request.num_tokens, plan)
    finite = request.active & jnp.isfinite(law.log_sum)
    rejected = end < request.num_tokens
    drawn = end < 0  # never, as a value that Triton can branch on
    if inputs.draft is not None and drafted is not None:
        drawn = rejected & finite & ~request.scaling.greedy & ~drafted.one_hot
    row = Row(
        inputs.target,
        request.target_row + end,
        request.scaling.scale,
        request.cutoff(inputs, end, request.active),
        law,
    )
    return Ending(request, end, row, finite, rejected, drafted, drawn, best, logprobs)


def next_address(inputs: Inputs, ending: Ending, plan: Plan) -> Words:
    """The address of the draw of the token after the kept drafts."""
    return ending.request.address(inputs, ending.end, Stream.TARGET, plan)
