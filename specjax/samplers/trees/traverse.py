r"""Traversal verification: siblings sampled without replacement, tried depth first.

    visit(v, r):                        r = 1 at the root
      p, q = rows of v
      for each child c of v, token x:
        if visit(c, min(1, r p(x) / q(x))): return accepted
        p, q, r = residual rows and rate after the rejection (`siblings`)
      u < r, or v is the root: accepted. The path to v is emitted, and a token y ~ p.

r never rises. At r = 0 no node below is accepted, so such a child is not visited. The recursion
is a loop over (node, last tried child), whose program does not grow with the tree.

References:
  Weng et al., 2025, arXiv:2505.12398.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.acceptance import log_ratio
from specjax.core.gumbel_max import gumbel_max_token
from specjax.core.logsumexp import block_logprobs
from specjax.core.noise import Stream, address, uniform
from specjax.core.residual import residual_log_masses
from specjax.core.temperature import parse_temperature
from specjax.devices.placement import pvary_like
from specjax.devices.rows import LogitRows
from specjax.samplers.trees.siblings import (
    ResidualRow,
    Siblings,
    TreeRows,
    child_logprobs,
    log_weights,
    reject_child,
    row_statistics_of,
)
from specjax.samplers.trees.tree import AcceptedPath, Tree, first_index


class _VisitState(NamedTuple):
    """State of the traversal.

    Attributes:
      node: i32, the visited node; -1 is the root.
      tried: i32, its last tried child; later children are still to be tried.
      accepted: bool, whether the node is accepted, which ends the traversal.
      residuals: [N + 1], of every row.
      siblings: [N], the rejected nodes.
    """

    node: jax.Array
    tried: jax.Array
    accepted: jax.Array
    residuals: ResidualRow
    siblings: Siblings


def traverse_tree(
    tree: Tree, target: LogitRows, draft: LogitRows, max_depth: int, noise_dtype: Any
) -> AcceptedPath:
    """Returns the path to the node that the traversal accepts, and the token drawn after it.

    Args:
      tree: of one request.
      target: rows of every request; those of this one begin at `tree.first_row`.
      draft: rows of draft logits, in the order of `target`.
      max_depth: D.
      noise_dtype: float32 or float64.
    """
    is_used = ~tree.is_padding
    has_child = jnp.zeros_like(is_used, shape=(is_used.shape[0] + 1,))
    has_child = has_child.at[tree.parents + 1].max(is_used, mode="drop")
    is_read = jnp.pad(is_used, (1, 0), constant_values=True)
    target_rows = row_statistics_of(target, tree.first_row, tree.temperature, is_read)
    draft_rows = row_statistics_of(draft, tree.first_row, tree.draft_temperature, has_child)
    rows = TreeRows(tree, target, draft, target_rows, draft_rows)
    end = _visit(rows, noise_dtype)
    return _path_to(rows, end, max_depth, noise_dtype)


def _visit(rows: TreeRows, noise_dtype: Any) -> _VisitState:
    """Returns the state at the first accepted node; the root is always accepted."""
    tree, size = rows.tree, rows.tree.parents.shape[0]
    nodes = jnp.arange(size, dtype=jnp.int32)

    def step(state: _VisitState) -> _VisitState:
        node, row = state.node, state.node + 1
        # A node whose row is not a distribution is a leaf.
        is_child = (tree.parents == node) & ~tree.is_padding & rows.target_rows.valid[row]
        child = first_index(is_child & (nodes > state.tried))
        has_child, i = child < size, jnp.minimum(child, size - 1)
        residual = jax.tree.map(lambda x: x[row], state.residuals)
        p, q = child_logprobs(rows, state.siblings, residual, i)
        in_vocabulary = (tree.token_ids[i] >= 0) & (tree.token_ids[i] < rows.target.logits.shape[1])
        # A token with q = 0 cannot have been drawn here: p, q and r stay.
        skips = has_child & in_vocabulary & (q == -jnp.inf)
        log_rate = jnp.minimum(residual.log_rate + log_ratio(p, q), jnp.float32(0))
        descends = has_child & ~skips & (log_rate > -jnp.inf)
        accepted = ~has_child & (
            (node == -1) | _accepts(tree, node, residual.log_rate, noise_dtype)
        )

        rejects = jnp.where(has_child, ~skips & ~descends, ~accepted)
        rejected = jnp.where(has_child, i, jnp.maximum(node, 0))
        above = tree.parents[rejected] + 1

        def reject() -> tuple[ResidualRow, Siblings]:
            at_parent = jax.tree.map(lambda x: x[above], state.residuals)
            siblings, after = reject_child(rows, state.siblings, at_parent, rejected)
            return jax.tree.map(lambda x, y: x.at[above].set(y), state.residuals, after), siblings

        residuals, siblings = jax.lax.cond(
            rejects, reject, lambda: (state.residuals, state.siblings)
        )
        rates = residuals.log_rate.at[i + 1].set(
            jnp.where(descends, log_rate, residuals.log_rate[i + 1])
        )
        # Children come after their parents in index order.
        climbs = ~has_child & ~accepted
        after = _VisitState(
            node=jnp.where(descends, i, jnp.where(climbs, above - 1, node)),
            tried=jnp.where(has_child, i, jnp.where(climbs, node, state.tried)),
            accepted=accepted,
            residuals=residuals._replace(log_rate=rates),
            siblings=siblings,
        )
        return pvary_like(after, state)

    # Derived from the tree, so that they vary over its axes inside shard_map.
    root = jnp.full_like(tree.position, -1)
    none, zeros = jnp.zeros_like(tree.is_padding), jnp.zeros_like(tree.depths, jnp.float32)
    whole = jnp.zeros_like(tree.temperature, shape=(size + 1,))
    start = _VisitState(
        node=root,
        tried=root,
        accepted=root >= 0,
        residuals=ResidualRow(whole, whole, whole),
        siblings=Siblings(none, none, zeros, zeros),
    )
    start = pvary_like(start, rows)
    return jax.lax.while_loop(lambda state: ~state.accepted, step, start)


def _accepts(tree: Tree, node: jax.Array, log_rate: jax.Array, noise_dtype: Any) -> jax.Array:
    """Returns whether a node's uniform is below its rate after all of its children."""
    v = jnp.maximum(node, 0)
    at = address(tree.key, tree.position + tree.depths[v], Stream.accept(tree.indices[v]))
    u = uniform(at, jnp.uint32(0), noise_dtype)
    return jnp.log(u) < log_rate.astype(u.dtype)


