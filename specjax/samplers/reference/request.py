"""The reference: one request of a batch, its rows of logits and its drafted tokens.

A ragged batch holds the drafted tokens of all requests end to end. Cumulative counts say which are
whose.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.call_arrays import VerifyInputs, cumulative_counts
from specjax.core.acceptance import is_one_hot, num_valid_drafts
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import (
    LogNormalizer,
    mask_below_cutoff,
    normalizer_from_statistics,
    row_logsumexp,
)
from specjax.core.noise import Words, address
from specjax.core.temperature import Temperature, parse_temperature
from specjax.core.token_map import take_mapped
from specjax.devices.rows import LogitRows
from specjax.types import Draft, RaggedDraft


class DraftRows(NamedTuple):
    """Flat rows of draft logits.

    Attributes:
      rows: [M, V_d], without cutoffs, which a `Request` has.
      draft_ids: i32[V], the draft id of every token of the target, V_d where the draft has none;
        None where the ids are the same.
    """

    rows: LogitRows
    draft_ids: jax.Array | None = None


class DraftRow(NamedTuple):
    """One row of `DraftRows`, [V_d] with its cutoff, read at the target's ids."""

    row: LogitRows
    draft_ids: jax.Array | None

    def kept_logits(self, token_id: jax.Array) -> jax.Array:
        """Returns kept logits f32 at token ids of any shape; -inf where the draft has none."""
        if self.draft_ids is not None:
            token_id = take_mapped(self.draft_ids, token_id, self.row.vocab_size)
        return self.row.take(token_id)

    def kept_row(self, size: int) -> jax.Array:
        """Returns kept logits f32 of tokens 0, 1, ... of the target, of `size` at most."""
        if self.draft_ids is not None:
            return self.row.take(self.draft_ids)
        return mask_below_cutoff(self.row.logits[:size], self.row.cutoff)


