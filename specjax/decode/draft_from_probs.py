"""`draft_from_probs`: a draft whose probabilities are known rather than its logits."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import as_array, parse_array
from specjax.draft import Draft

__all__ = ["draft_from_probs"]


def draft_from_probs(token_ids: jax.Array, probs: jax.Array) -> Draft:
    """Returns a draft whose probabilities are known rather than its logits.

    Args:
      token_ids: i32[B, K], sampled from `probs`.
      probs: [B, K, V], bf16, f16 or f32, >= 0. A row need not sum to 1 exactly.

    Returns:
      `Draft` with logits log(probs), f32[B, K, V], and temperature 1.

    Raises:
      ValueError: if the shapes do not fit together.

    Example:
      >>> draft = specjax.draft_from_probs(jnp.array([[1]]), jnp.array([[[0.25, 0.75]]]))
      >>> draft.temperature
      Array([1.], dtype=float32)
    """
    token_ids = parse_array("token_ids", token_ids, jnp.int32, np.shape(token_ids))
    probs = jnp.asarray(as_array("probs", probs))
    if probs.ndim != 3 or probs.shape[:2] != token_ids.shape:
        raise ValueError(
            f"probs has shape {probs.shape} for token_ids {token_ids.shape}; it needs [B, K, V], "
            "one distribution per drafted token."
        )
    temperature = jnp.ones(token_ids.shape[:1], jnp.float32)
    return Draft(
        jnp.asarray(token_ids), logits=jnp.log(probs.astype(jnp.float32)), temperature=temperature
    )
