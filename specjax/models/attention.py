"""Attention over a cache that is indexed by position, and over whole sequences.

Axes: `B` requests, `T` tokens fed, `S` cache slots, `G` key-value heads, `R` query heads per
key-value head, `D` head dimension.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

__all__ = ["Kernel", "Rule", "cached_attention", "causal_attention"]

Kernel = Literal["xla", "cudnn"] | None
_MASKED = -1e30  # Finite: a padding token sees no slot and must still give finite numbers.


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one layer weighs what it sees.

    Attributes:
      scale: multiplies the scores.
      window: how many tokens back a token sees, itself included; None is all.
      softcap: c, where scores s become c tanh(s / c), or None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


def _weights(scores: jax.Array, seen: jax.Array, rule: Rule) -> jax.Array:
    """The softmax of f32 scores over the slots that are seen."""
    scores = scores * rule.scale
    if rule.softcap is not None:
        scores = jnp.tanh(scores / rule.softcap) * rule.softcap
    return jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1)


def cached_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, cache: Any, rule: Rule
) -> tuple[jax.Array, Any]:
    """Writes keys and values at their positions, and attends to all slots up to each token's own.

    Args:
      q: [B, T, G * R, D].
      k: [B, T, G, D].
      v: [B, T, G, D].
      positions: i32[B, T]; a token at -1 writes nothing and sees nothing.
      cache: keys and values, two [B, G, S, D].
      rule: how the slots are weighed.

    Returns:
      [B, T, G * R * D], and the cache with the tokens in it.
    """
    (batch, tokens), (keys, values) = positions.shape, cache
    groups, slots, head_dim = keys.shape[1:]
    # Past the end and dropped: an index of -1 would write the last slot.
    index = jnp.where(positions < 0, slots, positions)
    rows = jnp.arange(batch)[:, None]
    keys = keys.at[rows, :, index].set(k, mode="drop")
    values = values.at[rows, :, index].set(v, mode="drop")
    dtype = q.dtype
    # The query heads that share a key head are rows of one product with it.
    q = q.reshape(batch, tokens, groups, -1, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, -1, head_dim)
    scores = jnp.matmul(q, keys.swapaxes(-1, -2), preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, groups, -1, tokens, slots)
    slot, position = jnp.arange(slots)[None, None], positions[..., None]
    seen = slot <= position
    if rule.window is not None:
        seen &= slot > position - rule.window
    weights = _weights(scores, seen[:, None, None], rule)
    weights = weights.astype(dtype).reshape(batch, groups, -1, slots)
    y = (weights @ values).reshape(batch, groups, -1, tokens, head_dim)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, -1), (keys, values)


def causal_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, rule: Rule, implementation: Kernel
) -> jax.Array:
    """[B, T, G * R * D] of whole sequences, each token seeing those before it.

    Args:
      q: [B, T, G * R, D].
      k: [B, T, G, D].
      v: [B, T, G, D].
      rule: how the tokens are weighed.
      implementation: of `jax.nn.dot_product_attention`, which has no soft cap: with one it
        needs to be "xla" or None.

    Raises:
      ValueError: if a soft cap is to go through another implementation.
    """
    batch, length = q.shape[:2]
    if rule.softcap is None:
        y = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=rule.scale,
            is_causal=True,
            local_window_size=None if rule.window is None else (rule.window - 1, 0),
            implementation=implementation,
        )
        return y.reshape(batch, length, -1)
    if implementation not in (None, "xla"):
        raise ValueError(
            f"implementation is {implementation!r}; a model with attention_softcap needs 'xla'."
        )
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    shape = (batch, k.shape[2], length, k.shape[3])
    cache = (jnp.zeros(shape, k.dtype), jnp.zeros(shape, v.dtype))
    return cached_attention(q, k, v, positions, cache, rule)[0]
