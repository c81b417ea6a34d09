"""A call on each device's part of arrays: its requests, and its part of the vocabulary."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.devices.placement import shard_map_batch
from specjax.devices.vocabulary_split import VocabularySplit

__all__ = ["map_parts", "map_vocabulary"]


def map_parts(
    function: Callable[[Any, Any], Any],
    leader: jax.Array,
    split: VocabularySplit | None,
    over_vocabulary: Sequence[jax.Array | None],
    *,
    check_vma: bool = True,
    keeps_vocabulary: bool = False,
) -> Callable[[Any, Any], Any]:
    """Returns a function of a batch that runs `function` on the part that each device has.

    Where no sharding splits the vocabulary this is `shard_map_batch`, or the function of one row.

    Args:
      function: of two pytrees of arrays: one with a leading batch axis, and one that every device
        has of all requests.
      leader: the array whose leading axis says how a batch of whole rows is sharded.
      split: of the vocabulary, or None.
      over_vocabulary: those of the arrays whose last axis is the vocabulary, or words of it.
      check_vma: as in `jax.shard_map`; Pallas' interpreter does not pass its check.
      keeps_vocabulary: whether the result is an array that lies as the leader does, which is one of
        `over_vocabulary`; else arrays with a leading batch axis, equal on all devices of V.

    Returns:
      A function of these two pytrees.
    """
    if split is None or split.mesh is None:
        # One row has no requests that a mesh could divide.
        return function if leader.ndim == 1 else shard_map_batch(function, leader, check_vma)
    mesh, axis = split.mesh, split.axis_name

    def specs(tree: Any, requests: Any) -> Any:
        def spec(x: jax.Array) -> PartitionSpec:
            if not any(x is rows for rows in over_vocabulary):
                return _leading(requests)
            between = (None,) * (x.ndim - 2)
            return PartitionSpec(*(requests, *between, axis)[-x.ndim :])

        return jax.tree.map(spec, tree)

    def call(batch: Any, shared: Any) -> Any:
        arrays, in_specs = (batch, shared), (specs(batch, split.requests), specs(shared, None))
        out_specs = specs(leader, split.requests) if keeps_vocabulary else _leading(split.requests)
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )
        return mapped(*_reshard(arrays, mesh, in_specs))

    return call


def map_vocabulary(
    function: Callable[[Any], Any],
    split: VocabularySplit | None,
    over_vocabulary: Sequence[jax.Array | None],
    *,
    check_vma: bool = True,
) -> Callable[[Any], Any]:
    """Returns `function`, or one that runs it on each device's part of a vocabulary.

    Every device has all requests.

    Args:
      function: of a pytree of arrays.
      split: of the vocabulary, or None.
      over_vocabulary: as in `map_parts`; the first one is not None.
      check_vma: as in `jax.shard_map`.
    """
    leader = over_vocabulary[0]
    if split is None or split.mesh is None or leader is None:
        return function
    mapped = map_parts(
        lambda _, arrays: function(arrays),
        leader,
        dataclasses.replace(split, requests=None),
        over_vocabulary,
        check_vma=check_vma,
    )
    return functools.partial(mapped, None)


def _reshard(arrays: Any, mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """Returns arrays that lie as specs say over the Explicit axes; XLA moves the others."""
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in types if kind == AxisType.Explicit}
    if not explicit:
        return arrays

    def reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        parts = [names if isinstance(names, tuple) else (names,) for names in spec]
        kept = [tuple(name for name in names if name in explicit) or None for names in parts]
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*kept)))

    return jax.tree.map(reshard, arrays, specs)


def _leading(requests: Any) -> PartitionSpec:
    return PartitionSpec() if requests is None else PartitionSpec(requests)
