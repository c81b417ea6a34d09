"""One split of a cache: the blocks of slots that a program of attention reads.

Split p of P owns blocks p, p + P, p + 2 P, ... of `BLOCK_KV` slots. A cache fills from slot 0 on,
so every split has a share of the filled slots. P may depend on the request's length.
Axes: `B` requests, `G` key-value heads, `S` cache slots, `N` slots of a block, `D` head dimension,
`P` splits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.decoder.pallas import online_softmax
from specjax.models.decoder.pallas.online_softmax import OnlineSoftmax, Queries
from specjax.models.decoder.pallas.request_qkv import load_rows, row_mask
from specjax.models.decoder.pallas.tilings import BLOCK_KV, pad_to_mma
from specjax.models.decoder.shared_math import AttentionSpec
from specjax.pallas.launch import divmod_i32

# Rows from which on a tile's arithmetic takes longer than its reads: blocks that all rows attend to
# are then read in a loop of their own, without masks.
_MIN_ROWS_OF_WHOLE_BLOCKS = 64


class KVBlock(NamedTuple):
    """Slots i32[N] of a cache, a mask of those that exist, their keys [N, D] and values [N, D].

    A whole block has neither slots nor a mask.
    """

    slot: jax.Array | None
    inside: jax.Array | None
    keys: jax.Array
    values: jax.Array


class VisibleBlocks(NamedTuple):
    """Blocks of a cache that the rows of a tile attend to.

    Attributes:
      start: i32[], the first block that a row attends to.
      end: i32[], one past the last.
      whole_end: i32[], at most `end`. All rows attend to every slot of blocks `start` to
        `whole_end` - 1; rows without a token may count as such.
    """

    start: jax.Array
    end: jax.Array
    whole_end: jax.Array


class KVSplit(NamedTuple):
    """Blocks of the cache of one key-value head: every `num_splits`-th one from block `split` on.

    With `segment` they are those of segment `split`: so many blocks in a row.

    Attributes:
      keys: reference [B, G, S, D].
      values: reference [B, G, S, D].
      row: i32[], of the cache.
      g: i32[], the key-value head.
      split: i32[]; from `num_splits` on the split has no block.
      num_splits: P, a Python int or i32[].
      segment: number of blocks, or None.
    """

    keys: Any
    values: Any
    row: jax.Array
    g: jax.Array
    split: jax.Array
    num_splits: int | jax.Array
    segment: int | None = None

    def load(self, i: jax.Array, is_whole: bool = False) -> KVBlock:
        """Loads the i-th block of this split; `is_whole` as in `VisibleBlocks`."""
        num_slots, head_dim = self.keys.shape[2:]
        if self.segment is None:
            slot = (self.split + i * self.num_splits) * BLOCK_KV
        else:
            slot = (self.split * self.segment + i) * BLOCK_KV
        slot += jax.lax.iota(jnp.int32, BLOCK_KV)
        dim = jax.lax.iota(jnp.int32, pad_to_mma(head_dim))
        at = (self.row, self.g, slot)
        if is_whole:
            mask = None if dim.shape[0] == head_dim else (dim < head_dim)[None]
            return KVBlock(None, None, *(load_rows(x, at, dim, mask) for x in self[:2]))
        inside = (slot < num_slots) & (self.split < self.num_splits)
        mask = row_mask(inside, dim, head_dim)
        return KVBlock(slot, inside, *(load_rows(x, at, dim, mask) for x in self[:2]))

    def attend(
        self,
        first_block: KVBlock | None,
        queries: Queries,
        visible: VisibleBlocks,
        excluded_slots: list[jax.Array],
        spec: AttentionSpec,
        exp2: Callable[[jax.Array], jax.Array],
    ) -> OnlineSoftmax:
        """Returns the online softmax of queries over the blocks of this split.

        Args:
          first_block: block 0 of the split, if already loaded.
          queries: the rows.
          visible: blocks that a row attends to; others are skipped.
          excluded_slots: i32[] each, slots that no row attends to.
          spec: scale, window and soft cap.
          exp2: as in `online_softmax.update`.
        """

        def update(block: KVBlock, state: OnlineSoftmax) -> OnlineSoftmax:
            slot, inside = block.slot, block.inside
            if slot is not None and inside is not None:
                for position in excluded_slots:
                    inside &= slot != position
                slot = jnp.where(inside, slot, jnp.int32(-1))
            return online_softmax.update(state, queries, block.keys, block.values, slot, spec, exp2)

        start, end, whole_end = (self._num_before(block) for block in visible)
        num_rows, head_dim = queries.rows.shape
        state = online_softmax.init(num_rows, head_dim, BLOCK_KV)
        if first_block is not None:
            start, state = jnp.maximum(start, 1), update(first_block, state)

        def step(i: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
            return update(self.load(i), state)

        def step_whole(i: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
            return update(self.load(i, is_whole=True), state)

        if num_rows >= _MIN_ROWS_OF_WHOLE_BLOCKS and not excluded_slots:
            whole_end = jnp.maximum(whole_end, start)
            state = jax.lax.fori_loop(start, whole_end, step_whole, state)
            is_token = (queries.position >= 0)[:, None]
            state, start = state._replace(acc=jnp.where(is_token, state.acc, 0.0)), whole_end
        return online_softmax.reduce_l(jax.lax.fori_loop(start, end, step, state))

    def _num_before(self, block: jax.Array) -> jax.Array:
        """Returns the number of this split's blocks before a block: ceil((block - p) / P)."""
        if self.segment is not None:
            return jnp.clip(block - self.split * self.segment, 0, self.segment)
        num_splits = jnp.asarray(self.num_splits, jnp.int32)
        return jax.lax.div(jnp.maximum(block - self.split + (num_splits - 1), 0), num_splits)


def visible_blocks(
    lowest: jax.Array, highest: jax.Array, num_slots: int, window: int | None
) -> VisibleBlocks:
    """Returns the blocks that tokens attend to.

    Args:
      lowest: i32[], the least position of a token; at least S if there is none.
      highest: i32[], the greatest position; -1 if there is no token.
      num_slots: S.
      window: as in `AttentionSpec`.
    """
    end, _ = divmod_i32(jnp.minimum(highest, num_slots - 1) + BLOCK_KV, BLOCK_KV)
    if window is None:
        whole_end, _ = divmod_i32(jnp.minimum(lowest, num_slots), BLOCK_KV)
        return VisibleBlocks(jnp.int32(0), end, jnp.minimum(whole_end, end))
    start, _ = divmod_i32(jnp.maximum(lowest - (window - 1), 0), BLOCK_KV)
    start = jnp.minimum(start, end)
    return VisibleBlocks(start, end, start)
