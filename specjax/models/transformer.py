"""A Llama-family decoder: its modules, and its view as pure functions.

Weights are `(in, out)` so that a product of few tokens streams them in order, projections
that read the same input are one array, and every layer has arrays of its own: a stack of
layers under a scan copies each layer's slice before using it.
Axes: `B` requests, `T` tokens fed, `S` cache slots, `E` hidden, `G` key-value heads, `R`
query heads per key-value head, `D` head dimension, `V` vocabulary.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.config import TransformerConfig
from specjax.typing import Model

__all__ = [
    "Attention",
    "Layer",
    "MLP",
    "RMSNorm",
    "Transformer",
    "build",
    "causal_hidden",
    "functions",
]

_Kernel = Literal["xla", "cudnn"] | None
_MASKED = -1e30  # Finite: a padding token sees no slot and must still give finite numbers.


def _weight(rngs: nnx.Rngs, config: TransformerConfig, *shape: int) -> nnx.Param:
    values = jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02
    return nnx.Param(values.astype(config.dtype))


class RMSNorm(nnx.Module):
    """Scales by the root mean square, in float32."""

    def __init__(self, config: TransformerConfig) -> None:
        self.eps = config.rms_norm_eps
        self.weight = nnx.Param(jnp.ones((config.hidden_size,), config.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * jnp.broadcast_to(self.weight[...], x.shape)


def _rotation(config: TransformerConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    exponents = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    frequencies = config.rope_theta**-exponents
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    cos, sin = rotation
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings, over a cache or causal in itself."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.heads = config.num_attention_heads
        self.groups = config.num_key_value_heads
        self.head_dim = config.head_dim
        out = (self.heads + 2 * self.groups) * self.head_dim
        self.qkv = _weight(rngs, config, config.hidden_size, out)
        self.out = _weight(rngs, config, self.heads * self.head_dim, config.hidden_size)

    def _project(self, x: jax.Array, rotation: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        y = (x @ self.qkv[...]).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(y, [self.heads, self.heads + self.groups], axis=2)
        return _rotate(q, rotation), _rotate(k, rotation), v

    def causal(self, x: jax.Array, rotation: Any, implementation: _Kernel) -> jax.Array:
        """[B, T, E] of whole sequences, each token seeing those before it."""
        q, k, v = self._project(x, rotation)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
        return y.reshape(*x.shape[:2], -1) @ self.out[...]

    def __call__(
        self, x: jax.Array, rotation: Any, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        batch, tokens = positions.shape
        q, k, v = self._project(x, rotation)
        keys, values = cache
        slots = keys.shape[2]
        # Past the end and dropped: an index of -1 would write the last slot.
        index = jnp.where(positions < 0, slots, positions)
        rows = jnp.arange(batch)[:, None]
        keys = keys.at[rows, :, index].set(k, mode="drop")
        values = values.at[rows, :, index].set(v, mode="drop")
        # The query heads that share a key head are rows of one product with it.
        q = q.reshape(batch, tokens, self.groups, -1, self.head_dim).transpose(0, 2, 3, 1, 4)
        q = q.reshape(batch, self.groups, -1, self.head_dim)
        scores = jnp.matmul(q, keys.swapaxes(-1, -2), preferred_element_type=jnp.float32)
        scores = scores.reshape(batch, self.groups, -1, tokens, slots) * self.head_dim**-0.5
        seen = jnp.arange(slots)[None, None] <= positions[..., None]
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1)
        weights = weights.astype(x.dtype).reshape(batch, self.groups, -1, slots)
        y = (weights @ values).reshape(batch, self.groups, -1, tokens, self.head_dim)
        y = y.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, -1)
        return y @ self.out[...], (keys, values)


class MLP(nnx.Module):
    """SwiGLU: the gate and the up projection are one array."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.gate_up = _weight(rngs, config, config.hidden_size, 2 * config.intermediate_size)
        self.down = _weight(rngs, config, config.intermediate_size, config.hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x @ self.gate_up[...], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ self.down[...]


class Layer(nnx.Module):
    """Pre-norm attention and SwiGLU, each added to the residual stream."""

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config)
        self.mlp = MLP(config, rngs)

    def causal(self, x: jax.Array, rotation: Any, implementation: _Kernel) -> jax.Array:
        """The residual stream [B, T, E] of whole sequences after this layer."""
        x = x + self.attention.causal(self.attention_norm(x), rotation, implementation)
        return x + self.mlp(self.mlp_norm(x))

    def __call__(
        self, x: jax.Array, rotation: Any, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        y, cache = self.attention(self.attention_norm(x), rotation, positions, cache)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), cache


