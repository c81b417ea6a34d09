"""Statistics of draft rows that nobody carried: one more launch, which reads all of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import row_logsumexp, row_statistics
from specjax.pallas.blocks import (
    Partials,
    Share,
    load_tiles,
    load_token,
    partials_like,
    store_partials,
)
from specjax.pallas.inputs import Inputs, Plan, draft_place, read_request
from specjax.pallas.launch import arrive, divide, launch, like

__all__ = ["with_statistics"]


class _Operands(NamedTuple):
    inputs: Inputs
    counters: jax.Array


class _Outputs(NamedTuple):
    logprobs: Any
    logsumexp: Any
    partials: Partials
    counters: Any


def with_statistics(inputs: Inputs, plan: Plan) -> Inputs:
    """The inputs with `logprobs` and `logsumexp` of every drafted token that counts."""
    size, k = plan.size, plan.num_drafts
    vocab_size = inputs.draft.shape[1]
    count = plan.tile.count(vocab_size)

    def statistics_kernel(operands: _Operands, out: _Outputs) -> None:
        inputs = operands.inputs
        place, number = divide(pl.program_id(0), count)
        b, i = divide(place, k)
        request = read_request(inputs, b, plan)
        wanted = request.active & (i < request.num_tokens)

        @pl.when(wanted)
        def _() -> None:
            where = draft_place(inputs, request, i, wanted, plan)
            scale = where.scaling.scale
            share = Share(inputs.draft, where.row, number, scale, where.cutoff, None)
            store_partials(share, out.partials, place, plan.tile, plan.interpret)

            @pl.when(arrive(out.counters, (place,), count, plan.interpret))
            def _() -> None:
                merged = row_statistics(load_tiles(out.partials, place, wanted), scale)
                token_id = inputs.token_ids[request.first + i]
                logit = load_token(inputs.draft, where.row, token_id, where.cutoff, wanted)
                logsumexp = row_logsumexp(merged.normalizer, scale)
                out.logsumexp[request.first + i] = jnp.where(merged.valid, logsumexp, jnp.nan)
                out.logprobs[request.first + i] = token_logprobs(logit, merged.normalizer, scale)

    zeros = jnp.zeros((size * k,), jnp.uint32)
    done = launch(
        statistics_kernel,
        _Operands(inputs, zeros),
        _Outputs(
            like(inputs.token_ids.shape),
            like(inputs.token_ids.shape),
            partials_like(size * k, vocab_size, plan.tile),
            like(zeros.shape, jnp.uint32),
        ),
        num_programs=size * k * count,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": zeros},
    )
    return inputs._replace(logprobs=done.logprobs, logsumexp=done.logsumexp)
