"""Statistics of draft rows for drafts without them: an additional first launch."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.call_arrays import FlatBatch
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import row_logsumexp, row_statistics
from specjax.pallas.blocks import (
    Partials,
    RowTile,
    load_logits,
    load_tiles,
    partials_shape,
    store_partials,
)
from specjax.pallas.launch import divmod_i32, is_last_arrival, output
from specjax.pallas.load_request import Schedule, load_draft_ids, load_request, locate_draft_row


class _Outputs(NamedTuple):
    logprobs: Any
    logsumexp: Any
    partials: Partials
    counters: Any


def add_draft_statistics(arrays: FlatBatch, schedule: Schedule) -> FlatBatch:
    """Returns the arrays with `draft_logprobs` and `draft_logsumexp` of every drafted token."""
    num_rows = schedule.num_requests * schedule.max_draft_tokens
    vocab_size = arrays.draft_logits.shape[1]
    zeros = jnp.zeros((num_rows,), jnp.uint32)
    outputs = schedule.launch(
        draft_statistics_kernel,
        (arrays, zeros),
        _Outputs(
            output(arrays.token_ids.shape),
            output(arrays.token_ids.shape),
            partials_shape(num_rows, vocab_size, schedule.tile),
            zeros,
        ),
        num_programs=num_rows * schedule.tile.num_tiles(vocab_size),
    )
    return arrays._replace(draft_logprobs=outputs.logprobs, draft_logsumexp=outputs.logsumexp)


def draft_statistics_kernel(
    operands: tuple[FlatBatch, Any], out: _Outputs, *, schedule: Schedule
) -> None:
    """Writes logsumexp(x / τ) of a draft row and log q = x[token] / τ - logsumexp of its token.

    Grid: B * K * tiles programs of 8 warps; one owns a tile of one draft row. The program
    of a row that arrives last merges the row's tiles.
    Bytes per row: V * itemsize read; V / 128 * 8 + tiles * 8 + 8 written. Rows without a valid
    drafted token are not read.
    Why one launch: the merge of a row is short, and the last program has no other work.
    Memory order: `is_last_arrival` on `counters[row]`; the counters begin at 0.
    Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867: the merge.
    """
    arrays = operands[0]
    num_tiles = schedule.tile.num_tiles(arrays.draft_logits.shape[1])
    index, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    b, i = divmod_i32(index, schedule.max_draft_tokens)
    request = load_request(arrays, b, schedule)
    has_draft = request.active & (i < request.num_draft_tokens)

    @pl.when(has_draft)
    def _() -> None:
        row = locate_draft_row(request, i, has_draft)
        scale = row.temperature.scale
        where = (arrays.draft_logits, row.row_index, tile_index, scale, row.cutoff)
        row_tile = RowTile(*where, schedule.tile, schedule.interpret)
        store_partials(row_tile, out.partials, index)

        @pl.when(is_last_arrival(out.counters, (index,), num_tiles, schedule.interpret))
        def _() -> None:
            statistics = row_statistics(load_tiles(out.partials, index, has_draft), scale)
            at = request.first_draft + i
            draft_id = load_draft_ids(arrays, arrays.token_ids[at])
            logit = load_logits(arrays.draft_logits, row.row_index, draft_id, row.cutoff, has_draft)
            logsumexp = row_logsumexp(statistics.normalizer, scale)
            out.logsumexp[at] = jnp.where(statistics.valid, logsumexp, jnp.nan)
            out.logprobs[at] = token_logprobs(logit, statistics.normalizer, scale)
