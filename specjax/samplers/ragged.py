"""Ragged batches: drafted rows of all requests end to end, cut by cumulative counts."""

import jax
import jax.numpy as jnp

from specjax.samplers.request import PerRequest, Request
from specjax.typing import Draft

__all__ = ["ragged_requests"]


def ragged_requests(
    draft: Draft, options: PerRequest, cu_num_draft_tokens: jax.Array, max_draft_tokens: int
) -> Request:
    """Requests of a ragged draft: token arrays become [B, K], logits stay where they lie.

    Request r owns drafted rows `cu[r]:cu[r + 1]` and target rows
    `cu[r] + r : cu[r + 1] + r + 1`, the last its bonus row.

    Args:
      draft: token arrays [N]; `temperature` and `num_tokens` [B].
      options: the batch's.
      cu_num_draft_tokens: i32[B + 1], from 0, non-decreasing.
      max_draft_tokens: K, at least 1.

    Returns:
      `Request` with a leading axis B.
    """
    starts = cu_num_draft_tokens[:-1]
    counts = jnp.maximum(cu_num_draft_tokens[1:] - starts, 0)
    place = starts[:, None] + jnp.arange(max_draft_tokens, dtype=jnp.int32)[None]

    def pad(values: jax.Array | None) -> jax.Array | None:
        return None if values is None else jnp.take(values, place, mode="clip")

    num_tokens = counts if draft.num_tokens is None else jnp.minimum(draft.num_tokens, counts)
    padded = Draft(
        token_ids=jnp.take(draft.token_ids, place, mode="clip"),
        temperature=draft.temperature,
        logprobs=pad(draft.logprobs),
        logsumexp=pad(draft.logsumexp),
        cutoff=pad(draft.cutoff),
        num_tokens=num_tokens,
    )
    requests = Request.of_padded(padded, options, num_target_rows=1)
    return requests._replace(
        target_row=starts + jnp.arange(starts.shape[0], dtype=jnp.int32),
        draft_rows=place if draft.rows is None else jnp.take(draft.rows, place, mode="clip"),
    )
