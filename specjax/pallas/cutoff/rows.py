"""`logit_cutoff` in two launches and four phases: reduce, bound, compact, search.

A cutoff is the smallest logit that top-k, top-p and min-p keep. A sort of V logits would find it;
here nearly all logits are excluded first, and a search runs over the rest.

    cutoff_reduce_kernel         cutoff_search_kernel, S programs per row
    R x tiles programs
    +-----------------+          +-----------------+ few    program 0
    | 1 reduce        | m_i, l_i | 2 bound         | reach  +---------------+     +--------------+
    | logits, once    | -------> | 7 halvings over | -----> | 3 compact     | --> | 4 search:    |
    | 32-token        |          | (m_i, l_i): low |        | logits >= low |     | bisection    |
    | sub-blocks      |          |                 |        +---------------+     +--------------+
    +-----------------+          |                 | many   the S programs as a team
                                 |                 | reach  +------------------------------------+
                                 |                 | -----> | 4 search: P pivots in each pass    |
                                 +-----------------+        | over the row; members sum shares   |
                                                            +------------------------------------+

1. reduce: every program reduces a tile of a row to the largest logit m_i and the sum of
   exponentials l_i of each sub-block (`bound.store_sub_blocks`).
2. bound: (m_i, l_i) alone give a lower bound `low` of the cutoff (`bound.bound_cutoff`).
3. compact: the logits at or above `low` are gathered. Most sub-blocks have none. Where one has
   exactly one by (m_i, l_i), it is m_i. The others are read again
   (`candidates.compact_candidates`).
4. search: among the candidates (`core.truncation.search_cutoff`). Up to 2048 candidates lie in
   registers, and a bisection finds the cutoff. It alternates between the middle value and the
   middle bit pattern of the bracket. Up to min(V / 4, 32768) candidates lie in the buffer, which
   a search reads again for every P pivots.

A row is wide if more than `KernelConfig.max_reread` sub-blocks would have to be read again, or if
no bound is known. Thousands of its tokens are kept. A wide row skips phase 3, and its programs
search it together (`team`). Therefore all S programs of a row compute its bound, on multiprocessors
that would idle. If the row is not wide, all but program 0 then end. A row with more candidates than
the buffer holds is searched by program 0 alone.

The two bisections differ. Phase 2 bisects the distance from the row's largest logit, seven times,
for a bound. Phase 4 searches the logits themselves. It runs for top-k first, from `low`. The
threshold of top-k is then the lower end of the search for top-p.

Axes: `R` rows, `V` vocabulary, `S` programs per row, `P` pivots.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.core.truncation import Filters, refuse_nan
from specjax.implementation import Implementation
from specjax.pallas.cutoff.bound import (
    CutoffRows,
    RowSummary,
    SubBlocks,
    any_filter_active,
    bound_cutoff,
    load_filters,
    load_sub_blocks,
    store_sub_blocks,
    sub_blocks_shape,
    summarize_row,
)
from specjax.pallas.cutoff.candidates import (
    CandidateBuffer,
    classify_sub_blocks,
    compact_candidates,
)
from specjax.pallas.cutoff.search import search_by_team, search_candidates
from specjax.pallas.cutoff.team import (
    Counters,
    Team,
    TeamMemory,
    counters_shape,
    form_team,
    sums_shape,
)
from specjax.pallas.kernel_config import KernelConfig, Tile
from specjax.pallas.launch import cond_or, divmod_i32, launch, output


class _ReduceOutputs(NamedTuple):
    """Partials of sub-blocks, and counters of the teams, all 0."""

    sub_blocks: SubBlocks
    counters: Counters


class _SearchOperands(NamedTuple):
    rows: CutoffRows
    sub_blocks: SubBlocks
    counters: Counters


class _SearchOutputs(NamedTuple):
    """`cutoff` f32[R], and memory of the programs of each row: candidates, and its team's."""

    cutoff: Any
    buffer: CandidateBuffer
    counters: Counters
    sums: Any


