"""`logit_cutoff` in two launches and four phases: reduce, bound, compact, search.

A cutoff is the smallest logit that top-k, top-p and min-p keep. A sort of V logits would find it;
here nearly all logits are excluded first, and a bisection runs over the rest.

    cutoff_reduce_kernel                  cutoff_search_kernel, one program per row
    R x tiles programs
    +-----------------+  m_i, l_i of      +----------------+  low  +--------------+  candidates
    | 1 reduce        |  32-token    ---> | 2 bound        | ----> | 3 compact    | --------+
    | logits, once    |  sub-blocks       | 7 halvings     |       | logits >= low|         |
    +-----------------+                   | over (m_i, l_i)|       +--------------+         v
                                          +----------------+             +------------------------+
                                                                         | 4 search               |
                    the smallest logit that all filters keep <---------- | bisection of the values|
                                                                         +------------------------+

1. reduce: every program reduces a tile of a row to the largest logit m_i and the sum of
   exponentials l_i of each sub-block (`bound.store_sub_blocks`).
2. bound: from (m_i, l_i) alone follows a logit `low` that the cutoff is not below
   (`bound.bound_cutoff`).
3. compact: the logits at or above `low` are gathered. Most sub-blocks have none. Where one has
   exactly one by (m_i, l_i), it is m_i. The others are read again
   (`candidates.compact_candidates`).
4. search: a bisection among the candidates, alternately at the middle value and at the middle bit
   pattern of the bracket, gives the cutoff
   (`core.truncation.search_cutoff`, `core.bisection`). At most 2048 candidates lie in registers, at
   most min(V / 4, 32768) in the buffer. Where there are more, more than 2048 sub-blocks to read
   again, or no bound, the search reads the row itself, which takes far longer.

The two bisections differ. Phase 2 bisects the distance from the row's largest logit, seven times,
and leaves a bound. Phase 4 bisects the logits themselves. Every few halvings it narrows the bracket
to the least and the largest logit inside, so it ends at one value. It runs for top-k first, from
`low`; the threshold that it finds is the lower end of the search for top-p.

Axes: `R` rows, `V` vocabulary.
"""

import functools
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
from specjax.pallas.blocks import load_prefix, load_raw_logits
from specjax.pallas.cutoff.bound import (
    CutoffRows,
    RowSummary,
    SubBlocks,
    any_filter_active,
    bound_cutoff,
    load_sub_blocks,
    store_sub_blocks,
    sub_blocks_shape,
    summarize_row,
)
from specjax.pallas.cutoff.candidates import CandidateBuffer, compact_candidates
from specjax.pallas.kernel_config import KernelConfig, Tile
from specjax.pallas.launch import cond_or, divmod_i32, launch, make_exp2, output

__all__ = [
    "cutoff_reduce_kernel",
    "cutoff_rows",
    "cutoff_search_kernel",
    "memory_queries",
    "register_queries",
]


def register_queries(x: jax.Array, row: RowSummary, interpret: bool) -> RowQueries:
    """Returns queries on logits f32[N] that the program holds in registers."""
    weights = mass_weights(x, row.anchor, row.scale, make_exp2(interpret))
    return RowQueries(
        count_above=lambda pivot: mass_above(x, None, pivot),
        mass_above=lambda pivot: mass_above(x, weights, pivot),
        extremes_inside=lambda bracket: extremes_blocks(x, bracket),
        min_kept=lambda low: min_kept(x, low, row.anchor, row.scale, row.filters.min_p),
        # Between two clamps of the bracket: a clamp is cheap among few candidates.
        halvings=4,
    )


