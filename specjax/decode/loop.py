"""One step of decoding, compiled.

    pending draft -> target's K + 1 rows -> verification -> commit -> next draft

The first step of a request has no pending draft: its row 0 follows the prompt, and gives the first
token. The state is one pytree, and parameters are arguments. Without a drafter K = 0: plain
decoding. Where K is "auto", a step in which no request of the batch has a draft computes one row.
Arguments were checked by `generate`. What the functions of a model or a drafter return is checked
here, where it enters; functions of arrays are called from there on.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.checks import check_logits, check_shape
from specjax.config import SpeculativeConfig
from specjax.core.acceptance import num_valid_drafts
from specjax.decode.choose_k import add_step
from specjax.decode.commit import Origin, append, append_emitted
from specjax.decode.draft_next import draft_next, run_if
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import (
    TopLogprobs,
    check_num_listed,
    empty_logprobs,
    list_logprobs,
)
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
from specjax.processing.token_counts import add_to_counts
from specjax.samplers.rejection_sample import verify_draft
from specjax.verification import Verification

__all__ = ["apply_model", "run_step"]


class _Decision(NamedTuple):
    """What the target's rows decide: K + 1 rows, of which fewer may have been computed."""

    target_cache: Any
    verification: Verification
    listed: TopLogprobs | None
    deciding: jax.Array
    hidden: jax.Array | None


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
    draft, lengths = state.draft, state.lengths
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    last = _take_at(state.token_ids, lengths - 1)
    input_ids = jnp.maximum(jnp.concatenate([last[:, None], draft.token_ids], axis=1), 0)
    index = jnp.arange(input_ids.shape[1], dtype=jnp.int32)[None]
    positions = jnp.where(
        index <= num_drafted[:, None], lengths[:, None] - 1 + index, jnp.int32(-1)
    )
    reads_features = drafter is not None and drafter.reads_features
    fed = (input_ids, positions, reads_features)
    decision = _decide(target, state, num_drafted, fed, config, implementation)
    state = _commit(state._replace(target_cache=decision.target_cache), decision, num_drafted)
    verification, num_committed = decision.verification, state.lengths - lengths
    # The token after the prompt is no step of speculation: nothing could be drafted.
    is_first = lengths == state.settings.prompt_lengths
    metrics = update_metrics(
        state.metrics,
        jnp.where(is_first, -1, num_drafted),
        verification,
        num_committed=num_committed,
        finish=state.finish,
    )
    if drafter is not None and reads_features:
        positions = jnp.where(index < num_committed[:, None], positions, -1)
        drafter_state = drafter.extend(
            drafter.params, state.drafter_state, input_ids, positions, decision.hidden
        )
        state = state._replace(drafter_state=drafter_state)
    if state.draft_history is not None:
        num_accepted = verification.num_accepted
        history = add_step(state.draft_history, num_drafted, num_accepted, state.lengths)
        state = state._replace(draft_history=history)
    state = state._replace(metrics=metrics)
    state = draft_next(drafter, state, decision.deciding, config, implementation)
    return state, StepInfo(verification, num_drafted)


