"""A call on each device's part of arrays: its requests, and its part of the vocabulary."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.devices.placement import batch_axes
from specjax.devices.vocabulary_split import VocabularySplit

_Function = Callable[[Any], Any]
_Arrays = Sequence[jax.Array | None]


def map_parts(
    function: _Function,
    leader: jax.Array,
    split: VocabularySplit | None = None,
    over_vocabulary: _Arrays = (),
    *,
    whole: Any = False,
    check_vma: bool = True,
    keeps_vocabulary: bool = False,
) -> _Function:
    """Returns a function of a batch that runs `function` on the part that each device has.

    Where no sharding splits the vocabulary, the batch is divided as explicit mesh axes divide the
    leader. Without those this is `function`, as it is for one row.

    Args:
      function: of a pytree of arrays with a leading batch axis, or which every device has whole.
      leader: the array whose leading axis says how a batch of whole rows is sharded.
      split: of the vocabulary, or None.
      over_vocabulary: those of the arrays whose last axis is the vocabulary, or words of it.
      whole: whether every device has an array of all requests; a bool, or a pytree of bools that
        is a prefix of the function's.
      check_vma: as in `jax.shard_map`; Pallas' interpreter does not pass its check.
      keeps_vocabulary: whether the result is one array that lies as the leader does, and the leader
        is one of `over_vocabulary`. If False, the results are arrays with a leading batch axis,
        equal on all devices of V.

    Returns:
      A function of this pytree.
    """
    if split is not None and split.mesh is not None:
        mesh, requests, axis = split.mesh, split.requests, split.axis_name
    elif leader.ndim == 1 and _holds(over_vocabulary, leader):
        # One row has no requests that a mesh could divide.
        return function
    else:
        (mesh, requests), axis = batch_axes(leader), None
        if mesh is None:
            return function

    def spec(x: jax.Array, is_whole: bool = False) -> PartitionSpec:
        leading = None if is_whole else requests
        if axis is not None and _holds(over_vocabulary, x):
            between = (None,) * (x.ndim - 2)
            return PartitionSpec(*(leading, *between, axis)[-x.ndim :])
        return _leading(leading)

    def call(arrays: Any) -> Any:
        in_specs = jax.tree.map(
            lambda is_whole, part: jax.tree.map(lambda x: spec(x, is_whole), part), whole, arrays
        )
        out_specs = spec(leader) if keeps_vocabulary else _leading(requests)
        mapped = jax.shard_map(
            function, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=check_vma
        )
        return mapped(_reshard(arrays, mesh, in_specs))

    return call


def map_vocabulary(
    function: _Function,
    split: VocabularySplit | None,
    over_vocabulary: _Arrays,
    *,
    check_vma: bool = True,
) -> _Function:
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
    split = dataclasses.replace(split, requests=None)
    return map_parts(function, leader, split, over_vocabulary, check_vma=check_vma)


def _holds(arrays: _Arrays, x: jax.Array) -> bool:
    return any(x is each for each in arrays)


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