def memory_queries(
    logits: Any, b: jax.Array, count: jax.Array, row: RowSummary, tile: Tile, interpret: bool
) -> RowQueries:
    """Returns queries on the first `count` logits of row b; each query reads them from memory.

    A query merges the tiles elementwise, then reduces the merged tile to a scalar.
    """
    num_tiles, _ = divmod_i32(count + (tile.size - 1), tile.size)
    offset = jax.lax.iota(jnp.int32, tile.size)
    zero = offset.astype(jnp.float32) * jnp.float32(0)  # 0 for each element, as a computed value

    def fold_tiles(
        query: Callable[[jax.Array], Any], merge: Callable[[Any, Any], Any], initial: Any
    ) -> Any:
        def add_tile(tile_index: jax.Array, state: Any) -> Any:
            index = tile_index * tile.size + offset
            x = load_raw_logits(logits, b, index).astype(jnp.float32)
            x = jnp.where(index < count, x, jnp.float32(-jnp.inf))
            return jax.tree.map(merge, state, query(x))

        return jax.lax.fori_loop(jnp.int32(0), num_tiles, add_tile, initial)

    def sum_above(weights: Callable[[jax.Array], jax.Array], pivot: jax.Array) -> jax.Array:
        def query(x: jax.Array) -> jax.Array:
            return jnp.where(x >= pivot, weights(x), jnp.float32(0))

        return jnp.sum(fold_tiles(query, jnp.add, zero))

    def weights(x: jax.Array) -> jax.Array:
        return mass_weights(x, row.anchor, row.scale, make_exp2(interpret))

    def extremes_inside(bracket: Bracket) -> Extremes:
        def query(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Each element is a block of its own. Minima of x and of -x: one merge serves both.
            extremes = extremes_blocks(x[:, None], jax.tree.map(lambda key: key[None], bracket))
            return extremes.least, -extremes.most

        least, most = fold_tiles(query, jnp.minimum, (zero + jnp.inf, zero + jnp.inf))
        return Extremes(jnp.min(least), -jnp.min(most))

    def min_kept_above(low: jax.Array) -> jax.Array:
        def query(x: jax.Array) -> jax.Array:
            min_p = row.filters.min_p
            options = row.anchor[None], row.scale[None], None if min_p is None else min_p[None]
            return min_kept(x[:, None], low[None], *options)

        return jnp.min(fold_tiles(query, jnp.minimum, zero + jnp.inf))

    return RowQueries(
        count_above=lambda pivot: sum_above(jnp.ones_like, pivot),
        mass_above=lambda pivot: sum_above(weights, pivot),
        extremes_inside=extremes_inside,
        min_kept=min_kept_above,
    )


class _SearchOperands(NamedTuple):
    rows: CutoffRows
    sub_blocks: SubBlocks


class _SearchOutputs(NamedTuple):
    """`cutoff` f32[R], and memory in which the programs keep candidates."""

    cutoff: Any
    buffer: CandidateBuffer


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
    num_rows, vocab_size = logits.shape
    config, interpret = implementation.config(KernelConfig), implementation.interpret
    tile, rows = config.reduce_tile(num_rows, vocab_size), CutoffRows(logits, temperature, filters)
    sub_blocks = launch(
        functools.partial(cutoff_reduce_kernel, tile=tile, interpret=interpret),
        rows,
        sub_blocks_shape(num_rows, vocab_size, tile),
        num_programs=num_rows * tile.num_tiles(vocab_size),
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    # A row with more candidates than a quarter of its logits is searched itself.
    values = output((num_rows, min(-(-vocab_size // 4), config.num_buffered_logits)))
    buffer = CandidateBuffer(output(sub_blocks.max.shape, jnp.int32), values)
    return launch(
        functools.partial(cutoff_search_kernel, config=config, interpret=interpret),
        _SearchOperands(rows, sub_blocks),
        _SearchOutputs(output((num_rows,)), buffer),
        num_programs=num_rows,
        num_warps=config.num_search_warps,
        interpret=interpret,
    ).cutoff


def cutoff_reduce_kernel(rows: CutoffRows, out: SubBlocks, *, tile: Tile, interpret: bool) -> None:
    """Phase 1: writes m_i = max x and l_i = sum exp((x - m_i) / τ) of every sub-block i of a tile.

    Grid: R * tiles programs of 8 warps; one owns a tile of one row, 4096 logits if R <= 16, else
    16384.
    Bytes per row: V * itemsize read; V / 32 * 8 written. Rows that no filter cuts are not read.
    Why tiles: a row's tiles together keep the whole memory busy; one program could not.
    Memory order: the next launch begins to load after this one has ended.
    Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867 (online softmax): (m, l).
    """
    b, tile_index = divmod_i32(pl.program_id(0), tile.num_tiles(rows.logits.shape[1]))

    @pl.when(any_filter_active(rows, b))
    def _() -> None:
        store_sub_blocks(rows, b, tile_index, out, tile, interpret)


def cutoff_search_kernel(
    operands: _SearchOperands, out: _SearchOutputs, *, config: KernelConfig, interpret: bool
) -> None:
    """Phases 2 to 4: writes the smallest logit that all filters of a row keep; -inf if none cuts.

    Formula: top-k keeps logits >= the largest t with #{x >= t} >= k. Top-p keeps, of those, the
    logits >= the largest t such that they have at least p of the mass that top-k kept. Min-p keeps
    logits with (x - max) / τ >= log(min_p). The cutoff is the smallest logit that is kept.
    Grid: R programs of 8 warps; one owns a row.
    Bytes per row: V / 32 * 8 read, all loads in flight before the filters are known; 32 * itemsize
    for each sub-block that may hold several candidates; 4 for each candidate, written and read; 4
    written. Where phase 4 reads the row (above): the row itself, once per step of the search.
    Why one program: the search is a chain of about 20 sums that each need the one before. Within a
    program such a sum costs a barrier; between programs it would cost a launch.
    Memory order: a debug barrier orders the stores of a program's threads to the buffer before
    their loads from it. No program reads what another of this launch writes.
    """
    b = pl.program_id(0)
    # Loaded before it is known whether a filter cuts the row.
    partials = load_sub_blocks(operands.sub_blocks, b)

    def search() -> jax.Array:
        row = summarize_row(operands.rows, b, partials, interpret)
        return _search_row(operands.rows, row, b, out.buffer, config, interpret)

    active = any_filter_active(operands.rows, b)
    out.cutoff[b] = cond_or(active, search, jnp.float32(-jnp.inf))


def _search_row(
    rows: CutoffRows,
    row: RowSummary,
    b: jax.Array,
    buffer: CandidateBuffer,
    config: KernelConfig,
    interpret: bool,
) -> jax.Array:
    """Returns the cutoff of row b, which some filter cuts if it is a distribution."""
    low, vocab_size = bound_cutoff(row, interpret), rows.logits.shape[1]
    count = compact_candidates(rows, row, b, low, buffer, config, interpret)
    buffer_tile, whole_row_tile = config.buffer_search_tile(), config.row_search_tile(vocab_size)
    candidates = load_prefix(buffer.values, b, config.num_register_logits, count)
    in_registers = register_queries(candidates, row, interpret)
    in_buffer = memory_queries(buffer.values, b, count, row, buffer_tile, interpret)
    in_row = memory_queries(rows.logits, b, jnp.int32(vocab_size), row, whole_row_tile, interpret)

    def search(row_queries: RowQueries, low: jax.Array) -> jax.Array:
        bounds = RowBounds(row.anchor, row.mass, row.cuts_k, row.cuts_p, low)
        return search_cutoff(row_queries, row.filters, bounds)

    def search_whole_row() -> jax.Array:
        # Without a bound it starts at the least logit: bisections from the least float cost more.
        bracket = initial_bracket(low, row.anchor, row.is_cut)
        start = cond_or(low == -jnp.inf, lambda: in_row.extremes_inside(bracket).least, low)
        return search(in_row, start)

    # One branch for each place of the candidates: registers answer in a fifth of the time.
    is_buffered = row.is_cut & (low > -jnp.inf) & (count <= buffer.values.shape[1])
    # A computed -inf, which Triton takes as the result of a branch.
    fits, no_cutoff = count <= config.num_register_logits, jnp.minimum(low, -jnp.inf)
    cutoff = cond_or(is_buffered & fits, lambda: search(in_registers, low), no_cutoff)
    cutoff = jax.lax.cond(is_buffered & ~fits, lambda: search(in_buffer, low), lambda: cutoff)
    cutoff = jax.lax.cond(row.is_cut & ~is_buffered, search_whole_row, lambda: cutoff)
    return jnp.where(row.is_cut, cutoff, -jnp.inf)
