"""Drafts for a loop of your own: cached ones in the order of another batch, and known ones."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import as_array, check_shape, parse_array
from specjax.core.acceptance import num_valid_drafts
from specjax.devices.map_parts import map_parts
from specjax.types import Draft


def gather_drafts(
    cache: Draft, cached_request_ids: jax.Array, request_ids: jax.Array, num_tokens: jax.Array
) -> Draft:
    """Returns cached drafts in the order of a batch that was reordered, grown or shrunk.

    No logits move: `Draft.rows` points at them. A request that is not in the cache has no drafts.
    A draft serves one verification, so the caller drops it from the cache afterwards.

    Args:
      cache: `Draft` with token arrays [S, K].
      cached_request_ids: i32[S], the request of each slot; negative for an empty slot.
      request_ids: i32[B].
      num_tokens: i32[B], most drafted tokens of each request: 0 for none, -1 for an inactive
        request.

    Returns:
      `Draft` with token arrays [B, K], and the logits and the map of the cache.

    Raises:
      ValueError: if the shapes do not fit together.

    Example:
      >>> cache = specjax.Draft(jnp.array([[5, 6], [7, 8], [9, 4]]))
      >>> draft = specjax.gather_drafts(
      ...     cache, jnp.array([10, 11, 12]), jnp.array([12, 10]), jnp.array([1, 2]))
      >>> draft.token_ids.tolist(), draft.num_tokens.tolist()
      ([[9, 4], [5, 6]], [1, 2])
    """
    slots = cache.token_ids.shape[0]
    cached_request_ids = jnp.asarray(as_array("cached_request_ids", cached_request_ids))
    request_ids = jnp.asarray(as_array("request_ids", request_ids))
    if request_ids.ndim != 1:
        raise ValueError(f"request_ids has shape {request_ids.shape}; it needs [B].")
    num_tokens = jnp.asarray(parse_array("num_tokens", num_tokens, jnp.int32, request_ids.shape))
    check_shape("cached_request_ids", cached_request_ids, (slots,))
    # What is not per request does not move.
    without_logits = cache.replace(logits=None, token_map=None)

    def align(arrays: Any) -> Draft:
        request_ids, num_tokens, cache, cached_request_ids = arrays
        matches = request_ids[:, None] == cached_request_ids[None]
        matches &= (cached_request_ids >= 0)[None]
        slot = jnp.argmax(matches, axis=1).astype(jnp.int32)
        num_cached = num_valid_drafts(cache.token_ids, cache.num_tokens)[slot]
        num_drafted = jnp.clip(num_tokens, 0, jnp.maximum(num_cached, 0))
        num_drafted = jnp.where(jnp.any(matches, axis=1), num_drafted, 0)
        aligned: Draft = jax.tree.map(lambda values: values[slot], cache)
        rows = slot if aligned.rows is None else aligned.rows
        return aligned.replace(num_tokens=jnp.where(num_tokens < 0, -1, num_drafted), rows=rows)

    align_parts = map_parts(align, request_ids, whole=(False, False, True, True))
    draft: Draft = align_parts((request_ids, num_tokens, without_logits, cached_request_ids))
    if cache.logits is None:
        return draft.replace(rows=None)
    return draft.replace(logits=cache.logits, token_map=cache.token_map)


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
