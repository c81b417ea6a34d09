"""`logit_cutoff` in four launches: blocks are reduced, and candidates guessed, gathered, searched.

Where they turn out not to hold the cutoff the row itself is searched, which takes far longer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.filters import Filters, Searched, Source, search_cutoff
from specjax.logits import read_temperature
from specjax.pallas.candidates import (
    Candidates,
    Rows,
    asks_anything,
    candidates_like,
    guess_low,
    read_row,
    store_candidates,
)
from specjax.pallas.launch import divide, launch, like, value_when
from specjax.pallas.logsumexp import (
    Partials,
    Share,
    load_line,
    partials_like,
    store_partials,
)
from specjax.pallas.search import in_memory, in_registers, load_candidates
from specjax.pallas.tiles import GUESS_WARPS, SEARCH_WARPS, Tile, row_tile, search_tile
from specjax.truncation import mass_target

__all__ = ["cutoff_rows"]

# Candidates of a tile that most rows do not exceed: a row of them is searched in few registers.
_FEW = 32


class _Reduced(NamedTuple):
    rows: Rows
    partials: Partials


class _Guesses(NamedTuple):
    low: Any


class _Gather(NamedTuple):
    rows: Rows
    block_max: Any
    low: Any


class _Search(NamedTuple):
    rows: Rows
    partials: Partials
    candidates: Candidates


class _Cutoffs(NamedTuple):
    cutoff: Any


def cutoff_rows(
    logits: jax.Array,
    temperature: jax.Array,
    filters: Filters,
    *,
    interpret: bool,
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

    def reduce_kernel(rows: Rows, out: Partials) -> None:
        b, number = divide(pl.program_id(0), count)

        @pl.when(asks_anything(rows, b))
        def _() -> None:
            scale = read_temperature(rows.temperature[b]).scale
            share = Share(rows.logits, b, number, scale, None, None)
            store_partials(share, out, b, tile, interpret)

    def guess_kernel(reduced: _Reduced, out: _Guesses) -> None:
        b = pl.program_id(0)

        @pl.when(asks_anything(reduced.rows, b))
        def _() -> None:
            row = read_row(*reduced, b, interpret)
            out.low[b] = guess_low(row, interpret)

    partials = launch(
        reduce_kernel,
        rows,
        partials_like(size, vocab_size, tile, tiles=False),
        num_programs=size * count,
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    guesses = launch(
        guess_kernel,
        _Reduced(rows, partials),
        _Guesses(like((size,))),
        num_programs=size,
        num_warps=GUESS_WARPS,
        interpret=interpret,
    )
    return _search_rows(rows, partials, guesses.low, interpret)


def _search_rows(rows: Rows, partials: Partials, low: jax.Array, interpret: bool) -> jax.Array:
    """Gathers the candidates of rows and searches them."""
    size, vocab_size = rows.logits.shape
    tile = search_tile(vocab_size)
    tiles = tile.count(vocab_size)

    def gather_kernel(operands: _Gather, out: Candidates) -> None:
        b, number = divide(pl.program_id(0), tiles)

        @pl.when(asks_anything(operands.rows, b))
        def _() -> None:
            store_candidates(*operands, out, b, number, tile)

    def search_kernel(operands: _Search, out: _Cutoffs) -> None:
        b = pl.program_id(0)

        def search() -> jax.Array:
            return _search_row(operands, b, tile, interpret)

        asks = asks_anything(operands.rows, b)
        out.cutoff[b] = value_when(asks, search, jnp.float32(-jnp.inf))

    candidates = launch(
        gather_kernel,
        _Gather(rows, partials.block_max, low),
        candidates_like(rows.logits, tile, None),
        num_programs=size * tiles,
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    return launch(
        search_kernel,
        _Search(rows, partials, candidates._replace(low=low)),
        _Cutoffs(like((size,))),
        num_programs=size,
        num_warps=SEARCH_WARPS,
        interpret=interpret,
    ).cutoff


def _search_row(operands: _Search, b: jax.Array, tile: Tile, interpret: bool) -> jax.Array:
    """The cutoff of a row that asks for one."""
    rows, partials, candidates = operands
    row, low = read_row(rows, partials, b, interpret), candidates.low[b]
    counts = load_line(candidates.count, b, 0)
    most, number = jnp.max(counts), jnp.sum(counts, dtype=jnp.int32)

    def search(source: Source, low: jax.Array) -> jax.Array:
        known = Searched(row.anchor, row.mass, row.cuts_k, row.cuts_p, low)
        return search_cutoff(source, row.filters, known)

    def packed(capacity: int) -> Callable[[], tuple[jax.Array, jax.Array]]:
        def run() -> tuple[jax.Array, jax.Array]:
            x = load_candidates(candidates, b, capacity)
            source = in_registers(x, row, interpret)
            enough = row.asks
            if row.cuts_k is not None and row.filters.top_k is not None:
                enough &= ~row.cuts_k | (number >= row.filters.top_k)
            if row.cuts_p is not None and row.filters.top_p is not None:
                target = mass_target(row.filters.top_p, row.mass)
                of_all = row.cuts_p if row.cuts_k is None else row.cuts_p & ~row.cuts_k
                enough &= ~of_all | (source.weigh(low) >= target)
            least = value_when(enough, lambda: search(source, low), low)
            return least, enough

        return run

    few = min(_FEW, candidates.capacity)

    def many() -> tuple[jax.Array, jax.Array]:
        fits = most <= candidates.capacity
        return value_when(fits, packed(candidates.capacity), (low, fits))

    least, enough = jax.lax.cond(most <= few, packed(few), many)
    whole = in_memory(rows.logits, b, row, tile, interpret)
    nowhere = jnp.minimum(low, -jnp.inf)
    least = jax.lax.cond(enough | ~row.asks, lambda: least, lambda: search(whole, nowhere))
    return jnp.where(row.asks, least, -jnp.inf)