def cutoff_rows(
    logits: jax.Array, temperature: jax.Array, filters: Filters, *, implementation: Implementation
) -> jax.Array:
    """Returns the cutoffs of rows.

    Args:
      logits: [R, V], bf16, f16 or f32.
      temperature: f32[R].
      filters: of each row.
      implementation: whose kernels run.

    Returns:
      f32[R], -inf where nothing is cut.
    """
    num_rows, vocab_size = logits.shape
    config, interpret = implementation.config(KernelConfig), implementation.interpret
    tile, rows = config.reduce_tile(num_rows, vocab_size), CutoffRows(logits, temperature, filters)
    reduced = launch(
        functools.partial(cutoff_reduce_kernel, tile=tile, interpret=interpret),
        rows,
        _ReduceOutputs(sub_blocks_shape(num_rows, vocab_size, tile), counters_shape(num_rows)),
        num_programs=num_rows * tile.num_tiles(vocab_size),
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    # If more than a quarter of a row's logits are candidates, the row itself is searched.
    values = output((num_rows, min(-(-vocab_size // 4), config.num_buffered_logits)))
    buffer = CandidateBuffer(output(reduced.sub_blocks.max.shape, jnp.int32), values)
    sums = sums_shape(num_rows, config)
    return launch(
        functools.partial(cutoff_search_kernel, config=config, interpret=interpret),
        _SearchOperands(rows, reduced.sub_blocks, reduced.counters),
        _SearchOutputs(output((num_rows,)), buffer, reduced.counters, sums),
        num_programs=num_rows * config.search_programs(num_rows),
        num_warps=config.num_search_warps,
        interpret=interpret,
    ).cutoff


def cutoff_reduce_kernel(
    rows: CutoffRows, out: _ReduceOutputs, *, tile: Tile, interpret: bool
) -> None:
    """Phase 1: writes m_i = max x and l_i = sum exp((x - m_i) / τ) of every sub-block i of a tile.

    Grid: R * tiles programs of 8 warps; one owns a tile of one row, 4096 logits if R <= 16, else
    16384.
    Bytes per row: V * itemsize read; V / 32 * 8 written, and 12 of counters. Rows that no filter
    cuts are not read.
    Why tiles: a row's tiles together keep the whole memory busy; one program could not.
    Memory order: the next launch begins to load after this one has ended.
    Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867 (online softmax): (m, l).
    """
    b, tile_index = divmod_i32(pl.program_id(0), tile.num_tiles(rows.logits.shape[1]))

    @pl.when(any_filter_active(rows, b))
    def _() -> None:
        store_sub_blocks(rows, b, tile_index, out.sub_blocks, tile, interpret)

        @pl.when(tile_index == 0)
        def _() -> None:
            for counter in out.counters:
                counter[b] = jnp.int32(0)


def cutoff_search_kernel(
    operands: _SearchOperands, out: _SearchOutputs, *, config: KernelConfig, interpret: bool
) -> None:
    """Phases 2 to 4: writes the smallest logit that all filters of a row keep; -inf if none cuts.

    Formula: top-k keeps logits >= the largest t with #{x >= t} >= k. Top-p keeps, of those, the
    logits >= the largest t such that they have at least p of the mass that top-k kept. Min-p keeps
    logits with (x - max) / τ >= log(min_p). The cutoff is the smallest logit that is kept.
    Grid: R * S programs of 8 warps, program 0 of all rows first; S = 128 / R, from 1 to 16, R
    padded to a power of two. Program 0 owns a row that is not wide, its team a wide one.
    Bytes per row: S * V / 32 * 8 read, all loads in flight before the filters are known. Then 32 *
    itemsize for each sub-block that may hold several candidates; 4 for each candidate, written and
    read; 4 written. A wide row: V * itemsize read and 512 * (S + 1) exchanged in each pass, of
    which bf16 takes 3 or 4, f32 8.
    Why one program: the search among few candidates is a chain of about 20 sums that each need the
    one before. Within a program such a sum costs a barrier; between programs a microsecond.
    Why several: a pass over a wide row takes one program about 40 us at V = 131072.
    Memory order: a debug barrier orders the stores of a program's threads to the buffer before
    their loads from it. A team's members wait for each other (`team`), and for no other program.
    References: Fan et al., 2018, arXiv:1805.04833 (top-k); Holtzman et al., 2019, arXiv:1904.09751
    (top-p); Nguyen et al., 2024, arXiv:2407.01082 (min-p).
    """
    member, b = divmod_i32(pl.program_id(0), operands.rows.logits.shape[0])
    is_first = member == 0
    # Loaded early, so that the loads do not wait for the filters.
    partials = load_sub_blocks(operands.sub_blocks, b)
    active = any_filter_active(operands.rows, b)

    @pl.when(active)
    def _() -> None:
        row = summarize_row(operands.rows, b, partials, config, interpret)
        _search_row(row, is_first, out)

    @pl.when(~active & is_first)
    def _() -> None:
        # -inf as a computed value: Triton's lowering takes no such literal.
        keeps_all = jnp.where(active, jnp.float32(0), jnp.float32(-jnp.inf))
        out.cutoff[b] = refuse_nan(keeps_all, load_filters(operands.rows, b))


def _search_row(row: RowSummary, is_first: jax.Array, out: _SearchOutputs) -> None:
    """Writes the cutoff of a row; some filter cuts the row if it is a distribution."""
    b, config = row.b, row.config
    num_programs = config.search_programs(row.rows.logits.shape[0])
    low, buffer = bound_cutoff(row), out.buffer
    kinds = classify_sub_blocks(row, low)
    num_reread = kinds.num[1]
    limit = jnp.int32(config.reread_limit(num_programs))
    if row.cuts_p is not None:
        limit = jnp.where(row.cuts_p, jnp.int32(config.reread_limit(None)), limit)
    by_team = row.is_cut & ((low == -jnp.inf) | (num_reread > limit))
    by_first = is_first & ~by_team
    count = cond_or(
        by_first, lambda: compact_candidates(row, kinds, buffer), jnp.minimum(num_reread, 0)
    )
    overflows = by_first & row.is_cut & (count > buffer.values.shape[1])

    @pl.when(by_first & ~overflows)
    def _() -> None:
        cutoff = search_candidates(buffer.values, count, row, low)
        cutoff = jnp.where(row.is_cut, cutoff, jnp.float32(-jnp.inf))
        out.cutoff[b] = refuse_nan(cutoff, row.filters)

    @pl.when(by_team | overflows)
    def _() -> None:
        # Rank 0 of 1 member, as computed values: `cond_or` takes no literal.
        only_first = Team(jnp.minimum(count, 0), jnp.maximum(jnp.minimum(count, 1), 1))
        team = cond_or(by_team, lambda: form_team(out.counters, b, num_programs), only_first)

        @pl.when(team.rank < team.size)
        def _() -> None:
            cutoff = search_by_team(row, low, team, TeamMemory(out.counters, out.sums))

            @pl.when(team.rank == 0)
            def _() -> None:
                out.cutoff[b] = refuse_nan(cutoff, row.filters)
