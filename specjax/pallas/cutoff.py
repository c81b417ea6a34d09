"""`logit_cutoff` in two launches: quarters of blocks are reduced, and one program a row searches.

Where there is no bound, or too much above it, the row itself is searched, which takes far longer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.core.bisection import open_bracket
from specjax.core.filters import Filters, Searched, Source, search_cutoff
from specjax.pallas.blocks import load_some
from specjax.pallas.bound import bound_low
from specjax.pallas.candidates import Found, gather
from specjax.pallas.launch import divide, launch, like, value_when
from specjax.pallas.quarters import (
    Quarters,
    Row,
    Rows,
    asks_anything,
    load_quarters,
    quarters_like,
    read_row,
    store_tile,
)
from specjax.pallas.search import in_memory, in_registers
from specjax.pallas.tiles import (
    SEARCH_HELD,
    SEARCH_NOTED,
    SEARCH_WARPS,
    row_tile,
    search_tile,
    whole_search_tile,
)

__all__ = ["cutoff_rows"]


class _Search(NamedTuple):
    rows: Rows
    quarters: Quarters


class _Cutoffs(NamedTuple):
    """`cutoff` f32[R], and what was gathered of each row."""

    cutoff: Any
    found: Found


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

    def reduce_kernel(rows: Rows, out: Quarters) -> None:
        b, number = divide(pl.program_id(0), count)

        @pl.when(asks_anything(rows, b))
        def _() -> None:
            store_tile(rows, b, number, out, tile, interpret)

    def search_kernel(operands: _Search, out: _Cutoffs) -> None:
        b = pl.program_id(0)
        # On their way before it is known whether anything is asked.
        partials = load_quarters(operands.quarters, b)

        def search() -> jax.Array:
            row = read_row(operands.rows, b, partials, interpret)
            return _search_row(operands.rows, row, b, out.found, interpret)

        asks = asks_anything(operands.rows, b)
        out.cutoff[b] = value_when(asks, search, jnp.float32(-jnp.inf))

    quarters = launch(
        reduce_kernel,
        rows,
        quarters_like(size, vocab_size, tile),
        num_programs=size * count,
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    room = like((size, min(-(-vocab_size // 4), SEARCH_NOTED)))
    found = Found(like(quarters.max.shape, jnp.int32), room)
    return launch(
        search_kernel,
        _Search(rows, quarters),
        _Cutoffs(like((size,)), found),
        num_programs=size,
        num_warps=SEARCH_WARPS,
        interpret=interpret,
    ).cutoff


def _search_row(rows: Rows, row: Row, b: jax.Array, found: Found, interpret: bool) -> jax.Array:
    """The cutoff of a row that asks for one."""
    low, vocab_size = bound_low(row, interpret), rows.logits.shape[1]
    count = gather(rows, row, b, low, found, interpret)
    noted, whole = search_tile(SEARCH_NOTED), whole_search_tile(vocab_size)
    sources = (
        in_registers(load_some(found.values, b, SEARCH_HELD, count), row, interpret),
        in_memory(found.values, b, count, row, noted, interpret),
        in_memory(rows.logits, b, jnp.int32(vocab_size), row, whole, interpret),
    )

    def search(source: Source, low: jax.Array) -> jax.Array:
        known = Searched(row.anchor, row.mass, row.cuts_k, row.cuts_p, low)
        return search_cutoff(source, row.filters, known)

    def search_whole() -> jax.Array:
        # Without a bound from the least logit on: halvings from the least float on cost more.
        bracket = open_bracket(low, row.anchor, row.asks)
        start = value_when(low == -jnp.inf, lambda: sources[2].look(bracket).least, low)
        return search(sources[2], start)

    # A branch of its own for each place: what is in registers is asked in a fifth of the time.
    bounded = row.asks & (low > -jnp.inf) & (count <= found.values.shape[1])
    held, nowhere = count <= SEARCH_HELD, jnp.minimum(low, -jnp.inf)
    least = value_when(bounded & held, lambda: search(sources[0], low), nowhere)
    least = jax.lax.cond(bounded & ~held, lambda: search(sources[1], low), lambda: least)
    least = jax.lax.cond(row.asks & ~bounded, search_whole, lambda: least)
    return jnp.where(row.asks, least, -jnp.inf)
