"""The kind of a pytree: what decides which compiled program takes it.

A model has hundreds of leaves, and Python takes a millisecond to look at their types. So the kind
of a `Model` or `Drafter` is found again only if leaves were exchanged, as in a dict of parameters.
"""

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from specjax.decode.drafters import Drafter
from specjax.types import Model


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """Structure and leaves of a pytree. Equal ones are one object, of the 64 that were used last.

    Attributes:
      structure: the pytree's.
      types: shape, dtype and weak type of each leaf.
      devices: on which arrays were put; none where all may move; None where one is traced by an
        outer program.
    """

    structure: Any
    types: tuple[tuple[Any, Any, bool], ...]
    devices: frozenset[jax.Device] | None

    def shapes(self) -> Any:
        """Returns the pytree with a `jax.ShapeDtypeStruct` for each leaf."""
        leaves = (
            jax.ShapeDtypeStruct(shape, dtype, weak_type=is_weak)
            for shape, dtype, is_weak in self.types
        )
        return jax.tree.unflatten(self.structure, leaves)


def kind_of(tree: Any) -> Kind:
    """Returns the kind of a pytree of arrays and numbers."""
    leaves, structure = jax.tree.flatten(tree)
    types = tuple(
        (x.shape, x.dtype, getattr(x, "weak_type", False))
        if hasattr(x, "dtype")
        else ((), jax.dtypes.canonicalize_dtype(type(x)), True)
        for x in leaves
    )
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    if any(isinstance(array, jax.core.Tracer) for array in arrays):
        return _kind(structure, types, None)
    # The devices of a sharding are one set: most arrays share it, so that few are hashed.
    sets = {id(x): x for x in (array.devices() for array in arrays if array.committed)}
    return _kind(structure, types, frozenset().union(*sets.values()))


def kind_of_model(model: Model | Drafter | None) -> Kind:
    """Returns the kind of a model, of a drafter or of None."""
    if model is None:
        return kind_of(None)
    leaves, structure = jax.tree.flatten(model)
    known = _KINDS.get(id(model))
    is_same = known is not None and known.model() is model and known.kind.structure == structure
    if known and is_same and all(map(operator.is_, (get() for get in known.leaves), leaves)):
        return known.kind
    key = id(model)
    reference = weakref.ref(model, lambda _: _KINDS.pop(key, None))
    known = _KINDS[key] = _Known(reference, [_refer(leaf) for leaf in leaves], kind_of(model))
    return known.kind


class Kinds(NamedTuple):
    """The kinds of a call's target, drafter or None, and requests."""

    target: Kind
    drafter: Kind
    requests: Kind


def kinds_of(models: Any, requests: Any) -> Kinds:
    """Returns the kinds of a pair of a target and a drafter, and of a batch of requests."""
    target, drafter = models
    return Kinds(kind_of_model(target), kind_of_model(drafter), kind_of(requests))


class _Known(NamedTuple):
    """A model and its leaves, none of which is kept alive, and its kind."""

    model: Callable[[], Any]
    leaves: list[Callable[[], Any]]
    kind: Kind


def _refer(leaf: Any) -> Callable[[], Any]:
    """Returns a weak reference to an array; to a number, which has none, a strong one."""
    try:
        return weakref.ref(leaf)
    except TypeError:
        return lambda: leaf


_kind = functools.lru_cache(maxsize=64)(Kind)
_KINDS: dict[int, _Known] = {}
