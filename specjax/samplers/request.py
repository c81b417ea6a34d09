"""What verification reads of one request: its rows of logits, its drafted tokens.

Ragged batches hold the drafted rows of all requests end to end, cut by cumulative counts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.acceptance import is_one_hot, num_valid_drafts
from specjax.core.gumbel_max import gather_logits, token_logprobs
from specjax.core.logsumexp import (
    LogNormalizer,
    block_partials,
    normalizer_from_statistics,
    row_logsumexp,
    row_statistics_once,
)
from specjax.core.noise import Words
from specjax.core.temperature import parse_temperature
from specjax.typing import Draft

__all__ = [
    "DraftedToken",
    "PerRequest",
    "Request",
    "Rows",
    "draft_row",
    "drafted_token",
    "ragged_requests",
    "take_row",
]


class Rows(NamedTuple):
    """Flat rows of logits: `logits` [R, V] and `cutoff` f32[R], None keeping all."""

    logits: jax.Array
    cutoff: jax.Array | None = None


class PerRequest(NamedTuple):
    """A call's options, each with a leading axis [B]; `key` u32[B, 2], `rates` [B, K]."""

    key: jax.Array
    position: jax.Array
    temperature: jax.Array
    rates: jax.Array | None
    bonus_token_id: jax.Array | None


class Request(NamedTuple):
    """What verification reads of one request; of a batch, with a leading axis [B].

    Attributes:
      key: two u32 words.
      position: i32, absolute position of the first token to decide.
      temperature: f32, the target's.
      target_row: i32, the request's first row of target logits.
      draft_rows: i32[K], each drafted token's row of draft logits.
      token_ids: i32[K]; K >= 1.
      num_tokens: i32, drafted tokens in [-1, K], none of them -1.
      draft_temperature: f32.
      draft_logprobs: f32[K], computed when None; `draft_logsumexp` likewise.
      draft_cutoff: f32[K], None keeping every logit.
      rates: f32[K], conditional acceptance rates of a synthetic call, or None.
      bonus_token_id: i32, or None.
    """

    key: Words
    position: jax.Array
    temperature: jax.Array
    target_row: jax.Array
    draft_rows: jax.Array
    token_ids: jax.Array
    num_tokens: jax.Array
    draft_temperature: jax.Array
    draft_logprobs: jax.Array | None
    draft_logsumexp: jax.Array | None
    draft_cutoff: jax.Array | None
    rates: jax.Array | None
    bonus_token_id: jax.Array | None

    @classmethod
    def of_padded(cls, draft: Draft, options: PerRequest, num_target_rows: int) -> "Request":
        """Requests whose token arrays are [B, K], K >= 1, and which lie row behind row.

        Args:
          draft: token arrays [B, K]; of its logits only the places are computed.
          options: the call's.
          num_target_rows: rows of target logits per request.
        """
        size, k = draft.token_ids.shape
        token_ids = draft.token_ids.astype(jnp.int32)
        first = jnp.arange(size, dtype=jnp.int32)
        row = first if draft.rows is None else draft.rows
        return cls(
            key=(options.key[:, 0], options.key[:, 1]),
            position=options.position,
            temperature=options.temperature,
            rates=options.rates,
            bonus_token_id=options.bonus_token_id,
            target_row=first * num_target_rows,
            draft_rows=row[:, None] * k + jnp.arange(k, dtype=jnp.int32)[None],
            token_ids=token_ids,
            num_tokens=num_valid_drafts(token_ids, draft.num_tokens),
            draft_temperature=options.temperature
            if draft.temperature is None
            else draft.temperature,
            draft_logprobs=draft.logprobs,
            draft_logsumexp=draft.logsumexp,
            draft_cutoff=draft.cutoff,
        )


class DraftedToken(NamedTuple):
    """A drafted token and the distribution it came from.

    Attributes:
      token_id: i32.
      logprob: f32, log q of the token, 0 where `one_hot`.
      normalizer: of its row, which gives log q of any token.
      one_hot: bool.
    """

    token_id: jax.Array
    logprob: jax.Array
    normalizer: LogNormalizer
    one_hot: jax.Array


def take_row(rows: Rows, index: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Row `index`, [V], and its cutoff."""
    row = jax.lax.dynamic_index_in_dim(rows.logits, index, 0, keepdims=False)
    return row, None if rows.cutoff is None else rows.cutoff[index]


def draft_row(
    request: Request, draft_logits: jax.Array, i: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The row of draft logits that token i was drawn from, [V_d], and its cutoff."""
    row, _ = take_row(Rows(draft_logits), request.draft_rows[i])
    return row, None if request.draft_cutoff is None else request.draft_cutoff[i]


def drafted_token(request: Request, draft_logits: jax.Array | None, i: jax.Array) -> DraftedToken:
    """Drafted token i with the statistics it carries, or else those of its row.

    It is one-hot where there are no logits, where it was chosen rather than drawn, and
    where its statistics are not those of a distribution.
    """
    token_id = request.token_ids[i]
    zero = jnp.float32(0)
    if draft_logits is None:
        return DraftedToken(token_id, zero, LogNormalizer(zero, zero), jnp.bool_(True))
    logits, cutoff = draft_row(request, draft_logits, i)
    scaling = parse_temperature(request.draft_temperature)
    logit = gather_logits(logits, token_id, cutoff)
    if request.draft_logsumexp is not None and request.draft_logprobs is not None:
        logsumexp, logprob = request.draft_logsumexp[i], request.draft_logprobs[i]
    else:
        row = row_statistics_once(block_partials(logits, scaling.scale, cutoff), scaling.scale)
        logsumexp = jnp.where(row.valid, row_logsumexp(row.normalizer, scaling.scale), jnp.nan)
        # The target's own formula, so that equal rows give equal log-probabilities.
        logprob = token_logprobs(logit, row.normalizer, scaling.scale)
    one_hot = is_one_hot(scaling, logprob, logsumexp)
    normalizer = normalizer_from_statistics(logit, logprob, logsumexp)
    return DraftedToken(token_id, jnp.where(one_hot, zero, logprob), normalizer, one_hot)


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
