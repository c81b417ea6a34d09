"""A softmax over keys that come tile by tile, and the values that it weighs.

Axes: `M` rows, `N` keys of a tile, `D` head dimension.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.pallas.launch import dot

__all__ = ["Queries", "Softmax", "add", "is_seen", "nothing", "summed"]

_MASKED = -1e30  # Finite: a row that sees no slot must not subtract infinities.


class Queries(NamedTuple):
    """Rows of queries [M, D], and their positions i32[M], -1 for none."""

    rows: jax.Array
    position: jax.Array


class Softmax(NamedTuple):
    """Rows so far: `peak` f32[M], the weights' `total` f32[M], values `mixed` f32[M, D].

    While tiles are added the total is f32[M, N], of each key's place in its tile apart: the warps
    of a program then wait for one another once less for each tile.
    """

    peak: jax.Array
    total: jax.Array
    mixed: jax.Array


def nothing(rows: int, head_dim: int, *keys: int) -> Softmax:
    """Rows that have seen nothing; with N, ready for tiles of so many keys."""
    return Softmax(
        jnp.full((rows,), _MASKED, jnp.float32),
        jnp.zeros((rows, *keys), jnp.float32),
        jnp.zeros((rows, head_dim), jnp.float32),
    )


def summed(state: Softmax) -> Softmax:
    """Rows that have seen all of their tiles."""
    return state._replace(total=jnp.sum(state.total, axis=1))


def is_seen(position: jax.Array, slot: jax.Array, rule: Any) -> jax.Array:
    """Whether rows at positions see slots, arrays that broadcast; a slot of -1 is none."""
    seen = (slot >= 0) & (slot <= position)
    return seen if rule.window is None else seen & (slot > position - rule.window)


def add(
    state: Softmax,
    queries: Queries,
    keys: jax.Array,
    values: jax.Array,
    slot: jax.Array,
    rule: Any,
) -> Softmax:
    """Adds what rows see of a tile.

    Args:
      state: the rows so far, ready for tiles.
      queries: the rows.
      keys: [N, D].
      values: [N, D].
      slot: i32[N], where the keys stand; -1 for none.
      rule: a `specjax.models.pallas.attention_kernels.Rule`.
    """
    scores = dot(queries.rows, keys, (1, 1)) * rule.scale
    if rule.softcap is not None:
        scores = jnp.tanh(scores / rule.softcap) * rule.softcap
    seen = is_seen(queries.position[:, None], slot[None], rule)
    peak = jnp.maximum(state.peak, jnp.max(jnp.where(seen, scores, _MASKED), axis=1))
    weights = jnp.where(seen, jnp.exp(scores - peak[:, None]), 0.0)
    shrunk = jnp.exp(state.peak - peak)
    return Softmax(
        peak,
        state.total * shrunk[:, None] + weights,
        state.mixed * shrunk[:, None] + dot(weights.astype(values.dtype), values, (1, 0)),
    )
