"""Stream compaction: the program that searches a row gathers the logits that can be its cutoff.

A candidate is a logit >= low, the bound of the cutoff. A sub-block with m_i >= low holds one
candidate or several. It holds one if its other 31 tokens, whose exponentials sum to l_i - 1
relative to m_i, weigh less than one token at `low` does. Then m_i is stored without reading the
sub-block. Sub-blocks that may hold several are read again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.truncation import mass_weights
from specjax.pallas.cutoff.bound import SUB_BLOCK, RowSummary
from specjax.pallas.launch import divmod_i32, make_exp2

# Two counts share an i32: the first in its low 15 bits, the second above them.
_COUNT_RADIX = 1 << 15

# Far more than the rounding of a sum of 32 terms.
_SUM_ROUNDING = 1e-5


class CandidateBuffer(NamedTuple):
    """Memory of the program of each row.

    Attributes:
      reread_sub_blocks: i32[R, N], indices of sub-blocks to read again.
      values: f32[R, L], candidates, in any order.
    """

    reread_sub_blocks: Any
    values: Any


class SubBlockKinds(NamedTuple):
    """The sub-blocks of a row that reach a bound; others hold no candidate.

    Attributes:
      low: f32, the bound; -inf reaches none.
      holds_one: bool[N], whether the largest logit is the only candidate.
      holds_several: bool[N], whether there may be several.
      num_before: two i32[N], the numbers of earlier sub-blocks that hold one, and several.
      num: two i32, the numbers of sub-blocks that hold one, and several.
    """

    low: jax.Array
    holds_one: jax.Array
    holds_several: jax.Array
    num_before: tuple[jax.Array, jax.Array]
    num: tuple[jax.Array, jax.Array]


def classify_sub_blocks(row: RowSummary, low: jax.Array) -> SubBlockKinds:
    """Returns which sub-blocks hold candidates by a bound f32 of the cutoff."""
    largest = row.sub_blocks.max
    reaches = (largest >= low) & (low > -jnp.inf)
    # The mass of the other tokens is known up to the rounding of the sum.
    other_mass = row.sub_blocks.sum * jnp.float32(1 + _SUM_ROUNDING) - 1
    low_mass = mass_weights(low, largest, row.scale, make_exp2(row.interpret))
    holds_several = reaches & (other_mass >= low_mass)
    holds_one = reaches & ~holds_several
    num_before, num = _prefix_sums(holds_one, holds_several)
    return SubBlockKinds(low, holds_one, holds_several, num_before, num)


def compact_candidates(row: RowSummary, kinds: SubBlockKinds, buffer: CandidateBuffer) -> jax.Array:
    """Stores the logits of a row that reach the bound, and returns their number, i32.

    If the number exceeds the buffer, only those that fit are stored.

    Args:
      row: its summary; `config` says how many sub-blocks are read per iteration.
      kinds: of its sub-blocks.
      buffer: of all rows.
    """
    b, largest, config = row.b, row.sub_blocks.max, row.config
    low, holds_one, holds_several, (index, reread_index), (total, num_reread) = kinds
    max_candidates = buffer.values.shape[1]
    fits = holds_one & (index < max_candidates)
    # The index past the end: the interpreter drops such stores, the GPU masks them.
    plgpu.store(buffer.values.at[b, jnp.where(fits, index, max_candidates)], largest, mask=fits)
    sub_block = jax.lax.iota(jnp.int32, largest.shape[0])
    reread_index = jnp.where(holds_several, reread_index, largest.shape[0])
    plgpu.store(buffer.reread_sub_blocks.at[b, reread_index], sub_block, mask=holds_several)
    _barrier(row.interpret)
    # A chunk has a static size. So there are two loops, of which at most one iterates.
    small_chunk, large_chunk = config.small_reread_chunk, config.large_reread_chunk
    chunk_sizes = (
        (small_chunk, num_reread <= small_chunk),
        (large_chunk, num_reread > small_chunk),
    )
    for chunk_size, is_chosen in chunk_sizes:
        num_chosen = jnp.where(is_chosen, num_reread, 0)
        num_chunks, _ = divmod_i32(num_chosen + (chunk_size - 1), chunk_size)
        compact = functools.partial(_compact_chunk, row, low, buffer, num_reread, chunk_size)
        total = jax.lax.fori_loop(jnp.int32(0), num_chunks, compact, total)
    _barrier(row.interpret)
    return total


def _compact_chunk(
    row: RowSummary,
    low: jax.Array,
    buffer: CandidateBuffer,
    num_reread: jax.Array,
    chunk_size: int,
    chunk_index: jax.Array,
    total: jax.Array,
) -> jax.Array:
    """Reads one chunk of the sub-blocks to reread, and stores their candidates from `total` on.

    Returns:
      The number of candidates stored so far: `total` plus those of this chunk.
    """
    b, logits, max_candidates = row.b, row.rows.logits, buffer.values.shape[1]
    slot = chunk_index * chunk_size + jax.lax.iota(jnp.int32, chunk_size)
    sub_block = plgpu.load(
        buffer.reread_sub_blocks.at[b, slot], mask=slot < num_reread, other=jnp.int32(0)
    )
    # The load is masked: a `where` on the ids would hide from Triton that they are consecutive.
    token_id = sub_block[:, None] * SUB_BLOCK + jax.lax.iota(jnp.int32, SUB_BLOCK)[None]
    exists = (slot < num_reread)[:, None] & (token_id < logits.shape[1])
    other = jnp.asarray(-jnp.inf, logits.dtype)
    x = plgpu.load(logits.at[b, token_id], mask=exists, other=other).astype(jnp.float32)
    reaches = (x >= low) & (x > -jnp.inf)
    ones = reaches.astype(jnp.int32)
    num_before, num_candidates = _prefix_sum(jnp.sum(ones, axis=1, dtype=jnp.int32))
    index = total + num_before[:, None] + jnp.cumsum(ones, axis=1, dtype=jnp.int32) - 1
    fits = reaches & (index < max_candidates)
    plgpu.store(buffer.values.at[b, jnp.where(fits, index, max_candidates)], x, mask=fits)
    return total + num_candidates


def _prefix_sum(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the exclusive prefix sum of i32[N], and the sum of all."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts, jnp.sum(counts, dtype=jnp.int32)


def _prefix_sums(
    holds_one: jax.Array, holds_several: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns the prefix sums of both bool[N], and both sums; at once where an i32 holds both."""
    singles, multiples = holds_one.astype(jnp.int32), holds_several.astype(jnp.int32)
    if holds_one.shape[0] >= _COUNT_RADIX:
        num_before, num = zip(_prefix_sum(singles), _prefix_sum(multiples), strict=True)
        return num_before, num
    sums = _prefix_sum(singles + multiples * _COUNT_RADIX)
    num_before, num = (divmod_i32(counts, _COUNT_RADIX)[::-1] for counts in sums)
    return num_before, num


def _barrier(interpret: bool) -> None:
    """Orders the stores of every thread of a program before the loads that follow."""
    if not interpret:
        plgpu.debug_barrier()
