"""`logit_cutoff` in two launches: blocks are reduced, and one program a row guesses and searches.

Where what it gathers turns out not to hold the cutoff the row itself is searched, which takes far
longer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.filters import Filters, Searched, Source, search_cutoff
from specjax.pallas.candidates import (
    MOST_QUARTERS,
    Reduced,
    Rows,
    asks_anything,
    gather,
    guess_low,
    read_row,
    reduced_like,
    store_tile,
)
from specjax.pallas.launch import divide, launch, like, value_when
from specjax.pallas.search import in_memory, in_registers
from specjax.pallas.tiles import SEARCH_WARPS, Tile, power_of_two, row_tile, search_tile
from specjax.truncation import mass_target

__all__ = ["cutoff_rows"]


class _Search(NamedTuple):
    rows: Rows
    reduced: Reduced


class _Cutoffs(NamedTuple):
    """`cutoff` f32[R], and room i32[R, n] in which a row's program notes what it gathers."""

    cutoff: Any
    found: Any


def cutoff_rows(
    logits: jax.Array, temperature: jax.Array, filters: Filters, *, interpret: bool
) -> jax.Array:
    """The cutoffs of rows.

    Args:
      logits: [R, V], bf16, f16 or f32.
      temperature: f32[R].
      filters: what to keep of each.
      interpret: run in Pallas' interpreter.

    Returns:
      f32[R], -inf where nothing is cut.
    """
    size, vocab_size = logits.shape
    tile, rows = row_tile(size, vocab_size), Rows(logits, temperature, filters)
    count = tile.count(vocab_size)

    def reduce_kernel(rows: Rows, out: Reduced) -> None:
        b, number = divide(pl.program_id(0), count)

        @pl.when(asks_anything(rows, b))
        def _() -> None:
            store_tile(rows, b, number, out, tile, interpret)

    def search_kernel(operands: _Search, out: _Cutoffs) -> None:
        b = pl.program_id(0)

        def search() -> jax.Array:
            return _search_row(operands, b, out.found, search_tile(vocab_size), interpret)

        asks = asks_anything(operands.rows, b)
        out.cutoff[b] = value_when(asks, search, jnp.float32(-jnp.inf))

    reduced = launch(
        reduce_kernel,
        rows,
        reduced_like(size, vocab_size, tile),
        num_programs=size * count,
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    room = MOST_QUARTERS + power_of_two(reduced.quarter_max.shape[1])
    return launch(
        search_kernel,
        _Search(rows, reduced),
        _Cutoffs(like((size,)), like((size, room), jnp.int32)),
        num_programs=size,
        num_warps=SEARCH_WARPS,
        interpret=interpret,
    ).cutoff


def _search_row(
    operands: _Search, b: jax.Array, found: Any, tile: Tile, interpret: bool
) -> jax.Array:
    """The cutoff of a row that asks for one."""
    rows, reduced = operands
    row = read_row(rows, reduced, b, interpret)
    low = guess_low(row, interpret)
    x, count = gather(rows, reduced.quarter_max, b, low, found, interpret)
    source = in_registers(x, row, interpret)

    def search(source: Source, low: jax.Array) -> jax.Array:
        known = Searched(row.anchor, row.mass, row.cuts_k, row.cuts_p, low)
        return search_cutoff(source, row.filters, known)

    enough = row.asks & (low > -jnp.inf) & (count <= MOST_QUARTERS)
    if row.cuts_k is not None and row.filters.top_k is not None:
        number = source.number(low)
        enough &= ~row.cuts_k | (number >= row.filters.top_k.astype(jnp.float32))
    if row.cuts_p is not None and row.filters.top_p is not None:
        target = mass_target(row.filters.top_p, row.mass)
        of_all = row.cuts_p if row.cuts_k is None else row.cuts_p & ~row.cuts_k
        enough &= ~of_all | (source.weigh(low) >= target)
    least = value_when(enough, lambda: search(source, low), low)
    whole = in_memory(rows.logits, b, row, tile, interpret)
    nowhere = jnp.minimum(low, -jnp.inf)
    least = jax.lax.cond(enough | ~row.asks, lambda: least, lambda: search(whole, nowhere))
    return jnp.where(row.asks, least, -jnp.inf)
