"""Meshes: a call on every shard of a batch, and loop carries that vary over mesh axes."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

__all__ = [
    "check_unsharded",
    "pvary_like",
    "shard_map_batch",
]


def pvary_like(tree: Any, *like: Any, without: str | None = None) -> Any:
    """Marks `tree` as varying over every manual mesh axis that `like` varies over.

    A loop's first carry must have the type of its later ones. Inside `shard_map` the type says over
    which axes a value differs, and a constant differs over none.

    Args:
      tree: a pytree of arrays.
      *like: pytrees of arrays.
      without: an axis that is left out: that over which rows of logits lie, and nothing else.

    Returns:
      The pytree, marked.
    """
    axes: frozenset[str] = frozenset().union(*map(_varying, jax.tree.leaves(like))) - {without}

    def mark(leaf: Any) -> Any:
        missing = tuple(sorted(axes - _varying(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(mark, tree)


def _varying(leaf: Any) -> frozenset[str]:
    return jax.typeof(leaf).manual_axis_type.varying


def _batch_axes(array: jax.Array) -> tuple[Any, Any]:
    """Returns the mesh and the explicit mesh axes of the leading axis, or None for both."""
    sharding: Any = jax.typeof(array).sharding
    mesh, spec = sharding.mesh, sharding.spec
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None, None
    return mesh, spec[0] if len(spec) else None


def shard_map_batch(
    function: Callable[[Any, Any], Any], leader: jax.Array, check_vma: bool = True
) -> Callable[[Any, Any], Any]:
    """Returns `function`, or one that runs it on each shard of a batch with explicit mesh axes.

    Args:
      function: of two pytrees of arrays: one with a leading batch axis, and one that every shard
        needs whole. Returns arrays with a leading batch axis.
      leader: the array whose leading axis says how the batch is sharded.
      check_vma: as in `jax.shard_map`; Pallas' interpreter does not pass its check.

    Returns:
      A function of these two pytrees. Its results are sharded like the leader's leading axis.
    """
    mesh, axes = _batch_axes(leader)
    if mesh is None:
        return function
    split, whole = PartitionSpec(axes), PartitionSpec()
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=(split, whole), out_specs=split, check_vma=check_vma
    )

    def reshard_and_call(batch: Any, shared: Any) -> Any:
        batch = jax.tree.map(lambda x: jax.sharding.reshard(x, split), batch)
        shared = jax.tree.map(lambda x: jax.sharding.reshard(x, whole), shared)
        return mapped(batch, shared)

    return reshard_and_call


def check_unsharded(name: str, array: Any) -> None:
    """Raises `ValueError` for an array whose leading axis is split over explicit mesh axes."""
    _, axes = _batch_axes(array)
    if axes is not None:
        raise ValueError(
            f"{name} is sharded over mesh axis {axes!r} along its rows; the ragged form takes all "
            "rows on every device, because rows do not align with requests. Reshard it, or use "
            "rejection_sample."
        )
