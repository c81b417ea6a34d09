"""Meshes: where a model lies, a call on every shard of a batch, and carries of loops over axes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes over which requests and shares of a model lie; a pytree without leaves.

    Attributes:
      mesh: a mesh whose axes are all of type Auto.
      data: the axis over which requests lie, or None.
      model: the axis over which heads, MLPs and vocabulary lie; None if every device has them all.
    """

    mesh: Mesh | AbstractMesh
    data: str | None = None
    model: str | None = None

    @property
    def num_shares(self) -> int:
        """Returns how many devices share the weights."""
        return 1 if self.model is None else self.mesh.shape[self.model]

    @property
    def num_processes(self) -> int:
        """Returns how many processes have devices of the mesh; 1 for an abstract mesh."""
        if not isinstance(self.mesh, Mesh):
            return 1
        return len({device.process_index for device in self.mesh.devices.flat})

    def spec(self, *axes: str | None) -> PartitionSpec:
        """Returns the specification of arrays [B, ...] whose next axes lie over `axes`."""
        return PartitionSpec(self.data, *axes)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Returns a specification on this mesh."""
        return NamedSharding(self.mesh, spec)

    def check_axes(self) -> None:
        """Refuses a context of explicit axes, on which no array of the model lies."""
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            raise ValueError(
                "a mesh of explicit axes is in use here, as by jax.set_mesh, and the model lies on "
                "Auto ones. Make and run an Engine outside it; inside it call generate, init and "
                "step, and functions of a Model through jax.sharding.auto_axes."
            )

    def map(self, function: Any, in_specs: Any, out_specs: Any, check_vma: bool = True) -> Any:
        """Returns a function that runs on the shares of all devices; arguments of `shard_map`."""
        self.check_axes()
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
        )

    def round_up(self, size: int) -> int:
        """Returns the least number of requests, from `size` on, that all devices have alike."""
        num_parts = 1 if self.data is None else self.mesh.shape[self.data]
        return -(-size // num_parts) * num_parts

    def pad(self, array: jax.Array, fill: Any = 0) -> jax.Array:
        """Returns an array [B, ...] filled up to `round_up(B)` requests."""
        missing = self.round_up(array.shape[0]) - array.shape[0]
        if not missing:
            return array
        padding = jnp.full((missing, *array.shape[1:]), fill, array.dtype)
        return jnp.concatenate([array, padding])


def parse_mesh(mesh: Any, replicate: bool = False) -> Placement:
    """Returns the placement of a model on a mesh, or refuses the mesh.

    Args:
      mesh: with an axis "model", an axis "data", or both.
      replicate: whether every device is to have all weights.

    Raises:
      ValueError: for what is no such mesh.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ValueError(
            f"mesh is {type(mesh).__name__}; it needs a jax.sharding.Mesh with axes 'data' and "
            "'model', or one of them: jax.make_mesh((1, 2), ('data', 'model'))."
        )
    names = mesh.axis_names
    if not names or not set(names) <= {"data", "model"}:
        raise ValueError(
            f"mesh has axes {list(names)}; it needs 'data', over which requests lie, and 'model', "
            "over which weights lie, or one of them."
        )
    if isinstance(mesh, Mesh):
        mesh = _auto_mesh(mesh)
    data, model = (name if name in names else None for name in ("data", "model"))
    return Placement(mesh, data, None if replicate else model)


def replicate(placement: Placement | None, tree: Any) -> Any:
    """Returns a pytree whose arrays are replicated over a placement's devices, if there is one.

    Traced arrays and shapes are returned as they are.
    """
    if placement is None:
        return tree
    whole = placement.sharding(PartitionSpec())

    def put(x: Any) -> Any:
        is_there = isinstance(x, jax.Array | np.ndarray) and not isinstance(x, jax.core.Tracer)
        return jax.device_put(x, whole) if is_there else x

    return jax.tree.map(put, tree)


def with_auto_axes(
    function: Callable[..., Any], placement: Placement | None, *operands: Any, like: Any
) -> Any:
    """Calls a function with Auto mesh axes, which a model over devices needs.

    Arrays with explicit axes are passed with Auto ones. Outputs get the caller's axis types again.
    No data moves.

    Args:
      function: of the operands.
      placement: of the target, or None.
      *operands: pytrees.
      like: a pytree of a few of the arrays, which say whether the caller's axes are explicit where
        no context of `jax.set_mesh` does.

    Raises:
      ValueError: inside `jit`, of a model over devices.
    """
    arrays = [leaf for leaf in jax.tree.leaves(like) if isinstance(leaf, jax.Array)]
    kinds = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)]
    if not any(AxisType.Explicit in kind.axis_types for kind in kinds):
        return function(*operands)
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
        if placement is None:
            return function(*operands)
        raise ValueError(
            "a mesh has explicit axes here, and inside jit a model over devices needs Auto ones; "
            "call this outside jit, or inside jax.sharding.auto_axes."
        )
    theirs = [jax.sharding.get_mesh(), *(getattr(x.sharding, "mesh", None) for x in arrays)]
    mesh = next(each for each in theirs if each and AxisType.Explicit in each.axis_types)
    auto_mesh: Any = _auto_mesh(mesh) if placement is None else placement.mesh
    with jax.set_mesh(auto_mesh):
        outputs = function(*_with_axis_types(operands, auto_mesh))
    return _with_axis_types(outputs, mesh)


def _auto_mesh(mesh: Mesh) -> Mesh:
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _with_axis_types(tree: Any, mesh: Mesh) -> Any:
    """Returns arrays in their places, on a mesh of the same devices and other axis types."""

    def retype(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
            return leaf
        if sharding.mesh == mesh:
            return leaf
        is_alike = sharding.mesh.shape_tuple == mesh.shape_tuple
        spec = sharding.spec if is_alike else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(retype, tree)


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


def batch_axes(array: jax.Array) -> tuple[Any, Any]:
    """Returns the mesh and the explicit mesh axes of the leading axis, or None for both."""
    sharding: Any = jax.typeof(array).sharding
    mesh, spec = sharding.mesh, sharding.spec
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return None, None
    return mesh, spec[0] if len(spec) else None


def check_unsharded(name: str, array: Any) -> None:
    """Raises `ValueError` for an array whose leading axis is split over explicit mesh axes."""
    _, axes = batch_axes(array)
    if axes is not None:
        raise ValueError(
            f"{name} is sharded over mesh axis {axes!r} along its rows; the ragged form takes all "
            "rows on every device, because rows do not align with requests. Reshard it, or use "
            "rejection_sample."
        )
