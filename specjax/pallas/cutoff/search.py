"""Phase 4 of `logit_cutoff`: the search, among a row's candidates or in a whole row by a team."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.truncation import search_cutoff
from specjax.pallas.blocks import load_first_values
from specjax.pallas.cutoff.bound import RowSummary
from specjax.pallas.cutoff.queries import (
    MemoryRow,
    Merge,
    register_queries,
    search_in_memory,
    split_steps,
)
from specjax.pallas.cutoff.team import NUM_SHARES, Team, TeamMemory, reduce_shares
from specjax.pallas.launch import cond_or, divmod_i32


def search_candidates(values: Any, count: jax.Array, row: RowSummary, low: jax.Array) -> jax.Array:
    """Returns the cutoff of a row whose candidates all lie in the buffer; -inf if it is not cut.

    Args:
      values: reference to the candidates of all rows, f32[R, L].
      count: i32, how many the row has.
      row: its summary; `config` says how many candidates are searched in registers.
      low: f32, a lower bound of its cutoff.
    """
    num_register_logits, tile = row.config.num_register_logits, row.config.buffer_search_tile()
    x = load_first_values(values, row.b, num_register_logits, count)
    num_columns, num_chunks, _ = split_steps(tile.size, tile)
    memory = MemoryRow(values, row.b, count, num_columns, num_chunks)
    num_steps, _ = divmod_i32(count + (tile.size - 1), tile.size)

    def ask_whole(_: jax.Array, ask: Callable[..., jax.Array], __: Merge) -> jax.Array:
        return ask(jnp.int32(0), num_steps)

    # One branch for each place of the candidates: a query in registers takes a fifth of the time.
    fits, no_cutoff = count <= num_register_logits, jnp.minimum(low, -jnp.inf)
    queries = register_queries(x, row)

    def search_registers() -> jax.Array:
        return search_cutoff(queries, row.filters, row.bounds(low))

    cutoff = cond_or(row.is_cut & fits, search_registers, no_cutoff)

    def search_buffer() -> jax.Array:
        return search_in_memory(memory, row, low, ask_whole)

    return jax.lax.cond(row.is_cut & ~fits, search_buffer, lambda: cutoff)


def search_by_team(row: RowSummary, low: jax.Array, team: Team, memory: TeamMemory) -> jax.Array:
    """Returns the cutoff of a wide row to every member of its team."""
    vocab_size = row.rows.logits.shape[1]
    tile = row.config.row_search_tile(vocab_size)
    num_columns, num_chunks, num_steps = split_steps(-(-vocab_size // NUM_SHARES), tile)

    def ask_all(slot: jax.Array, ask: Callable[..., jax.Array], merge: Merge) -> jax.Array:
        def ask_share(share: jax.Array) -> jax.Array:
            return ask(share * num_steps, (share + 1) * num_steps)

        return reduce_shares(team, memory, row.b, slot, ask_share, merge, row.interpret)

    num_logits = jnp.int32(vocab_size)
    values = MemoryRow(row.rows.logits, row.b, num_logits, num_columns, num_chunks)
    return search_in_memory(values, row, low, ask_all)
