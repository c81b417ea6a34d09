"""`unrolled_eagle3`: an EAGLE-3 head over its own outputs from every token on, for training.

A proposal that begins after token t reads, at draft i, token t + i and the state of the token
before it: the target's for i = 0, its own output of draft i - 1 after that. Its context are the
pairs of tokens 1 to t with the target's states, as in the cache while decoding.
Axes: `B` requests, `T` tokens, `G` key-value heads, `R` query heads per key-value head, `D` head
dimension, `H` hidden of the head.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.models.decoder.layers import linear
from specjax.models.decoder.rope import rope_cos_sin, rotate
from specjax.models.heads.eagle3 import Eagle3Config, Eagle3Head, head_graph

__all__ = ["unrolled_eagle3"]

_MASKED = -1e30  # Finite, since the first token of a sequence has no context.


def unrolled_eagle3(
    config: Eagle3Config, params: Any, tokens: jax.Array, features: jax.Array, num_steps: int
) -> jax.Array:
    """Returns the rows that an lm_head reads, of proposals that begin at every token.

    Args:
      config: sizes and variants.
      params: of the head, of any floating dtype.
      tokens: [B, T, H], embeddings of whole sequences.
      features: [B, T, A * E], the target's taps at these tokens.
      num_steps: drafted tokens per proposal, a Python int >= 1.

    Returns:
      [num_steps, B, T, H]. Entry [i, :, t] is of the proposal that begins after token t, and
      decides on token t + i + 1. Rows with t = 0 or t + i >= T are meaningless.

    Example:
      >>> from specjax.models import TransformerConfig, build_eagle3
      >>> config = Eagle3Config(TransformerConfig(64, 16, 32, 1, 4, 2, 4), 16, 64, taps=(1, 2))
      >>> tokens, features = jnp.zeros((1, 5, 16)), jnp.zeros((1, 5, 32))
      >>> unrolled_eagle3(config, build_eagle3(config), tokens, features, num_steps=3).shape
      (3, 1, 5, 16)
    """
    head: Eagle3Head = nnx.merge(head_graph(config), nnx.State(params))
    length = tokens.shape[1]
    place = jnp.arange(length, dtype=jnp.int32)[None]
    state = jnp.pad(head.fuse(features, "xla"), ((0, 0), (1, 0), (0, 0)))[:, :length]
    # Token 0 makes no pair.
    visible = (place <= place.T) & (place > 0)
    keys: list[jax.Array] = []
    values: list[jax.Array] = []
    outputs = []
    for step in range(num_steps):
        rows, x = head.layer_input(_shift(tokens, step), state)
        q, k, v = _project_qkv(head, rows, place + step)
        keys, values = [*keys, k], [*values, v]
        y = _attend(head.layer.attention.spec.scale, q, keys, values, visible)
        x = x + linear(y, head.layer.attention.out, head.layer.attention.out_bias)
        x = x + head.layer.mlp(head.layer.mlp_norm(x))
        state = head.norm(x) if config.norm_output else x
        outputs.append(head.decode(state))
    return jnp.stack(outputs)


def _shift(x: jax.Array, step: int) -> jax.Array:
    """Returns x with row t + step at t, and zeros after the end."""
    return jnp.pad(x[:, step:], ((0, 0), (0, step), (0, 0)))


def _project_qkv(
    head: Eagle3Head, rows: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns queries [B, T, G, R, D], keys and values [B, T, G, D], rotated."""
    attention, size = head.layer.attention, head.config.layer.head_dim
    cos_sin = rope_cos_sin(*head.layer.rope, size, positions)
    heads = attention.normed_heads(linear(rows, attention.qkv, attention.qkv_bias))
    ends = [attention.num_heads, attention.num_heads + attention.num_kv_heads]
    q, k, v = jnp.split(heads, ends, axis=2)
    q, k = rotate(q, cos_sin), rotate(k, cos_sin)
    return q.reshape(*rows.shape[:2], attention.num_kv_heads, -1, size), k, v


def _attend(
    scale: float, q: jax.Array, keys: list[jax.Array], values: list[jax.Array], visible: jax.Array
) -> jax.Array:
    """Returns [B, T, heads * D]: row t sees the pairs of the context up to its own, and its drafts.

    Args:
      scale: of the scores.
      q: [B, T, G, R, D].
      keys: of each step so far, [B, T, G, D]; those of step 0 are of the context's pairs.
      values: as keys.
      visible: bool[T, T], which pairs of the context a row sees.
    """
    length = q.shape[1]
    scores = jnp.where(visible, jnp.einsum("btgrd,bsgd->bgrts", q, keys[0]), _MASKED)
    own = [jnp.einsum("btgrd,btgd->bgrt", q, k)[..., None] for k in keys[1:]]
    scores = jnp.concatenate([scores, *own], axis=-1).astype(jnp.float32) * scale
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    y = jnp.einsum("bgrts,bsgd->btgrd", weights[..., :length], values[0])
    for n, v in enumerate(values[1:]):
        y += jnp.einsum("bgrt,btgd->btgrd", weights[..., length + n], v)
    return y.reshape(*y.shape[:2], -1)
