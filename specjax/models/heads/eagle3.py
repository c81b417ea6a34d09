"""EAGLE-3: one decoder layer on a token and the target's state before it.

    g[t]   = fc(concat(taps[t]))                  of the target, or the head's own output
    a      = concat(token_norm(embed(token[t + 1])), hidden_norm(g[t]))
    r      = g[t] + attention(a)                  hidden_norm(g[t]) with norm_before_residual
    out[t] = r + mlp(norm(r)),   logits of token t + 2 = lm_head(norm(out[t]))

taps[t] are the target's residual streams after some layers, at token t. A committed token has the
target's g. A drafted token has the previous drafted token's output: out, or norm(out) with
`norm_output`.
Axes: `B` requests, `T` tokens, `A` taps, `E` hidden of the target, `H` hidden of the head, `V_d`
draft vocabulary, `G` key-value heads, `R` query heads per key-value head, `D` head dimension.

References:
  Li et al., 2025, arXiv:2503.01840.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.implementation import Implementation
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.dispatch import run_layer, run_product
from specjax.models.decoder.layers import Layer, RMSNorm, linear, weight
from specjax.models.decoder.rope import rope_cos_sin, rotate

_MASKED = -1e30  # Finite, since the first token of a sequence has no context.


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Sizes and variants of an EAGLE-3 head.

    Attributes:
      layer: of the head's layer. Its `hidden_size` is H, its `vocab_size` the target's.
      target_hidden_size: E.
      draft_vocab_size: V_d.
      taps: numbers of layers of the target after which the residual stream is read; 0 is the
        embeddings.
      num_speculative_tokens: K that the head was trained for, or None.
      fc_bias: whether `fc` has a bias.
      fc_norm: whether each tap has an RMSNorm before `fc`.
      norm_before_fc: whether all taps together have an RMSNorm before `fc`.
      norm_before_residual: whether the layer adds to the normed state.
      norm_output: whether a drafted token gets the normed output of the previous one.
      has_embedding: whether the head has its own embeddings; else they are the target's.
      has_lm_head: whether the head has its own output layer; else it is the target's.
      logit_scale: multiplies the logits.
      kind: the name of the kind in messages.
      max_speculative_tokens: None: the head drafts token by token, without a maximum.
    """

    kind: ClassVar[str] = "EAGLE-3"
    max_speculative_tokens: ClassVar[int | None] = None
    layer: TransformerConfig
    target_hidden_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    num_speculative_tokens: int | None = None
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    has_embedding: bool = False
    has_lm_head: bool = True
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc are both true; the taps are normed one by one or "
                "together."
            )
        if not self.has_lm_head and self.draft_vocab_size != self.layer.vocab_size:
            raise ValueError(
                f"a head without an lm_head has a draft vocabulary of {self.draft_vocab_size} "
                f"tokens; the target's lm_head has {self.layer.vocab_size}."
            )
        shares = not (self.has_embedding and self.has_lm_head)
        if shares and self.layer.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size is {self.layer.hidden_size} and target_hidden_size "
                f"{self.target_hidden_size}; a head of another size than the target needs "
                "embeddings and an lm_head of its own."
            )


