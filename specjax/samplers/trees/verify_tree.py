"""Verification of the trees of a batch: for each request a walk or a traversal, and its output."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import TreeArrays, flatten
from specjax.call_options import CallOptions
from specjax.core.temperature import parse_temperature
from specjax.devices.placement import pvary_like
from specjax.devices.rows import LogitRows
from specjax.implementation import is_for_cpu_alone
from specjax.samplers.trees.traverse import traverse_tree
from specjax.samplers.trees.tree import AcceptedPath, Tree, find_padding, place_nodes
from specjax.samplers.trees.walk import walk_tree
from specjax.types import TreeVerification

# Requests per iteration of `lax.map`, except on a CPU, which takes one.
_BATCH_SIZE = 8


def verify_trees(arrays: TreeArrays, *, max_depth: int, options: CallOptions) -> TreeVerification:
    """Verifies a batch, or one shard of it; neither checks nor shards.

    Args:
      arrays: every option once per request, keys as words; N >= 1.
      max_depth: D.
      options: static.
    """
    arrays = pvary_like(arrays, arrays)
    size, num_rows = arrays.target_logits.shape[:2]
    depths, indices = place_nodes(arrays.parents)
    draft_temperature = arrays.draft_temperature
    trees = Tree(
        key=(arrays.keys[:, 0], arrays.keys[:, 1]),
        position=arrays.positions,
        temperature=arrays.temperature,
        draft_temperature=arrays.temperature if draft_temperature is None else draft_temperature,
        first_row=jnp.arange(size, dtype=jnp.int32) * num_rows,
        token_ids=arrays.token_ids,
        parents=arrays.parents,
        depths=depths,
        indices=indices,
        is_padding=find_padding(arrays.token_ids, depths, max_depth),
    )
    # Inside shard_map the first rows are numbers that vary over no axis; a tree varies as a whole.
    trees = pvary_like(trees, arrays)
    target = LogitRows(flatten(arrays.target_logits, 1), flatten(arrays.target_cutoff))
    draft = None
    if arrays.draft_logits is not None:
        draft = LogitRows(flatten(arrays.draft_logits, 1), flatten(arrays.draft_cutoff))

    def one(tree: Tree) -> TreeVerification:
        return verify_tree(tree, target, draft, max_depth, options.noise_dtype)

    mapped = functools.partial(jax.lax.map, one)
    if is_for_cpu_alone(options.implementation):
        return mapped(trees)
    # Not all at once: each tree holds several rows of float32.
    batched = functools.partial(mapped, batch_size=_BATCH_SIZE)
    return jax.lax.platform_dependent(trees, cpu=mapped, default=batched)


def verify_tree(
    tree: Tree, target: LogitRows, draft: LogitRows | None, max_depth: int, noise_dtype: Any
) -> TreeVerification:
    """Verifies the tree of one request.

    Args:
      tree: without a batch axis.
      target: rows of every request; those of this one begin at `tree.first_row`.
      draft: rows of draft logits in the same order, or None where every node is one-hot.
      max_depth: D.
      noise_dtype: float32 or float64.

    Returns:
      `TreeVerification` without a batch axis.
    """

    def walk() -> AcceptedPath:
        return walk_tree(tree, target, max_depth, noise_dtype)

    if draft is None:
        path = walk()
    else:
        drawn = parse_temperature(tree.draft_temperature)
        is_drawn = drawn.valid & ~drawn.greedy & ~parse_temperature(tree.temperature).greedy
        path = jax.lax.cond(
            is_drawn, lambda: traverse_tree(tree, target, draft, max_depth, noise_dtype), walk
        )
    return _emit(tree, path, max_depth)


def _emit(tree: Tree, path: AcceptedPath, max_depth: int) -> TreeVerification:
    """Returns the tokens of a path and the token after it; none if the request is invalid."""
    is_active = parse_temperature(tree.temperature).valid
    num_accepted = jnp.where(is_active, path.num_accepted, jnp.int32(0))
    emits = is_active & path.valid
    depth = jnp.arange(max_depth + 1, dtype=jnp.int32)
    nodes = jnp.pad(path.nodes, (0, 1), constant_values=-1)
    is_accepted, is_next = depth < num_accepted, emits & (depth == num_accepted)
    token_ids = jnp.where(is_next, path.token, jnp.int32(-1))
    logprobs = jnp.where(is_next, path.logprob, jnp.float32(0))
    return TreeVerification(
        token_ids=jnp.where(is_accepted, tree.token_ids[jnp.maximum(nodes, 0)], token_ids),
        num_accepted=num_accepted,
        num_emitted=num_accepted + emits.astype(jnp.int32),
        logprobs=jnp.where(is_accepted, jnp.pad(path.logprobs, (0, 1)), logprobs),
        nodes=jnp.where(is_accepted, nodes, jnp.int32(-1))[:max_depth],
    )
