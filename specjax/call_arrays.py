"""The arrays of a call, from the public function to the reference or kernels, by kind of call."""

from typing import Any, NamedTuple

import jax

from specjax.types import Draft, RaggedDraft


class SampleArrays(NamedTuple):
    """Arrays of `gumbel_sample`, or in a kernel the references to them.

    A public call passes typed keys and per-row values, each [B] or (). `sample_batch` makes them
    [B], and the keys words.

    Attributes:
      logits: [B, V].
      keys: u32[B, 2].
      positions: i32[B].
      stream: i32[B].
      temperature: f32[B].
      cutoff: f32[B], or None.
      first_token: as in `FlatBatch`.
    """

    logits: Any
    keys: Any
    positions: Any
    stream: Any
    temperature: Any
    cutoff: Any
    first_token: Any = None


class VerifyInputs(NamedTuple):
    """Inputs of a verification: requests, or a shard of them.

    A public call passes typed keys and per-request values, each [B] or (). `once_per_request`
    makes them [B], and the keys words. Rows and drafted tokens are [B, K, ...] with a `Draft`, and
    laid end to end with a `RaggedDraft`.

    Attributes:
      draft: its `token_ids` are None without drafts, K = 0.
      target_logits: [B, K + 1, V], or ragged [N + B, V].
      target_cutoff: f32 of the rows of `target_logits`, or None.
      keys: u32[B, 2].
      positions: i32[B].
      temperature: f32[B].
      conditional_rates: f32[B, K], or None.
      bonus_token_ids: i32[B], or None.
      draft_ids: i32[V], which `once_per_request` makes of `draft.token_map`: the draft id of every
        token of the target, V_d where the draft has none. None where the ids are the same.
    """

    draft: Draft | RaggedDraft
    target_logits: Any
    target_cutoff: Any
    keys: Any
    positions: Any
    temperature: Any
    conditional_rates: Any = None
    bonus_token_ids: Any = None
    draft_ids: Any = None


class FlatBatch(NamedTuple):
    """Arrays of the kernels of verification, or in a kernel the references to them.

    The rows of all requests are laid end to end, and so are their drafted tokens. Without
    cumulative counts request b has K tokens from b * K on, and K + 1 target rows from b * (K + 1)
    on. Without drafts, K = 0, the arrays of drafts are None.

    Attributes:
      target_logits: [R, V]; R is N + B.
      target_cutoff: f32[R], or None.
      draft_logits: [S, V_d]; None where every draft is one-hot.
      token_ids: i32[N].
      draft_logprobs: f32[N], or None.
      draft_logsumexp: f32[N], or None.
      draft_cutoff: f32[N], or None.
      draft_temperature: f32[B]; None for the request's own.
      num_tokens: i32[B], drafted tokens of each request, or None.
      draft_rows: i32[B], request b's K rows of `draft_logits` begin at `draft_rows[b] * K`. With
        cumulative counts i32[N], the row of each token. None for the order of the tokens.
      cu_num_draft_tokens: i32[B + 1], or None where every request has room for K tokens.
      keys: u32[B, 2].
      positions: i32[B].
      temperature: f32[B].
      conditional_rates: f32[B, K], or None.
      bonus_token_ids: i32[B], or None.
      draft_ids: i32[V], as in `VerifyInputs`, or None.
      first_token: i32[1], of a split vocabulary: the id of the first token that this device has.
        Where the vocabulary is padded i32[2], with the number of its tokens. None stands for whole
        rows.
      shared: `SharedRows` of `pallas.split.shared_rows`, the statistics that devices exchange; or
        None.
    """

    target_logits: Any
    target_cutoff: Any
    draft_logits: Any
    token_ids: Any
    draft_logprobs: Any
    draft_logsumexp: Any
    draft_cutoff: Any
    draft_temperature: Any
    num_tokens: Any
    draft_rows: Any
    cu_num_draft_tokens: Any
    keys: Any
    positions: Any
    temperature: Any
    conditional_rates: Any
    bonus_token_ids: Any
    draft_ids: Any
    first_token: Any = None
    shared: Any = None

    @classmethod
    def from_inputs(cls, inputs: VerifyInputs) -> "FlatBatch":
        """Returns the flat batch of what `once_per_request` returns."""
        draft = inputs.draft
        return cls(
            target_logits=flatten(inputs.target_logits, 1),
            target_cutoff=flatten(inputs.target_cutoff),
            draft_logits=flatten(draft.logits, 1),
            token_ids=flatten(draft.token_ids),
            draft_logprobs=flatten(draft.logprobs),
            draft_logsumexp=flatten(draft.logsumexp),
            draft_cutoff=flatten(draft.cutoff),
            draft_temperature=draft.temperature,
            num_tokens=draft.num_tokens,
            draft_rows=draft.rows,
            cu_num_draft_tokens=cumulative_counts(draft),
            keys=inputs.keys,
            positions=inputs.positions,
            temperature=inputs.temperature,
            conditional_rates=inputs.conditional_rates,
            bonus_token_ids=inputs.bonus_token_ids,
            draft_ids=inputs.draft_ids,
        )


def flatten(values: Any, num_axes: int = 0) -> Any:
    """Returns an array with all axes but the last `num_axes` made one; None for None."""
    return None if values is None else values.reshape(-1, *values.shape[values.ndim - num_axes :])


def cumulative_counts(draft: Draft | RaggedDraft) -> jax.Array | None:
    """Returns the cumulative counts i32[B + 1] of a ragged draft, None of a padded one."""
    return draft.cu_num_draft_tokens if isinstance(draft, RaggedDraft) else None


class TreeArrays(NamedTuple):
    """Arrays of `tree_rejection_sample`.

    A public call passes typed keys and per-request values, each [B] or (). Its jitted body makes
    them [B], and the keys words.

    Attributes:
      token_ids: i32[B, N].
      parents: i32[B, N].
      target_logits: [B, N + 1, V].
      target_cutoff: f32[B, N + 1], or None.
      draft_logits: [B, N + 1, V_d]; None where every node is one-hot.
      draft_cutoff: f32[B, N + 1], or None.
      draft_temperature: f32[B]; None for the request's own.
      keys: u32[B, 2].
      positions: i32[B].
      temperature: f32[B].
    """

    token_ids: Any
    parents: Any
    target_logits: Any
    target_cutoff: Any
    draft_logits: Any
    draft_cutoff: Any
    draft_temperature: Any
    keys: Any
    positions: Any
    temperature: Any
