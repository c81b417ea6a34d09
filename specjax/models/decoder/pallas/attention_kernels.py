"""Flash-decoding: attention of a few tokens to a cache, one program per split of its slots.

A split stores an online softmax (m_i, l_i, acc), and `combine` merges the splits. The rows of a
program's tile are the query heads of one key-value head, for every token. So a key is loaded once
for all of them. A program belongs to one key-value head of one request,
`request_kv_head` = b * G + g. Axes as in `attention`; `M` rows of a tile,
token after token; `N` keys of a block; `P` splits.

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
    combine,
    store_output,
    store_partial,
)
from specjax.models.decoder.pallas.kv_split import KVSplit
from specjax.models.decoder.pallas.online_softmax import Queries
from specjax.models.decoder.pallas.request_qkv import (
    QKVOperands,
    RequestQKV,
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
    is_visible,
    last_visible,
)
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import cond_or, divmod_i32, is_last_arrival

__all__ = [
    "AttentionOperands",
    "AttentionOutputs",
    "FusedOutputs",
    "attention_kernel",
    "fused_attention_kernel",
]


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
    """References that `attention_kernel` reads, as `PreparedQKV` describes them.

    Attributes:
      queries: [B, T, H, D].
      flagged_positions: i32[B, G, T], the position p of each token, -1 for none; flagged, as -2 -
        p, if its value is not finite.
      keys: [B, G, S, D], with those of the tokens.
      values: [B, G, S, D], with those of the tokens.
      counters: u32[B * G], zeros.
    """

    queries: Any
    flagged_positions: Any
    keys: Any
    values: Any
    counters: Any


class AttentionOutputs(NamedTuple):
    """Results of `attention_kernel`.

    Attributes:
      partials: of P splits; not written if P is 1 and `y` is given.
      y: [B, T', H, D], zeros from T on; None if `combine_kernel` is to write it.
      keys: [B, G, S, D], the cache, updated in place; NaN where a value was not finite.
      counters: u32[B * G], how many splits are stored; unused without `y`.
    """

    partials: PartialSoftmax
    y: Any
    keys: Any
    counters: Any


def fused_attention_kernel(
    operands: QKVOperands,
    out: FusedOutputs,
    *,
    spec: AttentionSpec,
    norm: NormSpec,
    head_norm: NormSpec | None,
) -> None:
    """Writes (m_i, l_i, acc) of one split of a cache, and the new keys and values to the cache.

    Formula: s = scale * <q, k>, capped by c tanh(s / c). Over the slots that a row attends to,
    m_i = max s, l_i = sum e^(s - m_i), acc = sum e^(s - m_i) v.
    Grid: B * G * (P + 1) programs of 2 or 4 warps. Programs 0 to P - 1 of a key-value head
    own every P-th block of 64 slots; program P owns the new tokens, and writes them to the cache.
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
    """
    num_kv_heads, num_slots, head_dim = operands.keys.shape[1:]
    num_tokens, num_splits = operands.positions.shape[1], out.partials.m_i.shape[1] - 1
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
        state = online_softmax.update(empty_state, queries, keys, values, position, spec)
        store_partial(out.partials, request_kv_head, split, online_softmax.reduce_l(state), is_row)
        # One past the end for tokens that the cache does not hold: the store masks it.
        is_held = (position >= 0) & (position < num_slots)
        slot = jnp.where(is_held, position, jnp.int32(num_slots))
        mask = row_mask(slot < num_slots, dim, head_dim)
        for cache, entry in zip((out.keys, out.values), entries, strict=True):
            plgpu.store(cache.at[b, g, slot[:, None], dim[None]], entry, mask=mask)

    @pl.when(split < num_splits)
    def _() -> None:
        state = kv.attend(first_block, queries, positions, positions, spec)
        store_partial(out.partials, request_kv_head, split, state, is_row)


def attention_kernel(
    operands: AttentionOperands,
    out: AttentionOutputs,
    *,
    spec: AttentionSpec,
    tiling: AttentionTiling,
    interpret: bool,
) -> None:
    """Writes (m_i, l_i, acc) of a split of a cache; a key-value head's last program combines them.

    Formula: s = scale * <q, k>, capped by c tanh(s / c). Over the slots that a row attends to,
    m_i = max s, l_i = sum e^(s - m_i), acc = sum e^(s - m_i) v. Then as in `combine`.
    Grid: B * G * P programs of 2 or 4 warps; one owns every P-th block of 64 slots of a
    key-value head.
    Bytes per key-value head: each block of slots that a token attends to once, at most
    2 S D * itemsize. The queries P times, from the L2 cache. Written: P * M * (D + 2) * 4, which
    the last program reads, and the output; the output alone if P is 1.
    Why splits: B * G programs alone would leave multiprocessors idle. At most about two per
    multiprocessor, and at most 32 splits, are launched (`tilings.num_kv_splits`).
    Memory order: `prepare_qkv_kernel` has ended, so the new tokens have their slots. A program
    stores its state, then adds 1 to the counter of its key-value head. The addition releases its
    stores and acquires those of earlier additions. The program that reads P - 1 is the last.
    Without `y` no program counts, and `combine_kernel` follows.

    Args:
      operands: references.
      out: references; `keys` and `counters` are those of `operands`.
      spec: scale, window and soft cap.
      tiling: `num_register_splits` is used.
      interpret: whether this runs in Pallas' interpreter.
    """
    num_kv_heads, _, head_dim = operands.keys.shape[1:]
    num_tokens, num_splits = operands.flagged_positions.shape[2], out.partials.m_i.shape[1]
    queries_per_kv = operands.queries.shape[2] // num_kv_heads
    request_kv_head, split = divmod_i32(pl.program_id(0), num_splits)
    b, g = divmod_i32(request_kv_head, num_kv_heads)
    dim = jax.lax.iota(jnp.int32, pad_to_mma(head_dim))
    kv = KVSplit(operands.keys, operands.values, b, g, split, num_splits)
    row = jax.lax.iota(jnp.int32, out.partials.m_i.shape[2])
    token, head_in_group = divmod_i32(row, queries_per_kv)
    is_row = token < num_tokens
    flagged_positions = [operands.flagged_positions[b, g, t] for t in range(num_tokens)]
    # The position p, -2 - p if a value is not finite, or -1 for no token.
    positions = [jnp.maximum(flagged, -2 - flagged) for flagged in flagged_positions]
    mask = row_mask(is_row, dim, head_dim)
    rows = load_rows(operands.queries, (b, token, g * queries_per_kv + head_in_group), dim, mask)
    last = last_visible(positions, spec)
    queries = Queries(rows, select_by_token(token, last, jnp.int32(-1)))
    state = kv.attend(None, queries, positions, [], spec)
    # Every program of a key-value head does this: a NaN row is NaN in every split.
    nan_rows = _store_nan_keys(flagged_positions, queries, out.keys, b, g, spec)
    state = state._replace(l_i=state.l_i + nan_rows)
    if out.y is None:
        store_partial(out.partials, request_kv_head, split, state, is_row)
    elif num_splits == 1:
        store_output(out.y, b, g, num_kv_heads, state)
    else:
        store_partial(out.partials, request_kv_head, split, state, is_row)

        @pl.when(is_last_arrival(out.counters, (request_kv_head,), num_splits, interpret))
        def _() -> None:
            state = combine(out.partials, request_kv_head, is_row, tiling.num_register_splits)
            store_output(out.y, b, g, num_kv_heads, state)


def _store_nan_keys(
    flagged_positions: list[jax.Array],
    queries: Queries,
    keys: Any,
    b: jax.Array,
    g: jax.Array,
    spec: AttentionSpec,
) -> jax.Array:
    """Makes keys of flagged tokens NaN; returns f32[M], NaN for rows that attend to one, else 0.

    The stored NaN is for later steps. Another program may read such a key before or after the
    store. In either case the returned NaN makes a row that attends to it NaN, and no other row
    depends on it.

    Args:
      flagged_positions: i32[] each, of `PreparedQKV`, of one request's key-value head.
      queries: the rows.
      keys: [B, G, S, D], of the cache.
      b: i32[], the request.
      g: i32[], the key-value head.
      spec: its window decides the slots that a row attends to.
    """
    num_slots, head_dim = keys.shape[2:]

    def store_nan() -> jax.Array:
        # The slot of a token with a value that is not finite; negative for other tokens.
        flagged_slots = [
            jnp.where(flagged >= -1 - num_slots, -2 - flagged, jnp.int32(-1))
            for flagged in flagged_positions
        ]
        token = jax.lax.iota(jnp.int32, next_power_of_2(len(flagged_positions)))
        dim = jax.lax.iota(jnp.int32, next_power_of_2(head_dim))
        slot = select_by_token(token, flagged_slots, jnp.int32(-1))
        mask = row_mask(slot >= 0, dim, head_dim)
        nan = jnp.full(mask.shape, jnp.nan, keys.dtype)
        plgpu.store(keys.at[b, g, slot[:, None], dim[None]], nan, mask=mask)
        visible = [is_visible(queries.position, slot, spec.window) for slot in flagged_slots]
        return jnp.where(functools.reduce(jnp.logical_or, visible), jnp.float32(jnp.nan), 0.0)

    has_flag = functools.reduce(jnp.minimum, flagged_positions) < -1
    return cond_or(has_flag, store_nan, jnp.zeros(queries.position.shape, jnp.float32))
