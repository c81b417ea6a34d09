"""Target rows reduced, and in a large batch judged on the spot.

Of a small batch every row is reduced, and judged by whoever ends its request. In a large one a row
is judged by the last of its programs to arrive. The programs of row 0 of all requests come first,
then those of row 1, and so on: whoever judges a drafted token not kept says so, and programs of
later rows that start after that leave without reading. No row waits for another: the larger the
batch, the fewer rows behind a rejection are read. Of a greedy request any tile with a larger logit
than the drafted token's is verdict enough, before the rest of the row is reduced.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.core.subnormal import largest_equal
from specjax.pallas.blocks import Share, load_token, partials_like, store_partials
from specjax.pallas.inputs import Inputs, Plan, Request, read_request
from specjax.pallas.judge import judge_rows
from specjax.pallas.launch import arrive, divide, launch, like, only, value_when
from specjax.pallas.rows import Judged, Reduced

__all__ = ["accept_rows", "reduce_rows"]


class _Operands(NamedTuple):
    inputs: Inputs
    counters: jax.Array


def reduce_rows(inputs: Inputs, plan: Plan) -> Reduced:
    """Reduces every target row that a request has."""
    vocab_size = inputs.target.shape[1]
    count = plan.tile.count(vocab_size)
    flat = plan.size * plan.num_rows

    def reduce_kernel(inputs: Inputs, out: Reduced) -> None:
        place, number = divide(pl.program_id(0), count)
        b, i = divide(place, plan.num_rows)
        request = read_request(inputs, b, plan)

        @pl.when((i == 0) & (number == 0))
        def _() -> None:
            out.counters[b] = jnp.uint32(0)

        @pl.when(request.active & (i <= request.num_tokens))
        def _() -> None:
            share = _share(inputs, request, i, number)
            store_partials(share, out.partials, place, plan.tile, plan.interpret)

    return launch(
        reduce_kernel,
        inputs,
        Reduced(partials_like(flat, vocab_size, plan.tile), like((plan.size,), jnp.uint32)),
        num_programs=flat * count,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
    )


def accept_rows(inputs: Inputs, plan: Plan) -> Judged:
    """Reduces and judges the target rows of a request, until it is known to have ended."""
    vocab_size, flat = inputs.target.shape[1], plan.size * plan.num_rows

    def accept_kernel(operands: _Operands, out: Judged) -> None:
        _accept(operands.inputs, out, plan)

    zeros = jnp.zeros((plan.size, plan.num_rows + 1), jnp.uint32)
    return launch(
        accept_kernel,
        _Operands(inputs, zeros),
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


def _accept(inputs: Inputs, out: Judged, plan: Plan) -> None:
    """One tile of a target row, and the verdict on the row by the last of its programs."""
    count, num_rows = plan.tile.count(inputs.target.shape[1]), plan.num_rows
    turn, number = divide(pl.program_id(0), count)
    i, b = divide(turn, plan.size)
    request = read_request(inputs, b, plan)
    ending = (b, jnp.int32(num_rows))

    def known() -> jax.Array:
        # An atomic read: the threads of a program must all go the same way.
        return plgpu.atomic_max(out.counters, ending, jnp.uint32(0)).astype(jnp.int32)

    def end() -> None:
        plgpu.atomic_max(out.counters, ending, (num_rows - i).astype(jnp.uint32))

    is_ended = num_rows - value_when(i > 0, known, jnp.int32(0)) < i

    @pl.when(request.active & (i <= request.num_tokens) & ~is_ended)
    def _() -> None:
        share = _share(inputs, request, i, number)
        top = store_partials(share, out.partials, b * num_rows + i, plan.tile, plan.interpret)
        if inputs.rates is None and num_rows > 1:
            pl.when(request.scaling.greedy & (i < request.num_tokens))(
                lambda: pl.when(largest_equal(_load_drafted(inputs, request, i)) < top)(end)
            )

        @pl.when(arrive(out.counters, (b, i), count, plan.interpret))
        def _() -> None:
            row = i + jax.lax.iota(jnp.int32, 1)
            verdict = judge_rows(inputs, request, row, out.partials, plan)
            at = b * num_rows + row
            plgpu.store(out.anchor.at[at], verdict.law.anchor)
            plgpu.store(out.log_sum.at[at], verdict.law.log_sum)
            plgpu.store(out.logprobs.at[at], verdict.logprobs)
            plgpu.store(out.best.at[at], verdict.best)
            pl.when(only(verdict.kept.astype(jnp.int32), row == i) == 0)(end)


def _load_drafted(inputs: Inputs, request: Request, i: jax.Array) -> jax.Array:
    """The target's logit f32[] of a request's drafted token i, which exists."""
    lane = jax.lax.iota(jnp.int32, 1)
    token_id = plgpu.load(inputs.token_ids.at[request.first + i + lane])
    cutoff = request.cutoff(inputs, i + lane, lane == 0)
    logit = load_token(inputs.target, request.target_row + i + lane, token_id, cutoff, lane == 0)
    return only(logit, lane == 0)


def _share(inputs: Inputs, request: Request, i: jax.Array, number: jax.Array) -> Share:
    """Tile `number` of a request's target row i, which exists."""
    cutoff = request.cutoff(inputs, i, i >= 0)
    row = request.target_row + i
    scaling = request.scaling
    return Share(inputs.target, row, number, scaling.scale, cutoff, scaling.greedy)
