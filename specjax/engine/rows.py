"""Takes one request's row out of a state of slots, and puts one in, whatever axis the row is on."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from specjax.decode.state import DecodeState

__all__ = ["find_axes", "put_beginning", "put_row", "row_bytes", "state_axes", "take_row"]

_State = TypeVar("_State")
# Of a leaf that all requests share.
_SHARED = -1


def find_axes(make: Callable[[int], Any], name: str) -> Any:
    """Returns the axis of each leaf of `make(batch_size)` that holds the requests.

    Args:
      make: returns a pytree of arrays for a batch size; it is traced, and nothing is made.
      name: of the pytree, for the error.

    Returns:
      The pytree with an int for each leaf.

    Raises:
      ValueError: for a leaf with no such axis. A row of it cannot be given to another request.

    Example:
      >>> import jax.numpy as jnp
      >>> find_axes(lambda size: (jnp.zeros((4, size, 9)), jnp.zeros(size)), "the cache")
      (1, 0)
    """
    small, large = (jax.eval_shape(lambda size=size: make(size)) for size in (2, 3))

    def axis_of(one: Any, other: Any) -> int:
        pairs = enumerate(zip(one.shape, other.shape, strict=True))
        axes = [axis for axis, sizes in pairs if sizes == (2, 3)]
        if len(axes) != 1:
            raise ValueError(
                f"{name} has a leaf of shape {one.shape} for two requests and {other.shape} for "
                "three; an engine gives one request's row to the next, so each leaf needs one axis "
                "of the batch size."
            )
        return axes[0]

    return jax.tree.map(axis_of, small, large)


def state_axes(state: DecodeState, cache_axes: Any, drafter_axes: Any) -> tuple[int, ...]:
    """Returns the axis of each leaf of a state that holds the requests; hashable, so static.

    Args:
      state: of arrays or of their shapes.
      cache_axes: of the target's cache, from `find_axes`.
      drafter_axes: of the drafter's state.
    """
    axes = jax.tree.map(lambda _: 0, state)
    names = ("conditional_rates", "k_by_rate")
    shared: dict[str, Any] = {
        name: _SHARED for name in names if getattr(axes.settings, name) is not None
    }
    sampling = axes.settings.sampling
    if sampling is not None:
        grammar = jax.tree.map(lambda _: _SHARED, sampling.grammar)
        shared["sampling"] = sampling._replace(grammar=grammar)
    draft = axes.draft
    if draft.token_map is not None:
        draft = draft._replace(token_map=_SHARED)
    axes = axes._replace(
        target_cache=cache_axes,
        drafter_state=drafter_axes,
        draft=draft,
        settings=axes.settings._replace(**shared),
    )
    return tuple(jax.tree.leaves(axes))


def take_row(state: _State, axes: tuple[int, ...], slot: jax.Array) -> _State:
    """Returns the state of the request in a slot: a batch of one."""
    leaves, structure = jax.tree.flatten(state)

    def take(leaf: jax.Array, axis: int) -> jax.Array:
        return leaf if axis == _SHARED else jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis)

    return jax.tree.unflatten(structure, map(take, leaves, axes))


def put_row(state: _State, row: _State, axes: tuple[int, ...], slot: jax.Array) -> _State:
    """Returns the state with the request of a batch of one in a slot.

    Args:
      state: of all slots.
      row: of one request; what all requests share is not read.
      axes: from `state_axes`.
      slot: i32.
    """
    leaves, structure = jax.tree.flatten(state)

    def put(leaf: jax.Array, value: jax.Array, axis: int) -> jax.Array:
        if axis == _SHARED:
            return leaf
        return jax.lax.dynamic_update_slice_in_dim(leaf, value, slot, axis)

    return jax.tree.unflatten(structure, map(put, leaves, jax.tree.leaves(row), axes))


def put_beginning(whole: _State, part: _State) -> _State:
    """Returns a pytree of arrays with another, of a shorter length, at the beginning of each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> put_beginning([jnp.zeros((1, 4)), jnp.zeros(2)], [jnp.ones((1, 2)), jnp.ones(2)])
      [Array([[1., 1., 0., 0.]], dtype=float32), Array([1., 1.], dtype=float32)]
    """

    def put(leaf: jax.Array, value: jax.Array) -> jax.Array:
        if leaf.shape == value.shape:
            return value
        return jax.lax.dynamic_update_slice(leaf, value, (0,) * leaf.ndim)

    return jax.tree.map(put, whole, part)


def row_bytes(state: Any, axes: tuple[int, ...]) -> int:
    """Returns how many bytes of a state belong to one request."""
    leaves = zip(jax.tree.leaves(state), axes, strict=True)
    return sum(
        leaf.size * leaf.dtype.itemsize // leaf.shape[axis]
        for leaf, axis in leaves
        if axis != _SHARED
    )
