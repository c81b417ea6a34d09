"""Masks that a host gives for the rows of one step: an `allowed` [B, K + 1, ...] of the parameters.

The masks are the target's. A draft is drawn before the host can know which tokens its rows allow.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.processing.sampling_params import SamplingParams, parse_sampling


def has_row_masks(sampling: SamplingParams | None) -> bool:
    """Returns whether the mask has an axis of rows, and so is of one step alone."""
    return sampling is not None and sampling.allowed is not None and sampling.allowed.ndim == 3


def draft_sampling(sampling: SamplingParams | None) -> SamplingParams | None:
    """Returns the parameters that a drafter is given: those without masks of the target's rows."""
    if sampling is None or not has_row_masks(sampling):
        return sampling
    unmasked = sampling._replace(allowed=None)
    return None if all(field is None for field in unmasked) else unmasked


def split_first_mask(sampling: Any) -> tuple[Any, Any]:
    """Returns the parameters without a mask of the first token alone, and that mask or None.

    Args:
      sampling: of `init`, unchecked. A mask of three axes is of the first token.
    """
    if not isinstance(sampling, SamplingParams) or np.ndim(sampling.allowed) != 3:
        return sampling, None
    return sampling._replace(allowed=None), sampling.allowed


def with_first_mask(
    sampling: SamplingParams | None, allowed: Any, size: int, num_rows: int
) -> SamplingParams:
    """Returns the parameters with a mask of the first generated token, of `init`.

    Args:
      sampling: of the requests, checked.
      allowed: bool [B, 1, V] or words [B, 1, ceil(V / 32)], unchecked.
      size: B.
      num_rows: K + 1. The first step computes so many rows, and emits the token of the first.

    Raises:
      ValueError: for another shape or dtype.
    """
    mask = parse_sampling(SamplingParams(allowed=allowed), size, 1, prefix="sampling.").allowed
    return _with_masks(sampling, jnp.repeat(jnp.asarray(mask), num_rows, axis=1))


def with_row_masks(
    sampling: SamplingParams | None, allowed: Any, size: int, num_rows: int
) -> SamplingParams | None:
    """Returns the parameters with masks of the rows of this step, of `step`.

    Args:
      sampling: of the requests, checked.
      allowed: bool [B, K + 1, V] or words [B, K + 1, ceil(V / 32)], unchecked; or None.
      size: B.
      num_rows: K + 1.

    Raises:
      ValueError: for another shape or dtype. Also for masks that some steps of a text have, and
        others do not.
    """
    if (allowed is None) == has_row_masks(sampling):
        raise ValueError(
            f"allowed is {'None' if allowed is None else 'given'}, and the state was begun "
            f"{'with' if allowed is None else 'without'} masks; a text that init began with "
            "a mask of its first token needs allowed in every step, and no other takes it."
        )
    if allowed is None:
        return sampling
    masks = parse_sampling(SamplingParams(allowed=allowed), size, num_rows).allowed
    if masks.ndim != 3:
        raise ValueError(
            f"allowed has shape {masks.shape}; a step needs a mask of each of its rows, "
            f"[{size}, {num_rows}, V] or [{size}, {num_rows}, ceil(V / 32)]."
        )
    return _with_masks(sampling, masks)


def _with_masks(sampling: SamplingParams | None, masks: Any) -> SamplingParams:
    return (SamplingParams() if sampling is None else sampling)._replace(allowed=masks)
