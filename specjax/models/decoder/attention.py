"""Attention in plain JAX, over a cache indexed by position and over whole sequences.

Axes: `B` requests, `T` new tokens, `S` cache slots, `G` key-value heads, `R` query heads per
key-value head, `D` head dimension.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.models.decoder.rope import rotate
from specjax.models.decoder.shared_math import AttentionSpec, cache_entries
from specjax.types import Pieces

AttentionBackend = Literal["xla", "cudnn"] | None


def _weights(scores: jax.Array, visible: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Returns the softmax of f32 scores over the visible slots; zeros where none is visible."""
    scores = scores * spec.scale
    if spec.softcap is not None:
        scores = jnp.tanh(scores / spec.softcap) * spec.softcap
    return jax.nn.softmax(scores, axis=-1, where=visible)


def attend(
    heads: jax.Array, cos_sin: Any, positions: jax.Array, cache: Any, *, spec: AttentionSpec
) -> tuple[jax.Array, Any]:
    """Writes keys and values at their positions, and attends to all slots up to each token's own.

    If `spec` is not causal, each token attends to all slots up to the request's last token.

    Args:
      heads: [B, T, G * R + 2 * G, D], queries, keys and values, none of them rotated.
      cos_sin: cosines and sines of the rotary embeddings, two f32[B, T, 1, D / 2].
      positions: i32[B, T], distinct in a request except for -1, which is no token. The others of a
        request lie within T consecutive positions.
      cache: keys and values, two [B, G, S, D]. Or keys, values and rows i32[B]: request b, a piece
        of a text, continues row rows[b] of the cache, two [N, G, S, D].
      spec: scale, window and soft cap.

    Returns:
      [B, T, G * R * D], and keys and values with those of the tokens.
    """
    (batch, tokens), (groups, slots, head_dim) = positions.shape, cache[0].shape[1:]
    q, k, v = split_heads(heads, cos_sin, groups)
    written = write_entries(cache, positions, (k, v))
    keys, values = written if len(cache) == 2 else (x[cache[2]] for x in written)
    # The query heads of a key head are rows of one product with it.
    q = q.reshape(batch, tokens, groups, -1, head_dim).transpose(0, 2, 3, 1, 4)
    q = q.reshape(batch, groups, -1, head_dim)
    # Not of gathered rows: XLA would compute the gather inside each of the two loops.
    is_one = batch == tokens == 1 and len(cache) == 2
    multiply, average = (_scores_of_one, _average_of_one) if is_one else (_scores, jnp.matmul)
    scores = multiply(q, keys).reshape(batch, groups, -1, tokens, slots)
    slot, position = jnp.arange(slots)[None, None], positions[..., None]
    if not spec.is_causal:
        position = jnp.where(position < 0, position, jnp.max(position, axis=1, keepdims=True))
    visible = slot <= position
    if spec.window is not None:
        visible &= slot > position - spec.window
    weights = _weights(scores, visible[:, None, None], spec)
    weights = weights.astype(q.dtype).reshape(batch, groups, -1, slots)
    y = average(weights, values).reshape(batch, groups, -1, tokens, head_dim)
    return y.transpose(0, 3, 1, 2, 4).reshape(batch, tokens, -1), written


def _scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns the products of queries [..., N, D] and keys [..., S, D], f32[..., N, S]."""
    return jnp.matmul(q, keys.swapaxes(-1, -2), preferred_element_type=jnp.float32)


def _scores_of_one(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns the scores of one token as sums, which read the cache without a copy.

    For a product of so few rows, XLA on a CPU transposes all keys and copies all values twice.
    """
    products = q[..., :, None, :].astype(jnp.float32) * keys[..., None, :, :].astype(jnp.float32)
    return jnp.sum(products, axis=-1)


