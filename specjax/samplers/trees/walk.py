"""Draw and walk: the target draws a token after each node, and the walk descends to its child.

Row 0 is drawn from first. While a child of the current node holds the drawn token, the walk goes to
the lowest such child and draws from its row. The text equals plain decoding with the same keys,
whatever the nodes hold. No rule keeps more of one-hot nodes that are distinct.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.noise import Stream, address
from specjax.core.temperature import parse_temperature
from specjax.devices.placement import pvary_like
from specjax.devices.rows import LogitRows
from specjax.samplers.trees.tree import AcceptedPath, Tree, first_index


class _WalkState(NamedTuple):
    """State of the loop over rows.

    Attributes:
      node: i32, where the walk is; -1 is the root.
      active: bool, whether the walk has just descended, and the node's row is read next.
      path: the nodes so far, and the last draw.
    """

    node: jax.Array
    active: jax.Array
    path: AcceptedPath


def walk_tree(tree: Tree, target: LogitRows, max_depth: int, noise_dtype: Any) -> AcceptedPath:
    """Returns the path of nodes that hold what the target draws, and its last draw.

    Args:
      tree: of one request.
      target: rows of every request; those of this one begin at `tree.first_row`.
      max_depth: D.
      noise_dtype: float32 or float64.
    """

    def step(state: _WalkState) -> _WalkState:
        path, depth = state.path, state.path.num_accepted
        at = address(tree.key, tree.position + depth, Stream.TARGET)
        token, logprob, row = target.row(tree.first_row + state.node + 1).draw(
            at, parse_temperature(tree.temperature), noise_dtype
        )
        is_child = (tree.parents == state.node) & ~tree.is_padding & (tree.token_ids == token)
        descends = row.valid & jnp.any(is_child)
        child = first_index(is_child)
        path = AcceptedPath(
            nodes=path.nodes.at[depth].set(jnp.where(descends, child, jnp.int32(-1))),
            logprobs=path.logprobs.at[depth].set(jnp.where(descends, logprob, jnp.float32(0))),
            num_accepted=depth + descends.astype(jnp.int32),
            token=token,
            logprob=logprob,
            valid=row.valid,
        )
        node = jnp.where(descends, child, state.node)
        return pvary_like(_WalkState(node, descends, path), state)

    # Derived from the tree, so that they vary over its axes inside shard_map.
    zero, zero_logprob = jnp.zeros_like(tree.position), jnp.zeros_like(tree.temperature)
    nothing = AcceptedPath(
        nodes=jnp.full_like(tree.position, -1, shape=(max_depth,)),
        logprobs=jnp.zeros_like(tree.temperature, shape=(max_depth,)),
        num_accepted=zero,
        token=zero - 1,
        logprob=zero_logprob,
        valid=zero > 0,
    )
    start = pvary_like(_WalkState(zero - 1, zero == 0, nothing), tree, target)
    return jax.lax.while_loop(lambda state: state.active, step, start).path
