"""The modules of a decoder layer: norms, attention and a gated MLP.

Weights are `(in, out)` so that a product of few tokens streams them in order, and projections
that read the same input are one array.
Axes: `B` requests, `T` tokens fed, `E` hidden, `D` head dimension.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.attention import Kernel, Rule, cached_attention, causal_attention
from specjax.models.config import TransformerConfig
from specjax.models.rope import rotate

__all__ = ["Attention", "Layer", "MLP", "RMSNorm", "weight"]


def weight(rngs: nnx.Rngs, config: TransformerConfig, *shape: int) -> nnx.Param:
    """A random parameter of the configuration's dtype."""
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02
    return nnx.Param(values.astype(config.dtype))


def _bias(config: TransformerConfig, size: int) -> nnx.Param:
    return nnx.Param(jnp.zeros((size,), config.dtype))


def _affine(x: jax.Array, matrix: nnx.Param, bias: nnx.Param | None) -> jax.Array:
    if bias is None:
        return x @ matrix[...]
    # Rounded once, behind the bias.
    y = jnp.matmul(x, matrix[...], preferred_element_type=jnp.float32)
    return (y + bias[...].astype(jnp.float32)).astype(x.dtype)


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
        self.rule = Rule(scale, config.window(layer), config.attention_softcap)
        out = (self.heads + 2 * self.groups) * self.head_dim
        self.qkv = weight(rngs, config, config.hidden_size, out)
        self.out = weight(rngs, config, self.heads * self.head_dim, config.hidden_size)
        self.qkv_bias = _bias(config, out) if config.qkv_bias else None
        self.out_bias = _bias(config, config.hidden_size) if config.out_bias else None
        self.query_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None
        self.key_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None

    def _project(self, x: jax.Array, turns: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = _affine(x, self.qkv, self.qkv_bias).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(y, [self.heads, self.heads + self.groups], axis=2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        return rotate(q, turns), rotate(k, turns), v

    def causal(self, x: jax.Array, turns: Any, implementation: Kernel) -> jax.Array:
        """[B, T, E] of whole sequences, each token seeing those before it."""
        q, k, v = self._project(x, turns)
        y = causal_attention(q, k, v, self.rule, implementation)
        return _affine(y, self.out, self.out_bias)

    def __call__(
        self, x: jax.Array, turns: Any, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        q, k, v = self._project(x, turns)
        y, cache = cached_attention(q, k, v, positions, cache, self.rule)
        return _affine(y, self.out, self.out_bias), cache


class MLP(nnx.Module):
    """A gated MLP: the gate and the up projection are one array."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.gate_up = weight(rngs, config, config.hidden_size, 2 * config.intermediate_size)
        self.down = weight(rngs, config, config.intermediate_size, config.hidden_size)
        self.silu = config.hidden_act == "silu"

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x @ self.gate_up[...], 2, axis=-1)
        gate = jax.nn.silu(gate) if self.silu else jax.nn.gelu(gate, approximate=True)
        return (gate * up) @ self.down[...]


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

    def _add(self, x: jax.Array, y: jax.Array, norm: RMSNorm | None) -> jax.Array:
        return x + (y if norm is None else norm(y))

    def _feed(self, x: jax.Array) -> jax.Array:
        return self._add(x, self.mlp(self.mlp_norm(x)), self.mlp_out_norm)

    def causal(self, x: jax.Array, turns: Any, implementation: Kernel) -> jax.Array:
        """The residual stream [B, T, E] of whole sequences after this layer."""
        y = self.attention.causal(self.attention_norm(x), turns, implementation)
        return self._feed(self._add(x, y, self.attention_out_norm))

    def __call__(
        self, x: jax.Array, turns: Any, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        y, cache = self.attention(self.attention_norm(x), turns, positions, cache)
        return self._feed(self._add(x, y, self.attention_out_norm)), cache