def _average_of_one(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns `weights @ values` of one token, also as sums."""
    products = weights[..., None].astype(jnp.float32) * values[..., None, :, :].astype(jnp.float32)
    return jnp.sum(products, axis=-2).astype(weights.dtype)


def layer_caches(cache: Any) -> Any:
    """Returns each layer's cache as `attend` takes it, of a decoder's cache or of `Pieces`."""
    if isinstance(cache, Pieces):
        return tuple((*entry, cache.rows) for entry in cache.cache)
    return cache


def write_entries(cache: Any, positions: jax.Array, entries: Any) -> Any:
    """Returns keys and values with new ones written at their positions.

    Args:
      cache: as in `attend`.
      positions: as in `attend`.
      entries: keys and values as a cache holds them, two [B, T, G, D].
    """
    (batch, tokens), slots = positions.shape, cache[0].shape[2]
    cache, rows = cache[:2], cache[2:]
    if not rows and batch == 1 and tokens <= slots:
        return _write_window(cache, positions[0], entries)
    # One past the end is dropped; an index of -1 would write the last slot.
    index = jnp.where(positions < 0, slots, positions)
    row = (rows[0] if rows else jnp.arange(batch))[:, None]
    return jax.tree.map(
        lambda old, new: old.at[row, :, index].set(new, mode="drop"), cache, entries
    )


def _write_window(cache: Any, positions: jax.Array, entries: Any) -> Any:
    """Returns one request's cache with its entries: T slots are read, changed and written.

    A scatter per layer would take more than half of XLA's time on a CPU.
    """
    tokens, slots = positions.shape[0], cache[0].shape[2]
    first = jnp.min(jnp.where(positions < 0, slots, positions))
    start = jnp.clip(first, 0, slots - tokens)
    is_at = positions == start + jnp.arange(tokens)[:, None]
    token, written = jnp.sum(is_at * jnp.arange(tokens), axis=1), jnp.any(is_at, axis=1)

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.take(new.swapaxes(1, 2), token, axis=2, mode="clip")
        window = jax.lax.dynamic_slice_in_dim(old, start, tokens, axis=2)
        window = jnp.where(written[:, None], new, window)
        return jax.lax.dynamic_update_slice_in_dim(old, window, start, axis=2)

    return jax.tree.map(write, cache, entries)


def causal_attention(
    heads: jax.Array,
    cos_sin: Any,
    groups: int,
    spec: AttentionSpec,
    implementation: AttentionBackend,
) -> jax.Array:
    """Returns [B, T, G * R * D] for whole sequences: each token attends to those up to its own.

    Args:
      heads: [B, T, G * R + 2 * G, D], queries, keys and values, none of them rotated.
      cos_sin: cosines and sines of the rotary embeddings, two f32[B, T, 1, D / 2].
      groups: G.
      spec: scale, window and soft cap.
      implementation: of `jax.nn.dot_product_attention`, which has no soft cap. With a soft cap it
        needs to be "xla" or None.

    Raises:
      ValueError: for a soft cap with another implementation.
    """
    batch, length, _, head_dim = heads.shape
    if spec.softcap is None:
        q, k, v = split_heads(heads, cos_sin, groups)
        y = jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=spec.scale,
            is_causal=True,
            local_window_size=None if spec.window is None else (spec.window - 1, 0),
            implementation=implementation,
        )
        return y.reshape(batch, length, -1)
    if implementation not in (None, "xla"):
        raise ValueError(
            f"implementation is {implementation!r}; a model with attention_softcap needs 'xla'."
        )
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    empty = jnp.zeros((batch, groups, length, head_dim), heads.dtype)
    return attend(heads, cos_sin, positions, (empty, empty), spec=spec)[0]


def split_heads(
    heads: jax.Array, cos_sin: Any, groups: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns rotated queries [B, T, H, D], and keys and values [B, T, G, D] as a cache has them.

    Args:
      heads: [B, T, H + 2 * G, D], queries, keys and values, none of them rotated.
      cos_sin: as in `attend`.
      groups: G.
    """
    num_queries = heads.shape[2] - 2 * groups
    q, k, v = jnp.split(heads, [num_queries, num_queries + groups], axis=2)
    return rotate(q, cos_sin), *cache_entries(rotate(k, cos_sin), v)
