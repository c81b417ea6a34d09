"""Attention over a cache that is indexed by position, and over whole sequences.

Axes: `B` requests, `T` tokens fed, `S` cache slots, `G` key-value heads, `R` query heads per
key-value head, `D` head dimension.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.implementation import shared_memory
from specjax.models.ops import Product, by_launches, chosen, is_few
from specjax.models.rope import rotate, turn

__all__ = [
    "Kernel",
    "Rule",
    "cache_entries",
    "cached_attention",
    "causal_attention",
    "is_looked_at",
]

Kernel = Literal["xla", "cudnn"] | None
_MASKED = -1e30  # Finite: a padding token sees no slot and must still give finite numbers.


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one layer weighs what it sees.

    Attributes:
      scale: multiplies the scores.
      window: how many tokens back a token sees, itself included; None is all.
      softcap: c, where scores s become c tanh(s / c), or None.
      size: E, of the rows whose norm queries, keys and values may have to be divided by.
      eps: added to their mean square.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    size: int = 0
    eps: float = 0.0


def cache_entries(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values as a cache holds them: values that are not finite are 0, their keys NaN.

    A masked slot has weight 0, and 0 * NaN is NaN: values have to be finite for a row not to
    depend on the slots that it does not see. The NaN in the key makes every row that does see the
    slot NaN, so that an overflow is not hidden.

    Args:
      keys: of the cache's dtype, rotated.
      values: of the cache's dtype, of the same shape.
    """
    # x - x is NaN where x is not finite, and 0 elsewhere. Kernels have to do this with few
    # instructions: `isfinite` takes two comparisons.
    keys = keys - (keys - keys) - (values - values)
    return keys, jnp.where(jnp.abs(values) < jnp.inf, values, jnp.zeros((), values.dtype))


def _weights(scores: jax.Array, seen: jax.Array, rule: Rule) -> jax.Array:
    """The softmax of f32 scores over the slots that are seen."""
    scores = scores * rule.scale
    if rule.softcap is not None:
        scores = jnp.tanh(scores / rule.softcap) * rule.softcap
    return jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1)


def is_looked_at(padded: int, tokens: int, shared: int, keys: jax.Array) -> bool:
    """Whether tokens, so many with their padding, attend to a cache by kernels.

    Of a prompt's tokens, a product for each pair of them is the better way.

    Args:
      padded: T'.
      tokens: T.
      shared: R.
      keys: [B, G, S, D], of the cache.
    """
    from specjax.models.pallas.tiles import attention_stages, is_alone, query_rows

    batch, _, _, head_dim = keys.shape
    if not is_few(batch, padded) or tokens > 16 or tokens * shared > 64:
        return False
    rows = query_rows(tokens, padded, shared, is_alone(batch))
    return attention_stages(rows, head_dim, keys.dtype.itemsize, shared_memory()) > 0


def cached_attention(
    projected: Product, turns: Any, positions: jax.Array, cache: Any, rule: Rule
) -> tuple[jax.Array, Any]:
    """Writes keys and values at their positions, and attends to all slots up to each token's own.

    Args:
      projected: a product of [B, T', (G * R + 2 * G) * D], queries, keys and values, none of them
        rotated; rows from T on are padding.
      turns: cosines and sines by which queries and keys are, two f32[B, T, 1, D / 2].
      positions: i32[B, T], none twice in a request but -1; a token there writes and sees nothing.
      cache: keys and values, two [B, G, S, D].
      rule: how the slots are weighed.

    Returns:
      [B, T', G * R * D], and the cache with the tokens in it.
    """
    tokens, (_, groups, _, head_dim) = positions.shape[1], cache[0].shape
    projected = projected._replace(
        parts=projected.parts.reshape(*projected.parts.shape[:3], -1, head_dim)
    )
    shared = projected.parts.shape[3] // groups - 2
    few = is_looked_at(projected.parts.shape[2], tokens, shared, cache[0])

    def xla(projected: Product, *rest: Any) -> tuple[jax.Array, Any]:
        if projected.squares is not None:
            projected = projected._replace(squares=projected.squares[:, :, None])
        heads = projected.whole(rule.size, rule.eps).astype(cache[0].dtype)
        return _attend(heads, *rest, rule=rule)

    def kernels(
        projected: Product, turns: Any, positions: jax.Array, cache: Any, interpret: bool
    ) -> tuple[jax.Array, Any]:
        from specjax.models.pallas.attention import attend
        from specjax.models.pallas.qkv import Heads

        cos, sin = (x[:, :, 0] for x in turns)
        heads = Heads(*projected, cos, sin, positions.astype(jnp.int32), *cache)
        return attend(
            heads,
            rule=rule,
            turn=turn,
            entries=cache_entries,
            room=shared_memory(),
            interpret=interpret,
        )

    implementation = chosen() if few else "xla"
    return by_launches(implementation, xla, kernels, projected, turns, positions, cache, early=0)


def _attend(
    heads: jax.Array, turns: Any, positions: jax.Array, cache: Any, *, rule: Rule
) -> tuple[jax.Array, Any]:
    (batch, tokens), (keys, values) = positions.shape, cache
    groups, slots, head_dim = keys.shape[1:]
    q, k, v = _split(heads[:, :tokens], turns, groups)
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
    y = y.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, -1)
    return jnp.pad(y, ((0, 0), (0, heads.shape[1] - tokens), (0, 0))), (keys, values)


def causal_attention(
    heads: jax.Array, turns: Any, groups: int, rule: Rule, implementation: Kernel
) -> jax.Array:
    """[B, T, G * R * D] of whole sequences, each token seeing those before it.

    Args:
      heads: [B, T, G * R + 2 * G, D], queries, keys and values, none of them rotated.
      turns: cosines and sines by which queries and keys are, two f32[B, T, 1, D / 2].
      groups: G.
      rule: how the tokens are weighed.
      implementation: of `jax.nn.dot_product_attention`, which has no soft cap: with one it
        needs to be "xla" or None.

    Raises:
      ValueError: if a soft cap is to go through another implementation.
    """
    batch, length, _, head_dim = heads.shape
    if rule.softcap is None:
        q, k, v = _split(heads, turns, groups)
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
    nothing = jnp.zeros((batch, groups, length, head_dim), heads.dtype)
    return _attend(heads, turns, positions, (nothing, nothing), rule=rule)[0]


def _split(heads: jax.Array, turns: Any, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries and keys, rotated, and values; keys and values as a cache holds them."""
    num_queries = heads.shape[2] - 2 * groups
    q, k, v = jnp.split(heads, [num_queries, num_queries + groups], axis=2)
    return rotate(q, turns), *cache_entries(rotate(k, turns), v)
