"""The loop over the tokens of a proposal, each drawn after the one before."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.devices.placement import pvary_like

__all__ = ["draw_tokens"]


def draw_tokens(
    draw: Callable[..., Any],
    carry: Any,
    token_ids: jax.Array,
    keys: jax.Array,
    num_tokens: int,
    num_drawn: Any = None,
) -> tuple[list[jax.Array], Any]:
    """Returns what K draws return, and the carry after the last.

    Where the first draw returns a carry of the type that it takes, all are one loop, and a draw is
    compiled once. On a mesh it stands before the loop: what it returns may lie otherwise.

    Args:
      draw: ``(i, carry, token_ids, drafted) -> (carry, token_ids, outputs)``. It draws token i, a
        number or i32[], after the one before. `drafted` is the first output of the draws before,
        [B, K], of which index i and those after it say nothing. It may be None where i is 0.
      carry: pytree.
      token_ids: i32[B], the last committed tokens.
      keys: [B], of the mesh axes that outputs vary over inside `shard_map`.
      num_tokens: K, a Python int >= 1.
      num_drawn: i32[], how many are drawn, at least 1. None is all. What the others hold says
        nothing.

    Returns:
      Arrays [B, K, ...], one for each output, and the carry.
    """

    def first(carry: Any, token_ids: jax.Array) -> Any:
        """Draws once; every index holds this draw until its own is made."""
        carry, last, outputs = draw(0, carry, token_ids, None)
        return carry, last, [jnp.repeat(x[:, None], num_tokens, axis=1) for x in outputs]

    is_one_loop = False
    if not _is_on_a_mesh((carry, token_ids, keys)):
        types = jax.eval_shape(first, carry, token_ids)
        is_one_loop = _types((carry, token_ids)) == _types(types[:2])
    if is_one_loop:
        last, rows = token_ids, [jnp.zeros(x.shape, x.dtype) for x in types[2]]
    else:
        carry, last, rows = first(carry, token_ids)

    def body(i: jax.Array, state: Any) -> Any:
        carry, last, rows = state
        carry, last, outputs = draw(i, carry, last, rows[0])
        update = jax.lax.dynamic_update_index_in_dim
        rows = [update(row, x, i, 1) for row, x in zip(rows, outputs, strict=True)]
        return pvary_like((carry, last, rows), state)

    start = (carry, last, rows)
    begin, end = 0 if is_one_loop else 1, num_tokens if num_drawn is None else num_drawn
    carry, _, rows = jax.lax.fori_loop(begin, end, body, pvary_like(start, start, keys))
    return rows, carry


def _is_on_a_mesh(tree: Any) -> bool:
    """Whether arrays lie on a mesh, or are inside one; also where a leaf is no array."""
    leaves = jax.tree.leaves(tree)
    if not all(isinstance(x, (jax.Array, np.ndarray)) for x in leaves):
        return True
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in leaves)]
    return not all(mesh.empty for mesh in meshes)


def _types(tree: Any) -> Any:
    """Returns the structure of a pytree with its arrays' shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(jnp.shape(x), jnp.result_type(x)) for x in leaves]
