"""`group_lookup_drafter`: drafts what follows a request's last tokens in its group's texts."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.decode.drafters import Drafter, ngram_drafter
from specjax.decode.propose import DraftInputs
from specjax.types import Draft


def group_lookup_drafter(groups: Any, *, max_ngram: int = 3, min_ngram: int = 1) -> Drafter:
    """Returns a drafter by lookup in the prompts and outputs of all requests of a group.

    The last n tokens of a request are searched in its own text and the texts of its group, n from
    `max_ngram` down to `min_ngram`. The occurrence with the most tokens after it wins, counted up
    to K. Among equals one in the request's own text wins, then the latest. Drafts are one-hot.

    A draft depends on the texts of other requests. So a request's tokens do, too, but their
    distribution does not. Greedy requests, and all requests of the method "coupled", keep their
    tokens.

    Args:
      groups: i32[B], the number of each request's group. It is data: a change compiles nothing.
      max_ngram: longest suffix searched, a Python int >= min_ngram.
      min_ngram: shortest suffix searched, a Python int >= 1.

    Returns:
      `Drafter` whose parameters are the groups.

    Raises:
      ValueError: if the range of n is empty or begins below 1.

    Example:
      >>> drafter = group_lookup_drafter([0, 0, 1])
      >>> texts = jnp.array([[5, 6, 7, 8], [1, 5, 6, -1], [1, 5, 6, -1]])
      >>> inputs = specjax.DraftInputs(
      ...     jax.random.key(0), jnp.array([4, 3, 3]), num_tokens=jnp.array([2, 2, 2]))
      >>> draft, _ = drafter.propose(
      ...     drafter.params, (), texts, None, inputs,
      ...     config=specjax.SpeculativeConfig(num_speculative_tokens=2))
      >>> draft.token_ids.tolist(), draft.num_tokens.tolist()
      ([[-1, -1], [7, 8], [-1, -1]], [0, 2, 0])
    """
    drafter = ngram_drafter(max_ngram, min_ngram)  # It refuses a range, and has no state either.
    groups = jnp.asarray(groups, jnp.int32)
    return dataclasses.replace(drafter, params=groups, propose=_propose(max_ngram, min_ngram))


@functools.lru_cache(maxsize=64)
def _propose(max_ngram: int, min_ngram: int) -> Any:
    """Returns `Drafter.propose`; equal ones for equal ranges, to share programs."""

    def propose(
        groups: jax.Array,
        state: Any,
        token_ids: jax.Array,
        hidden: Any,
        inputs: DraftInputs,
        *,
        config: SpeculativeConfig,
        **options: Any,
    ) -> tuple[Draft, Any]:
        positions, num_tokens = inputs.positions, inputs.num_tokens
        assert num_tokens is not None
        k = config.num_speculative_tokens

        def look_up(request: jax.Array) -> tuple[jax.Array, jax.Array]:
            is_searched = groups == groups[request]
            return _look_up(token_ids, positions, request, is_searched, k, max_ngram, min_ngram)

        ids, count = jax.vmap(look_up)(jnp.arange(groups.shape[0], dtype=jnp.int32))
        return Draft(ids, num_tokens=jnp.minimum(num_tokens, count)), state

    return propose


def _look_up(
    token_ids: jax.Array,
    lengths: jax.Array,
    request: jax.Array,
    is_searched: jax.Array,
    k: int,
    max_ngram: int,
    min_ngram: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens i32[k] after a match of the last tokens, and the number of drafts."""
    size, width = token_ids.shape
    index = jnp.arange(width, dtype=jnp.int32)[None]
    is_request = jnp.arange(size, dtype=jnp.int32)[:, None] == request
    text, length = token_ids[request], lengths[request]
    start, count = jnp.int32(0), jnp.int32(0)
    for n in range(min_ngram, max_ngram + 1):
        matches = is_searched[:, None] & (index < lengths[:, None] - n) & (length >= n)
        for t in range(n):
            suffix_token = text[jnp.maximum(length - n + t, 0)]
            matches &= jnp.take(token_ids, index[0] + t, axis=1, mode="clip") == suffix_token
        num_after = jnp.minimum(lengths[:, None] - index - n, k)
        score = (num_after * 2 + is_request.astype(jnp.int32)) * width + index
        score = jnp.where(matches, score, -1).reshape(-1)
        best = jnp.argmax(score).astype(jnp.int32)
        is_found = score[best] >= 0
        start = jnp.where(is_found, best + n, start)
        count = jnp.where(is_found, num_after.reshape(-1)[best], count)
    offsets = jnp.arange(k, dtype=jnp.int32)
    ids = jnp.take(token_ids.reshape(-1), start + offsets, mode="clip")
    return jnp.where(offsets < count, ids, -1), count
