"""Flash-decoding: attention of new tokens to a cache, one program per split of its slots.

A split stores an online softmax (m_i, l_i, acc), and `combine` merges the splits. The rows of a
program's tile are the query heads of one key-value head, for some or all tokens. So a key is
loaded once for all of them. A program belongs to one key-value head of one request,
`request_kv_head` = b * G + g. Axes as in `attention`; `M` rows of a tile, token after token; `C`
tiles; `N` keys of a block; `P` splits.

References:
  Dao et al., 2022, arXiv:2205.14135: FlashAttention.
  Dao et al., 2023: Flash-Decoding for long-context inference.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.decoder.pallas import online_softmax
from specjax.models.decoder.pallas.combine import (
    PartialSoftmax,
    TileRows,
    add_segment,
    combine,
    store_output,
    store_partial,
)
from specjax.models.decoder.pallas.kv_split import KVSplit, VisibleBlocks, visible_blocks
from specjax.models.decoder.pallas.online_softmax import OnlineSoftmax, Queries
from specjax.models.decoder.pallas.request_qkv import (
    QKVOperands,
    RequestQKV,
    cache_row,
    load_rows,
    make_inv_rms,
    row_mask,
    select_by_token,
)
from specjax.models.decoder.pallas.tilings import MIN_MMA, AttentionTiling, pad_to_mma
from specjax.models.decoder.shared_math import (
    AttentionSpec,
    NormSpec,
    cache_entries,
    last_visible,
)
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import divmod_i32, is_last_arrival, make_exp2


class FusedOutputs(NamedTuple):
    """Results of `fused_attention_kernel`.

    Attributes:
      partials: of P + 1 splits; the last one is of the new tokens.
      keys: [B, G, S, D], the cache, updated in place.
      values: [B, G, S, D], the cache, updated in place.
    """

    partials: PartialSoftmax
    keys: Any
    values: Any


class AttentionOperands(NamedTuple):
    """References that `attention_kernel` reads.

    Attributes:
      queries: [B, T, H, D], rotated.
      positions: i32[B, T], -1 for no token.
      keys: [B, G, S, D], with those of the tokens.
      values: [B, G, S, D], with those of the tokens.
      counters: u32[B * G * C], zeros.
      rows: as in `QKVOperands`.
    """

    queries: Any
    positions: Any
    keys: Any
    values: Any
    counters: Any
    rows: Any = None


class AttentionOutputs(NamedTuple):
    """Results of `attention_kernel`.

    Attributes:
      partials: of at most P splits; not written where one split has a tile's whole cache, and `y`
        is given; None if P is 1 then.
      y: [B, T', H, D], zeros from T on; None if `combine_kernel` is to write it.
      counters: u32[B * G * C], how many splits are stored; unused without `y`.
    """

    partials: PartialSoftmax | None
    y: Any
    counters: Any


def fused_attention_kernel(
    operands: QKVOperands,
    out: FusedOutputs,
    *,
    spec: AttentionSpec,
    norm: NormSpec,
    head_norm: NormSpec | None,
    interpret: bool,
) -> None:
    """Writes (m_i, l_i, acc) of one split of a cache, and the new keys and values to the cache.

    Formula: of `online_softmax`, over the slots that a row attends to.
    Grid: B * G * (P + 1) programs of 2 or 4 warps. Each of programs 0 to P - 1 of a
    key-value head owns every P-th block of 64 slots. Program P owns the new tokens, and writes them
    to the cache.
    Bytes per key-value head: each block of slots that a token attends to once, at most
    2 S D * itemsize. Each of the P + 1 programs also reads the queries, Q * T * H / G * D * 4.
    Written: the new keys and values, and (P + 1) * M * (D + 2) * 4.
    Why fused: with B < 4 requests, a launch that prepares queries costs more than preparing them
    P + 1 times. Why splits: B * G programs alone would leave most multiprocessors idle.
    Memory order: program P writes the slots of the new tokens. The other programs may load them
    half written, and mask their scores; cached values are finite, so a weight of 0 removes them.
    Loads begin after the previous launch has ended. `combine_kernel` follows.

    Args:
      operands: references.
      out: references.
      spec: scale, window and soft cap.
      norm: the deferred norm of queries, keys and values.
      head_norm: of queries and keys; None if they have none.
      interpret: whether this runs in Pallas' interpreter.
    """
    num_kv_heads, num_slots, head_dim = operands.keys.shape[1:]
    num_tokens, num_splits = operands.positions.shape[1], out.partials.m_i.shape[1] - 1
    exp2 = make_exp2(interpret)
    queries_per_kv = operands.parts.shape[3] // num_kv_heads - 2
    request_kv_head, split = divmod_i32(pl.program_id(0), num_splits + 1)
    b, g = divmod_i32(request_kv_head, num_kv_heads)
    dim = jax.lax.iota(jnp.int32, pad_to_mma(head_dim))
    kv = KVSplit(operands.keys, operands.values, b, g, split, num_splits)

    # Loaded before the tokens are known: nothing else takes as long.
    first_block = kv.load(jnp.int32(0))
    row = jax.lax.iota(jnp.int32, out.partials.m_i.shape[2])
    token, head_in_group = divmod_i32(row, queries_per_kv)
    is_row = token < num_tokens
    positions = [operands.positions[b, t] for t in range(num_tokens)]
    inv_rms_of = make_inv_rms(operands.squares, b, num_tokens, norm)
    qkv = RequestQKV(operands, b, inv_rms_of, head_norm)
    head, mask = g * queries_per_kv + head_in_group, row_mask(is_row, dim, head_dim)
    rows = qkv.rotated_heads(token, head, mask, operands.query_norm)
    last = last_visible(positions, spec)
    queries = Queries(rows, select_by_token(token, last, jnp.int32(-1)))
    empty_state = online_softmax.init(row.shape[0], dim.shape[0], MIN_MMA)

    @pl.when(split == num_splits)
    def _() -> None:
        new_token = jax.lax.iota(jnp.int32, MIN_MMA)
        position = select_by_token(new_token, positions, jnp.int32(-1))
        mask = row_mask(new_token < num_tokens, dim, head_dim)
        # In `parts` the keys' heads follow those of the queries, and the values' those of the keys.
        key_head = queries_per_kv * num_kv_heads + g
        keys = qkv.rotated_heads(new_token, key_head, mask, operands.key_norm)
        values = qkv.heads(new_token, key_head + num_kv_heads, dim, mask).astype(
            operands.keys.dtype
        )
        entries = cache_entries(keys, values)
        if num_tokens > 1:
            # With one token every row attends to it, so no row needs protection from a value
            # that is not finite. Attention uses the raw keys and values, and does not wait for
            # the check.
            keys, values = entries
        state = online_softmax.update(empty_state, queries, keys, values, position, spec, exp2)
        store_partial(out.partials, request_kv_head, split, online_softmax.reduce_l(state), is_row)
        # One past the end for tokens that the cache does not hold: the store masks it.
        is_held = (position >= 0) & (position < num_slots)
        slot = jnp.where(is_held, position, jnp.int32(num_slots))
        mask = row_mask(slot < num_slots, dim, head_dim)
        for cache, entry in zip((out.keys, out.values), entries, strict=True):
            plgpu.store(cache.at[b, g, slot[:, None], dim[None]], entry, mask=mask)

    @pl.when(split < num_splits)
    def _() -> None:
        highest = functools.reduce(jnp.maximum, positions)
        held = [jnp.where(position < 0, jnp.int32(num_slots), position) for position in positions]
        lowest = functools.reduce(jnp.minimum, held)
        visible = visible_blocks(lowest, highest, num_slots, spec.window)
        state = kv.attend(first_block, queries, visible, positions, spec, exp2)
        store_partial(out.partials, request_kv_head, split, state, is_row)


def attention_kernel(
    operands: AttentionOperands,
    out: AttentionOutputs,
    *,
    spec: AttentionSpec,
    tiling: AttentionTiling,
    interpret: bool,
) -> None:
    """Writes attention of a tile of queries to a cache, or (m_i, l_i, acc) of one of its splits.

    Formula: of `online_softmax`, over the slots that a row attends to. Then as in `combine`.
    Grid: B * G * C * P programs of 2 to 8 warps. A tile is `tokens_per_tile` tokens of a request
    with the query heads of a key-value head; C tiles hold all tokens. One program owns every P_b-th
    block of 64 slots for a tile. P_b <= P follows from the request's own positions alone
    (`num_active_splits`), so that a long request among short ones has more splits. A program from
    P_b on ends at once.
    Bytes per tile: each block of slots that a token attends to once, at most 2 S D * itemsize. The
    queries P_b times, from the L2 cache. If P_b > 1, P_b * M * (D + 2) * 4 are written, and read by
    the last program. The output is written once.
    Why splits: B * G * C programs alone would leave multiprocessors idle, or wait for the longest
    request (`tilings.num_kv_splits`).
    Memory order: `prepare_qkv_kernel` has ended, so the new tokens have their slots. A program
    stores its state, then adds 1 to the counter of its tile. The addition releases its stores and
    acquires those of earlier additions. The program that reads P_b - 1 is the last. Without `y` no
    program counts, and `combine_kernel` follows; P_b is P unless splits are segments.

    Args:
      operands: references.
      out: references; `counters` is that of `operands`.
      spec: scale, window and soft cap.
      tiling: sizes of tiles, and numbers of splits.
      interpret: whether this runs in Pallas' interpreter.
    """
    num_kv_heads, num_slots, head_dim = operands.keys.shape[1:]
    num_tokens, num_splits = operands.positions.shape[1], tiling.num_splits
    queries_per_kv = operands.queries.shape[2] // num_kv_heads
    tile, split = divmod_i32(pl.program_id(0), num_splits)
    request_kv_head, tile_in_head = divmod_i32(tile, tiling.num_tiles)
    b, g = divmod_i32(request_kv_head, num_kv_heads)
    dim = jax.lax.iota(jnp.int32, pad_to_mma(head_dim))
    rows = TileRows.of_tile(tile_in_head, g, queries_per_kv, tiling)
    is_row = rows.is_row & (rows.token < num_tokens)
    position = _load_positions(operands.positions, b, rows.token, is_row)
    highest = jnp.max(position)
    if not spec.is_causal:
        token = jax.lax.iota(jnp.int32, next_power_of_2(num_tokens))
        highest = jnp.max(_load_positions(operands.positions, b, token, token < num_tokens))
    lowest = jnp.min(jnp.where(position < 0, jnp.int32(num_slots), position))
    visible = visible_blocks(lowest, highest, num_slots, spec.window)

    def attend(num_splits: int | jax.Array, split: jax.Array = split) -> OnlineSoftmax:
        mask = row_mask(is_row, dim, head_dim)
        heads = load_rows(operands.queries, (b, rows.token, rows.head), dim, mask)
        last = position if spec.is_causal else jnp.where(position < 0, position, highest)
        row = cache_row(operands.rows, b)
        caches = operands.keys, operands.values
        kv = KVSplit(*caches, row, g, split, num_splits, tiling.segment)
        return kv.attend(None, Queries(heads, last), visible, [], spec, make_exp2(interpret))

    if out.y is None and tiling.segment is None:
        assert out.partials is not None
        store_partial(out.partials, tile, split, attend(num_splits), is_row)
        return
    num_active = num_active_splits(visible, tiling)
    if out.y is None:
        assert out.partials is not None
        partials = out.partials

        @pl.when(split < num_active)
        def _() -> None:
            store_partial(partials, tile, split, attend(num_active), is_row)

        return
    if num_splits == 1 and tiling.segment is not None:

        def add(i: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
            return add_segment(state, attend(num_active, i))

        empty = online_softmax.init(tiling.num_rows, dim.shape[0])
        state = jax.lax.fori_loop(jnp.int32(0), num_active, add, empty)
        store_output(out.y, b, rows, state)
        return
    if num_splits == 1:
        store_output(out.y, b, rows, attend(1))
        return
    assert out.partials is not None
    partials = out.partials

    @pl.when(split < num_active)
    def _() -> None:
        state = attend(num_active)

        @pl.when(num_active == 1)
        def _() -> None:
            store_output(out.y, b, rows, state)

        @pl.when(num_active > 1)
        def _() -> None:
            store_partial(partials, tile, split, state, is_row)

            @pl.when(is_last_arrival(out.counters, (tile,), num_active, interpret))
            def _() -> None:
                row = jax.lax.iota(jnp.int32, tiling.num_rows)
                total = combine(partials, tile, row, is_row, num_active, tiling)
                store_output(out.y, b, rows, total)


def num_active_splits(visible: VisibleBlocks, tiling: AttentionTiling) -> jax.Array:
    """Returns P_b i32[], the splits of a tile with these visible blocks, at least 1.

    The blocks of a request alone decide, so that its results do not depend on other requests.

    Args:
      visible: blocks that the tile's rows attend to.
      tiling: `even_splits`, `blocks_per_split` and `num_splits` are used.
    """
    if tiling.segment is not None:
        num_segments, _ = divmod_i32(visible.end + (tiling.segment - 1), tiling.segment)
        return jnp.maximum(num_segments, 1)
    num_blocks = visible.end - visible.start
    wanted, _ = divmod_i32(num_blocks + (tiling.blocks_per_split - 1), tiling.blocks_per_split)
    wanted = jnp.minimum(jnp.maximum(wanted, tiling.even_splits), tiling.num_splits)
    return jnp.maximum(jnp.minimum(wanted, num_blocks), 1)


def _load_positions(reference: Any, b: jax.Array, token: jax.Array, mask: jax.Array) -> jax.Array:
    return plgpu.load(reference.at[b, token], mask=mask, other=jnp.int32(-1))
