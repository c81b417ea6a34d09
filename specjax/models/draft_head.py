"""A draft head: one decoder layer on the target's embeddings and hidden states, like EAGLE.

    x[t]      = concat(norm(embed(token[t])), norm(embed(token[t - 1])), norm(hidden[t])) @ mix
    hidden'   = norm(layer(x)),  logits = target.logits(hidden')

hidden[t] is the state whose logits decided token[t]. It is the target's for the last committed
token, and the head's own for drafted tokens. It is zero for the context, whose hidden states a
drafter is not given.
Axes: `B` requests, `T` new tokens, `E` hidden, `G` key-value heads, `R` query heads per
key-value head, `D` head dimension.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.implementation import Implementation
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.dispatch import run_layer
from specjax.models.decoder.layers import Layer, RMSNorm, weight
from specjax.models.decoder.rope import rope_cos_sin, rotate

__all__ = [
    "DraftHead",
    "HeadConfig",
    "build_head",
    "check_head",
    "draft_head_functions",
    "unrolled_hidden",
]

_MASKED = -1e30  # Finite, since the first token of a sequence has no context.


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Sizes of a draft head; its layer is a Llama layer for every family of targets.

    Attributes:
      hidden_size: of the target.
      intermediate_size: width of the gated MLP.
      num_attention_heads: query heads.
      num_key_value_heads: key-value heads, a divisor of the query heads.
      head_dim: size of one attention head, even.
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope_theta: base of the rotary frequencies.
      window: number of tokens that a token attends to, itself included, so that long sequences
        do not exceed what the head was trained on. None is all.
      dtype: of parameters, activations and cache.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    window: int | None = None
    dtype: str = "float32"

    def layer(self) -> TransformerConfig:
        """Returns the configuration of the layer; embeddings and logits are the target's."""
        sizes = dataclasses.asdict(self)
        windows = (sizes.pop("window"),)
        return TransformerConfig(vocab_size=1, num_hidden_layers=1, layer_windows=windows, **sizes)


