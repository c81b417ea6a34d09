"""A vocabulary that lies over a mesh axis: its true size, and the checks of calls that have one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from specjax.core.noise import SAMPLING_BLOCK
from specjax.implementation import Implementation
from specjax.types import Draft, RaggedDraft

# A block of 128 tokens lies on two devices at most.
_MIN_WIDTH = 128
# Ids travel between devices as float32, which is exact up to here.
_MAX_TOKENS = 2**24


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VocabularySplit:
    """The mesh axis over which rows of logits lie; static, so a pytree without leaves.

    Device d of the axis has the tokens from `d * width` on, where `width` is the last axis of its
    rows.

    Attributes:
      axis_name: the mesh axis.
      vocab_size: V, without the padding at the end of the axis.
      mesh: that of arrays whose sharding says how they lie, which `map_parts` divides among
        devices. None inside `shard_map`, where an array is a device's part.
      requests: with `mesh`, the axes over which the leading axis of the rows lies, or None.
    """

    axis_name: str
    vocab_size: int
    mesh: Mesh | AbstractMesh | None = None
    requests: Any = None


def axis_of(split: VocabularySplit | None) -> str | None:
    """Returns the mesh axis over which rows of logits lie, or None."""
    return None if split is None else split.axis_name


def keep_split(
    split: VocabularySplit | None, width: int, why_whole: Callable[[int], str | None]
) -> VocabularySplit | None:
    """Returns the split of rows of logits, None where a call reads whole rows.

    Args:
      split: of the logits, or None.
      width: of the logits.
      why_whole: says of the tokens on each device what asks for whole rows, or None.

    Raises:
      ValueError: inside `shard_map` for parts that are to be whole.
    """
    if split is None:
        return None
    reason = why_whole(width // (1 if split.mesh is None else split.mesh.shape[split.axis_name]))
    if reason is not None and split.mesh is None:
        raise ValueError(reason)
    return split if reason is None else None


def plain_if_split(implementation: Implementation, split: VocabularySplit | None) -> Implementation:
    """Returns the implementation of a call that has no kernels for parts of rows."""
    return implementation if split is None else Implementation("xla")


def why_no_kernels(
    split: VocabularySplit | None, width: int, noise_dtype: Any, missing: str | None
) -> str | None:
    """Returns the reason why kernels cannot read this split vocabulary; None where they can.

    Args:
      split: of the vocabulary, or None.
      width: the tokens of a row that a device holds.
      noise_dtype: float32 or float64.
      missing: what the kernels lack for a call of any split vocabulary, or None.
    """
    if split is None:
        return None
    if missing is not None:
        return missing
    size = jax.lax.axis_size(split.axis_name)
    if jnp.dtype(noise_dtype) != jnp.float32:
        return "draw with float32 noise alone"
    if width % SAMPLING_BLOCK or width * size > _MAX_TOKENS:
        return (
            f"read a vocabulary that lies there in multiples of {SAMPLING_BLOCK} tokens, "
            f"{_MAX_TOKENS} at most in all; this one lies on {size} in parts of {width}"
        )
    return None


def parse_split(
    axis_name: Any,
    vocab_size: Any,
    logits: Any,
    implementation: str | None = None,
    draft: Draft | RaggedDraft | None = None,
    rule: Any = None,
) -> VocabularySplit | None:
    """Returns the split of rows of logits, None for whole rows.

    Args:
      axis_name: the mesh axis of a device's part of rows inside `shard_map`. None asks the sharding
        of the logits.
      vocab_size: V, or None for all that the axis holds.
      logits: [..., width], this device's part of each row; without `axis_name` whole arrays.
      implementation: the name of the implementation; None where there is no choice.
      draft: of a verification, or None.
      rule: of a verification, or None.

    Returns:
      `VocabularySplit` or None. Rows whose sharding splits them are whole for a call that cannot
      read parts, unless it names `vocab_size`. Rows over an axis of one device are whole without
      `vocab_size`.

    Raises:
      ValueError: for an axis that there is not, a size that does not fit, or kernels by name.
    """
    if axis_name is None:
        mesh, axis_name, requests = _axes_of(logits, vocab_size is not None)
        if axis_name is None:
            _check_no_size(vocab_size)
            _check_draft_is_whole(logits, draft)
            return None
        size = mesh.shape[axis_name]
    else:
        # An axis of vmap has a size, too, and is none of a mesh.
        if not isinstance(axis_name, str) or axis_name not in _manual_axes():
            raise ValueError(
                f"axis_name is {axis_name!r}; it needs the name of one mesh axis, inside shard_map."
            )
        mesh, requests, size = None, None, jax.lax.axis_size(axis_name)
    most = logits.shape[-1] * (size if mesh is None else 1)
    reason = _why_whole(axis_name, most // size, logits, draft, rule)
    if reason is not None:
        if mesh is not None and vocab_size is None:
            return None
        raise ValueError(reason)
    if implementation in ("triton", "interpret"):
        raise ValueError(
            f"implementation={implementation!r} names the kernels, which read whole rows; over "
            f"devices of axis {axis_name!r} it needs None or 'xla'."
        )
    true = most if vocab_size is None else vocab_size
    if not isinstance(true, int) or isinstance(true, bool) or not 1 <= true <= most:
        raise ValueError(
            f"vocab_size is {vocab_size!r}; it needs a Python int from 1 to {most}, the tokens of "
            f"{size} devices with {most // size} each."
        )
    return VocabularySplit(axis_name, true, mesh, requests)


def _manual_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().manual_axes


def _axes_of(logits: Any, has_size: bool) -> tuple[Any, str | None, Any]:
    """Returns the mesh, the axis of the vocabulary and those of the requests of a sharded array.

    All three are None if the vocabulary is whole or split over several axes. The type of a traced
    array names only Explicit axes. With `has_size`, an axis of one device counts as a split.
    """
    nowhere = None, None, None
    is_traced = isinstance(logits, jax.core.Tracer)
    sharding: Any = jax.typeof(logits) if is_traced else logits
    sharding = getattr(sharding, "sharding", None)
    if not isinstance(sharding, NamedSharding) or _manual_axes():
        return nowhere
    mesh = sharding.mesh
    spec = [*sharding.spec, *[None] * (logits.ndim - len(sharding.spec))]
    by_axis = [axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    names = [name for name in by_axis[-1] if name is not None]
    split_over = [name for name in names if mesh.shape[name] > 1]
    if has_size and not split_over:
        split_over = (names or _unnamed_axes(mesh, sum(by_axis, ())))[:1]
    if len(split_over) != 1:
        return nowhere
    return mesh, split_over[0], spec[0] if logits.ndim > 1 else None


def _unnamed_axes(mesh: Mesh | AbstractMesh, names: tuple[str | None, ...]) -> list[str]:
    """Returns the Auto axes of one device that a sharding does not name.

    XLA drops their names from what `jit` returns, so that V may lie over each of them. None for
    the mesh of a traced array, which tells its Explicit axes alone.
    """
    if not isinstance(mesh, Mesh):
        return []
    types = zip(mesh.axis_names, mesh.axis_types, strict=True)
    auto_axes = [name for name, kind in types if kind == AxisType.Auto]
    return [name for name in auto_axes if mesh.shape[name] == 1 and name not in names]


def _check_no_size(vocab_size: Any) -> None:
    if vocab_size is not None:
        raise ValueError(
            f"vocab_size is {vocab_size!r} without axis_name, and no sharding says that the "
            "vocabulary lies over one mesh axis (inside jit Explicit axes alone are seen). Cut "
            "whole rows: logits[..., :vocab_size]."
        )


def _check_draft_is_whole(logits: Any, draft: Draft | RaggedDraft | None) -> None:
    """Refuses a draft that is split over Explicit axes where the target lies on no mesh."""
    if draft is None or draft.logits is None or not jax.typeof(logits).sharding.mesh.empty:
        return
    sharding = jax.typeof(draft.logits).sharding
    if AxisType.Explicit in sharding.mesh.axis_types and sharding.spec[-1] is not None:
        raise ValueError(
            f"draft.logits lie over mesh axis {sharding.spec[-1]!r}, and target_logits over none; "
            "both need to lie on the mesh, or to be whole."
        )


def _why_whole(
    axis_name: str, width: int, logits: Any, draft: Draft | RaggedDraft | None, rule: Any
) -> str | None:
    """Returns the reason for whole rows: narrow parts, a rule, drafts of other tokens; or None."""
    if width < _MIN_WIDTH:
        return (
            f"logits have {width} tokens on each device of axis {axis_name!r}; a split vocabulary "
            f"needs at least {_MIN_WIDTH} there. Pass whole rows without axis_name."
        )
    if draft is None:
        return None
    if rule is not None:
        return f"rule is given over axis {axis_name!r}; rules read whole rows of logits."
    if draft.token_map is not None:
        return (
            f"draft.token_map is given over axis {axis_name!r}; a split vocabulary needs "
            "draft.logits at the target's ids: scatter them to V, -inf elsewhere."
        )
    if draft.logits is not None and draft.logits.shape[-1] != logits.shape[-1]:
        return (
            f"draft.logits has {draft.logits.shape[-1]} tokens and target_logits "
            f"{logits.shape[-1]}; over axis {axis_name!r} they need the same tokens there: pad "
            "them with -inf."
        )
    return None
