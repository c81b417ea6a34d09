"""Drafts for the next step: at most K tokens of each request, and none where none are worth it.

With `num_speculative_tokens="auto"` a step for which no request drafts does not run the drafter,
which then reads the committed tokens that it missed before it drafts again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import check_draft
from specjax.config import SpeculativeConfig
from specjax.core.acceptance import num_valid_drafts
from specjax.decode.choose_k import choose_k, choose_shared_k
from specjax.decode.drafters import Drafter, reads_chunks
from specjax.decode.state_and_info import DecodeState, Settings
from specjax.devices.placement import pvary_like
from specjax.implementation import Implementation
from specjax.processing.history import History
from specjax.processing.row_masks import draft_sampling
from specjax.types import Draft

__all__ = ["draft_next", "drop_other_draft", "most_drafted", "propose_draft", "run_draft", "run_if"]

# Missed tokens that a drafter reads at once.
_CHUNK_SIZE = 7


def run_if(predicate: jax.Array, function: Callable[[Any], Any], operand: Any) -> Any:
    """Returns `function(operand)` where the predicate holds, and the operand elsewhere.

    A loop of at most one round: XLA writes into a loop's carry in place, and copies the operands of
    a conditional, which here hold caches.
    """

    def run(carry: Any) -> Any:
        return pvary_like((jnp.zeros((), bool), function(carry[1])), carry)

    start = (predicate, operand)
    return jax.lax.while_loop(lambda carry: carry[0], run, pvary_like(start, start))[1]


def most_drafted(
    drafter: Drafter | None, state: DecodeState, config: SpeculativeConfig
) -> jax.Array:
    """Returns how many tokens each request drafts next at most, i32[B]; -1 if it ended."""
    settings = state.settings
    k = 0 if drafter is None else config.num_speculative_tokens
    # A step always emits one token besides the accepted drafts.
    num_tokens = jnp.clip(settings.max_lengths - state.lengths - 1, 0, k)
    if state.draft_history is not None:
        table = settings.k_by_rate
        assert table is not None
        if table.ndim == 1:
            best = choose_k(state.draft_history, table)
        else:
            best = choose_shared_k(state.draft_history, table, state.finish == 0)
        num_tokens = jnp.minimum(num_tokens, best)
    return jnp.where(state.finish == 0, num_tokens, jnp.int32(-1))


def drop_other_draft(
    drafter: Drafter | None,
    state: DecodeState,
    hidden: jax.Array,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> DecodeState:
    """Returns the state without its pending draft if this config makes drafts of other fields.

    That draft is then of another method. Tokens drawn with the target's noise bias the output of
    every method but "coupled". Nothing of this is in the program of a state that config began.

    Args:
      drafter: as in `run_step`.
      state: before verification.
      hidden: [B, D], of any token.
      config: as in `run_step`.
      implementation: as in `run_step`.
    """
    if drafter is None:
        return state
    like, _ = propose_draft.eval_shape(
        drafter,
        state.drafter_state,
        state.history,
        hidden,
        state.settings,
        state.draft.num_tokens,
        config=config,
        implementation=implementation,
    )
    if [x is None for x in like] == [x is None for x in state.draft]:
        return state
    none = jnp.minimum(jnp.asarray(state.draft.num_tokens), 0)
    draft = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
    return state._replace(draft=draft._replace(num_tokens=none))


def draft_next(
    drafter: Drafter | None,
    state: DecodeState,
    hidden: jax.Array,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> DecodeState:
    """Puts the next draft into the state, which says how many tokens are drafted at most."""
    if drafter is None:
        return state
    options: dict[str, Any] = {"config": config, "implementation": implementation}
    if state.draft_history is None:
        return run_draft(drafter, state, hidden, **options)
    before, wanted = (state.draft, state.drafter_state, state.draft_history), state.draft.num_tokens
    assert wanted is not None

    def run(last: tuple[Any, ...]) -> tuple[Any, ...]:
        draft, drafter_state, history = last
        given = state._replace(draft=draft, drafter_state=drafter_state, draft_history=history)
        given = run_draft(drafter, given, hidden, **options)
        return given.draft, given.drafter_state, given.draft_history

    draft, drafter_state, history = run_if(jnp.any(wanted > 0), run, before)
    return state._replace(draft=draft, drafter_state=drafter_state, draft_history=history)


def run_draft(
    drafter: Drafter,
    state: DecodeState,
    hidden: jax.Array,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> DecodeState:
    """Runs the drafter: the third part of `run_step`, without which nothing is drafted.

    Args:
      drafter: as in `run_step`.
      state: from `commit_rows`.
      hidden: [B, D], from `commit_rows`.
      config: as in `run_step`.
      implementation: as in `run_step`.
    """
    options: dict[str, Any] = {"config": config, "implementation": implementation}
    history, num_tokens = state.draft_history, state.draft.num_tokens
    assert num_tokens is not None
    text = (state.history, hidden, state.settings)
    if history is None:
        draft, drafter_state = propose_draft(
            drafter, state.drafter_state, *text, num_tokens, **options
        )
        return state._replace(draft=draft, drafter_state=drafter_state)
    drafts = num_tokens > 0
    drafter_state = _read_missed(drafter, state, drafts)
    # To the drafter a request that drafts nothing is an inactive one, alone or in a batch.
    asked = jnp.where(drafts, num_tokens, -1)
    draft, drafter_state = propose_draft(drafter, drafter_state, *text, asked, **options)
    # It has read all but the last token of its draft.
    num_read = state.lengths - 1 + jnp.maximum(draft.num_tokens, 1)
    return state._replace(
        draft=draft._replace(num_tokens=jnp.where(drafts, draft.num_tokens, num_tokens)),
        drafter_state=drafter_state,
        draft_history=history._replace(num_read=jnp.where(drafts, num_read, history.num_read)),
    )


def _read_missed(drafter: Drafter, state: DecodeState, drafts: jax.Array) -> Any:
    """Returns the drafter's state after the committed tokens that it missed, but for the last.

    It missed none where only the token before the last is unread: every proposal reads that one.
    The first column of a chunk is the token before it, at position -1.
    """
    history, end = state.draft_history, state.lengths - 1
    assert history is not None
    if drafter.reads_features or not reads_chunks(state.drafter_state):
        return state.drafter_state
    missed = drafts & (end - history.num_read > 1)
    offsets = jnp.arange(-1, _CHUNK_SIZE, dtype=jnp.int32)[None]

    def read(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        num_read, drafter_state = carry
        index = num_read[:, None] + offsets
        ids = jnp.take_along_axis(state.token_ids, jnp.maximum(index, 0), axis=1, mode="clip")
        inside = (offsets >= 0) & (index < end[:, None])
        ids, positions = jnp.maximum(ids, 0), jnp.where(inside, index, -1)
        drafter_state = drafter.extend(drafter.params, drafter_state, ids, positions, None)
        return pvary_like((num_read + _CHUNK_SIZE, drafter_state), carry)

    # A request that missed none has read to its end.
    start = (jnp.where(missed, history.num_read, end), state.drafter_state)
    start = pvary_like(start, start, drafter)
    return jax.lax.while_loop(lambda carry: jnp.any(carry[0] < end), read, start)[1]


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def propose_draft(
    drafter: Drafter,
    drafter_state: Any,
    text: History,
    hidden: jax.Array,
    settings: Settings,
    max_tokens: jax.Array,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> tuple[Draft, Any]:
    """Returns a checked draft of at most `max_tokens` i32[B] tokens, and the drafter's state.

    A function of its own: the shapes of its draft are asked for before the first step, and a
    compiled function is traced once for both.
    """
    sampling = draft_sampling(settings.sampling)
    draft, drafter_state = drafter.propose(
        drafter.params,
        drafter_state,
        text.token_ids,
        hidden,
        keys=settings.keys,
        positions=text.lengths,
        num_tokens=max_tokens,
        temperature=settings.temperature,
        config=config,
        sampling=sampling,
        history=None if sampling is None else text,
        implementation=implementation,
    )
    draft = check_draft(draft)
    # Only the loop ends requests, and no draft is longer than a request has tokens left.
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    num_tokens = jnp.minimum(jnp.maximum(num_drafted, 0), max_tokens)
    return draft._replace(num_tokens=num_tokens), drafter_state