def _path_to(rows: TreeRows, end: _VisitState, max_depth: int, noise_dtype: Any) -> AcceptedPath:
    """Returns the path from the root to the accepted node, and draws the token after it."""
    tree, node = rows.tree, end.node
    num_accepted = jnp.where(node < 0, jnp.int32(0), tree.depths[jnp.maximum(node, 0)] + 1)

    def climb(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        v, nodes, logprobs = state
        depth, parent = tree.depths[v], tree.parents[v]
        logprob = rows.target_logprobs(parent + 1, tree.token_ids[v])
        after = parent, nodes.at[depth].set(v), logprobs.at[depth].set(logprob)
        return pvary_like(after, state)

    path = (
        jnp.full_like(tree.position, -1, shape=(max_depth,)),
        jnp.zeros_like(tree.temperature, shape=(max_depth,)),
    )
    start = pvary_like((node, *path), rows, end)
    _, nodes, logprobs = jax.lax.while_loop(lambda state: state[0] >= 0, climb, start)
    token = _draw(rows, end, num_accepted, noise_dtype)
    logprob, valid = rows.target_logprobs(node + 1, token), rows.target_rows.valid[node + 1]
    return AcceptedPath(nodes, logprobs, num_accepted, token, logprob, valid)


def _draw(rows: TreeRows, end: _VisitState, num_accepted: jax.Array, noise_dtype: Any) -> jax.Array:
    """Returns the token drawn from the accepted node's row after its rejected children."""
    tree, row = rows.tree, end.node + 1
    target = rows.target.row(tree.first_row + row)
    scale = parse_temperature(tree.temperature).scale
    normalizer = jax.tree.map(lambda x: x[row], rows.target_rows.normalizer)
    is_child = end.siblings.is_rejected & (tree.parents + 1 == row)
    last = jnp.max(jnp.where(is_child, jnp.arange(is_child.shape[0], dtype=jnp.int32), -1))
    is_whole = (last < 0) | end.siblings.is_empty[last]

    def weights(index: jax.Array) -> jax.Array:
        return log_weights(rows, end.siblings, row, index)

    def whole_masses() -> jax.Array:
        return block_logprobs(target.partials(scale), normalizer, scale)

    def residual_masses() -> jax.Array:
        log_m = weights(jnp.arange(target.vocab_size, dtype=jnp.int32))
        return residual_log_masses(log_m, jnp.full_like(log_m, -jnp.inf))

    masses = jax.lax.cond(is_whole, whole_masses, residual_masses)
    at = address(tree.key, tree.position + num_accepted, Stream.TARGET)
    return gumbel_max_token(masses, weights, at, noise_dtype)
