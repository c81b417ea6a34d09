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
from specjax.decode.choose_k import choose_k
from specjax.decode.drafters import Drafter, reads_chunks
from specjax.decode.state_and_info import DecodeState, Settings
from specjax.draft import Draft
from specjax.implementation import Implementation
from specjax.mesh import pvary_like
from specjax.processing.history import History
from specjax.processing.token_counts import TokenCounts

__all__ = ["draft_next", "propose_draft", "run_if"]

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


def draft_next(
    drafter: Drafter | None,
    state: DecodeState,
    hidden: jax.Array,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> DecodeState:
    """Puts the next draft into the state; requests that ended are inactive from here on."""
    settings = state.settings
    # A step always emits one token besides the accepted drafts.
    num_tokens_left = settings.max_lengths - state.lengths - 1
    k = 0 if drafter is None else config.num_speculative_tokens
    max_tokens = jnp.where(state.finish == 0, jnp.clip(num_tokens_left, 0, k), jnp.int32(-1))
    if drafter is None:
        return state._replace(draft=state.draft._replace(num_tokens=max_tokens))
    options = {"config": config, "implementation": implementation}
    if state.draft_history is not None:
        return _draft_where_worth_it(drafter, state, hidden, max_tokens, options)
    operands = (state.drafter_state, state.token_ids, state.lengths, state.counts, hidden)
    draft, drafter_state = propose_draft(drafter, *operands, settings, max_tokens, **options)
    return state._replace(draft=draft, drafter_state=drafter_state)


def _draft_where_worth_it(
    drafter: Drafter,
    state: DecodeState,
    hidden: jax.Array,
    max_tokens: jax.Array,
    options: dict[str, Any],
) -> DecodeState:
    """Puts a draft of as many tokens as each request's history makes worth it into the state."""
    settings, history = state.settings, state.draft_history
    assert history is not None
    assert settings.k_by_rate is not None
    max_tokens = jnp.minimum(max_tokens, choose_k(history, settings.k_by_rate))
    # To the drafter a request that drafts nothing is an inactive one, alone or in a batch.
    num_tokens = jnp.where(max_tokens > 0, max_tokens, -1)

    def propose(last: tuple[Draft, Any, jax.Array]) -> tuple[Draft, Any, jax.Array]:
        before = state._replace(drafter_state=last[1])
        drafter_state = _read_missed(drafter, before, num_tokens > 0)
        operands = (drafter_state, state.token_ids, state.lengths, state.counts, hidden)
        draft, drafter_state = propose_draft(drafter, *operands, settings, num_tokens, **options)
        # It has read all but the last token of its draft.
        num_read = state.lengths - 1 + jnp.maximum(draft.num_tokens, 1)
        return draft, drafter_state, jnp.where(num_tokens > 0, num_read, history.num_read)

    last = (state.draft, state.drafter_state, history.num_read)
    draft, drafter_state, num_read = run_if(jnp.any(num_tokens > 0), propose, last)
    return state._replace(
        draft=draft._replace(num_tokens=jnp.where(num_tokens > 0, draft.num_tokens, max_tokens)),
        drafter_state=drafter_state,
        draft_history=history._replace(num_read=num_read),
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
    token_ids: jax.Array,
    lengths: jax.Array,
    counts: TokenCounts | None,
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
    sampling = settings.sampling
    draft, drafter_state = drafter.propose(
        drafter.params,
        drafter_state,
        token_ids,
        hidden,
        keys=settings.keys,
        positions=lengths,
        num_tokens=max_tokens,
        temperature=settings.temperature,
        config=config,
        sampling=sampling,
        history=None if sampling is None else History(token_ids, lengths, counts),
        implementation=implementation,
    )
    draft = check_draft(draft)
    # Only the loop ends requests, and no draft is longer than a request has tokens left.
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    num_tokens = jnp.minimum(jnp.maximum(num_drafted, 0), max_tokens)
    return draft._replace(num_tokens=num_tokens), drafter_state
