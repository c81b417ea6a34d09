"""The launch between the QKV product and attention: prepares queries, keys and values.

The product is read as split-K partial sums of rows whose RMSNorm is deferred. `request_qkv` sums,
scales, norms and rotates them, here or in `fused_attention_kernel`.

A weight of 0 does not remove a value that is not finite. So the cache holds 0 for each value
element that is not finite, and the token's key becomes NaN. A key that is not finite becomes NaN,
too. A row that attends to the token is then NaN, and no other row is. The program of a key head
does not read the values. So the program of a value head stores `flagged_positions`, the tokens
whose keys `attention_kernel` still has to set to NaN.

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
    make_inv_rms,
    row_mask,
)
from specjax.models.decoder.shared_math import NormSpec, cache_entries
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import divmod_i32

__all__ = ["PreparedQKV", "prepare_qkv_kernel"]


class PreparedQKV(NamedTuple):
    """Queries ready for attention, and the cache with the new keys and values, updated in place.

    Attributes:
      queries: [B, T, H, D].
      keys: [B, G, S, D], NaN for those that are not finite.
      values: [B, G, S, D], 0 for those that are not finite.
      flagged_positions: i32[B, G, T], the position p of each token, or -1 for none. A token with a
        value that is not finite is flagged by -2 - p: its key still has to become NaN.
      counters: u32[B * G], zeros, for the arrivals of the next launch.
    """

    queries: Any
    keys: Any
    values: Any
    flagged_positions: Any
    counters: Any


def prepare_qkv_kernel(
    operands: QKVOperands, out: PreparedQKV, *, norm: NormSpec, head_norm: NormSpec | None
) -> None:
    """Sums, scales and rotates one head of one request, and writes keys and values to the cache.

    Formula: qkv_t = rsqrt(mean(x_t^2) + eps) * sum_q parts[q, t], then QK-norm and RoPE for queries
    and keys.
    Grid: B * (H + 2 G) programs of 4 warps; one owns a head of all T tokens of a request. The H
    queries come first, then G keys, then G values.
    Bytes per head and token: Q * D * 4 read, D * itemsize written.
    Why a launch: with B >= 4 requests, P splits that each prepare the queries again cost more than
    a launch (`tilings.prepares_in_attention`).
    Memory order: a program that writes values cannot change their keys, which another program
    writes. It stores `flagged_positions`. The next launch begins to load after this one has ended,
    and makes the flagged keys NaN. The program of a key head sets its counter to 0 for that launch.
    References: Su et al., 2021, arXiv:2104.09864: RoPE; Henry et al., 2020, arXiv:2010.04245:
    QK-norm.

    Args:
      operands: references.
      out: references; `keys` and `values` are those of `operands`.
      norm: the deferred norm.
      head_norm: of queries and keys; None if they have none.
    """
    num_kv_heads, num_slots, head_dim = operands.keys.shape[1:]
    num_tokens, num_query_heads = out.queries.shape[1:3]
    b, head = divmod_i32(pl.program_id(0), num_query_heads + 2 * num_kv_heads)
    inv_rms_of = make_inv_rms(operands.squares, b, num_tokens, norm)
    qkv = RequestQKV(operands, b, inv_rms_of, head_norm)
    token = jax.lax.iota(jnp.int32, next_power_of_2(num_tokens))
    inside = token < num_tokens
    position = plgpu.load(operands.positions.at[b, token], mask=inside, other=jnp.int32(-1))
    # One past the end for tokens that the cache does not hold: the store masks it.
    slot = jnp.where((position >= 0) & (position < num_slots), position, jnp.int32(num_slots))

    def store(reference: Any, at: tuple[Any, ...], is_stored: jax.Array, halves: Any) -> None:
        dim = jax.lax.iota(jnp.int32, halves[0].shape[1])
        mask = row_mask(is_stored, dim, head_dim // 2)
        for x, dims in zip(halves, (dim, dim + head_dim // 2), strict=True):
            plgpu.store(reference.at[(*at, dims[None])], x.astype(reference.dtype), mask=mask)

    @pl.when(head < num_query_heads)
    def _() -> None:
        halves = qkv.rotated_halves(token, head, inside, operands.query_norm)
        store(out.queries, (b, token[:, None], head), inside, halves)

    @pl.when((head >= num_query_heads) & (head < num_query_heads + num_kv_heads))
    def _() -> None:
        at = (b, head - num_query_heads, slot[:, None])
        halves = qkv.rotated_halves(token, head, inside, operands.key_norm)
        keys = [x.astype(out.keys.dtype) for x in halves]
        store(out.keys, at, slot < num_slots, tuple(cache_entries(x, x)[0] for x in keys))
        out.counters[b * num_kv_heads + head - num_query_heads] = jnp.uint32(0)

    @pl.when(head >= num_query_heads + num_kv_heads)
    def _() -> None:
        g = head - num_query_heads - num_kv_heads
        at, halves = (b, g, slot[:, None]), qkv.value_halves(token, head, inside)
        values = [x.astype(out.values.dtype) for x in halves]
        store(out.values, at, slot < num_slots, tuple(cache_entries(x, x)[1] for x in values))
        low, high = (~(jnp.abs(x) < jnp.inf) for x in values)
        is_not_finite = jnp.max((low | high).astype(jnp.int32), axis=1) > 0
        flagged_position = jnp.maximum(position, -1)
        plgpu.store(
            out.flagged_positions.at[b, g, token],
            jnp.where(is_not_finite, -2 - flagged_position, flagged_position),
            mask=inside,
        )
