"""`tree_rejection_sample`: checks, and the jitted body."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import TreeArrays
from specjax.call_options import CallOptions, Options, check_options, check_whole_rows
from specjax.checks import (
    as_array,
    check_count,
    check_keys,
    check_logits,
    check_type,
    parse_array,
    parse_optional,
)
from specjax.devices.map_parts import map_parts
from specjax.implementation import Implementation, resolve_implementation
from specjax.samplers.batch import broadcast_requests
from specjax.samplers.trees.tree import MAX_DEPTH
from specjax.samplers.trees.verify_tree import verify_trees
from specjax.types import TreeDraft, TreeVerification


def tree_rejection_sample(
    tree: TreeDraft,
    target_logits: jax.Array,
    *,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    options: Options = Options(),
) -> TreeVerification:
    r"""Verifies a tree of drafted tokens: several candidates at one position, exactly.

    The output is a path from the root, which is the last committed token, and one token after it.

    One-hot nodes, without `tree.logits`: the target draws a token :math:`y` after each node, on the
    target's stream. The path descends while a child holds :math:`y`. The emitted tokens are those
    that `gumbel_sample` draws without a draft.

    Sampled nodes, with `tree.logits`: siblings are drawn without replacement, and a traversal
    carries an acceptance rate r down from node to child and back,

    .. math:: r_c = \min(1, r\, p(x) / q(x)), \qquad
      p \leftarrow \frac{\max(r p - q, 0)}{Z}, \quad
      r \leftarrow \frac{Z}{Z + 1 - r}, \quad Z = \sum \max(r p - q, 0)

    the second after each rejected child, whose token leaves q. The deepest nodes are tried first,
    and a node is accepted if its uniform lies below its r. On a chain this is
    `rules.block`, token for token.

    Draw node v by `gumbel_sample` of its parent's row of draft logits, with the tokens of earlier
    siblings at -inf. Its address is ``positions + d`` on ``Stream.draft(d + 1024 * j)``. Here d is
    the depth of v, 0 at the root's children, and j the number of nodes before v of that depth.
    `specjax.samplers.trees.tree.place_nodes` gives d and the index of the stream. Siblings drawn
    with replacement, or at one address, bias the output. The shape may depend on tokens already
    drawn; a drawn node may not be dropped afterwards.

    Args:
      tree: `TreeDraft` of N nodes per request.
      target_logits: [B, N + 1, V], bf16, f16 or f32, raw. Row 0 follows the root, row v + 1 node v.
      keys: typed threefry keys, [B] or (), as in `rejection_sample`.
      positions: i32, [B] or scalar, where the root's children stand.
      temperature: f32, [B] or scalar, >= 0. Below 1e-5 the request is greedy: the path is that
        of the target's argmax. Negative or not finite makes the request invalid: it emits nothing.
      cutoff: f32[B, N + 1], target logits below it are left out. None keeps all.
      options: `Options`, static. Its `implementation` is None or "xla": there are no kernels of
        trees. Its `axis_name` and `vocab_size` are None: rows are whole, or gathered.

    Returns:
      `TreeVerification`. A node whose target row is not a distribution is a leaf. A path that ends
      there has no token after it.

    Raises:
      ValueError: for wrong shapes, dtypes or keys, or an implementation other than plain JAX.

    Example:
      >>> target_logits = jnp.log(jnp.array([[[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]]))
      >>> tree = specjax.TreeDraft(jnp.array([[0, 1]]), jnp.array([[-1, -1]]), max_depth=1)
      >>> step = specjax.tree_rejection_sample(
      ...     tree, target_logits, keys=jax.random.key(0), positions=0)
      >>> step.token_ids, step.nodes
      (Array([[1, 0]], dtype=int32), Array([[1]], dtype=int32))

    References:
      Weng et al., 2025, arXiv:2505.12398.
    """
    check_options(options)
    check_whole_rows(options, "trees are verified on whole rows of logits")
    check_type("tree", tree, TreeDraft, "a specjax.TreeDraft")
    ids = as_array("tree.token_ids", tree.token_ids)
    if ids.ndim != 2:
        raise ValueError(f"tree.token_ids has shape {ids.shape}; it needs [B, N].")
    size, num_nodes = ids.shape
    max_depth = check_count("tree.max_depth", tree.max_depth, 1, "the length of the longest path")
    if max_depth > MAX_DEPTH:
        raise ValueError(
            f"tree.max_depth is {max_depth}; it needs at most {MAX_DEPTH}: deeper nodes would "
            "share their noise with others."
        )
    if tree.logits is None and tree.cutoff is not None:
        raise ValueError(
            "tree.cutoff is given without tree.logits; nodes without logits are one-hot."
        )
    each = ((), (size,))
    nodes, rows = (size, num_nodes), (size, num_nodes + 1)
    arrays = TreeArrays(
        token_ids=parse_array("tree.token_ids", ids, jnp.int32, nodes),
        parents=parse_array("tree.parents", tree.parents, jnp.int32, nodes),
        target_logits=_check_rows("target_logits", target_logits, nodes),
        target_cutoff=parse_optional("cutoff", cutoff, jnp.float32, rows),
        draft_logits=None
        if tree.logits is None
        else _check_rows("tree.logits", tree.logits, nodes),
        draft_cutoff=parse_optional("tree.cutoff", tree.cutoff, jnp.float32, rows),
        draft_temperature=parse_optional("tree.temperature", tree.temperature, jnp.float32, *each),
        keys=check_keys(keys, size),
        positions=parse_array("positions", positions, jnp.int32, *each),
        temperature=parse_array("temperature", temperature, jnp.float32, *each),
    )
    call_options = CallOptions.from_options(_plain_jax(options))
    return _tree_rejection_sample(arrays, max_depth=max_depth, options=call_options)


def _check_rows(name: str, logits: Any, nodes: tuple[int, int]) -> Any:
    logits = as_array(name, logits)
    check_logits(name, logits, "[B, N + 1, V]", nodes[0])
    if logits.shape[1] != nodes[1] + 1:
        raise ValueError(
            f"{name} has {logits.shape[1]} rows per request for {nodes[1]} nodes; it needs "
            f"{nodes[1] + 1}: one for the root and one after each node."
        )
    return logits


def _plain_jax(options: Options) -> Options:
    """Returns options of plain JAX; refuses a name that stands for kernels."""
    implementation = options.implementation
    name = implementation.name if isinstance(implementation, Implementation) else implementation
    if name in ("triton", "interpret"):
        raise ValueError(
            f"implementation={name!r} names the Triton kernels, and there are none of trees; use "
            "None or 'xla'."
        )
    resolve_implementation(implementation)
    return dataclasses.replace(options, implementation="xla")


@functools.partial(jax.jit, static_argnames=("max_depth", "options"))
def _tree_rejection_sample(
    arrays: TreeArrays, *, max_depth: int, options: CallOptions
) -> TreeVerification:
    """Runs `tree_rejection_sample` on checked arguments."""
    size, num_nodes = arrays.token_ids.shape
    if size == 0:
        none, padded = jnp.zeros((0,), jnp.int32), jnp.zeros((0, max_depth + 1), jnp.int32)
        return TreeVerification(padded, none, none, padded.astype(jnp.float32), padded[:, 1:])
    if num_nodes == 0:
        padding = jnp.full_like(arrays.token_ids, -1, shape=(size, 1))
        arrays = arrays._replace(token_ids=padding, parents=padding, draft_logits=None)
    arrays = broadcast_requests(arrays, size)
    run = functools.partial(verify_trees, max_depth=max_depth, options=options)
    return map_parts(run, arrays.target_logits)(arrays)