class DraftHead(nnx.Module):
    """A draft head as an NNX module; `draft_head_functions` makes pure functions of it.

    Args:
      config: sizes and constants.
      rngs: source of the initial weights.
    """

    def __init__(self, config: HeadConfig, rngs: nnx.Rngs | None) -> None:
        self.config, layer = config, config.layer()
        self.token_norm = RMSNorm(layer, config.hidden_size)
        self.hidden_norm = RMSNorm(layer, config.hidden_size)
        self.mix = weight(rngs, layer, 3 * config.hidden_size, config.hidden_size)
        self.layer = Layer(layer, 0, rngs)
        self.norm = RMSNorm(layer, config.hidden_size)

    def _fuse(self, tokens: jax.Array, previous: jax.Array, hidden: jax.Array) -> jax.Array:
        parts = [self.token_norm(tokens), self.token_norm(previous), self.hidden_norm(hidden)]
        return jnp.concatenate(parts, axis=-1) @ self.mix[...]

    def _cos_sin(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        return rope_cos_sin(*self.layer.rope, self.config.head_dim, positions)

    def __call__(
        self,
        tokens: jax.Array,
        previous: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        cache: Any,
        implementation: str | Implementation | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns hidden states [B, T, E] after each token, and the cache with the tokens."""
        x = self._fuse(tokens, previous, hidden)
        x, cache = run_layer(
            self.layer, x, self._cos_sin(positions), positions, cache, implementation
        )
        return self.norm(x), cache

    def _project_qkv(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, ...]:
        """Returns queries [B, T, G, R, D], keys and values [B, T, G, D]."""
        attention, cos_sin = self.layer.attention, self._cos_sin(positions)
        y = self.layer.attention_norm(x) @ attention.qkv[...]
        y = y.reshape(*x.shape[:2], -1, self.config.head_dim)
        q, k, v = jnp.split(
            y, [attention.num_heads, attention.num_heads + attention.num_kv_heads], axis=2
        )
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        return q.reshape(*x.shape[:2], attention.num_kv_heads, -1, self.config.head_dim), k, v

    def _apply_mlp(self, x: jax.Array) -> jax.Array:
        gate, up = jnp.split(x @ self.layer.mlp.gate_up[...], 2, axis=-1)
        return (jax.nn.silu(gate) * up) @ self.layer.mlp.down[...]

    def unroll(self, tokens: jax.Array, hidden: jax.Array, num_steps: int) -> jax.Array:
        """Returns `unrolled_hidden` of embeddings [B, T, E]."""
        length = tokens.shape[1]
        positions = jnp.arange(length, dtype=jnp.int32)[None]
        previous = jnp.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
        context = self._fuse(tokens, previous, jnp.zeros_like(tokens))
        _, context_k, context_v = self._project_qkv(context, positions)
        # Drafted tokens attend to the context before the token of the first step.
        visible = positions < positions.T
        state = jnp.pad(hidden, ((0, 0), (1, 0), (0, 0)))[:, :length]
        keys: list[jax.Array] = []
        values: list[jax.Array] = []
        states = []
        for step in range(num_steps):
            x = self._fuse(_shift(tokens, step), _shift(previous, step), state)
            q, k, v = self._project_qkv(x, positions + step)
            keys, values = [*keys, k], [*values, v]
            if self.config.window is not None:
                visible &= positions > positions.T + (step - self.config.window)
            context_scores = jnp.einsum("btgrd,bsgd->bgrts", q, context_k)
            draft_scores = [jnp.einsum("btgrd,btgd->bgrt", q, k)[..., None] for k in keys]
            scores = jnp.concatenate(
                [jnp.where(visible, context_scores, _MASKED), *draft_scores], axis=-1
            )
            scores = scores.astype(jnp.float32) * self.config.head_dim**-0.5
            weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
            y = jnp.einsum("bgrts,bsgd->btgrd", weights[..., :length], context_v)
            for n, v in enumerate(values):
                y += jnp.einsum("bgrt,btgd->btgrd", weights[..., length + n], v)
            x = x + y.reshape(*x.shape[:2], -1) @ self.layer.attention.out[...]
            state = self.norm(x + self._apply_mlp(self.layer.mlp_norm(x)))
            states.append(state)
        return jnp.stack(states)


def check_head(config: HeadConfig, hidden_size: int) -> None:
    """Refuses a draft head for a target whose hidden states have another size.

    Args:
      config: of the head.
      hidden_size: of the target.

    Raises:
      ValueError: if the sizes differ.

    Example:
      >>> check_head(HeadConfig(16, 32, 4, 2, 4), hidden_size=16)
    """
    if hidden_size != config.hidden_size:
        raise ValueError(
            f"the draft head reads hidden states of size {config.hidden_size} and the target's "
            f"have {hidden_size}; use the head that was trained for this target."
        )


def _shift(x: jax.Array, step: int) -> jax.Array:
    """Returns x with row t + step at t, and zeros after the end."""
    return jnp.pad(x[:, step:], ((0, 0), (0, step), (0, 0)))


@functools.cache
def _graph_def(config: HeadConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: DraftHead(config, None)))[0]


@functools.cache
def draft_head_functions(
    config: HeadConfig, implementation: str | Implementation | None = None
) -> tuple[Any, Any]:
    """Returns `(init_cache, apply)` like those of a `Model`, for embeddings and hidden states.

    `apply(params, tokens, previous, hidden, positions, cache) -> (hidden, cache)`

    tokens: [B, T, E], embeddings of the tokens.
    previous: [B, T, E], embeddings of the tokens before them.
    hidden: [B, T, E], states whose logits decided the tokens, zero where unknown.

    Equal arguments give equal functions, and so share compilations.

    Args:
      config: sizes and constants.
      implementation: of the layer, as in `build`.
    """

    def init_cache(batch_size: int, max_length: int) -> Any:
        shape = (batch_size, config.num_key_value_heads, max_length, config.head_dim)
        return jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)

    def apply(
        params: Any,
        tokens: jax.Array,
        previous: jax.Array,
        hidden: jax.Array,
        positions: jax.Array,
        cache: Any,
    ) -> tuple[jax.Array, Any]:
        inputs = (x.astype(config.dtype) for x in (tokens, previous, hidden))
        head = nnx.merge(_graph_def(config), nnx.State(params))
        return head(*inputs, positions, cache, implementation)

    return init_cache, apply


def unrolled_hidden(
    config: HeadConfig, params: Any, tokens: jax.Array, hidden: jax.Array, num_steps: int
) -> jax.Array:
    """Returns the hidden states of proposals that begin at every token, for training.

    Args:
      config: sizes and constants.
      params: of the head, of any floating dtype.
      tokens: [B, T, E], embeddings of whole sequences at positions 0 to T - 1.
      hidden: [B, T, E], the target's hidden states after these tokens.
      num_steps: drafted tokens per proposal, a Python int >= 1.

    Returns:
      [num_steps, B, T, E]. Entry [i, :, t] is of the proposal that begins after token t. It read
      tokens t to t + i and the target's state after token t - 1. Its logits by the target give the
      draft's distribution of token t + i + 1. Rows with t + i >= T are meaningless.

    Example:
      >>> config, states = HeadConfig(16, 32, 4, 2, 4), jnp.zeros((1, 5, 16))
      >>> unrolled_hidden(config, build_head(config), states, states, num_steps=2).shape
      (2, 1, 5, 16)
    """
    head = nnx.merge(_graph_def(config), nnx.State(params))
    return head.unroll(tokens, hidden, num_steps)


def build_head(config: HeadConfig, seed: int = 0) -> Any:
    """Returns random parameters of a draft head as a nested dict.

    Args:
      config: sizes and constants.
      seed: of the weights.

    Returns:
      Parameters as `load_head` returns them.

    Example:
      >>> sorted(build_head(HeadConfig(16, 32, 4, 2, 4)))
      ['hidden_norm', 'layer', 'mix', 'norm', 'token_norm']
    """
    return nnx.to_pure_dict(nnx.state(DraftHead(config, nnx.Rngs(seed)), nnx.Param))
