"""Target rows reduced, and in a large batch judged on the spot.

Of a small batch every row is reduced, and judged by whoever ends its request. In a large one a row
is judged by the last of its programs to arrive. The programs of row 0 of all requests come first,
then those of row 1, and so on: whoever judges a drafted token not kept says so, and programs of
later rows that start after that leave without reading. No row waits for another: the larger the
batch, the fewer rows behind a rejection are read.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.pallas.inputs import Inputs, Plan, Request, read_request
from specjax.pallas.judge import judge_rows
from specjax.pallas.launch import arrive, divide, launch, like, only, value_when
from specjax.pallas.logsumexp import Partials, Share, partials_like, store_partials

__all__ = ["Judged", "Reduced", "accept_rows", "reduce_rows"]


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
      anchor: f32, and `log_sum`: `Verdict.law`.
      logprobs: f32, as in `Verdict`; `best` i32 likewise.
      counters: u32[B, K + 2], programs arrived at each row; then K + 1 less the first row known
        not to be kept, or 0.
    """

    partials: Partials
    anchor: Any
    log_sum: Any
    logprobs: Any
    best: Any
    counters: Any


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
    vocab_size = inputs.target.shape[1]
    size, num_rows = plan.size, plan.num_rows
    count, flat = plan.tile.count(vocab_size), size * num_rows

    def accept_kernel(operands: _Operands, out: Judged) -> None:
        inputs = operands.inputs
        turn, number = divide(pl.program_id(0), count)
        i, b = divide(turn, size)
        request = read_request(inputs, b, plan)
        ending = (b, jnp.int32(num_rows))

        def known() -> jax.Array:
            # An atomic read: the threads of a program must all go the same way.
            return plgpu.atomic_max(out.counters, ending, jnp.uint32(0)).astype(jnp.int32)

        ended = num_rows - value_when(i > 0, known, jnp.int32(0)) < i

        @pl.when(request.active & (i <= request.num_tokens) & ~ended)
        def _() -> None:
            place = b * num_rows + i
            share = _share(inputs, request, i, number)
            store_partials(share, out.partials, place, plan.tile, plan.interpret)

            @pl.when(arrive(out.counters, (b, i), count, plan.interpret))
            def _() -> None:
                row = i + jax.lax.iota(jnp.int32, 1)
                verdict = judge_rows(inputs, request, row, out.partials, plan)
                at = b * num_rows + row
                plgpu.store(out.anchor.at[at], verdict.law.anchor)
                plgpu.store(out.log_sum.at[at], verdict.law.log_sum)
                plgpu.store(out.logprobs.at[at], verdict.logprobs)
                plgpu.store(out.best.at[at], verdict.best)

                @pl.when(only(verdict.kept.astype(jnp.int32), row == i) == 0)
                def _() -> None:
                    plgpu.atomic_max(out.counters, ending, (num_rows - i).astype(jnp.uint32))

    zeros = jnp.zeros((size, num_rows + 1), jnp.uint32)
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
        num_programs=flat * count,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": zeros},
    )


def _share(inputs: Inputs, request: Request, i: jax.Array, number: jax.Array) -> Share:
    """Tile `number` of a request's target row i, which exists."""
    cutoff = request.cutoff(inputs, i, i >= 0)
    row = request.target_row + i
    return Share(inputs.target, row, number, request.scaling.scale, cutoff)
