"""The launch between the QKV product and attention: prepares queries, keys and values.

The product is read as split-K partial sums of rows whose RMSNorm is deferred. `request_qkv` sums,
scales, norms and rotates them, here or in `fused_attention_kernel`.

A weight of 0 does not remove a value that is not finite. So the cache holds 0 for each value
element that is not finite, and the token's key becomes NaN (`cache_entries`). A row that attends to
the token is then NaN, and no other row is.

Axes as in `specjax.models.decoder.pallas.attention`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.decoder.pallas.request_qkv import (
    QKVOperands,
    RequestQKV,
    cache_row,
    make_inv_rms,
    row_mask,
)
from specjax.models.decoder.pallas.tilings import TOKEN_TILE
from specjax.models.decoder.shared_math import NormSpec, cache_entries
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import divmod_i32


class PreparedQKV(NamedTuple):
    """Queries ready for attention, and the cache with the new keys and values, updated in place.

    Attributes:
      queries: [B, T, H, D].
      keys: [B, G, S, D].
      values: [B, G, S, D].
      counters: u32[B * G * C], zeros, for the arrivals of the next launch.
    """

    queries: Any
    keys: Any
    values: Any
    counters: Any


def prepare_qkv_kernel(
    operands: QKVOperands,
    out: PreparedQKV,
    *,
    norm: NormSpec,
    head_norm: NormSpec | None,
    token_tile: int,
) -> None:
    """Sums, scales and rotates heads of some tokens, and writes keys and values to the cache.

    Formula: qkv_t = rsqrt(mean(x_t^2) + eps) * sum_q parts[q, t], then QK-norm and RoPE for queries
    and keys.
    Grid: B * ceil(T / 16) * (H + G) programs of 4 warps. One owns up to 16 tokens of a request, and
    a query head, or the key and the value of a key-value head. The H queries come first.
    Bytes per head and token: Q * D * 4 read, D * itemsize written.
    Why a launch: with B >= 4 requests, P splits that each prepare the queries again cost more than
    a launch (`tilings.prepares_in_attention`). So do the tiles of a long input.
    Memory order: the next launch begins to load after this one has ended. The programs of key-value
    heads set the counters to 0 for that launch.
    References: Su et al., 2021, arXiv:2104.09864: RoPE; Henry et al., 2020, arXiv:2010.04245:
    QK-norm.

    Args:
      operands: references.
      out: references; `keys` and `values` are those of `operands`.
      norm: the deferred norm.
      head_norm: of queries and keys; None if they have none.
      token_tile: tokens of a program, with padding; `TOKEN_TILE` if a request has as many.
    """
    num_kv_heads, num_slots, head_dim = operands.keys.shape[1:]
    num_tokens, num_query_heads = out.queries.shape[1:3]
    num_tiles = num_token_tiles(num_tokens)
    tile, head = divmod_i32(pl.program_id(0), num_query_heads + num_kv_heads)
    b, tile_in_request = divmod_i32(tile, num_tiles)
    token = jax.lax.iota(jnp.int32, token_tile)
    token += tile_in_request * TOKEN_TILE
    inside = token < num_tokens
    qkv = RequestQKV(operands, b, make_inv_rms(operands.squares, b, num_tokens, norm), head_norm)

    def store(reference: Any, at: tuple[Any, ...], is_stored: jax.Array, halves: Any) -> None:
        dim = jax.lax.iota(jnp.int32, halves[0].shape[1])
        mask = row_mask(is_stored, dim, head_dim // 2)
        for x, dims in zip(halves, (dim, dim + head_dim // 2), strict=True):
            plgpu.store(reference.at[(*at, dims[None])], x.astype(reference.dtype), mask=mask)

    @pl.when(head < num_query_heads)
    def _() -> None:
        halves = qkv.rotated_halves(token, head, inside, operands.query_norm)
        store(out.queries, (b, token[:, None], head), inside, halves)

    @pl.when(head >= num_query_heads)
    def _() -> None:
        position = plgpu.load(operands.positions.at[b, token], mask=inside, other=jnp.int32(-1))
        is_held = (position >= 0) & (position < num_slots)
        # In `parts` the values' heads follow those of the keys.
        key_halves = qkv.rotated_halves(token, head, inside, operands.key_norm)
        value_halves = qkv.value_halves(token, head + num_kv_heads, inside)
        entries = [
            cache_entries(key.astype(out.keys.dtype), value.astype(out.values.dtype))
            for key, value in zip(key_halves, value_halves, strict=True)
        ]
        # One past the end for tokens that the cache does not hold: the store masks it.
        slot = jnp.where(is_held, position, jnp.int32(num_slots))
        row, g = cache_row(operands.rows, b), head - num_query_heads
        for cache, halves in zip((out.keys, out.values), zip(*entries, strict=True), strict=True):
            store(cache, (row, g, slot[:, None]), is_held, halves)
        num_counters = out.counters.shape[0] // (operands.positions.shape[0] * num_kv_heads)
        index = jax.lax.iota(jnp.int32, next_power_of_2(num_counters))
        at = (b * num_kv_heads + g) * num_counters + index
        is_first = (index < num_counters) & (tile_in_request == 0)
        plgpu.store(out.counters.at[at], jnp.zeros(index.shape, jnp.uint32), mask=is_first)


def num_token_tiles(num_tokens: int) -> int:
    """Returns the number of tiles of T tokens."""
    return -(-num_tokens // TOKEN_TILE)
