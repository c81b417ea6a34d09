"""A vocabulary that lies over a mesh axis: its true size, and the checks of calls that have one."""

import dataclasses
from typing import Any

import jax

from specjax.draft import Draft

__all__ = ["VocabularySplit", "parse_split"]

# A block of 128 tokens lies on two devices at most.
_LEAST_WIDTH = 128


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class VocabularySplit:
    """The mesh axis over which rows of logits lie; static, so a pytree without leaves.

    Device d of the axis has the tokens from `d * width` on, where `width` is the last axis of its
    rows.

    Attributes:
      axis_name: the mesh axis.
      vocab_size: V, without the padding at the end of the axis.
    """

    axis_name: str
    vocab_size: int


def parse_split(
    axis_name: Any,
    vocab_size: Any,
    logits: jax.Array,
    implementation: str | None = None,
    draft: Draft | None = None,
    rule: Any = None,
) -> VocabularySplit | None:
    """Returns the split of rows of logits inside `shard_map`, None for whole rows.

    Args:
      axis_name: the mesh axis, or None.
      vocab_size: V, or None for all that the axis holds.
      logits: [..., width], this device's part of each row.
      implementation: the name of the implementation; None where there is no choice.
      draft: of a verification, or None.
      rule: of a verification, or None.

    Returns:
      `VocabularySplit` or None.

    Raises:
      ValueError: for an axis that there is not, a size that does not fit, or kernels by name.
    """
    if axis_name is None:
        if vocab_size is not None:
            raise ValueError(
                f"vocab_size is {vocab_size!r} without axis_name; it is the size of a vocabulary "
                "that lies over a mesh axis. Cut whole rows: logits[..., :vocab_size]."
            )
        return None
    # An axis of vmap has a size, too, and is none of a mesh.
    if not isinstance(axis_name, str) or axis_name not in _manual_axes():
        raise ValueError(
            f"axis_name is {axis_name!r}; it needs the name of one mesh axis, inside shard_map."
        )
    size = jax.lax.axis_size(axis_name)
    width = logits.shape[-1]
    if width < _LEAST_WIDTH:
        raise ValueError(
            f"logits have {width} tokens on each device of axis {axis_name!r}; a split vocabulary "
            f"needs at least {_LEAST_WIDTH} there. Pass whole rows without axis_name."
        )
    if implementation in ("triton", "interpret"):
        raise ValueError(
            f"implementation={implementation!r} names the kernels, which read whole rows; with "
            "axis_name it needs None or 'xla'."
        )
    most = width * size
    true = most if vocab_size is None else vocab_size
    if not isinstance(true, int) or isinstance(true, bool) or not 1 <= true <= most:
        raise ValueError(
            f"vocab_size is {vocab_size!r}; it needs a Python int from 1 to {most}, the tokens of "
            f"{size} devices with {width} each."
        )
    if draft is not None:
        _check_draft(draft, width, rule)
    return VocabularySplit(axis_name, true)


def _manual_axes() -> tuple[str, ...]:
    return jax.sharding.get_abstract_mesh().manual_axes


def _check_draft(draft: Draft, width: int, rule: Any) -> None:
    """Refuses what a split vocabulary does not go with: other widths, a token map, a rule."""
    if rule is not None:
        raise ValueError("rule is given with axis_name; rules read whole rows of logits.")
    if draft.token_map is not None:
        raise ValueError(
            "draft.token_map is given with axis_name; it needs draft.logits at the target's ids: "
            "scatter them to V, -inf elsewhere."
        )
    if draft.logits is not None and draft.logits.shape[-1] != width:
        raise ValueError(
            f"draft.logits has {draft.logits.shape[-1]} tokens on each device and target_logits "
            f"{width}; with axis_name they need the same tokens there: pad them with -inf."
        )