class Eagle3Head(nnx.Module):
    """The head as an NNX module; `merge_eagle3` gives it parameters.

    Args:
      config: sizes and variants.
      rngs: source of the initial weights; None gives zeros.
    """

    def __init__(self, config: Eagle3Config, rngs: nnx.Rngs | None) -> None:
        self.config, layer = config, config.layer
        size, taps = layer.hidden_size, len(config.taps)
        self.tap_norms = nnx.List(
            [RMSNorm(layer, config.target_hidden_size) for _ in range(taps * config.fc_norm)]
        )
        width = taps * config.target_hidden_size
        self.taps_norm = RMSNorm(layer, width) if config.norm_before_fc else None
        self.fc = weight(rngs, layer, width, size)
        self.fc_bias = nnx.Param(jnp.zeros((size,), layer.dtype)) if config.fc_bias else None
        # The layer's attention reads the token and the state; its norm is that of the token.
        self.layer = Layer(layer, 0, rngs)
        self.layer.attention.qkv = weight(rngs, layer, 2 * size, self.layer.attention.qkv.shape[1])
        self.hidden_norm = RMSNorm(layer, size)
        self.norm = RMSNorm(layer, size)
        if config.has_embedding:
            self.embedding = weight(rngs, layer, layer.vocab_size, size)
        if config.has_lm_head:
            self.head = weight(rngs, layer, config.draft_vocab_size, size)

    def fuse(
        self, features: jax.Array, implementation: str | Implementation | None = None
    ) -> jax.Array:
        """Returns g [B, T, H] of the taps [B, T, A * E] next to one another.

        Args:
          features: of the target.
          implementation: of the product, as in `build`.
        """
        features = features.astype(self.fc.dtype)
        if self.taps_norm is not None:
            features = self.taps_norm(features)
        if len(self.tap_norms):
            taps = jnp.split(features, len(self.tap_norms), axis=-1)
            taps = [norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True)]
            features = jnp.concatenate(taps, axis=-1)
        if self.fc_bias is not None:
            return linear(features, self.fc, self.fc_bias)
        y: jax.Array = run_product(features, self.fc[...], implementation)
        return y

    def layer_input(self, tokens: jax.Array, states: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the input of attention [B, T, 2 * H], and the residual stream [B, T, H].

        Args:
          tokens: [B, T, H], embeddings.
          states: [B, T, H], g of the tokens before them.
        """
        normed = self.hidden_norm(states)
        rows = jnp.concatenate([self.layer.attention_norm(tokens), normed], axis=-1)
        return rows, normed if self.config.norm_before_residual else states

    def __call__(
        self,
        tokens: jax.Array,
        states: jax.Array,
        positions: jax.Array,
        cache: Any,
        implementation: str | Implementation | None = None,
    ) -> tuple[jax.Array, Any]:
        """Returns outputs [B, T, H], the states of drafted tokens, and the cache.

        Args:
          tokens: [B, T, H], embeddings, of any floating dtype.
          states: [B, T, H], g of the tokens before them.
          positions: i32[B, T], of the tokens before them; -1 is no pair.
          cache: keys and values, two [B, G, S, D].
          implementation: of the layer, as in `build`.
        """
        rows, x = self.layer_input(tokens.astype(self.config.layer.dtype), states)
        cos_sin = rope_cos_sin(*self.layer.rope, self.config.layer.head_dim, positions)
        x, cache = run_layer(self.layer, x, cos_sin, positions, cache, implementation, rows)
        return self.norm(x) if self.config.norm_output else x, cache

    def decode(self, outputs: jax.Array) -> jax.Array:
        """Returns outputs [B, H] as an lm_head reads them."""
        return outputs if self.config.norm_output else self.norm(outputs)


@functools.cache
def _graph(config: Eagle3Config) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Eagle3Head(config, None)))[0]


def merge_eagle3(config: Eagle3Config, params: Any) -> Eagle3Head:
    """Returns the head with these parameters.

    Args:
      config: sizes and variants.
      params: as `build_eagle3` returns them.
    """
    head: Eagle3Head = nnx.merge(_graph(config), nnx.State(params))
    return head


def build_eagle3(config: Eagle3Config, seed: int = 0) -> Any:
    """Returns random parameters of a head as a nested dict.

    Args:
      config: sizes and variants.
      seed: of the weights.

    Returns:
      Parameters as `load_eagle3` returns them, without a token map.

    Example:
      >>> layer = TransformerConfig(64, 16, 32, 1, 4, 2, 4)
      >>> sorted(build_eagle3(Eagle3Config(layer, 16, 64, taps=(1, 2))))
      ['fc', 'head', 'hidden_norm', 'layer', 'norm']
    """
    return nnx.to_pure_dict(nnx.state(Eagle3Head(config, nnx.Rngs(seed)), nnx.Param))


def unrolled_eagle3(
    config: Eagle3Config, params: Any, tokens: jax.Array, features: jax.Array, num_steps: int
) -> jax.Array:
    """Returns the lm_head's input rows of proposals that begin at every token, for training.

    A proposal that begins after token t reads, at draft i, token t + i and the state of the token
    before it. For i = 0 that state is the target's, then the proposal's output of draft i - 1. The
    context is the pairs of tokens 1 to t with the target's states, as in the cache while decoding.

    Args:
      config: sizes and variants.
      params: of the head, of any floating dtype.
      tokens: [B, T, H], embeddings of whole sequences.
      features: [B, T, A * E], the target's taps at these tokens.
      num_steps: drafted tokens per proposal, a Python int >= 1.

    Returns:
      [num_steps, B, T, H]. Entry [i, :, t] belongs to the proposal that begins after token t, and
      decides token t + i + 1. Rows with t = 0 or t + i >= T are meaningless.

    Example:
      >>> from specjax.models import TransformerConfig, build_eagle3
      >>> config = Eagle3Config(TransformerConfig(64, 16, 32, 1, 4, 2, 4), 16, 64, taps=(1, 2))
      >>> tokens, features = jnp.zeros((1, 5, 16)), jnp.zeros((1, 5, 32))
      >>> unrolled_eagle3(config, build_eagle3(config), tokens, features, num_steps=3).shape
      (3, 1, 5, 16)
    """
    head = merge_eagle3(config, params)
    length = tokens.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)[None]
    state = jnp.pad(head.fuse(features, "xla"), ((0, 0), (1, 0), (0, 0)))[:, :length]
    # Token 0 makes no pair.
    visible = (place <= place.T) & (place > 0)
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    outputs = []
    for step in range(num_steps):
        # Row t has token t + step.
        shifted = jnp.pad(tokens[:, step:], ((0, 0), (0, step), (0, 0)))
        rows, x = head.layer_input(shifted, state)
        q, k, v = _project_qkv(head, rows, place + step)
        keys, values = [*keys, k], [*values, v]
        y = _attend(head.layer.attention.spec.scale, q, keys, values, visible)
        x = x + linear(y, head.layer.attention.out, head.layer.attention.out_bias)
        x = x + head.layer.mlp(head.layer.mlp_norm(x))
        state = head.norm(x) if config.norm_output else x
        outputs.append(head.decode(state))
    return jnp.stack(outputs)


def _project_qkv(
    head: Eagle3Head, rows: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, T, G, R, D], keys and values [B, T, G, D], rotated."""
    attention, size = head.layer.attention, head.config.layer.head_dim
    cos_sin = rope_cos_sin(*head.layer.rope, size, positions)
    heads = attention.project(rows)
    ends = [attention.num_heads, attention.num_heads + attention.num_kv_heads]
    q, k, v = jnp.split(heads, ends, axis=2)
    q, k = rotate(q, cos_sin), rotate(k, cos_sin)
    return q.reshape(*rows.shape[:2], attention.num_kv_heads, -1, size), k, v


def _attend(
    scale: float, q: jax.Array, keys: list[jax.Array], values: list[jax.Array], visible: jax.Array
) -> jax.Array:
    """Returns [B, T, heads * D]: row t sees the context's pairs up to its own, and its drafts.

    Args:
      scale: of the scores.
      q: [B, T, G, R, D].
      keys: of each step so far, [B, T, G, D]; those of step 0 are of the context's pairs.
      values: as keys.
      visible: bool[T, T], which pairs of the context a row sees.
    """
    length = q.shape[1]
    scores = jnp.where(visible, jnp.einsum("btgrd,bsgd->bgrts", q, keys[0]), _MASKED)
    own_scores = [jnp.einsum("btgrd,btgd->bgrt", q, k)[..., None] for k in keys[1:]]
    scores = jnp.concatenate([scores, *own_scores], axis=-1).astype(jnp.float32) * scale
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    y = jnp.einsum("bgrts,bsgd->btgrd", weights[..., :length], values[0])
    for n, v in enumerate(values[1:]):
        y += jnp.einsum("bgrt,btgd->btgrd", weights[..., length + n], v)
    return y.reshape(*y.shape[:2], -1)
