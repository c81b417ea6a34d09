"""Statistics of draft rows that nobody carried: one more launch, which reads all of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.arrays import VerifyArrays
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
from specjax.pallas.inputs import Plan, load_request, locate_draft_row
from specjax.pallas.launch import arrive, divide, launch, like

__all__ = ["with_statistics"]


class _Operands(NamedTuple):
    arrays: VerifyArrays
    counters: jax.Array


class _Outputs(NamedTuple):
    logprobs: Any
    logsumexp: Any
    partials: Partials
    counters: Any


def with_statistics(arrays: VerifyArrays, plan: Plan) -> VerifyArrays:
    """The arrays with `logprobs` and `logsumexp` of every drafted token that counts."""
    size, k = plan.size, plan.num_drafts
    vocab_size = arrays.draft_logits.shape[1]
    count = plan.tile.count(vocab_size)

    def statistics_kernel(operands: _Operands, out: _Outputs) -> None:
        arrays = operands.arrays
        place, number = divide(pl.program_id(0), count)
        b, i = divide(place, k)
        request = load_request(arrays, b, plan)
        wanted = request.active & (i < request.num_tokens)

        @pl.when(wanted)
        def _() -> None:
            row = locate_draft_row(arrays, request, i, wanted, plan)
            scale = row.temperature.scale
            share = Share(arrays.draft_logits, row.row_index, number, scale, row.cutoff, None)
            store_partials(share, out.partials, place, plan.tile, plan.interpret)

            @pl.when(arrive(out.counters, (place,), count, plan.interpret))
            def _() -> None:
                merged = row_statistics(load_tiles(out.partials, place, wanted), scale)
                token_id = arrays.token_ids[request.first + i]
                logit = load_token(arrays.draft_logits, row.row_index, token_id, row.cutoff, wanted)
                logsumexp = row_logsumexp(merged.normalizer, scale)
                out.logsumexp[request.first + i] = jnp.where(merged.valid, logsumexp, jnp.nan)
                out.logprobs[request.first + i] = token_logprobs(logit, merged.normalizer, scale)

    zeros = jnp.zeros((size * k,), jnp.uint32)
    done = launch(
        statistics_kernel,
        _Operands(arrays, zeros),
        _Outputs(
            like(arrays.token_ids.shape),
            like(arrays.token_ids.shape),
            partials_like(size * k, vocab_size, plan.tile),
            like(zeros.shape, jnp.uint32),
        ),
        num_programs=size * k * count,
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
        in_place={"counters": zeros},
    )
    return arrays._replace(draft_logprobs=done.logprobs, draft_logsumexp=done.logsumexp)
