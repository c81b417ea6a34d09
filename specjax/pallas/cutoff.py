"""`logit_cutoff` in two launches: quarters of blocks are reduced, and one program a row searches.

The search bisects the candidates in registers, or in memory; without a bound, or with too many
logits above it, it bisects the row itself, which takes far longer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.core.bisection import Bracket, Extremes, initial_bracket
from specjax.core.truncation import (
    Filters,
    RowBounds,
    RowQueries,
    extremes_blocks,
    mass_above,
    mass_weights,
    min_kept,
    search_cutoff,
)
from specjax.implementation import Implementation
from specjax.pallas.blocks import load_row, load_some
from specjax.pallas.cutoff_bound import (
    Quarters,
    Row,
    Rows,
    asks_anything,
    bound_low,
    load_quarters,
    quarters_like,
    read_row,
    store_tile,
)
from specjax.pallas.cutoff_candidates import Found, gather
from specjax.pallas.launch import divide, fast_exp2, launch, like, value_when
from specjax.pallas.tiles import KernelConfig, Tile

__all__ = ["cutoff_rows", "in_memory", "in_registers"]


def in_registers(x: jax.Array, row: Row, interpret: bool) -> RowQueries:
    """Logits f32[N] that one program holds."""
    weights = mass_weights(x, row.anchor, row.scale, fast_exp2(interpret))
    return RowQueries(
        lambda pivot: mass_above(x, None, pivot),
        lambda pivot: mass_above(x, weights, pivot),
        lambda bracket: extremes_blocks(x, bracket),
        lambda low: min_kept(x, low, row.anchor, row.scale, row.filters.min_p),
        # A look finds few of them left.
        halvings=4,
    )


def in_memory(
    logits: Any, b: jax.Array, count: jax.Array, row: Row, tile: Tile, interpret: bool
) -> RowQueries:
    """The first `count` logits of row b, read again for every question."""
    tiles, _ = divide(count + (tile.size - 1), tile.size)
    lane = jax.lax.iota(jnp.int32, tile.size)
    zero = lane.astype(jnp.float32) * jnp.float32(0)

    def over(ask: Callable[[jax.Array], Any], merge: Callable[[Any, Any], Any], first: Any) -> Any:
        def read(number: jax.Array, so_far: Any) -> Any:
            index = number * tile.size + lane
            x = load_row(logits, b, index).astype(jnp.float32)
            x = jnp.where(index < count, x, jnp.float32(-jnp.inf))
            return jax.tree.map(merge, so_far, ask(x))

        return jax.lax.fori_loop(jnp.int32(0), tiles, read, first)

    def above(weights: Callable[[jax.Array], jax.Array], pivot: jax.Array) -> jax.Array:
        def ask(x: jax.Array) -> jax.Array:
            return jnp.where(x >= pivot, weights(x), jnp.float32(0))

        return jnp.sum(over(ask, jnp.add, zero))

    def weights(x: jax.Array) -> jax.Array:
        return mass_weights(x, row.anchor, row.scale, fast_exp2(interpret))

    def look(bracket: Bracket) -> Extremes:
        def ask(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = extremes_blocks(x[:, None], jax.tree.map(lambda key: key[None], bracket))
            return found.least, -found.most

        least, most = over(ask, jnp.minimum, (zero + jnp.inf, zero + jnp.inf))
        return Extremes(jnp.min(least), -jnp.min(most))

    def least(low: jax.Array) -> jax.Array:
        def ask(x: jax.Array) -> jax.Array:
            min_p = row.filters.min_p
            law = row.anchor[None], row.scale[None], None if min_p is None else min_p[None]
            return min_kept(x[:, None], low[None], *law)

        return jnp.min(over(ask, jnp.minimum, zero + jnp.inf))

    return RowQueries(
        lambda pivot: above(lambda x: jnp.ones_like(x), pivot),
        lambda pivot: above(weights, pivot),
        look,
        least,
    )


class _Search(NamedTuple):
    rows: Rows
    quarters: Quarters


class _Cutoffs(NamedTuple):
    """`cutoff` f32[R], and what was gathered of each row."""

    cutoff: Any
    found: Found


def cutoff_rows(
    logits: jax.Array, temperature: jax.Array, filters: Filters, *, implementation: Implementation
) -> jax.Array:
    """Returns the cutoffs of rows.

    Args:
      logits: [R, V], bf16, f16 or f32.
      temperature: f32[R].
      filters: what to keep of each.
      implementation: whose kernels run.

    Returns:
      f32[R], -inf where nothing is cut.
    """
    size, vocab_size = logits.shape
    config, interpret = implementation.config(KernelConfig), implementation.interpret
    tile, rows = config.row_tile(size, vocab_size), Rows(logits, temperature, filters)
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
            return _search_row(operands.rows, row, b, out.found, config, interpret)

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
    room = like((size, min(-(-vocab_size // 4), config.num_buffered_logits)))
    found = Found(like(quarters.max.shape, jnp.int32), room)
    return launch(
        search_kernel,
        _Search(rows, quarters),
        _Cutoffs(like((size,)), found),
        num_programs=size,
        num_warps=config.search_warps,
        interpret=interpret,
    ).cutoff


def _search_row(
    rows: Rows, row: Row, b: jax.Array, found: Found, config: KernelConfig, interpret: bool
) -> jax.Array:
    """The cutoff of a row that asks for one."""
    low, vocab_size = bound_low(row, interpret), rows.logits.shape[1]
    count = gather(rows, row, b, low, found, config, interpret)
    noted, whole = config.search_tile(), config.whole_search_tile(vocab_size)
    sources = (
        in_registers(load_some(found.values, b, config.num_register_logits, count), row, interpret),
        in_memory(found.values, b, count, row, noted, interpret),
        in_memory(rows.logits, b, jnp.int32(vocab_size), row, whole, interpret),
    )

    def search(source: RowQueries, low: jax.Array) -> jax.Array:
        known = RowBounds(row.anchor, row.mass, row.cuts_k, row.cuts_p, low)
        return search_cutoff(source, row.filters, known)

    def search_whole() -> jax.Array:
        # Without a bound from the least logit on: halvings from the least float on cost more.
        bracket = initial_bracket(low, row.anchor, row.asks)
        start = value_when(low == -jnp.inf, lambda: sources[2].extremes_inside(bracket).least, low)
        return search(sources[2], start)

    # A branch of its own for each place: what is in registers is asked in a fifth of the time.
    bounded = row.asks & (low > -jnp.inf) & (count <= found.values.shape[1])
    held, nowhere = count <= config.num_register_logits, jnp.minimum(low, -jnp.inf)
    least = value_when(bounded & held, lambda: search(sources[0], low), nowhere)
    least = jax.lax.cond(bounded & ~held, lambda: search(sources[1], low), lambda: least)
    least = jax.lax.cond(row.asks & ~bounded, search_whole, lambda: least)
    return jnp.where(row.asks, least, -jnp.inf)
