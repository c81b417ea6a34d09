"""Combines the online softmaxes of a cache's splits into one attention.

Each split p of the cache's slots stores (m_p, l_p, acc_p) of `online_softmax`. They merge to

    m = max_p m_p        o = sum_p 2^(m_p - m) acc_p  /  sum_p 2^(m_p - m) l_p

Without segments, the last program to arrive runs `combine`, or a launch of `combine_kernel` adds
all splits at once. With segments, `combine_kernel` runs `combine`, one row per program.
Axes as in `specjax.models.decoder.pallas.attention_kernels`.

References:
  Dao et al., 2023: Flash-Decoding for long-context inference.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.decoder.pallas.online_softmax import OnlineSoftmax, init
from specjax.models.decoder.pallas.request_qkv import load_rows, row_mask
from specjax.models.decoder.pallas.tilings import BLOCK_KV, AttentionTiling, pad_to_mma
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import divmod_i32


class TileRows(NamedTuple):
    """Rows of a tile: the query heads of one key-value head, token after token.

    Attributes:
      token: i32[M].
      head: i32[M], of the queries.
      is_row: bool[M], False for padding of the tile.
    """

    token: jax.Array
    head: jax.Array
    is_row: jax.Array

    @classmethod
    def of_tile(
        cls, tile: jax.Array, g: jax.Array, queries_per_kv: int, tiling: AttentionTiling
    ) -> "TileRows":
        """Returns the rows of a tile of key-value head g."""
        row = jax.lax.iota(jnp.int32, tiling.num_rows)
        token, head = divmod_i32(row, queries_per_kv)
        is_row = token < tiling.tokens_per_tile
        return cls(token + tile * tiling.tokens_per_tile, head + g * queries_per_kv, is_row)


class PartialSoftmax(NamedTuple):
    """The online softmax of every split, as `OnlineSoftmax` defines it.

    `P'` is P, or P + 1 after `fused_attention_kernel`, whose last split is of the new tokens.

    Attributes:
      acc: f32[B * G * C, P', M, D]; not written for rows of padding.
      m_i: f32[B * G * C, P', M].
      l_i: f32[B * G * C, P', M].
    """

    acc: Any
    m_i: Any
    l_i: Any


def store_partial(
    partials: PartialSoftmax,
    tile: jax.Array,
    split: jax.Array,
    state: OnlineSoftmax,
    is_row: jax.Array,
) -> None:
    """Stores the state of one split.

    Args:
      partials: references.
      tile: i32[], of all tiles: (b * G + g) * C + its number in the key-value head.
      split: i32[].
      state: of M rows.
      is_row: bool[M], False for padding.
    """
    num_rows, num_dims = state.acc.shape
    row, dim = jax.lax.iota(jnp.int32, num_rows), jax.lax.iota(jnp.int32, num_dims)
    plgpu.store(partials.m_i.at[tile, split, row], state.m_i)
    plgpu.store(partials.l_i.at[tile, split, row], state.l_i)
    mask = row_mask(is_row, dim, partials.acc.shape[3])
    plgpu.store(partials.acc.at[tile, split, row[:, None], dim[None]], state.acc, mask=mask)


def combine(
    partials: PartialSoftmax,
    tile: jax.Array,
    row: jax.Array,
    is_row: jax.Array,
    num_active: jax.Array,
    tiling: AttentionTiling,
) -> OnlineSoftmax:
    """Returns the state of rows over the splits of a tile; rows of padding have none.

    Segments are added one after another, as by a program that reads a whole text.

    Args:
      partials: references; the tile's splits have stored theirs.
      tile: as in `store_partial`.
      row: i32[N], of the tile's M rows.
      is_row: bool[N], False for padding.
      num_active: i32[], number of splits of the tile.
      tiling: `num_register_splits` and `segment` are used.
    """
    num_partials, _, head_dim = partials.acc.shape[1:]
    num_dims = pad_to_mma(head_dim)
    dim = jax.lax.iota(jnp.int32, num_dims)
    # Loads of one iteration do not wait for one another.
    splits_per_step = min(num_partials, tiling.num_register_splits)

    def load(split: jax.Array) -> OnlineSoftmax:
        at, is_stored = (tile, split, row), is_row & (split < num_active)
        m_i, l_i = (
            _load(partials.m_i, at, is_stored, -jnp.inf),
            _load(partials.l_i, at, is_stored, 0),
        )
        return OnlineSoftmax(
            m_i, l_i, load_rows(partials.acc, at, dim, row_mask(is_stored, dim, head_dim))
        )

    def add(i: jax.Array, state: OnlineSoftmax) -> OnlineSoftmax:
        loaded = [load(i * splits_per_step + k) for k in range(splits_per_step)]
        if tiling.segment is None:
            return merge([state, *loaded])
        return functools.reduce(add_segment, loaded, state)

    num_steps, _ = divmod_i32(num_active + (splits_per_step - 1), splits_per_step)
    return jax.lax.fori_loop(jnp.int32(0), num_steps, add, init(row.shape[0], num_dims))


def merge(states: list[OnlineSoftmax]) -> OnlineSoftmax:
    """Returns the state of rows over the slots of several states, added in their order."""
    m = functools.reduce(jnp.maximum, [each.m_i for each in states])
    weights = [jnp.exp2(each.m_i - m) for each in states]
    pairs = list(zip(states, weights, strict=True))
    l_i = [each.l_i * weight for each, weight in pairs]
    acc = [each.acc * weight[:, None] for each, weight in pairs]
    return OnlineSoftmax(m, functools.reduce(jnp.add, l_i), functools.reduce(jnp.add, acc))


def add_segment(total: OnlineSoftmax, segment: OnlineSoftmax) -> OnlineSoftmax:
    """Returns the state of rows over the slots of `total` and of one more segment.

    Only the state with the smaller maximum is scaled. Each sum then has one product, so a compiler
    can fuse it in one way only. Programs of all shapes get the same bits.
    """
    weight = jnp.exp2(-jnp.abs(total.m_i - segment.m_i))
    is_later = segment.m_i > total.m_i

    def add(old: jax.Array, new: jax.Array, weight: jax.Array, is_later: jax.Array) -> jax.Array:
        return jnp.where(is_later, new + old * weight, old + new * weight)

    return OnlineSoftmax(
        jnp.maximum(total.m_i, segment.m_i),
        add(total.l_i, segment.l_i, weight, is_later),
        add(total.acc, segment.acc, weight[:, None], is_later[:, None]),
    )


def store_output(y: Any, b: jax.Array, rows: TileRows, state: OnlineSoftmax) -> None:
    """Stores acc / l_i of a tile's rows: 0 for rows that attend to nothing, NaN for NaN.

    Args:
      y: reference [B, T', H, D].
      b: i32[], the request.
      rows: of the tile.
      state: of the M rows.
    """
    num_padded_tokens, _, head_dim = y.shape[1:]
    dim = jax.lax.iota(jnp.int32, state.acc.shape[1])
    values = state.acc / jnp.where(state.l_i == 0, 1.0, state.l_i)[:, None]
    at = (b, rows.token[:, None], rows.head[:, None], dim[None])
    mask = row_mask(rows.is_row & (rows.token < num_padded_tokens), dim, head_dim)
    plgpu.store(y.at[at], values.astype(y.dtype), mask=mask)


class CombineOperands(NamedTuple):
    """References that `combine_kernel` reads: partials, and the tokens' positions i32[B, T]."""

    partials: PartialSoftmax
    positions: Any


def combine_kernel(
    operands: CombineOperands,
    out: Any,
    *,
    num_kv_heads: int,
    is_causal: bool,
    tiling: AttentionTiling,
) -> None:
    """Writes o = sum_p 2^(m_p - m) acc_p / sum_p 2^(m_p - m) l_p for one query head of one token.

    Grid: B * T' * H programs of one warp. Without segments, a program holds all states of its row,
    [P', D]. With segments, it adds them in order, for the bits of one program that reads all.
    Tokens from T on are padding and are written as 0.
    Bytes per row: P' (D + 2) * 4 read, D * itemsize written.
    Why a launch: it always follows `fused_attention_kernel`. It follows `attention_kernel` if
    `AttentionTiling.combines_in_attention` is False: for segments that programs share, or if P is
    large. One last program per key-value head would read for longer than a launch takes.
    Memory order: the previous launch has ended when it begins to load. It triggers no launch early.

    Args:
      operands: references.
      out: references; `y` [B, T', H, D].
      num_kv_heads: G.
      is_causal: as in `AttentionSpec`.
      tiling: of the attention.
    """
    partials, num_tokens = operands.partials, operands.positions.shape[1]
    _, num_padded_tokens, num_query_heads, head_dim = out.y.shape
    queries_per_kv = num_query_heads // num_kv_heads
    token, head = divmod_i32(pl.program_id(0), num_query_heads)
    b, t = divmod_i32(token, num_padded_tokens)
    g, head_in_group = divmod_i32(head, queries_per_kv)
    # Tile and row of this token's head.
    tile_in_head, token_in_tile = divmod_i32(t, tiling.tokens_per_tile)
    tile = (b * num_kv_heads + g) * tiling.num_tiles + tile_in_head
    row = token_in_tile * queries_per_kv + head_in_group
    dim, is_token = jax.lax.iota(jnp.int32, pad_to_mma(head_dim)), t < num_tokens
    if tiling.segment is not None:
        last = operands.positions[b, jnp.where(is_token, t, 0)]
        if not is_causal:
            token = jax.lax.iota(jnp.int32, next_power_of_2(num_tokens))
            last = jnp.max(_load(operands.positions, (b, token), token < num_tokens, -1))
        size = tiling.segment * BLOCK_KV
        num_active, _ = divmod_i32(jnp.where(is_token, last, -1) + size, size)
        num_active = jnp.minimum(num_active, tiling.num_splits)
        rows, is_row = row + jax.lax.iota(jnp.int32, 1), jnp.broadcast_to(is_token, (1,))
        state = combine(partials, tile, rows, is_row, num_active, tiling)
        y = state.acc / jnp.where(state.l_i == 0, 1.0, state.l_i)[:, None]
        at = b, t, head, dim[None]
        plgpu.store(out.y.at[at], y.astype(out.y.dtype), mask=(dim < head_dim)[None])
        return
    num_partials = partials.m_i.shape[1]
    split = jax.lax.iota(jnp.int32, next_power_of_2(num_partials))
    inside = (split < num_partials) & is_token
    m_i = _load(partials.m_i, (tile, split, row), inside, -jnp.inf)
    l_i = _load(partials.l_i, (tile, split, row), inside, 0)
    acc = load_rows(partials.acc, (tile, split, row), dim, row_mask(inside, dim, head_dim))
    # Every split of a padding token is masked: its maximum is -inf, and -inf - -inf is NaN.
    weight = jnp.exp2(m_i - jnp.maximum(jnp.max(m_i), -3e38))
    total = jnp.sum(weight * l_i)
    y = jnp.sum(weight[:, None] * acc, axis=0) / jnp.where(total == 0, 1.0, total)
    plgpu.store(out.y.at[b, t, head, dim], y.astype(out.y.dtype), mask=dim < head_dim)


def _load(reference: Any, at: Any, mask: jax.Array, other: Any) -> jax.Array:
    return plgpu.load(reference.at[at], mask=mask, other=jnp.asarray(other, reference.dtype))
