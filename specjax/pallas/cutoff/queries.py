"""Searches of a cutoff among logits held in registers, or read from memory in each pass.

In registers a query costs little, and a search halves its bracket. A pass over logits in memory
reads them again, so it compares with several pivots at once:

    mass above each of P pivots = sum over chunks x of (x[None] >= pivots[:, None]) weight(x)[None]

Axes: `P` pivots, `W` columns: logits of a chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.pivot_search import Pass, search_by_pivots, unused_key_bits
from specjax.core.truncation import (
    RowQueries,
    extremes_blocks,
    mass_above,
    mass_weights,
    min_kept,
)
from specjax.pallas.cutoff.bound import RowSummary
from specjax.pallas.kernel_config import Tile
from specjax.pallas.launch import cond_or, make_add_above, make_exp2

# Merges the results of queries on parts of a row, f32[parts, P] to f32[P].
Merge = Callable[[jax.Array], jax.Array]
# Called as exchange(slot, ask, merge). The query `ask(first, end)` returns f32[P] of the steps
# `first` to `end` - 1. The exchange runs it on every part of the row, and returns the merged result
# of the whole row, f32[P]. Programs of a team store their results in slot i32[] of its memory.
Exchange = Callable[[jax.Array, Callable[[jax.Array, jax.Array], jax.Array], Merge], jax.Array]

# Columns of a warp, one per thread. A thread holds P sums of its column in registers. Logits keep
# the layout of their load, and nothing passes through shared memory.
_COLUMNS_PER_WARP = 32
# Chunks read at once for the smallest kept logit.
_NUM_MIN_CHUNKS = 4


class MemoryRow(NamedTuple):
    """The logits of a row in memory, and how a program reads them.

    Attributes:
      values: reference [R, N].
      row_index: i32.
      num_logits: i32; the row's first `num_logits` values are logits, and others are not read.
      num_columns: W.
      num_chunks: chunks of W logits that a program reads at once: one step.
    """

    values: Any
    row_index: jax.Array
    num_logits: jax.Array
    num_columns: int
    num_chunks: int

    @property
    def step_size(self) -> int:
        """Logits that a program reads at once."""
        return self.num_columns * self.num_chunks

    def load(self, step: jax.Array) -> list[jax.Array]:
        """Loads the chunks of a step, f32[W] each; -inf past the last logit."""
        column = jax.lax.iota(jnp.int32, self.num_columns)
        starts = range(0, self.step_size, self.num_columns)
        indices = [step * self.step_size + (start + column) for start in starts]
        # Past the end the last logit is read. A masked load would hold one of a thread's seven
        # predicates, and only six loads would be in flight.
        last = self.num_logits - 1
        loaded = [
            plgpu.load(self.values.at[self.row_index, jnp.minimum(index, last)])
            for index in indices
        ]
        return [
            jnp.where(index <= last, x.astype(jnp.float32), jnp.float32(-jnp.inf))
            for index, x in zip(indices, loaded, strict=True)
        ]


def split_steps(num_logits: int, tile: Tile) -> tuple[int, int, int]:
    """Returns W, the chunks of a step, and the number of steps in which a program reads logits.

    The steps are equal, and a step has at most a tile's logits.
    """
    num_columns = min(tile.size, _COLUMNS_PER_WARP * tile.num_warps)
    num_chunks = -(-num_logits // num_columns)
    num_steps = -(-num_chunks // (tile.size // num_columns))
    return num_columns, -(-num_chunks // num_steps), num_steps


def register_queries(x: jax.Array, row: RowSummary) -> RowQueries:
    """Returns queries on logits f32[N] that the program holds in registers."""
    weights = mass_weights(x, row.anchor, row.scale, make_exp2(row.interpret))
    return RowQueries(
        count_above=lambda pivot: mass_above(x, None, pivot),
        mass_above=lambda pivot: mass_above(x, weights, pivot),
        extremes_inside=lambda bracket: extremes_blocks(x, bracket),
        min_kept=lambda low: min_kept(x, low, row.anchor, row.scale, row.filters.min_p),
        # Between two clamps of the bracket: a clamp is cheap among few candidates.
        halvings=4,
    )


def search_in_memory(
    memory: MemoryRow, row: RowSummary, low: jax.Array, exchange: Exchange
) -> jax.Array:
    """Returns the cutoff f32[] of a row in memory, which is read again in each pass.

    Args:
      memory: where the logits are.
      row: its summary; `config` says how many pivots a pass has.
      low: f32, a lower bound of the cutoff.
      exchange: runs a query on each part of the row, and merges the results.
    """
    num_pivots = row.config.num_pivots

    def weigh(x: jax.Array, counts: jax.Array | bool) -> jax.Array:
        if counts is True:
            return jnp.ones_like(x)
        weights = mass_weights(x, row.anchor, row.scale, make_exp2(row.interpret))
        return weights if counts is False else jnp.where(counts, jnp.float32(1), weights)

    def sums_above(one_pass: Pass) -> jax.Array:
        def ask(first: jax.Array, end: jax.Array) -> jax.Array:
            weights = functools.partial(weigh, counts=one_pass.counts)
            return _sum_above(memory, first, end, weights, one_pass.pivots, row.interpret)

        # Two slots in turn: what one pass stored is read while the next pass stores.
        return exchange(one_pass.number % 2, ask, lambda parts: jnp.sum(parts, axis=0))

    bits, bounds = unused_key_bits(row.rows.logits.dtype), row.bounds(low)
    low, is_logit = search_by_pivots(sums_above, row.filters, bounds, num_pivots, bits)
    if row.filters.min_p is not None:
        is_logit &= ~(row.filters.min_p > 0)
    low = jnp.maximum(low, jnp.float32(jnp.finfo(jnp.float32).min))

    def ask(first: jax.Array, end: jax.Array) -> jax.Array:
        return jnp.broadcast_to(_min_kept(memory, first, end, low, row), (num_pivots,))

    def smallest_kept() -> jax.Array:
        # A slot of its own: it may follow any pass.
        return jnp.min(exchange(jnp.int32(2), ask, lambda parts: jnp.min(parts, axis=0)))

    return cond_or(~is_logit, smallest_kept, low)


def _sum_above(
    memory: MemoryRow,
    first: jax.Array,
    end: jax.Array,
    weights: Callable[[jax.Array], jax.Array],
    pivots: jax.Array,
    interpret: bool,
) -> jax.Array:
    """Returns the sums of weights at or above pivots f32[P], over steps from `first` to `end`."""
    shape, add_above = (pivots.shape[0], memory.num_columns), make_add_above(interpret)
    columns = jnp.broadcast_to(pivots[:, None], shape)

    def add_step(step: jax.Array, sums: jax.Array) -> jax.Array:
        for x in memory.load(step):
            x_rows, weight_rows = (jnp.broadcast_to(y[None], shape) for y in (x, weights(x)))
            sums = add_above(sums, x_rows, columns, weight_rows)
        return sums

    zeros = jnp.zeros(shape, jnp.float32)
    return jnp.sum(jax.lax.fori_loop(first, end, add_step, zeros), axis=1)


def _min_kept(
    memory: MemoryRow, first: jax.Array, end: jax.Array, low: jax.Array, row: RowSummary
) -> jax.Array:
    """Returns the smallest logit at or above `low` that min-p keeps, of steps; +inf for none."""
    min_p = row.filters.min_p
    options = row.anchor[None], row.scale[None], None if min_p is None else min_p[None]
    # One pass of a search has short steps: each chunk of a step is code to be compiled.
    parts = memory.num_chunks // math.gcd(memory.num_chunks, _NUM_MIN_CHUNKS)
    memory = memory._replace(num_chunks=memory.num_chunks // parts)

    def take_step(step: jax.Array, least: jax.Array) -> jax.Array:
        for x in memory.load(step):
            # Each element is a block of its own.
            least = jnp.minimum(least, min_kept(x[:, None], low[None], *options))
        return least

    start = jnp.full((memory.num_columns,), jnp.inf, jnp.float32)
    return jnp.min(jax.lax.fori_loop(first * parts, end * parts, take_step, start))
