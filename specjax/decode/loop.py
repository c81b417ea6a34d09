"""One step of decoding, compiled.

    pending draft -> target's K + 1 rows -> verification -> commit -> next draft

The first step of a request has no pending draft: its row 0 follows the prompt, and gives the first
token. The state is one pytree, and parameters are arguments. Without a drafter K = 0: plain
decoding.
Arguments were checked by `generate`. What the functions of a model or a drafter return is checked
here, where it enters; functions of arrays are called from there on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.checks import check_draft, check_logits, check_shape
from specjax.config import SpeculativeConfig
from specjax.core.acceptance import num_valid_drafts
from specjax.decode.commit import append, append_emitted
from specjax.decode.drafters import Drafter
from specjax.decode.finish_and_origin import Origin
from specjax.decode.logprobs import check_num_listed, list_logprobs
from specjax.decode.metrics import update_metrics
from specjax.decode.state_and_info import DecodeState, Settings, StepInfo
from specjax.draft import Draft
from specjax.implementation import Implementation, resolve_implementation
from specjax.model import Model
from specjax.processing.apply_sampling import apply_rules_and_filters
from specjax.processing.history import History
from specjax.processing.logit_rules import RowContext
from specjax.processing.rule_checks import check_widths
from specjax.processing.sampling_params import SamplingParams, split_sampling
from specjax.processing.token_counts import TokenCounts, add_to_counts
from specjax.samplers.rejection_sample import verify_draft

__all__ = ["apply_model", "propose_draft", "run_step"]


@functools.partial(jax.jit, static_argnames=("config", "implementation"))
def run_step(
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> tuple[DecodeState, StepInfo]:
    """Returns what `step` returns.

    Args:
      target: as in `step`.
      drafter: as in `step`.
      state: as in `step`.
      config: a compile key.
      implementation: a resolved one if the caller named one, else None.
    """
    draft = state.draft
    size, k = draft.token_ids.shape
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    last = _take_at(state.token_ids, state.lengths - 1)
    input_ids = jnp.maximum(jnp.concatenate([last[:, None], draft.token_ids], axis=1), 0)
    index = jnp.arange(k + 1, dtype=jnp.int32)[None]
    positions = jnp.where(
        index <= num_drafted[:, None], state.lengths[:, None] - 1 + index, jnp.int32(-1)
    )
    hidden, cache = apply_model(target, input_ids, positions, state.target_cache)
    logits = target.logits(target.params, hidden)
    _check_target_logits(logits, state.settings, size, k + 1)
    lengths = state.lengths
    state = state._replace(target_cache=cache)
    state, info = _verify_and_commit(state, logits, config, implementation)
    # The token after the prompt is no step of speculation: nothing could be drafted.
    is_first = lengths == state.settings.prompt_lengths
    num_committed = state.lengths - lengths
    metrics = update_metrics(
        state.metrics,
        jnp.where(is_first, -1, num_drafted),
        info.verification,
        num_committed=num_committed,
        finish=state.finish,
    )
    deciding = _take_at(hidden, info.verification.num_accepted)
    if drafter is not None and drafter.reads_features:
        positions = jnp.where(index < num_committed[:, None], positions, -1)
        drafter_state = drafter.extend(
            drafter.params, state.drafter_state, input_ids, positions, hidden
        )
        state = state._replace(drafter_state=drafter_state)
    state = state._replace(metrics=metrics)
    return _draft_next(drafter, state, deciding, config, implementation), info


@jax.jit
def apply_model(
    model: Model, token_ids: jax.Array, positions: jax.Array, cache: Any
) -> tuple[jax.Array, Any]:
    """Returns what `model.apply` does: traced once where its shapes are asked for before."""
    return model.apply(model.params, token_ids, positions, cache)


def _check_target_logits(logits: jax.Array, settings: Settings, size: int, num_rows: int) -> None:
    """Refuses logits [B, K + 1, V] that the settings were not made for."""
    check_logits("target_logits", logits, "[B, K + 1, V]", size)
    vocab_size = logits.shape[-1]
    check_shape("target_logits", logits, (size, num_rows, vocab_size))
    if settings.sampling is not None:
        rules, _ = split_sampling(settings.sampling)
        check_widths(rules, vocab_size)
    if settings.logprobs is not None:
        check_num_listed("num_logprobs", settings.logprobs.num, vocab_size)


def _verify_and_commit(
    state: DecodeState,
    logits: jax.Array,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> tuple[DecodeState, StepInfo]:
    """Verifies the pending draft against rows of target logits and commits the outcome."""
    settings, draft = state.settings, state.draft
    k = draft.token_ids.shape[1]
    resolved = resolve_implementation(implementation)
    processed, cutoff = _apply_sampling(state, logits, resolved)
    arrays = VerifyArrays.from_draft(
        draft,
        processed,
        keys=settings.keys,
        positions=state.lengths,
        temperature=settings.temperature,
        cutoff=cutoff,
        conditional_rates=settings.conditional_rates if k else None,
    )
    verification = verify_draft(arrays, options=CallOptions(config.noise_dtype, resolved, k))
    token_ids, lengths, finish = append_emitted(
        state.token_ids, state.lengths, verification, settings.eos_token_ids, settings.max_lengths
    )
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    accepted = verification.num_accepted[:, None]
    index = jnp.arange(k + 1, dtype=jnp.int32)[None]
    last = jnp.where(accepted == num_drafted[:, None], Origin.BONUS, Origin.RECOVERED)
    origins = jnp.where(index < accepted, Origin.ACCEPTED, last).astype(jnp.int8)
    num_committed, emitted = lengths - state.lengths, verification.token_ids
    counts = state.counts
    if counts is not None:
        counts = add_to_counts(counts, emitted, num_committed)
    sampled_from = (processed, settings.temperature, cutoff)
    listed = list_logprobs(settings.logprobs, emitted, logits, sampled_from)
    state = state._replace(
        counts=counts,
        top_logprobs=_append_each(state.top_logprobs, state.lengths, num_committed, listed),
        token_ids=token_ids,
        lengths=lengths,
        logprobs=append(state.logprobs, state.lengths, num_committed, verification.logprobs),
        origins=append(state.origins, state.lengths, num_committed, origins),
        finish=jnp.where(state.finish == 0, finish, state.finish),
    )
    return state, StepInfo(verification, num_drafted)


def _apply_sampling(
    state: DecodeState, logits: jax.Array, implementation: Implementation
) -> tuple[jax.Array, jax.Array | None]:
    """Returns processed logits and cutoffs of the target's rows."""
    settings, drafted = state.settings, state.draft.token_ids
    rules, filters = split_sampling(settings.sampling or SamplingParams())
    context = RowContext(_history(state), drafted if drafted.shape[1] else None, jnp.int32(0))
    return apply_rules_and_filters(
        logits,
        rules,
        filters,
        context,
        temperature=settings.temperature,
        implementation=implementation,
    )


def _history(state: DecodeState) -> History:
    return History(state.token_ids, state.lengths, state.counts)


def _append_each(buffers: Any, lengths: jax.Array, counts: jax.Array, values: Any) -> Any:
    """Appends to every array of a pytree, which may be None."""
    return jax.tree.map(lambda buffer, x: append(buffer, lengths, counts, x), buffers, values)


def _draft_next(
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
    operands = (state.drafter_state, state.token_ids, state.lengths, state.counts, hidden)
    draft, drafter_state = propose_draft(
        drafter, *operands, settings, max_tokens, config=config, implementation=implementation
    )
    return state._replace(draft=draft, drafter_state=drafter_state)


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


def _take_at(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns entry `index[b]` of row b: [B, L, ...] -> [B, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(
        values, index
    )