class Request(NamedTuple):
    """One request; with a leading axis [B], those of a batch.

    Attributes:
      key: two u32 words.
      position: i32, absolute position of the first token to decide.
      temperature: f32, the target's.
      target_row: i32, the request's first row of target logits.
      draft_rows: i32[K], each drafted token's row of draft logits.
      token_ids: i32[K]; K >= 1.
      num_tokens: i32, drafted tokens in [-1, K], none of them -1.
      draft_temperature: f32.
      draft_logprobs: f32[K], computed when None.
      draft_logsumexp: f32[K], computed when None.
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
    def from_inputs(cls, inputs: VerifyInputs, max_draft_tokens: int) -> "Request":
        """Returns the requests of a batch; one without drafts has K = 1 and the token -1.

        Args:
          inputs: one key, position and temperature per request.
          max_draft_tokens: K, at least 0.
        """
        draft, size = inputs.draft, inputs.temperature.shape[0]
        first = jnp.arange(size, dtype=jnp.int32)
        target_row = first * (max_draft_tokens + 1)
        if max_draft_tokens == 0:
            cu, draft_rows = cumulative_counts(draft), jnp.full((size, 1), -1, jnp.int32)
            draft = draft.replace(token_ids=draft_rows)
            target_row = target_row if cu is None else target_row + cu[:-1]
        elif isinstance(draft, RaggedDraft):
            target_row = draft.cu_num_draft_tokens[:-1] + first
            draft, draft_rows = _pad_ragged(draft, max_draft_tokens)
        else:
            row = first if draft.rows is None else draft.rows
            draft_rows = (
                row[:, None] * max_draft_tokens
                + jnp.arange(max_draft_tokens, dtype=jnp.int32)[None]
            )
        temperature, token_ids = inputs.temperature, draft.token_ids.astype(jnp.int32)
        return cls(
            key=(inputs.keys[:, 0], inputs.keys[:, 1]),
            position=inputs.positions,
            temperature=temperature,
            target_row=target_row,
            draft_rows=draft_rows,
            token_ids=token_ids,
            num_tokens=num_valid_drafts(token_ids, draft.num_tokens),
            draft_temperature=temperature if draft.temperature is None else draft.temperature,
            draft_logprobs=draft.logprobs,
            draft_logsumexp=draft.logsumexp,
            draft_cutoff=draft.cutoff,
            rates=inputs.conditional_rates,
            bonus_token_id=inputs.bonus_token_ids,
        )


def _pad_ragged(draft: RaggedDraft, max_draft_tokens: int) -> tuple[Draft, jax.Array]:
    """Returns a padded draft without logits, [B, K], and each token's row of draft logits.

    Request r owns drafted rows `cu[r]:cu[r + 1]` and target rows `cu[r] + r : cu[r + 1] + r + 1`.
    The last of these is its bonus row.
    """
    starts = draft.cu_num_draft_tokens[:-1]
    counts = jnp.maximum(draft.cu_num_draft_tokens[1:] - starts, 0)
    index = starts[:, None] + jnp.arange(max_draft_tokens, dtype=jnp.int32)[None]

    def pad(values: Any) -> Any:
        return None if values is None else jnp.take(values, index, mode="clip")

    rows, num_tokens = pad(draft.rows), draft.num_tokens
    padded = Draft(
        pad(draft.token_ids),
        temperature=draft.temperature,
        logprobs=pad(draft.logprobs),
        logsumexp=pad(draft.logsumexp),
        cutoff=pad(draft.cutoff),
        num_tokens=counts if num_tokens is None else jnp.minimum(num_tokens, counts),
    )
    return padded, index if rows is None else rows


class DraftedToken(NamedTuple):
    """A drafted token and the distribution that it came from.

    Attributes:
      token_id: i32.
      logprob: f32, log q of the token; 0 where one-hot.
      normalizer: of the draft row.
      one_hot: bool, whether q is 1 at the token.
    """

    token_id: jax.Array
    logprob: jax.Array
    normalizer: LogNormalizer
    one_hot: jax.Array


def first_false(flags: jax.Array) -> jax.Array:
    """Returns the index i32[] of the first False of bool[N]; N if there is none."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32)), dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class RequestRows:
    """One request, and the rows of logits that it reads.

    Attributes:
      request: without a batch axis.
      target: rows of every request; those of this one begin at `request.target_row`.
      draft: rows of draft logits, or None where every draft is one-hot.
      noise_dtype: float32 or float64.
    """

    request: Request
    target: LogitRows
    draft: DraftRows | None
    noise_dtype: Any

    @property
    def temperature(self) -> Temperature:
        """Returns the target's temperature, parsed."""
        return parse_temperature(self.request.temperature)

    def target_row(self, i: jax.Array) -> LogitRows:
        """Returns target row i of the request."""
        return self.target.row(self.request.target_row + i)

    def draft_row(self, i: jax.Array) -> DraftRow:
        """Returns the row of draft logits that token i came from."""
        assert self.draft is not None
        row, cutoff = self.draft.rows.row(self.request.draft_rows[i]), self.request.draft_cutoff
        row = dataclasses.replace(row, cutoff=None if cutoff is None else cutoff[i])
        return DraftRow(row, self.draft.draft_ids)

    def address(self, i: jax.Array, stream: Any) -> Words:
        """Returns the address of a draw at the request's position i."""
        return address(self.request.key, self.request.position + i, stream)


def drafted_token(rows: RequestRows, i: jax.Array) -> DraftedToken:
    """Returns drafted token i with the statistics that it carries, or else with those of its row.

    The token is one-hot without draft logits, at a greedy temperature, and where its statistics
    are not those of a distribution.
    """
    request, zero = rows.request, jnp.float32(0)
    token_id = request.token_ids[i]
    if rows.draft is None:
        return DraftedToken(token_id, zero, LogNormalizer(zero, zero), jnp.bool_(True))
    drafted_row = rows.draft_row(i)
    temperature = parse_temperature(request.draft_temperature)
    logit = drafted_row.kept_logits(token_id)
    if request.draft_logsumexp is not None and request.draft_logprobs is not None:
        logsumexp, logprob = request.draft_logsumexp[i], request.draft_logprobs[i]
    else:
        _, row = drafted_row.row.statistics(temperature.scale)
        logsumexp = jnp.where(row.valid, row_logsumexp(row.normalizer, temperature.scale), jnp.nan)
        # The target's formula, so that equal rows give equal log-probabilities.
        logprob = token_logprobs(logit, row.normalizer, temperature.scale)
    one_hot = is_one_hot(temperature, logprob, logsumexp)
    normalizer = normalizer_from_statistics(logit, logprob, logsumexp)
    return DraftedToken(token_id, jnp.where(one_hot, zero, logprob), normalizer, one_hot)
