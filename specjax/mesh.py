"""Meshes: the same call on every shard of a batch, and carries that vary with it."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

__all__ = ["map_batch_shards", "vary_like"]


def vary_like(tree: Any, *like: Any) -> Any:
    """Marks `tree` as varying over every manual mesh axis that `like` varies over.

    A loop's first carry must have the type of its later ones; inside `shard_map` that
    type says over which axes a value differs, which constants do not say.
    """
    axes: frozenset[str] = frozenset().union(*map(_varying, jax.tree.leaves(like)))

    def mark(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def _varying(leaf: Any) -> frozenset[str]:
    return jax.typeof(leaf).manual_axis_type.varying


def _batch_axes(array: jax.Array) -> tuple[Any, Any]:
    """The mesh and the explicit mesh axes of the leading axis; None where there are none."""
    sharding: Any = jax.typeof(array).sharding
    mesh, spec = sharding.mesh, sharding.spec
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None, None
    return mesh, spec[0] if len(spec) else None


def map_batch_shards(
    function: Callable[[Any, Any], Any], leader: jax.Array, batch: Any, shared: Any
) -> Any:
    """`function(batch, shared)`, on each shard of the batch under an explicit-axes mesh.

    Args:
      function: gives a pytree of arrays with a leading batch axis.
      leader: the array whose leading axis says how the batch is sharded.
      batch: pytree of arrays with a leading batch axis.
      shared: pytree of arrays that every shard needs whole.

    Returns:
      What `function` returns, sharded like the leader's leading axis.
    """
    mesh, axes = _batch_axes(leader)
    if mesh is None:
        return function(batch, shared)
    split, whole = PartitionSpec(axes), PartitionSpec()
    batch = jax.tree.map(lambda x: jax.sharding.reshard(x, split), batch)
    shared = jax.tree.map(lambda x: jax.sharding.reshard(x, whole), shared)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(split, whole), out_specs=split)
    return mapped(batch, shared)
