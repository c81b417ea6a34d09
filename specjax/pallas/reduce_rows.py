"""Target rows reduced to partials, every one of them.

References:
  Milakov and Gimelshein, 2018, arXiv:1805.02867.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.call_arrays import VerifyArrays
from specjax.pallas.blocks import Partials, RowTile, partials_shape, store_partials
from specjax.pallas.launch import divmod_i32, launch, output
from specjax.pallas.load_request import Plan, RequestScalars, load_request

__all__ = ["ReducedRows", "reduce_rows", "row_tile", "verify_reduce_kernel"]


class ReducedRows(NamedTuple):
    """Target rows [B * (K + 1)] of a small batch.

    Attributes:
      partials: of the rows up to each request's bonus row.
      counters: u32[B], zeros, in which the programs of the next launch count themselves.
    """

    partials: Partials
    counters: Any


def reduce_rows(arrays: VerifyArrays, plan: Plan) -> ReducedRows:
    """Launches the reduction of every target row."""
    vocab_size, num_rows = arrays.target_logits.shape[1], plan.num_requests * plan.rows_per_request
    return launch(
        functools.partial(verify_reduce_kernel, plan=plan),
        arrays,
        ReducedRows(
            partials_shape(num_rows, vocab_size, plan.tile),
            output((plan.num_requests,), jnp.uint32),
        ),
        num_programs=num_rows * plan.tile.num_tiles(vocab_size),
        num_warps=plan.tile.num_warps,
        interpret=plan.interpret,
    )


def verify_reduce_kernel(arrays: VerifyArrays, out: ReducedRows, *, plan: Plan) -> None:
    """Writes m_i = max x and l_i = sum exp((x - m_i) / τ) of every block of a tile of a target row.

    Grid: B * (K + 1) * tiles programs of 8 warps; one owns a tile of 8192 logits of one row.
    Bytes per row: V * itemsize read; V / 128 * 8 + tiles * 12 written. Rows past a request's drafts
    are not read.
    Why every row: with B <= 16 all rows run at about the same time, and a rejection would come too
    late to save reading.
    Memory order: the programs of this launch do not wait for one another. The first program of a
    request zeroes the counter of the next launch, which begins to load after this one has ended.
    Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867: (m, l).
    """
    num_tiles = plan.tile.num_tiles(arrays.target_logits.shape[1])
    index, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    b, i = divmod_i32(index, plan.rows_per_request)
    request = load_request(arrays, b, plan)

    @pl.when((i == 0) & (tile_index == 0))
    def _() -> None:
        out.counters[b] = jnp.uint32(0)

    @pl.when(request.active & (i <= request.num_draft_tokens))
    def _() -> None:
        tile = row_tile(arrays, request, i, tile_index)
        store_partials(tile, out.partials, index, plan.tile, plan.interpret)


def row_tile(
    arrays: VerifyArrays, request: RequestScalars, i: jax.Array, tile_index: jax.Array
) -> RowTile:
    """Returns tile `tile_index` of a request's target row i, which exists."""
    cutoff, temperature = request.cutoff(arrays, i, i >= 0), request.temperature
    row, scale = request.first_target_row + i, temperature.scale
    return RowTile(arrays.target_logits, row, tile_index, scale, cutoff, temperature.greedy)
