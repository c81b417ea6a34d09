"""The modules of a decoder layer: norms, attention and a gated MLP.

Weights are `(in, out)`, so that a product of few tokens streams them in order. Projections of one
input are one array. The modules are plain JAX; `dispatch.run_layer` chooses between the plain step
of a layer and the kernels.
Axes: `B` requests, `T` new tokens, `E` hidden, `D` head dimension.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.decoder.attention import AttentionBackend, attend, causal_attention
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.shared_math import AttentionSpec, NormSpec


def weight(rngs: nnx.Rngs | None, config: TransformerConfig, *shape: int) -> nnx.Param:
    """Returns a random parameter of the configuration's dtype; zeros if only shapes are wanted."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, config.dtype))
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02
    return nnx.Param(values.astype(config.dtype))


def _gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


def _bias(config: TransformerConfig, size: int) -> nnx.Param:
    return nnx.Param(jnp.zeros((size,), config.dtype))


def linear(
    x: jax.Array, matrix: nnx.Param | jax.Array, bias: nnx.Param | jax.Array | None
) -> jax.Array:
    """Returns x @ matrix + bias, rounded once, after the bias; None adds nothing."""
    if bias is None:
        return x @ matrix[...]
    y = jnp.matmul(x, matrix[...], preferred_element_type=jnp.float32)
    return (y + bias[...].astype(jnp.float32)[None, None]).astype(x.dtype)


def sum_shares(y: jax.Array, axis_name: str | None) -> jax.Array:
    """Returns the sum of the devices' parts of a product, rounded once; y itself without an axis.

    Args:
      y: this device's part.
      axis_name: the mesh axis over which the product's summed axis is split, or None.
    """
    if axis_name is None:
        return y
    return jax.lax.psum(y.astype(jnp.float32), axis_name)


def summed_linear(
    x: jax.Array,
    matrix: nnx.Param | jax.Array,
    bias: nnx.Param | jax.Array | None,
    axis_name: str | None,
) -> jax.Array:
    """Returns the row-parallel `linear`: a sum over `axis_name`, if it is not None.

    Args:
      x: [B, T, K], this device's columns.
      matrix: [K, N], this device's rows.
      bias: [N], on every device, or None.
      axis_name: the mesh axis, or None.
    """
    if axis_name is None:
        return linear(x, matrix, bias)
    y = sum_shares(jnp.matmul(x, matrix[...], preferred_element_type=jnp.float32), axis_name)
    y = y if bias is None else y + bias[...].astype(jnp.float32)[None, None]
    return y.astype(x.dtype)


def embed_tokens(table: jax.Array, token_ids: jax.Array, axis_name: str | None) -> jax.Array:
    """Returns embeddings [B, T, E]; the table's rows are split over `axis_name`, if it is not None.

    Args:
      table: [V, E], this device's rows.
      token_ids: i32[B, T], of the whole vocabulary.
      axis_name: the mesh axis, or None.
    """
    if axis_name is None:
        return table[token_ids]
    # One device has a token's row, and the others add 0.
    rows = token_ids - jax.lax.axis_index(axis_name) * len(table)
    is_here = (rows >= 0) & (rows < len(table))
    here = jnp.where(is_here[..., None], table[jnp.where(is_here, rows, 0)], 0)
    return jax.lax.psum(here, axis_name)


