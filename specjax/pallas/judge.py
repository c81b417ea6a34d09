"""The rules of acceptance on the rows of a request that one program holds."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.acceptance import accept_greedy, accept_random, accept_synthetic
from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import Law, merge_blocks
from specjax.core.noise import uniform
from specjax.core.subnormal import flush_subnormals
from specjax.pallas.blocks import Partials, load_tiles, load_token
from specjax.pallas.inputs import DraftedToken, Inputs, Plan, Request, fetch, read_drafted
from specjax.typing import Stream

__all__ = ["Verdict", "judge_rows"]


class Verdict(NamedTuple):
    """What is known of target rows [R].

    Attributes:
      law: f32, its `log_sum` NaN where the row is none.
      logprobs: f32, log p of the drafted tokens.
      best: i32, the argmax where the request is greedy.
      kept: bool, whether the drafted token is; the row behind the last of them keeps none.
      drafted: the drafted tokens; None where K is 0.
    """

    law: Law
    logprobs: jax.Array
    best: jax.Array
    kept: jax.Array
    drafted: DraftedToken | None


def judge_rows(
    inputs: Inputs, request: Request, i: jax.Array, partials: Partials, plan: Plan
) -> Verdict:
    """Judges rows i32[R] of a request, of which those behind its drafts may not exist."""
    exists, drafts = i <= request.num_tokens, i < request.num_tokens
    scale = request.scaling.scale
    tiles = load_tiles(partials, request.b * plan.num_rows + i, exists)
    cutoff = request.cutoff(inputs, i, exists)
    row = request.target_row + jnp.where(exists, i, 0)
    if plan.num_drafts:
        drafted = read_drafted(inputs, request, i, drafts, plan)
        logit = load_token(inputs.target, row, drafted.token_id, cutoff, drafts)
        at = request.address(inputs, i, Stream.accept(i), plan)
        coin = uniform(at, jnp.zeros_like(i, jnp.uint32), plan.noise_dtype)
    merged = merge_blocks(tiles, jnp.broadcast_to(scale, i.shape))
    law = merged.law._replace(log_sum=jnp.where(merged.finite, merged.law.log_sum, jnp.nan))
    # Of a request that is not greedy it is whatever the memory held, and nobody looks at it.
    place = request.b * plan.num_rows + i
    tile = first_argmax(flush_subnormals(tiles.max))
    best = fetch(partials.tile_best, (place, tile), exists)
    if plan.num_drafts == 0:
        return Verdict(law, jnp.zeros_like(i, jnp.float32), best, i < 0, None)
    logprobs = token_logprobs(logit, law, scale)
    if inputs.rates is None:
        kept = jnp.where(
            request.scaling.greedy,
            accept_greedy(drafted.token_id, best),
            accept_random(coin, logprobs, drafted.logprob),
        )
    else:
        rate = fetch(inputs.rates, (request.b, i), drafts)
        inside = (drafted.token_id >= 0) & (drafted.token_id < inputs.target.shape[1])
        kept = inside & accept_synthetic(coin, rate)
    return Verdict(law, logprobs, best, kept & drafts & merged.finite, drafted)
