"""Target rows reduced to statistics and, in a large batch, evaluated on the spot.

In a small batch every row is reduced, and the program that draws the request's next token
evaluates its drafted tokens. In a large batch the last program of a row to arrive evaluates it. The
programs of row 0 of all requests come first, then those of row 1, and so on: the program that
rejects a drafted token publishes that, and programs of later rows that start afterwards leave
without reading. No row waits for another: the larger the batch, the fewer rows after a rejection
are read. For a greedy request any tile with a larger logit than the drafted token's rejects it
before the row is reduced.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.arrays import VerifyArrays
from specjax.core.acceptance import accept_greedy, accept_random, accept_synthetic
from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import LogNormalizer, row_statistics
from specjax.core.noise import uniform
from specjax.core.subnormal import flush_subnormals, largest_equal
from specjax.pallas.blocks import (
    Partials,
    Share,
    load_tiles,
    load_token,
    partials_like,
    store_partials,
)
from specjax.pallas.inputs import (
    DraftedToken,
    Plan,
    RequestScalars,
    load_drafted,
    load_masked,
    load_request,
)
from specjax.pallas.launch import arrive, divide, launch, like, only, value_when
from specjax.typing import Stream

__all__ = ["Judged", "Reduced", "Verdict", "accept_rows", "judge_rows", "reduce_rows"]


class Reduced(NamedTuple):
    """A small batch's target rows [B * (K + 1)]: their partials.

    Attributes:
      partials: of the rows that exist.
      counters: u32[B], zero: programs arrived at the residual.
    """

    partials: Partials
    counters: Any


class Judged(NamedTuple):
    """A large batch's target rows [B * (K + 1)]: their partials and the verdicts on them.

    Attributes:
      partials: of the rows that were read.
      shift: f32, and `log_sum`: `Verdict.normalizer`.
      logprobs: f32, as in `Verdict`; `best` i32 likewise.
      counters: u32[B, K + 2], programs arrived at each row; then K + 1 less the first row known
        not to be kept, or 0.
    """

    partials: Partials
    shift: Any
    log_sum: Any
    logprobs: Any
    best: Any
    counters: Any


class Verdict(NamedTuple):
    """What is known of target rows [R].

    Attributes:
      normalizer: f32, its `log_sum` NaN where the row is invalid.
      logprobs: f32, log p of the drafted tokens.
      best: i32, the argmax where the request is greedy.
      kept: bool, whether the drafted token is; the row behind the last of them keeps none.
      drafted: the drafted tokens; None where K is 0.
    """

    normalizer: LogNormalizer
    logprobs: jax.Array
    best: jax.Array
    kept: jax.Array
    drafted: DraftedToken | None


def judge_rows(
    arrays: VerifyArrays, request: RequestScalars, i: jax.Array, partials: Partials, plan: Plan
) -> Verdict:
    """Judges rows i32[R] of a request, of which those behind its drafts may not exist."""
    exists, drafts = i <= request.num_tokens, i < request.num_tokens
    scale = request.temperature.scale
    tiles = load_tiles(partials, request.b * plan.num_rows + i, exists)
    cutoff = request.cutoff(arrays, i, exists)
    row = request.target_row + jnp.where(exists, i, 0)
    if plan.num_drafts:
        drafted = load_drafted(arrays, request, i, drafts, plan)
        logit = load_token(arrays.target_logits, row, drafted.token_id, cutoff, drafts)
        at = request.address(arrays, i, Stream.accept(i), plan)
        coin = uniform(at, jnp.zeros_like(i, jnp.uint32), plan.noise_dtype)
    merged = row_statistics(tiles, jnp.broadcast_to(scale, i.shape))
    normalizer = merged.normalizer._replace(
        log_sum=jnp.where(merged.valid, merged.normalizer.log_sum, jnp.nan)
    )
    # Of a request that is not greedy it is whatever the memory held, and nobody looks at it.
    place = request.b * plan.num_rows + i
    tile = first_argmax(flush_subnormals(tiles.max))
    best = load_masked(partials.tile_best, (place, tile), exists)
    if plan.num_drafts == 0:
        return Verdict(normalizer, jnp.zeros_like(i, jnp.float32), best, i < 0, None)
    logprobs = token_logprobs(logit, normalizer, scale)
    if arrays.conditional_rates is None:
        kept = jnp.where(
            request.temperature.greedy,
            accept_greedy(drafted.token_id, best),
            accept_random(coin, logprobs, drafted.logprob),
        )
    else:
        rate = load_masked(arrays.conditional_rates, (request.b, i), drafts)
        inside = (drafted.token_id >= 0) & (drafted.token_id < arrays.target_logits.shape[1])
        kept = inside & accept_synthetic(coin, rate)
    return Verdict(normalizer, logprobs, best, kept & drafts & merged.valid, drafted)


class _Operands(NamedTuple):
    arrays: VerifyArrays
    counters: jax.Array


def reduce_rows(arrays: VerifyArrays, plan: Plan) -> Reduced:
    """Reduces every target row that a request has."""
    vocab_size = arrays.target_logits.shape[1]
    count = plan.tile.count(vocab_size)
    flat = plan.size * plan.num_rows

    def reduce_kernel(arrays: VerifyArrays, out: Reduced) -> None:
        place, number = divide(pl.program_id(0), count)
        b, i = divide(place, plan.num_rows)
        request = load_request(arrays, b, plan)

        @pl.when((i == 0) & (number == 0))
        def _() -> None:
            out.counters[b] = jnp.uint32(0)

        @pl.when(request.active & (i <= request.num_tokens))
        def _() -> None:
            share = _share(arrays, request, i, number)
            store_partials(share, out.partials, place, plan.tile, plan.interpret)

    return launch(
        reduce_kernel,
        arrays,
        Reduced(partials_like(flat, vocab_size, plan.tile), like((plan.size,), jnp.uint32)),
        num_programs=flat * count,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
    )


def accept_rows(arrays: VerifyArrays, plan: Plan) -> Judged:
    """Reduces and judges the target rows of a request, until it is known to have ended."""
    vocab_size, flat = arrays.target_logits.shape[1], plan.size * plan.num_rows

    def accept_kernel(operands: _Operands, out: Judged) -> None:
        _accept(operands.arrays, out, plan)

    zeros = jnp.zeros((plan.size, plan.num_rows + 1), jnp.uint32)
    return launch(
        accept_kernel,
        _Operands(arrays, zeros),
        Judged(
            partials_like(flat, vocab_size, plan.tile),
            like((flat,)),
            like((flat,)),
            like((flat,)),
            like((flat,), jnp.int32),
            like(zeros.shape, jnp.uint32),
        ),
        num_programs=flat * plan.tile.count(vocab_size),
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": zeros},
    )


def _accept(arrays: VerifyArrays, out: Judged, plan: Plan) -> None:
    """One tile of a target row, and the verdict on the row by the last of its programs."""
    count, num_rows = plan.tile.count(arrays.target_logits.shape[1]), plan.num_rows
    turn, number = divide(pl.program_id(0), count)
    i, b = divide(turn, plan.size)
    request = load_request(arrays, b, plan)
    ending = (b, jnp.int32(num_rows))

    def known() -> jax.Array:
        # An atomic read: the threads of a program must all go the same way.
        return plgpu.atomic_max(out.counters, ending, jnp.uint32(0)).astype(jnp.int32)

    def end() -> None:
        plgpu.atomic_max(out.counters, ending, (num_rows - i).astype(jnp.uint32))

    is_ended = num_rows - value_when(i > 0, known, jnp.int32(0)) < i

    @pl.when(request.active & (i <= request.num_tokens) & ~is_ended)
    def _() -> None:
        share = _share(arrays, request, i, number)
        top = store_partials(share, out.partials, b * num_rows + i, plan.tile, plan.interpret)
        if arrays.conditional_rates is None and num_rows > 1:
            pl.when(request.temperature.greedy & (i < request.num_tokens))(
                lambda: pl.when(largest_equal(_load_drafted(arrays, request, i)) < top)(end)
            )

        @pl.when(arrive(out.counters, (b, i), count, plan.interpret))
        def _() -> None:
            row = i + jax.lax.iota(jnp.int32, 1)
            verdict = judge_rows(arrays, request, row, out.partials, plan)
            at = b * num_rows + row
            plgpu.store(out.shift.at[at], verdict.normalizer.shift)
            plgpu.store(out.log_sum.at[at], verdict.normalizer.log_sum)
            plgpu.store(out.logprobs.at[at], verdict.logprobs)
            plgpu.store(out.best.at[at], verdict.best)
            pl.when(only(verdict.kept.astype(jnp.int32), row == i) == 0)(end)


def _load_drafted(arrays: VerifyArrays, request: RequestScalars, i: jax.Array) -> jax.Array:
    """The target's logit f32[] of a request's drafted token i, which exists."""
    lane = jax.lax.iota(jnp.int32, 1)
    token_id = plgpu.load(arrays.token_ids.at[request.first + i + lane])
    cutoff = request.cutoff(arrays, i + lane, lane == 0)
    logit = load_token(
        arrays.target_logits, request.target_row + i + lane, token_id, cutoff, lane == 0
    )
    return only(logit, lane == 0)


def _share(arrays: VerifyArrays, request: RequestScalars, i: jax.Array, number: jax.Array) -> Share:
    """Tile `number` of a request's target row i, which exists."""
    cutoff = request.cutoff(arrays, i, i >= 0)
    row = request.target_row + i
    temperature = request.temperature
    return Share(arrays.target_logits, row, number, temperature.scale, cutoff, temperature.greedy)
