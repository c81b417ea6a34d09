"""A step of a decoder in plain JAX in which a row's bits depend on no other row.

A processor orders products and sums by their shapes. So every operation has one shape here, for
any number of requests and tokens: products and norms take 8 rows at a time, and attention takes one
token and 256 slots at a time.

    groups of 8 rows    norm, qkv, rotation
    one token           attention, by segments of 256 slots in their order
    groups of 8 rows    output projection, norm, MLP

On a GPU the kernels have one order, too (`DecodeConfig.row_invariant`).
Axes: `B` requests, `T` new tokens, `N` groups, `E` hidden, `G` key-value heads, `S` cache slots,
`D` head dimension.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.devices.map_groups import map_groups
from specjax.models.decoder.attention import split_heads, write_entries
from specjax.models.decoder.layers import Layer, linear, table_logits
from specjax.models.decoder.shared_math import AttentionSpec, is_visible

_SEGMENT = 256


def decode_by_groups(
    model: Any,
    token_ids: jax.Array,
    positions: jax.Array,
    cache: Any,
    taps: tuple[int, ...] = (),
) -> tuple[jax.Array, tuple[jax.Array, ...], Any]:
    """Returns hidden states [B, T, E], taps and cache, as `dispatch.run_decoder`.

    Args:
      model: a `Transformer`.
      token_ids: i32[B, T].
      positions: i32[B, T], -1 for no token.
      cache: for each layer, as in `attention.attend`.
      taps: as in `run_decoder`.
    """
    x, written = model.embed(token_ids), []
    states = [x]
    for layer, entry in zip(model.layers, cache, strict=True):
        x, entry = _layer_by_groups(model, layer, x, positions, entry)
        written.append(entry)
        states.append(x)
    hidden = map_groups(lambda rows: model.norm(rows).astype(rows.dtype), x)
    return hidden, tuple(states[tap] for tap in taps), tuple(written)


def logits_by_groups(hidden: jax.Array, table: jax.Array) -> jax.Array:
    """Returns logits [B, T, V] of hidden states [B, T, E] by an output layer's table [V, E]."""
    return map_groups(lambda rows: table_logits(table, rows), hidden)


def _layer_by_groups(
    model: Any, layer: Layer, x: jax.Array, positions: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Returns the residual stream [B, T, E] after a layer, and its cache."""
    attention = layer.attention

    def prepare(rows: jax.Array, position: jax.Array) -> tuple[jax.Array, ...]:
        heads = attention.project(layer.attention_norm(rows)).astype(cache[0].dtype)
        return split_heads(heads, model.cos_sin(position)[layer.rope], attention.num_kv_heads)

    def advance(rows: jax.Array, y: jax.Array) -> jax.Array:
        return layer.add(rows, linear(y, attention.out, attention.out_bias))

    queries, keys, values = map_groups(prepare, x, positions)
    cache = (*write_entries(cache, positions, (keys, values)), *cache[2:])
    y = _attend(queries, positions, cache, attention.spec)
    return map_groups(advance, x, y), cache[:2]


def _attend(queries: jax.Array, positions: jax.Array, cache: Any, spec: AttentionSpec) -> jax.Array:
    """Returns attention [B, T, H * D] of rotated queries [B, T, H, D] to slots up to their own."""
    (batch, tokens, num_heads, head_dim), (groups, slots) = queries.shape, cache[0].shape[1:3]
    # At least two segments: XLA would drop the slice of one, and multiply in another order.
    more = max(-slots % _SEGMENT, 2 * _SEGMENT - slots)
    width = ((0, 0), (0, 0), (0, more), (0, 0))
    keys, values = (jnp.pad(x, width) for x in cache[:2])
    rows = cache[2] if len(cache) > 2 else jnp.arange(batch, dtype=jnp.int32)
    queries, zero = queries.reshape(batch * tokens, groups, -1, head_dim), jnp.int32(0)

    def attend(operands: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, position, row = operands

        def add(i: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            m_i, l_i, acc = state
            start, size = (row, zero, i * _SEGMENT, zero), (1, groups, _SEGMENT, head_dim)
            k, v = (jax.lax.dynamic_slice(x, start, size)[0] for x in (keys, values))
            scores = jnp.matmul(q, k.swapaxes(1, 2), preferred_element_type=jnp.float32)
            scores *= spec.scale
            if spec.softcap is not None:
                scores = jnp.tanh(scores / spec.softcap) * spec.softcap
            visible = is_visible(position, i * _SEGMENT + jnp.arange(_SEGMENT), spec.window)
            m = jnp.maximum(m_i, jnp.max(scores, axis=-1, where=visible, initial=-1e30))
            p = jnp.where(visible, jnp.exp(scores - m[..., None]), 0.0)
            alpha = jnp.exp(m_i - m)
            weighted = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return m, l_i * alpha + jnp.sum(p, axis=-1), acc * alpha[..., None] + weighted

        state = tuple(
            jnp.full(shape, fill, jnp.float32)
            for shape, fill in ((q.shape[:2], -1e30), (q.shape[:2], 0), (q.shape, 0))
        )
        _, l_i, acc = jax.lax.fori_loop(zero, (position + _SEGMENT) // _SEGMENT, add, state)
        return (acc / jnp.where(l_i == 0, 1.0, l_i)[..., None]).astype(q.dtype)

    operands = queries, positions.reshape(-1), jnp.repeat(rows, tokens)
    return jax.lax.map(attend, operands).reshape(batch, tokens, num_heads * head_dim)
