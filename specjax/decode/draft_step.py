"""Drafts for the next step: at most K tokens of each request.

    draft_next -> draft_budget: how many tokens each request may draft
               -> run_draft -> propose_draft: the drafter's own `propose`, and a check

`state.k_policy` is a `KPolicy`, which lets everything through if K is fixed:

    budget        caps how many tokens each request may draft
    run_if_any    runs the drafter only if a request may draft
    draft         lets the drafter read the committed tokens that it missed, then propose

A `history` is a `History`, the committed tokens. A `draft_history` is a `DraftHistory`, the counts
of past drafts by which `KPolicy` decides.

`step` calls `draft_next` and `discard_incompatible_draft`. `prefill` asks `propose_draft` for the
shapes of a draft. `cli.stream_programs` calls `draft_budget` and `run_draft` in programs of its
own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import check_draft
from specjax.config import SpeculativeConfig
from specjax.core.acceptance import num_valid_drafts
from specjax.decode.drafters import Drafter, reads_chunks
from specjax.decode.options import StepOptions
from specjax.decode.propose import DraftInputs
from specjax.decode.state import DecodeState, Settings, StepInfo
from specjax.decode.target_step import TargetRows, gather_row
from specjax.devices.placement import pvary_like
from specjax.processing.history import History
from specjax.processing.host_masks import draft_sampling
from specjax.types import Draft

# Missed tokens that a drafter reads at once; with the token before them, a chunk has 8 columns.
_CHUNK_SIZE = 7


def draft_next(
    drafter: Drafter | None,
    state: DecodeState,
    rows: TargetRows,
    info: StepInfo,
    options: StepOptions,
) -> DecodeState:
    """Returns the state with the draft that the next step verifies; the last call of a step.

    Args:
      drafter: a drafter or None.
      state: after the commit of the step.
      rows: of the step.
      info: of the step.
      options: as in `run_step`.
    """
    num_tokens = draft_budget(drafter, state, options.config)
    # The draft that was just verified carries the budget to `run_draft`.
    state = state._replace(draft=state.draft.replace(num_tokens=num_tokens))
    if drafter is None:
        return state
    # Row n decided the last token of a request that accepted n.
    hidden = gather_row(rows.hidden, info.verification.num_accepted)

    def run(drafted: tuple[Any, ...]) -> tuple[Any, ...]:
        draft, drafter_state, draft_history = drafted
        before = state._replace(draft=draft, drafter_state=drafter_state)
        after = run_draft(drafter, before._replace(draft_history=draft_history), hidden, options)
        return after.draft, after.drafter_state, after.draft_history

    drafted = (state.draft, state.drafter_state, state.draft_history)
    draft, drafter_state, draft_history = state.k_policy.run_if_any(num_tokens, run, drafted)
    return state._replace(draft=draft, drafter_state=drafter_state, draft_history=draft_history)


def draft_budget(
    drafter: Drafter | None, state: DecodeState, config: SpeculativeConfig
) -> jax.Array:
    """Returns the most tokens that each request may draft next, i32[B]; -1 if it ended."""
    is_active = state.finish == 0
    k = 0 if drafter is None else config.num_speculative_tokens
    # A step always emits one token besides the accepted drafts.
    num_tokens = jnp.clip(state.settings.max_lengths - state.lengths - 1, 0, k)
    return jnp.where(is_active, state.k_policy.budget(num_tokens, is_active), jnp.int32(-1))


def run_draft(
    drafter: Drafter, state: DecodeState, hidden: jax.Array, options: StepOptions
) -> DecodeState:
    """Runs the drafter for at most `state.draft.num_tokens` tokens of each request.

    Args:
      drafter: a drafter.
      state: after the commit of a step; the draft has the budget as its `num_tokens`.
      hidden: [B, D], the target's hidden states that decided the last tokens.
      options: as in `run_step`.
    """
    num_tokens = state.draft.num_tokens
    assert num_tokens is not None

    def propose(drafter_state: Any, max_tokens: jax.Array) -> tuple[Draft, Any]:
        operands = (drafter, drafter_state, state.history, hidden, state.settings, max_tokens)
        return propose_draft(*operands, options=options)

    def read(drafter_state: Any, num_read: jax.Array) -> Any:
        return _read_missed(drafter, state, drafter_state, num_read)

    draft, drafter_state, draft_history = state.k_policy.draft(
        propose, read, state.drafter_state, num_tokens, state.lengths
    )
    return state._replace(draft=draft, drafter_state=drafter_state, draft_history=draft_history)


def _read_missed(
    drafter: Drafter, state: DecodeState, drafter_state: Any, num_read: jax.Array
) -> Any:
    """Returns the drafter's state after the committed tokens from `num_read` i32[B] on.

    The last token is not read: every proposal reads it. Here alone, where K is "auto", column 0 of
    a chunk is the token before the chunk, at position -1: context that is not read again.
    """
    # Features are read after every step. A drafter without a state that chunks make sees all
    # committed tokens in `propose`.
    if drafter.reads_features or not reads_chunks(drafter_state):
        return drafter_state
    end = state.lengths - 1
    offsets = jnp.arange(-1, _CHUNK_SIZE, dtype=jnp.int32)[None]

    def read(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        num_read, drafter_state = carry
        index = num_read[:, None] + offsets
        ids = jnp.take_along_axis(state.token_ids, jnp.maximum(index, 0), axis=1, mode="clip")
        inside = (offsets >= 0) & (index < end[:, None])
        ids, positions = jnp.maximum(ids, 0), jnp.where(inside, index, -1)
        drafter_state = drafter.extend(drafter.params, drafter_state, ids, positions, None)
        return pvary_like((num_read + _CHUNK_SIZE, drafter_state), carry)

    start = (num_read, drafter_state)
    # Inside `shard_map`, a loop's first carry must vary over the mesh axes of its later ones.
    start = pvary_like(start, start, drafter)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < end), read, start)[1]


def discard_incompatible_draft(
    drafter: Drafter | None, state: DecodeState, hidden: jax.Array, options: StepOptions
) -> DecodeState:
    """Returns the state without its pending draft if this config makes drafts of other structure.

    `specjax.step` may be called with another method than drew that draft. Then the draft has other
    fields, or was drawn on another stream. Tokens drawn with the target's noise bias the output of
    every method but "coupled". `Draft.on_target_stream` is static, so that the structures differ
    then, too. This is decided while the step is traced, and adds nothing to the program of a draft
    that fits.

    Args:
      drafter: a drafter or None.
      state: before verification.
      hidden: [B, D], of which only the shape and the dtype are read.
      options: as in `run_step`.
    """
    if drafter is None:
        return state
    max_tokens = state.draft.num_tokens
    operands = (drafter, state.drafter_state, state.history, hidden, state.settings, max_tokens)
    like, _ = propose_draft.eval_shape(*operands, options=options)
    # `Any`, because mypy does not know that structures can be compared.
    structure: Any = jax.tree.structure(state.draft)
    if structure == jax.tree.structure(like):
        return state
    # 0 tokens for an active request, and still -1 for others.
    none = jnp.minimum(jnp.asarray(state.draft.num_tokens), 0)
    draft = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return state._replace(draft=draft.replace(num_tokens=none))


@functools.partial(jax.jit, static_argnames="options")
def propose_draft(
    drafter: Drafter,
    drafter_state: Any,
    history: History,
    hidden: jax.Array,
    settings: Settings,
    max_tokens: jax.Array,
    *,
    options: StepOptions,
) -> tuple[Draft, Any]:
    """Returns a checked draft of at most `max_tokens` i32[B] tokens, and the drafter's state.

    `prefill.begin_prefill` asks for the shapes first, by `eval_shape`. Because this function has a
    `jit` of its own, the steps use that trace again.

    Args:
      drafter: a drafter.
      drafter_state: its state.
      history: the committed tokens.
      hidden: as in `run_draft`.
      settings: of the requests.
      max_tokens: i32[B], the budgets; -1 for a request that ended or, if K is adaptive, drafts
        nothing.
      options: as in `run_step`.
    """
    # Without the masks of rows, which are the target's alone.
    sampling = draft_sampling(settings.sampling)
    inputs = DraftInputs(
        keys=settings.keys,
        positions=history.lengths,
        num_tokens=max_tokens,
        temperature=settings.temperature,
        sampling=sampling,
        history=None if sampling is None else history,
    )
    draft, drafter_state = drafter.propose(
        drafter.params,
        drafter_state,
        history.token_ids,
        hidden,
        inputs,
        config=options.config,
        implementation=options.implementation,
    )
    draft = check_draft(draft)
    # A drafter's -1 ends no request, and a draft beyond the budget is cut.
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    num_tokens = jnp.minimum(jnp.maximum(num_drafted, 0), max_tokens)
    return draft.replace(num_tokens=num_tokens), drafter_state
