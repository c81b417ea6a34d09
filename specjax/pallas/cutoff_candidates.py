"""Stream compaction: the program that searches a row gathers the logits that can be its cutoff.

A sub-block with m_i >= low holds one candidate or several. It holds one if its other 31 tokens,
whose exponentials sum to l_i - 1 relative to m_i, weigh less than one token at `low` does. Then m_i
is stored without reading the sub-block. Sub-blocks that may hold several are read.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.truncation import mass_weights
from specjax.pallas.cutoff_bound import SUB_BLOCK, CutoffRows, RowSummary
from specjax.pallas.kernel_config import KernelConfig
from specjax.pallas.launch import divmod_i32, fast_exp2

__all__ = ["CandidateBuffer", "compact_candidates"]

# Two counts share an i32: the first in its low 15 bits, the second above them.
_COUNT_RADIX = 1 << 15

# Far more than the rounding of a sum of 32 terms.
_ROUNDING = 1e-5


class CandidateBuffer(NamedTuple):
    """Memory of the program of each row.

    Attributes:
      sub_blocks: i32[R, M], indices of sub-blocks to read.
      values: f32[R, N], candidates, in any order.
    """

    sub_blocks: Any
    values: Any


def compact_candidates(
    rows: CutoffRows,
    row: RowSummary,
    b: jax.Array,
    low: jax.Array,
    buffer: CandidateBuffer,
    config: KernelConfig,
    interpret: bool,
) -> jax.Array:
    """Stores the logits of row b that reach `low`, and returns their number, i32.

    Where the number exceeds the buffer, only as many are stored as fit.

    Args:
      rows: all rows.
      row: summary of row b.
      b: its index.
      low: f32, a lower bound of the cutoff; -inf stores nothing.
      buffer: of all rows.
      config: how many sub-blocks are read per iteration, and at most.
      interpret: whether the kernel runs in Pallas' interpreter.

    Returns:
      The number of candidates; N + 1 if more than `config.max_reread` sub-blocks were to be read.
    """
    largest, size = row.sub_blocks.max, buffer.values.shape[1]
    reaches = (largest >= low) & (low > -jnp.inf)
    # The mass of the other tokens is known up to the rounding of the sum.
    other_mass = row.sub_blocks.sum * jnp.float32(1 + _ROUNDING) - 1
    several = reaches & (other_mass >= mass_weights(low, largest, row.scale, fast_exp2(interpret)))
    single = reaches & ~several
    (index, num_single), (reread_index, num_reread) = _prefix_sums(single, several)
    fits = single & (index < size)
    # Index `size`, past the end: the interpreter drops such stores, the GPU masks them.
    plgpu.store(buffer.values.at[b, jnp.where(fits, index, size)], largest, mask=fits)
    sub_block = jax.lax.iota(jnp.int32, largest.shape[0])
    reread_index = jnp.where(several, reread_index, largest.shape[0])
    plgpu.store(buffer.sub_blocks.at[b, reread_index], sub_block, mask=several)
    _barrier(interpret)
    total = num_single
    small, are_reread = num_reread <= config.small_reread_batch, num_reread <= config.max_reread
    large = (num_reread > config.small_reread_batch) & are_reread
    for batch, selected in ((config.small_reread_batch, small), (config.large_reread_batch, large)):
        iterations, _ = divmod_i32(jnp.where(selected, num_reread, 0) + (batch - 1), batch)
        compact = functools.partial(_compact_batch, rows, b, low, buffer, num_reread, batch)
        total = jax.lax.fori_loop(jnp.int32(0), iterations, compact, total)
    _barrier(interpret)
    return jnp.where(are_reread, total, jnp.int32(size + 1))


def _compact_batch(
    rows: CutoffRows,
    b: jax.Array,
    low: jax.Array,
    buffer: CandidateBuffer,
    num_reread: jax.Array,
    batch: int,
    iteration: jax.Array,
    total: jax.Array,
) -> jax.Array:
    """Reads the next `batch` of `num_reread` sub-blocks, appends candidates after `total`."""
    vocab_size, size = rows.logits.shape[1], buffer.values.shape[1]
    slot = iteration * batch + jax.lax.iota(jnp.int32, batch)
    sub_block = plgpu.load(
        buffer.sub_blocks.at[b, slot], mask=slot < num_reread, other=jnp.int32(0)
    )
    # The load is masked: a `where` on the ids would hide from Triton that they are consecutive.
    token = sub_block[:, None] * SUB_BLOCK + jax.lax.iota(jnp.int32, SUB_BLOCK)[None]
    exists = (slot < num_reread)[:, None] & (token < vocab_size)
    other = jnp.asarray(-jnp.inf, rows.logits.dtype)
    x = plgpu.load(rows.logits.at[b, token], mask=exists, other=other).astype(jnp.float32)
    reaches = (x >= low) & (x > -jnp.inf)
    ones = reaches.astype(jnp.int32)
    num_before, number = _prefix_sum(jnp.sum(ones, axis=1, dtype=jnp.int32))
    index = total + num_before[:, None] + jnp.cumsum(ones, axis=1, dtype=jnp.int32) - 1
    fits = reaches & (index < size)
    plgpu.store(buffer.values.at[b, jnp.where(fits, index, size)], x, mask=fits)
    return total + number


def _prefix_sum(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the exclusive prefix sum of i32[N], and the sum of all."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts, jnp.sum(counts, dtype=jnp.int32)


def _prefix_sums(
    single: jax.Array, several: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Returns `_prefix_sum` of both bool[N], by one sum where an i32 holds both counts."""
    ones, others = single.astype(jnp.int32), several.astype(jnp.int32)
    if single.shape[0] >= _COUNT_RADIX:
        return _prefix_sum(ones), _prefix_sum(others)
    both = _prefix_sum(ones + others * _COUNT_RADIX)
    low, high = zip(*(divmod_i32(counts, _COUNT_RADIX)[::-1] for counts in both), strict=True)
    return low, high


def _barrier(interpret: bool) -> None:
    """Orders the stores of every thread of a program before the loads that follow."""
    if not interpret:
        plgpu.debug_barrier()
