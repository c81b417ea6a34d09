"""A request's queries, keys and values, as the kernels load them.

For token t and a head

    qkv_t = rsqrt(mean(x_t^2) + eps) * sum_q parts[q, t]

plus a bias, if there is one, rounded to the cache's dtype. Then follow the norms of the heads of
queries and keys (QK-norm), if there are any, and the rotation (RoPE).

Axes as in `attention`; `N` rows of a tile, each one head of one token.

References:
  Su et al., 2021, arXiv:2104.09864: RoPE.
  Henry et al., 2020, arXiv:2010.04245: QK-norm.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.models.decoder.pallas.add_rms_norm import inv_rms, load_squares, scale_norm
from specjax.models.decoder.shared_math import NormSpec, rotate_halves
from specjax.pallas.kernel_config import next_power_of_2


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
      key_norm: [D], weight of the norm of each key; None if there is none.
      bias: [H + 2 * G, D], of the projection, or None.
      rows: i32[B], the row of the cache, of R rows then, that each request of the call continues.
        Several may continue one row. None is row b of B.
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
    bias: Any = None
    rows: Any = None


class RequestQKV(NamedTuple):
    """The queries, keys and values of request `b`, loaded on demand.

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
        if (bias := self.operands.bias) is not None:
            at = (jnp.broadcast_to(head, token.shape),)
            total += load_rows(bias, at, dim, mask).astype(jnp.float32)
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

        Each head is one tile, as a product with keys needs it. So both elements of a pair are
        loaded for each element, twice as many loads as in `rotated_halves`.

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
          dim: i32[dims], indices of the elements.
        """
        if self.head_norm is None:
            return x
        size, offset, dtype = self.head_norm.size, self.head_norm.offset, self.operands.keys.dtype
        scale = plgpu.load(weight.at[dim], mask=dim < size, other=jnp.zeros((), weight.dtype))
        y = x * jax.lax.rsqrt(squares / size + self.head_norm.eps)[:, None]
        scale = (scale.astype(jnp.float32) + offset)[None]
        return scale_norm(y, scale, self.head_norm, dtype)


def cache_row(rows: Any, b: jax.Array) -> jax.Array:
    """Returns the row i32[] of the cache that request b continues, by `QKVOperands.rows`."""
    return b if rows is None else rows[b]


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
    if num_tokens > 16:
        # Tokens after the last, which are padding of a tile, have the last one's factor.
        return lambda token: inv_rms(
            load_squares(
                squares,
                jnp.full(token.shape, b),
                jnp.minimum(token, jnp.int32(num_tokens - 1)),
            ),
            norm,
        )
    # Summed once per token: a sum per row of the tile would take longer.
    scales = [inv_rms(load_squares(squares, b, jnp.int32(t)), norm) for t in range(num_tokens)]
    return lambda token: select_by_token(token, scales, jnp.float32(0))


def select_by_token(token: jax.Array, values: list[jax.Array], other: jax.Array) -> jax.Array:
    """Returns `values[token]` for each of [N] tokens, and `other` without one."""
    result = jnp.full(token.shape, other)
    for t, value in enumerate(values):
        result = jnp.where(token == t, value, result)
    return result


def row_mask(inside: jax.Array, dim: jax.Array, head_dim: int) -> jax.Array:
    """Returns bool[N, dims]: rows that are inside, and dimensions below `head_dim`."""
    mask = jnp.broadcast_to(inside[:, None], (inside.shape[0], dim.shape[0]))
    return mask if dim.shape[0] == head_dim else mask & (dim < head_dim)[None]


def load_rows(reference: Any, at: Any, dim: jax.Array, mask: jax.Array | None) -> jax.Array:
    """Returns rows [N, dims] of a reference [..., D], 0 outside the mask.

    Args:
      reference: the source.
      at: its leading indices, scalars or i32[N].
      dim: i32[dims], indices into D.
      mask: bool[N, dims] or [1, dims]; None loads all.
    """
    at = [x[:, None] if jnp.ndim(x) else x for x in at]
    other = None if mask is None else jnp.zeros((), reference.dtype)
    return plgpu.load(reference.at[(*at, dim[None])], mask=mask, other=other)