def _decide(
    target: Model,
    state: DecodeState,
    num_drafted: jax.Array,
    fed: tuple[jax.Array, jax.Array, bool],
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> _Decision:
    """Computes and verifies the target's rows: the first alone for a step without drafts."""

    def decide(k: int, last: _Decision) -> _Decision:
        before = state._replace(target_cache=last.target_cache)
        return _decide_rows(k, target, before, fed, config, implementation)

    k = state.draft.token_ids.shape[1]
    if state.draft_history is None:
        return _decide_rows(k, target, state, fed, config, implementation)
    decision = _empty_decision(target, state, fed)
    # A third program, of two drafts, would be a third copy of the target's layers to compile.
    is_plain = jnp.max(num_drafted) <= 0
    decision = run_if(is_plain, functools.partial(decide, 0), decision)
    return run_if(~is_plain, functools.partial(decide, k), decision)


def _empty_decision(
    target: Model, state: DecodeState, fed: tuple[jax.Array, jax.Array, bool]
) -> _Decision:
    """Returns the cache, and arrays for the decision of a step's K + 1 rows."""
    input_ids, positions, reads_features = fed
    size = input_ids.shape[0]
    shapes = apply_model.eval_shape(target, input_ids, positions, state.target_cache)[0]
    hidden = jnp.zeros(shapes.shape, shapes.dtype)
    counts, rows = jnp.zeros((size,), jnp.int32), jnp.zeros(input_ids.shape, jnp.float32)
    return _Decision(
        state.target_cache,
        Verification(jnp.zeros_like(input_ids), counts, counts, rows),
        empty_logprobs(state.settings.logprobs, input_ids.shape),
        hidden[:, 0],
        hidden if reads_features else None,
    )


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


def _decide_rows(
    k: int,
    target: Model,
    state: DecodeState,
    fed: tuple[jax.Array, jax.Array, bool],
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> _Decision:
    """Feeds the last token and k drafted ones, verifies them, and fills up to K + 1 rows."""
    input_ids, positions, reads_features = fed
    settings, (size, num_rows) = state.settings, input_ids.shape
    resolved = resolve_implementation(implementation)
    if k + 1 < num_rows:
        state = state._replace(draft=_first_drafts(state.draft, k))
        input_ids, positions = input_ids[:, : k + 1], positions[:, : k + 1]
    hidden, cache = apply_model(target, input_ids, positions, state.target_cache)
    logits = target.logits(target.params, hidden)
    _check_target_logits(logits, settings, size, k + 1)
    processed, cutoff = _apply_sampling(state, logits, resolved)
    arrays = VerifyArrays.from_draft(
        state.draft,
        processed,
        keys=settings.keys,
        positions=state.lengths,
        temperature=settings.temperature,
        cutoff=cutoff,
        conditional_rates=settings.conditional_rates if k else None,
    )
    outcome = verify_draft(arrays, options=CallOptions(config.noise_dtype, resolved, k))
    sampled_from = (processed, settings.temperature, cutoff)
    listed = list_logprobs(settings.logprobs, outcome.token_ids, logits, sampled_from)
    deciding = _take_at(hidden, outcome.num_accepted)
    features = hidden if reads_features else None
    if k + 1 < num_rows:
        fill = functools.partial(_fill_rows, num_rows=num_rows)
        listed, features = jax.tree.map(fill, (listed, features))
        token_ids, logprobs = fill(outcome.token_ids, value=-1), fill(outcome.logprobs)
        outcome = outcome._replace(token_ids=token_ids, logprobs=logprobs)
    return _Decision(cache, outcome, listed, deciding, features)


def _first_drafts(draft: Draft, k: int) -> Draft:
    """Returns the first k drafted tokens, with what verification reads of them."""
    if k == 0:
        return Draft(draft.token_ids[:, :0], num_tokens=draft.num_tokens)
    names = ("token_ids", "logits", "logprobs", "logsumexp", "cutoff")
    given = {name: getattr(draft, name) for name in names}
    return draft._replace(
        **{name: values[:, :k] for name, values in given.items() if values is not None}
    )


def _fill_rows(values: jax.Array, num_rows: int, value: int = 0) -> jax.Array:
    """Returns [B, num_rows, ...], filled up after the rows that there are."""
    widths = [(0, 0)] * values.ndim
    widths[1] = (0, num_rows - values.shape[1])
    return jnp.pad(values, widths, constant_values=value)


def _commit(state: DecodeState, decision: _Decision, num_drafted: jax.Array) -> DecodeState:
    """Appends what a step decided."""
    settings, verification = state.settings, decision.verification
    token_ids, lengths, finish = append_emitted(
        state.token_ids, state.lengths, verification, settings.eos_token_ids, settings.max_lengths
    )
    accepted, emitted = verification.num_accepted[:, None], verification.token_ids
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    last = jnp.where(accepted == num_drafted[:, None], Origin.BONUS, Origin.RECOVERED)
    origins = jnp.where(index < accepted, Origin.ACCEPTED, last).astype(jnp.int8)
    num_committed = lengths - state.lengths
    counts = state.counts
    if counts is not None:
        counts = add_to_counts(counts, emitted, num_committed)
    return state._replace(
        counts=counts,
        top_logprobs=_append_each(
            state.top_logprobs, state.lengths, num_committed, decision.listed
        ),
        token_ids=token_ids,
        lengths=lengths,
        logprobs=append(state.logprobs, state.lengths, num_committed, verification.logprobs),
        origins=append(state.origins, state.lengths, num_committed, origins),
        finish=jnp.where(state.finish == 0, finish, state.finish),
    )


def _apply_sampling(
    state: DecodeState, logits: jax.Array, implementation: Implementation
) -> tuple[jax.Array, jax.Array | None]:
    """Returns processed logits and cutoffs of the target's rows."""
    settings, drafted = state.settings, state.draft.token_ids
    rules, filters = split_sampling(settings.sampling or SamplingParams())
    history = History(state.token_ids, state.lengths, state.counts)
    context = RowContext(history, drafted if drafted.shape[1] else None, jnp.int32(0))
    return apply_rules_and_filters(
        logits,
        rules,
        filters,
        context,
        temperature=settings.temperature,
        implementation=implementation,
    )


def _append_each(buffers: Any, lengths: jax.Array, counts: jax.Array, values: Any) -> Any:
    """Appends to every array of a pytree, which may be None."""
    return jax.tree.map(lambda buffer, x: append(buffer, lengths, counts, x), buffers, values)


def _take_at(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns entry `index[b]` of row b: [B, L, ...] -> [B, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(
        values, index
    )