def table_logits(table: jax.Array, hidden: jax.Array) -> jax.Array:
    """Returns logits [..., V] of hidden states [..., E] by an output layer's table [V, E]."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    # The table on the left: one row against it is read in order, ten times faster on CPU.
    return (table @ rows.T).T.reshape(*hidden.shape[:-1], -1)


def rms_norm(x: jax.Array, scale: jax.Array, spec: NormSpec) -> jax.Array:
    """Returns x over its root mean square along the last axis, times a weight.

    Args:
      x: [..., E].
      scale: the weight, which broadcasts to x.
      spec: constants of the norm.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + spec.eps)
    scale = jnp.broadcast_to(scale, x.shape)
    if not spec.offset:
        return y.astype(x.dtype) * scale
    # In float32, as trained: a short float cannot hold offset + weight.
    return (y * (spec.offset + scale.astype(jnp.float32))).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Scales the last axis by its root mean square, in float32, and by a weight.

    Args:
      config: gives the offset of the weight, and its dtype.
      size: of the last axis.
    """

    def __init__(self, config: TransformerConfig, size: int) -> None:
        self.spec = NormSpec(size, config.rms_norm_eps, config.norm_offset)
        self.weight = nnx.Param(jnp.full((size,), 1.0 - self.spec.offset, config.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.spec)


def residual_add(x: jax.Array, y: jax.Array, norm: RMSNorm | None) -> jax.Array:
    """Returns x + y, or x + norm(y) if there is a norm."""
    return x + (y if norm is None else norm(y))


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings, over a cache or causal in itself.

    Args:
      config: sizes and constants.
      layer: number of the layer, which decides its window.
      rngs: source of the initial weights.
      axis_name: as in `Layer`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer: int,
        rngs: nnx.Rngs | None,
        axis_name: str | None = None,
    ) -> None:
        self.axis_name = axis_name
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        scale = config.head_dim**-0.5 if config.query_scale is None else config.query_scale
        self.spec = AttentionSpec(scale, config.window(layer), config.attention_softcap)
        out = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = weight(rngs, config, config.hidden_size, out)
        self.out = weight(rngs, config, self.num_heads * self.head_dim, config.hidden_size)
        self.qkv_bias = _bias(config, out) if config.qkv_bias else None
        self.out_bias = _bias(config, config.hidden_size) if config.out_bias else None
        self.query_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None
        self.key_norm = RMSNorm(config, self.head_dim) if config.qk_norm else None

    def normed_heads(self, y: jax.Array) -> jax.Array:
        """Returns queries, keys and values [B, T, heads, D] after their norms, none rotated.

        Args:
          y: [B, T, heads * D], from the projection.
        """
        heads = y.reshape(*y.shape[:2], -1, self.head_dim)
        if self.query_norm is None or self.key_norm is None:
            return heads
        q, k, v = jnp.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=2)
        return jnp.concatenate([self.query_norm(q), self.key_norm(k), v], axis=2)

    def project(self, x: jax.Array) -> jax.Array:
        """Returns queries, keys and values [B, T, heads, D] of rows [B, T, E], none rotated."""
        return self.normed_heads(linear(x, self.qkv, self.qkv_bias))

    def causal(self, x: jax.Array, cos_sin: Any, implementation: AttentionBackend) -> jax.Array:
        """Returns [B, T, E] of whole sequences: each token attends to those up to its own."""
        heads = self.project(x)
        y = causal_attention(heads, cos_sin, self.num_kv_heads, self.spec, implementation)
        return summed_linear(y, self.out, self.out_bias, self.axis_name)

    def __call__(
        self, x: jax.Array, cos_sin: Any, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Returns [B, T, E], and the cache with the tokens in it; arguments as in `Layer`."""
        heads = self.project(x).astype(cache[0].dtype)
        y, cache = attend(heads, cos_sin, positions, cache, spec=self.spec)
        return summed_linear(y, self.out, self.out_bias, self.axis_name), cache


class MLP(nnx.Module):
    """A gated MLP: the gate and the up projection are one array."""

    def __init__(
        self, config: TransformerConfig, rngs: nnx.Rngs | None, axis_name: str | None = None
    ) -> None:
        self.axis_name = axis_name
        self.gate_up = weight(rngs, config, config.hidden_size, 2 * config.intermediate_size)
        self.down = weight(rngs, config, config.intermediate_size, config.hidden_size)
        self.activation = jax.nn.silu if config.hidden_act == "silu" else _gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [B, T, E]."""
        gate, up = jnp.split(x @ self.gate_up[...], 2, axis=-1)
        y = (self.activation(gate) * up).astype(x.dtype)
        return summed_linear(y, self.down, None, self.axis_name)


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream.

    With `sandwich_norms` the outputs of both are normed first.

    Args:
      config: sizes and constants.
      number: of the layer.
      rngs: source of the initial weights.
      axis_name: the mesh axis over which heads and MLP lie, of which this device has the share
        that `config` describes; None is the whole layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        number: int,
        rngs: nnx.Rngs | None,
        axis_name: str | None = None,
    ) -> None:
        self.rope = config.rope(number)
        self.attention_norm = RMSNorm(config, config.hidden_size)
        self.attention = Attention(config, number, rngs, axis_name)
        self.mlp_norm = RMSNorm(config, config.hidden_size)
        self.mlp = MLP(config, rngs, axis_name)
        sandwich = config.sandwich_norms
        self.attention_out_norm = RMSNorm(config, config.hidden_size) if sandwich else None
        self.mlp_out_norm = RMSNorm(config, config.hidden_size) if sandwich else None

    def causal(self, x: jax.Array, cos_sin: Any, implementation: AttentionBackend) -> jax.Array:
        """Returns the residual stream [B, T, E] of whole sequences after this layer."""
        y = self.attention.causal(self.attention_norm(x), cos_sin, implementation)
        return self.add(x, y)

    def add(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Returns the stream [B, T, E] with the output of attention added, and the MLP."""
        x = residual_add(x, y.astype(x.dtype), self.attention_out_norm)
        y = self.mlp(self.mlp_norm(x)).astype(x.dtype)
        return residual_add(x, y, self.mlp_out_norm)

    def plain(
        self, x: jax.Array, cos_sin: Any, positions: jax.Array, cache: Any, rows: Any = None
    ) -> tuple[jax.Array, Any]:
        """Returns the residual stream [B, T, E] after this layer in plain JAX, and its cache.

        Args:
          x: [B, T, E], the residual stream.
          cos_sin: of the layer's rotary embeddings, two f32[B, T, 1, D / 2].
          positions: i32[B, T], -1 for no token.
          cache: keys and values, two [B, G, S, D].
          rows: [B, T, W], the input of attention instead of the norm of x, or None.
        """
        rows = self.attention_norm(x) if rows is None else rows
        y, cache = self.attention(rows, cos_sin, positions, cache)
        return self.add(x, y), cache
