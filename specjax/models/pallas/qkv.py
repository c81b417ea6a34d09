"""Queries, keys and values between the product that makes them and attention.

The product arrives as split-K partial sums of rows whose RMSNorm is deferred. For token t

    qkv_t = rsqrt(mean(x_t^2) + eps) * sum_q parts[q, t]

rounded to the cache's dtype. Where heads of queries and keys have a norm of their own (QK-norm), it
follows, and then their rotation (RoPE). `prepare_qkv_kernel` does it in a launch of its own, or
`fused_attention_kernel` where it needs them, both by `RequestQKV`.

A weight of 0 does not remove a value that is not finite. So the cache holds 0 for each element of a
value that is not finite, and NaN in its token's key and in a key that is not finite: a row that
attends to the token is NaN, and no other row is. The program of a key head does not read the
values. So the program of a value head leaves `flagged_positions`, which tell `attention_kernel`
whose keys still have to become NaN.

Axes as in `specjax.models.pallas.attention`; `N` rows of a tile, each one head of one token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.pallas.add_rms_norm import inv_rms, load_squares
from specjax.models.shared_math import NormSpec, cache_entries, rotate_halves
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import divmod_i32

__all__ = [
    "PreparedQKV",
    "QKVOperands",
    "RequestQKV",
    "load_rows",
    "make_inv_rms",
    "prepare_qkv_kernel",
    "row_mask",
    "select_by_token",
]


class QKVOperands(NamedTuple):
    """Arrays of a call, or in a kernel the references to them.

    Attributes:
      parts: [Q, B, T', H + 2 * G, D], split-K partial sums of H queries, G keys and G values, none
        of them rotated.
      squares: f32[B, T', n], partial sums of squares of the deferred norm; None if there is none.
      cos: f32[B, T, D / 2], of the angles by which queries and keys are rotated.
      sin: f32[B, T, D / 2].
      positions: i32[B, T]; a token at -1 writes nothing and attends to nothing.
      keys: [B, G, S, D], the cache.
      values: [B, G, S, D], the cache.
      query_norm: [D], weight of the norm of each query; None if queries and keys have none.
      key_norm: [D], the same of each key.
    """

    parts: Any
    squares: Any
    cos: Any
    sin: Any
    positions: Any
    keys: Any
    values: Any
    query_norm: Any = None
    key_norm: Any = None


class PreparedQKV(NamedTuple):
    """Queries ready for attention, and the cache with the new keys and values, updated in place.

    Attributes:
      queries: [B, T, H, D].
      keys: [B, G, S, D], NaN for those that are not finite.
      values: [B, G, S, D], 0 for those that are not finite.
      flagged_positions: i32[B, G, T], the position p of each token, -1 for none; flagged, as -2 -
        p, if one of its values is not finite: its key still has to become NaN.
      counters: u32[B * G], zeros, in which the programs of the next launch count themselves.
    """

    queries: Any
    keys: Any
    values: Any
    flagged_positions: Any
    counters: Any


class RequestQKV(NamedTuple):
    """View of the queries, keys and values of request `b`.

    Attributes:
      operands: references.
      b: i32[], the request.
      inv_rms_of: function from tokens i32[N] to 1 / rms, f32[N]; None where no norm is deferred.
      head_norm: of queries and keys; None if they have none.
    """

    operands: QKVOperands
    b: jax.Array
    inv_rms_of: Callable[[jax.Array], jax.Array] | None
    head_norm: NormSpec | None

    def heads(
        self, token: jax.Array, head: jax.Array, dim: jax.Array, mask: jax.Array
    ) -> jax.Array:
        """Returns heads of tokens, f32[N, dims], summed, scaled and rounded; no norm, not rotated.

        Args:
          token: i32[N].
          head: i32[N] or i32[].
          dim: i32[dims], in any order.
          mask: bool[N, dims]; elsewhere the result is 0.
        """
        parts = self.operands.parts
        total = jnp.zeros(mask.shape, jnp.float32)
        for q in range(parts.shape[0]):
            total += load_rows(parts, (q, self.b, token, head), dim, mask).astype(jnp.float32)
        if self.inv_rms_of is not None:
            total *= self.inv_rms_of(token)[:, None]
        return total.astype(self.operands.keys.dtype).astype(jnp.float32)

    def value_halves(
        self, token: jax.Array, head: jax.Array, inside: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns both halves of values of tokens, f32[N, at least D / 2] each.

        Args:
          token: i32[N].
          head: i32[N] or i32[].
          inside: bool[N], False where there is no token.
        """
        half = self.operands.keys.shape[3] // 2
        dim = jax.lax.iota(jnp.int32, next_power_of_2(half))
        mask = row_mask(inside, dim, half)
        low, high = (self.heads(token, head, index, mask) for index in (dim, dim + half))
        return low, high

    def rotated_halves(
        self, token: jax.Array, head: jax.Array, inside: jax.Array, weight: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Returns both halves of rotated heads of tokens, f32[N, at least D / 2] each.

        Args:
          token: i32[N].
          head: i32[N] or i32[].
          inside: bool[N], False where there is no token.
          weight: reference [D], of the heads' norm, or None.
        """
        low, high = self.value_halves(token, head, inside)
        half = self.operands.keys.shape[3] // 2
        dim = jax.lax.iota(jnp.int32, low.shape[1])
        squares = jnp.sum(low * low, axis=1) + jnp.sum(high * high, axis=1)
        low = self._normed(low, squares, weight, dim)
        high = self._normed(high, squares, weight, dim + half)
        at, mask = (self.b, token), row_mask(inside, dim, half)
        cos, sin = (load_rows(z, at, dim, mask) for z in (self.operands.cos, self.operands.sin))
        return rotate_halves(low, high, cos, sin)

    def rotated_heads(
        self, token: jax.Array, head: jax.Array, mask: jax.Array, weight: Any
    ) -> jax.Array:
        """Returns rotated heads of tokens, [N, D with padding], of the cache's dtype.

        Each head is one tile, as a product with keys takes it. So both elements of a rotated pair
        are loaded for each, twice as many as in `rotated_halves`.

        Args:
          token: i32[N].
          head: i32[N] or i32[].
          mask: bool[N, D with padding]; elsewhere the result is 0.
          weight: reference [D], of the heads' norm, or None.
        """
        size = self.operands.keys.shape[3]
        dim, half = jax.lax.iota(jnp.int32, mask.shape[1]), jnp.int32(size // 2)
        angle, pair = jax.lax.rem(dim, half), jax.lax.rem(dim + half, jnp.int32(size))
        x, x_pair = (self.heads(token, head, index, mask) for index in (dim, pair))
        squares = jnp.sum(x * x, axis=1)
        x, x_pair = (
            self._normed(z, squares, weight, index) for z, index in ((x, dim), (x_pair, pair))
        )
        at = (self.b, token)
        cos, sin = (load_rows(z, at, angle, mask) for z in (self.operands.cos, self.operands.sin))
        # The upper half is the lower half of a rotation by the opposite angle.
        rotated, _ = rotate_halves(x, x_pair, cos, jnp.where(dim < half, sin, -sin))
        return rotated.astype(self.operands.keys.dtype)

    def _normed(self, x: jax.Array, squares: jax.Array, weight: Any, dim: jax.Array) -> jax.Array:
        """Returns some elements f32[N, dims] of heads through the heads' norm, if they have one.

        Args:
          x: f32[N, dims], the elements.
          squares: f32[N], sums of squares of the whole heads.
          weight: reference [D], or None.
          dim: i32[dims], which elements they are.
        """
        if self.head_norm is None:
            return x
        size, offset, dtype = self.head_norm.size, self.head_norm.offset, self.operands.keys.dtype
        scale = plgpu.load(weight.at[dim], mask=dim < size, other=jnp.zeros((), weight.dtype))
        y = x * jax.lax.rsqrt(squares / size + self.head_norm.eps)[:, None]
        # Rounded as `layers.rms_norm` rounds.
        y = y if offset else y.astype(dtype).astype(jnp.float32)
        return (y * (scale.astype(jnp.float32) + offset)[None]).astype(dtype).astype(jnp.float32)


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
    writes. It leaves `flagged_positions`, and the next launch, which begins to load after all of
    this one has ended, makes the flagged keys NaN. The program of a key head sets its counter to 0
    for that launch.
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


def make_inv_rms(
    squares: Any, b: jax.Array, num_tokens: int, norm: NormSpec
) -> Callable[[jax.Array], jax.Array] | None:
    """Returns the function from tokens i32[N] of a request to factors f32[N] of the deferred norm.

    Args:
      squares: reference f32[B, T', n]; None gives None.
      b: i32[], the request.
      num_tokens: T.
      norm: the deferred norm.
    """
    if squares is None:
        return None
    # Summed once for each token: to sum for every row of the tile takes longer.
    scales = [inv_rms(load_squares(squares, b, jnp.int32(t)), norm) for t in range(num_tokens)]
    return lambda token: select_by_token(token, scales, jnp.float32(0))


def select_by_token(token: jax.Array, values: list[jax.Array], other: jax.Array) -> jax.Array:
    """Returns `values[token]` for each of [N] tokens, and `other` where there is none."""
    result = jnp.full(token.shape, other)
    for t, value in enumerate(values):
        result = jnp.where(token == t, value, result)
    return result


def row_mask(inside: jax.Array, dim: jax.Array, head_dim: int) -> jax.Array:
    """Returns bool[N, dims]: rows that are inside, and dimensions below `head_dim`."""
    mask = jnp.broadcast_to(inside[:, None], (inside.shape[0], dim.shape[0]))
    return mask if dim.shape[0] == head_dim else mask & (dim < head_dim)[None]


def load_rows(reference: Any, at: Any, dim: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns rows [N, dims] of a reference [..., D], 0 outside the mask.

    Args:
      reference: what to load from.
      at: its leading indices, scalars or i32[N].
      dim: i32[dims], indices into D.
      mask: bool[N, dims].
    """
    at = [x[:, None] if jnp.ndim(x) else x for x in at]
    other = jnp.zeros((), reference.dtype)
    return plgpu.load(reference.at[(*at, dim[None])], mask=mask, other=other)
