"""One request's drafted tree: the depth of each node, its streams, and which nodes are padding.

    d(v) = 0 for a child of the root, else d(parent) + 1
    j(v) = number of nodes before v of its depth, padding included
    i(v) = d(v) + 1024 j(v)

Node v is at position + d(v). Its token is drawn on `Stream.draft(i(v))`, its uniform on
`Stream.accept(i(v))`. i(v) determines d(v), and with it the position where the step began. So no
address occurs in two steps, whatever shapes the trees have. On a chain i = d.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.noise import Words

# Part of the contract: another number gives nodes other addresses.
MAX_DEPTH = 1024


class Tree(NamedTuple):
    """The drafted tree of one request; with a leading axis [B], those of a batch.

    Attributes:
      key: two u32 words.
      position: i32, absolute position of the first token to decide.
      temperature: f32, the target's.
      draft_temperature: f32.
      first_row: i32, the root's row among those of the batch.
      token_ids: i32[N].
      parents: i32[N], -1 for a child of the root.
      depths: i32[N], d(v).
      indices: i32[N], i(v).
      is_padding: bool[N]; nodes below padding need not be marked.
    """

    key: Words
    position: jax.Array
    temperature: jax.Array
    draft_temperature: jax.Array
    first_row: jax.Array
    token_ids: jax.Array
    parents: jax.Array
    depths: jax.Array
    indices: jax.Array
    is_padding: jax.Array


class AcceptedPath(NamedTuple):
    """The accepted nodes of a request and the token after them.

    Attributes:
      nodes: i32[D], -1 after the last.
      logprobs: f32[D], log p of the nodes' tokens, 0 after the last.
      num_accepted: i32.
      token: i32, drawn after the last node.
      logprob: f32, log p of the token.
      valid: bool, whether the row that the token is drawn from is a distribution.
    """

    nodes: jax.Array
    logprobs: jax.Array
    num_accepted: jax.Array
    token: jax.Array
    logprob: jax.Array
    valid: jax.Array


def place_nodes(parents: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the nodes' noise addresses: their depths d(v), and stream indices i(v).

    Draw node v at ``positions + d(v)`` on ``Stream.draft(i(v))``, with its earlier siblings masked.
    The shape of a tree alone decides both.

    Args:
      parents: i32[B, N], -1 for children of the root.

    Returns:
      Two i32[B, N]. The depth is -1 where a node or one above it has an impossible parent.
    """
    return jax.vmap(_place)(jnp.asarray(parents, jnp.int32))


def _place(parents: jax.Array) -> tuple[jax.Array, jax.Array]:
    nodes = jnp.arange(parents.shape[0], dtype=jnp.int32)

    def descend(v: jax.Array, depths: jax.Array) -> jax.Array:
        parent = parents[v]
        above = depths[jnp.maximum(parent, 0)]
        is_below = (parent >= 0) & (parent < v) & (above >= 0)
        depth = jnp.where(is_below, above + 1, jnp.int32(-1))
        return depths.at[v].set(jnp.where(parent == -1, jnp.int32(0), depth))

    # Derived from the parents, so that it varies over their axes inside shard_map.
    depths = jax.lax.fori_loop(0, parents.shape[0], descend, jnp.zeros_like(parents))
    is_before = (nodes[None] < nodes[:, None]) & (depths[None] == depths[:, None])
    return depths, depths + MAX_DEPTH * jnp.sum(is_before, axis=1, dtype=jnp.int32)


def find_padding(token_ids: jax.Array, depths: jax.Array, max_depth: int) -> jax.Array:
    """Returns which nodes are padding by themselves, bool[..., N]; those below are never reached.

    Args:
      token_ids: i32[..., N], -1 at padding.
      depths: i32[..., N], from `place_nodes`.
      max_depth: D.
    """
    return (token_ids == -1) | (depths < 0) | (depths >= max_depth)


def first_index(mask: jax.Array) -> jax.Array:
    """Returns the first index i32[] at which a mask bool[N] is True, N where it never is."""
    size = mask.shape[0]
    return jnp.min(jnp.where(mask, jnp.arange(size, dtype=jnp.int32), jnp.int32(size)))
