"""The modules of a decoder layer: norms, attention and a gated MLP.

Weights are `(in, out)` so that a product of few tokens streams them in order, and projections
that read the same input are one array.
Axes: `B` requests, `T` tokens fed, `E` hidden, `D` head dimension.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import (
    Kernel,
    Rule,
    cached_attention,
    causal_attention,
    is_looked_at,
)
from specjax.models.config import TransformerConfig
from specjax.models.ops import Normed, Product, gated, join, may_wait, multiply

__all__ = ["Attention", "Layer", "MLP", "RMSNorm", "weight"]


def weight(rngs: nnx.Rngs, config: TransformerConfig, *shape: int) -> nnx.Param:
    """A random parameter of the configuration's dtype."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02
    return nnx.Param(values.astype(config.dtype))


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _bias(config: TransformerConfig, size: int) -> nnx.Param:
    return nnx.Param(jnp.zeros((size,), config.dtype))


def _affine(x: jax.Array, matrix: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    if bias is None:
        return x @ matrix[...]
    # Rounded once, behind the bias.
    y = jnp.matmul(x, matrix[...], preferred_element_type=jnp.float32)
    return (y + bias[...].astype(jnp.float32)[None, None]).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Scales the last axis by its root mean square, in float32, and by a weight.

    Args:
      config: gives the offset of the weight, and its dtype.
      size: of the last axis.
    """

    def __init__(self, config: TransformerConfig, size: int) -> None:
        self.eps, self.offset = config.rms_norm_eps, config.norm_offset
        self.weight = nnx.Param(jnp.full((size,), 1.0 - self.offset, config.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        scale = jnp.broadcast_to(self.weight[...], x.shape)
        if not self.offset:
            return y.astype(x.dtype) * scale
        # In float32, as it was trained: offset and weight do not add up in a short float.
        return (y * (self.offset + scale.astype(jnp.float32))).astype(x.dtype)

    def late(self, x: jax.Array) -> Normed:
        """The rows with their weight; of few ones, not yet divided by their root mean square."""
        if not may_wait(x):
            return Normed(self(x), None)
        return join(x, None, self.weight[...], self.offset)[1]

    def after(
        self, x: jax.Array, parts: jax.Array, norm: "RMSNorm | None"
    ) -> tuple[jax.Array, Normed]:
        """The residual stream with a product [Q, B, T, E] added, normed before if asked; as `late`.

        Returns the stream, and its rows behind this norm.
        """
        if norm is None and may_wait(x):
            return join(x, parts, self.weight[...], self.offset)
        x = _added(x, Product(parts).whole(0, 0.0).astype(x.dtype), norm)
        return x, self.late(x)


def _added(x: jax.Array, y: jax.Array, norm: RMSNorm | None) -> jax.Array:
    return x + (y if norm is None else norm(y))


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings, over a cache or causal in itself.

    Args:
      config: sizes and constants.
      layer: number of the layer, which decides on its window.
      rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, layer: int, rngs: nnx.Rngs) -> None:
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        rest = (config.attention_softcap, config.hidden_size, config.rms_norm_eps)
        self.rule = Rule(scale, config.window(layer), *rest)
        # What it gives is then added to the stream by the kernel that begins the next norm.
        self.is_joined = not config.sandwich_norms
        out = (self.heads + 2 * self.groups) * self.head_dim
        self.qkv = weight(rngs, config, config.hidden_size, out)
        self.out = weight(rngs, config, self.heads * self.head_dim, config.hidden_size)
        self.qkv_bias = _bias(config, out) if config.qkv_bias else None
        self.out_bias = _bias(config, config.hidden_size) if config.out_bias else None
        self.query_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None
        self.key_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None

    def _heads(self, y: jax.Array) -> jax.Array:
        """Queries, keys and values [B, T, heads, D] behind their norms, none of them rotated."""
        heads = y.reshape(*y.shape[:2], -1, self.head_dim)
        if self.query_norm is None or self.key_norm is None:
            return heads
        q, k, v = jnp.split(heads, [self.heads, self.heads + self.groups], axis=2)
        return jnp.concatenate([self.query_norm(q), self.key_norm(k), v], axis=2)

    def causal(self, x: jax.Array, turns: Any, implementation: Kernel) -> jax.Array:
        """[B, T, E] of whole sequences, each token seeing those before it."""
        heads = self._heads(_affine(x, self.qkv, self.qkv_bias))
        y = causal_attention(heads, turns, self.groups, self.rule, implementation)
        return _affine(y, self.out, self.out_bias)

    def _project(self, x: Normed, tokens: int, keys: jax.Array) -> Product:
        """A product [B, T', heads * D], queries, keys and values, none of them rotated."""
        if self.qkv_bias is None and self.query_norm is None:
            early = is_looked_at(x.rows.shape[1], tokens, self.heads // self.groups, keys)
            return Product(multiply(x.rows, self.qkv[...], early=early), x.squares)
        if x.squares is None:
            y = _affine(x.rows, self.qkv, self.qkv_bias)
        else:
            product = Product(multiply(x.rows, self.qkv[...]), x.squares)
            y = product.whole(self.rule.size, self.rule.eps)
            if self.qkv_bias is not None:
                y += self.qkv_bias[...].astype(jnp.float32)[None, None]
            y = y.astype(x.rows.dtype)
        return Product(self._heads(y).reshape(1, *y.shape))

    def __call__(
        self, x: Normed, turns: Any, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """A product as parts [Q, B, T, E], and the cache with the tokens in it."""
        projected = self._project(x, positions.shape[1], cache[0])
        y, cache = cached_attention(projected, turns, positions, cache, self.rule)
        if self.out_bias is None:
            return multiply(y, self.out[...], early=self.is_joined and may_wait(y)), cache
        return _affine(y, self.out, self.out_bias)[None], cache


class MLP(nnx.Module):
    """A gated MLP: the gate and the up projection are one array."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.size, self.eps = config.hidden_size, config.rms_norm_eps
        self.gate_up = weight(rngs, config, config.hidden_size, 2 * config.intermediate_size)
        self.down = weight(rngs, config, config.intermediate_size, config.hidden_size)
        self.activation = jax.nn.silu if config.hidden_act == "silu" else _gelu

    def causal(self, x: jax.Array) -> jax.Array:
        """[B, T, E] of whole sequences."""
        gate, up = jnp.split(x @ self.gate_up[...], 2, axis=-1)
        return (self.activation(gate) * up) @ self.down[...]

    def __call__(self, x: Normed, *, is_joined: bool) -> jax.Array:
        """A product as parts [Q, B, T, E].

        Args:
          x: behind `mlp_norm`.
          is_joined: whether a norm's `after` adds the parts as they are.
        """
        early = is_joined and may_wait(x.rows)
        return gated(x, self.gate_up[...], self.down[...], mlp=self, early=early)


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream, normed before if asked."""

    def __init__(self, config: TransformerConfig, number: int, rngs: nnx.Rngs) -> None:
        self.rope = config.rope(number)
        self.attention_norm = RMSNorm(config, config.hidden_size)
        self.attention = Attention(config, number, rngs)
        self.mlp_norm = RMSNorm(config, config.hidden_size)
        self.mlp = MLP(config, rngs)
        sandwich = config.sandwich_norms
        self.attention_out_norm = RMSNorm(config, config.hidden_size) if sandwich else None
        self.mlp_out_norm = RMSNorm(config, config.hidden_size) if sandwich else None

    def causal(self, x: jax.Array, turns: Any, implementation: Kernel) -> jax.Array:
        """The residual stream [B, T, E] of whole sequences after this layer."""
        y = self.attention.causal(self.attention_norm(x), turns, implementation)
        x = _added(x, y, self.attention_out_norm)
        return _added(x, self.mlp.causal(self.mlp_norm(x)), self.mlp_out_norm)

    def advance(
        self,
        x: jax.Array,
        normed: Normed,
        turns: Any,
        positions: jax.Array,
        cache: Any,
        *,
        is_joined: bool = True,
    ) -> tuple[jax.Array, jax.Array, Any]:
        """The residual stream, what is to be added to it as parts, and the cache.

        Args:
          x: the residual stream [B, T, E].
          normed: the same behind `attention_norm`.
          turns: of the layer's rotary embeddings.
          positions: i32[B, T].
          cache: the layer's own.
          is_joined: whether a norm's `after` adds the parts.
        """
        parts, cache = self.attention(normed, turns, positions, cache)
        x, normed = self.mlp_norm.after(x, parts, self.attention_out_norm)
        is_joined = is_joined and self.mlp_out_norm is None
        return x, self.mlp(normed, is_joined=is_joined), cache

    def __call__(
        self, x: jax.Array, turns: Any, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """The residual stream [B, T, E] after this layer, and its cache."""
        normed = self.attention_norm.late(x)
        x, parts, cache = self.advance(x, normed, turns, positions, cache, is_joined=False)
        y = Product(parts).whole(0, 0.0).astype(x.dtype)
        return _added(x, y, self.mlp_out_norm), cache
