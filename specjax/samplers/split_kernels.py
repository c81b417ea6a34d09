"""Which calls over devices the kernels serve: they read parts of rows of some widths alone."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.rule import BLOCK, COUPLED
from specjax.devices.vocabulary_split import VocabularySplit

__all__ = ["may_run_kernels", "missing_of_verification"]

# Ids travel between devices as float32, which is exact up to here.
_MOST_TOKENS = 2**24


def may_run_kernels(options: CallOptions, width: int, missing: str | None = None) -> bool:
    """Returns whether a call may run on the kernels; a name that they cannot follow is refused.

    Args:
      options: of the call.
      width: the tokens of a row that a device holds.
      missing: what the kernels lack for this call where a vocabulary is split, or None.

    Raises:
      ValueError: for kernels by name that do not read the call's split vocabulary.
    """
    name = options.implementation.name
    if name == "xla" or options.split is None:
        return name != "xla"
    reason = missing or _why_not_read(options.split, width, options.noise_dtype)
    if reason is not None and name != "auto":
        raise ValueError(
            f"implementation={name!r} names the kernels, which over devices of axis "
            f"{options.axis_name!r} {reason}; use None or 'xla'."
        )
    return reason is None


def _why_not_read(split: VocabularySplit, width: int, noise_dtype: Any) -> str | None:
    """Says what the kernels do not read of a split row; None where they read it."""
    size = jax.lax.axis_size(split.axis_name)
    if jnp.dtype(noise_dtype) != jnp.float32:
        return "draw with float32 noise alone"
    if width % SAMPLING_BLOCK or width * size > _MOST_TOKENS:
        return (
            f"read a vocabulary that lies there in multiples of {SAMPLING_BLOCK} tokens, "
            f"{_MOST_TOKENS} at most in all; this one lies on {size} in parts of {width}"
        )
    return None


def missing_of_verification(arrays: VerifyArrays, options: CallOptions) -> str | None:
    """Says what the kernels lack to verify a split vocabulary; None where they lack nothing."""
    if options.max_draft_tokens == 0:
        return None
    if options.rule == BLOCK and arrays.draft_logits is not None:
        return "do not verify blocks"
    if options.rule == COUPLED:
        return None if arrays.bonus_token_ids is None else "take no bonus_token_ids"
    has_statistics = arrays.draft_logprobs is not None and arrays.draft_logsumexp is not None
    if arrays.draft_logits is not None and not has_statistics:
        return "need draft.logprobs and draft.logsumexp with draft.logits"
    return None