class Transformer(nnx.Module):
    """The decoder as an NNX module; `functions` is its view as pure functions.

    Args:
      config: sizes and constants.
      rngs: source of the initial weights.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embedding = _weight(rngs, config, config.vocab_size, config.hidden_size)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config)
        if not config.tie_word_embeddings:
            self.head = _weight(rngs, config, config.vocab_size, config.hidden_size)

    def __call__(
        self, token_ids: jax.Array, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        """Hidden states [B, T, E] after the last norm, and the cache with the tokens in it."""
        x = self.embedding[...][token_ids]
        rotation = _rotation(self.config, positions)
        written = []
        for layer, entry in zip(self.layers, cache, strict=True):
            x, entry = layer(x, rotation, positions, entry)
            written.append(entry)
        return self.norm(x), tuple(written)

    def causal(self, token_ids: jax.Array, implementation: _Kernel = None) -> jax.Array:
        """Hidden states [B, T, E] of whole sequences, without a cache, for training."""
        # A product: the gradient of a lookup adds colliding rows, in low precision and any order.
        table = self.embedding[...]
        x = jax.nn.one_hot(token_ids, self.config.vocab_size, dtype=table.dtype) @ table
        positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1])[None], token_ids.shape)
        rotation = _rotation(self.config, positions)
        for layer in self.layers:
            x = layer.causal(x, rotation, implementation)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits [..., V] of hidden states [..., E]."""
        table = self.embedding if self.config.tie_word_embeddings else self.head
        rows = hidden.reshape(-1, hidden.shape[-1])
        # The table on the left: one row against it is read in order, ten times faster on CPU.
        return (table[...] @ rows.T).T.reshape(*hidden.shape[:-1], -1)


@functools.cache
def _graph(config: TransformerConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0))))[0]


@functools.cache
def functions(config: TransformerConfig) -> tuple[Any, Any, Any]:
    """`(init_cache, apply, logits)` as `specjax.typing.Model` describes them.

    Equal configurations give the same functions, so that their models share compilations.
    """

    def init_cache(batch_size: int, max_length: int) -> Any:
        shape = (batch_size, config.num_key_value_heads, max_length, config.head_dim)
        layers = range(config.num_hidden_layers)
        return tuple(
            (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in layers
        )

    def apply(
        params: Any, token_ids: jax.Array, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        return nnx.merge(_graph(config), nnx.State(params))(token_ids, positions, cache)

    def logits(params: Any, hidden: jax.Array) -> jax.Array:
        return nnx.merge(_graph(config), nnx.State(params)).logits(hidden)

    return init_cache, apply, logits


def causal_hidden(
    config: TransformerConfig,
    params: Any,
    token_ids: jax.Array,
    implementation: _Kernel = None,
) -> jax.Array:
    """Hidden states [B, T, E] of whole sequences at positions 0 to T - 1, for training.

    Args:
      config: sizes and constants.
      params: as in `Model.params`, of any floating dtype.
      token_ids: i32[B, T].
      implementation: of `jax.nn.dot_product_attention`; None is its own choice.

    Returns:
      What `apply` gives for the same tokens on an empty cache.
    """
    return nnx.merge(_graph(config), nnx.State(params)).causal(token_ids, implementation)


def build(config: TransformerConfig, params: Any = None, *, seed: int = 0) -> Model:
    """A `specjax.typing.Model` of this configuration.

    Args:
      config: sizes and constants.
      params: nested dict of arrays as another such model holds it. None draws
        random weights from `seed`.
      seed: of the random weights.

    Example:
      >>> config = TransformerConfig(64, 16, 32, 2, 4, 2, 4)
      >>> model = build(config)
      >>> sorted(model.params)
      ['embedding', 'layers', 'norm']
    """
    if params is None:
        params = nnx.to_pure_dict(nnx.state(Transformer(config, nnx.Rngs(seed)), nnx.Param))
    return Model(params, *functions(config))
