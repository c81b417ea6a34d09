"""One step of decoding, compiled: compute rows, verify, commit, extend, draft.

    pending draft -> target's K + 1 rows -> accepted tokens -> buffers -> next draft

The first step of a request has no pending draft: its row 0 follows the prompt and gives the first
token. Without a drafter K = 0: plain decoding. The state is one pytree, and parameters are
arguments. The parts are functions of their own, so that a host can compile them apart.

`generate` has checked the arguments. What a model or a drafter returns is checked here, where it
enters.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.core.rule import COUPLED, static_rule
from specjax.decode.commit import Origin, append, append_emitted
from specjax.decode.draft_step import discard_incompatible_draft, draft_next
from specjax.decode.drafters import Drafter, Models
from specjax.decode.logprobs import TopLogprobs, list_top_logprobs
from specjax.decode.metrics import update_metrics
from specjax.decode.options import StepOptions
from specjax.decode.state import DecodeState, StepInfo
from specjax.decode.target_step import (
    TargetRows,
    apply_model,
    count_drafted,
    count_rows,
    run_smallest_k,
    score_hidden,
    step_inputs,
)
from specjax.implementation import resolve_implementation
from specjax.processing.grammar import advance
from specjax.processing.token_counts import add_to_counts
from specjax.samplers.batch import verify_over_mesh
from specjax.samplers.rejection_sample import verify_draft

__all__ = ["commit_emitted", "compute_rows", "extend_drafter", "run_step", "verify_pending"]


@functools.partial(jax.jit, static_argnames="options")
def run_step(
    models: Models, state: DecodeState, *, options: StepOptions
) -> tuple[DecodeState, StepInfo]:
    """Computes rows, verifies, commits, extends and drafts; returns the next state and the info.

    Args:
      models: the target, and a drafter or None.
      state: as in `step`.
      options: of the step.
    """
    drafter = models.drafter
    before, rows = compute_rows(models, state, options)
    info = verify_pending(before, rows, options)
    state = commit_emitted(before, rows, info)
    state = extend_drafter(drafter, before, state, rows)
    state = draft_next(drafter, state, rows, info, options)
    return state, info


def compute_rows(
    models: Models, state: DecodeState, options: StepOptions
) -> tuple[DecodeState, TargetRows]:
    """Returns the state with the target's cache, and the rows of the last token and the draft.

    A draft that another method drew is discarded, and only the first row is then used.

    Args:
      models: as in `run_step`.
      state: as in `run_step`.
      options: of the step.
    """
    target, drafter = models

    def score(k: int, cache: Any) -> tuple[Any, TargetRows]:
        input_ids, positions = (fed[:, : k + 1] for fed in step_inputs(state))
        *hidden, cache = apply_model(target, input_ids, positions, cache, models.taps)
        return cache, score_hidden(target, state, options.implementation, *hidden)

    cache, rows = run_smallest_k(state, score, state.target_cache, options.row_buckets)
    state = state._replace(target_cache=cache)
    return discard_incompatible_draft(drafter, state, rows.hidden[:, 0], options), rows


def verify_pending(state: DecodeState, rows: TargetRows, options: StepOptions) -> StepInfo:
    """Verifies the pending drafts against the target's rows.

    Args:
      state: before the step; the target's cache is not read.
      rows: of the last token and the draft.
      options: of the step.
    """
    config, settings, draft = options.config, state.settings, state.draft
    resolved = resolve_implementation(options.implementation)
    k = count_rows(state) - 1
    rule = static_rule(config.verification_rule(settings.conditional_rates))
    call = CallOptions(config.noise_dtype, resolved, k, rule)
    if rule == COUPLED:
        draft = draft.without_q()
    arrays = VerifyArrays.from_draft(
        draft,
        rows.logits,
        keys=settings.keys,
        positions=state.lengths,
        temperature=settings.temperature,
        cutoff=rows.cutoff,
        conditional_rates=settings.conditional_rates if k else None,
    )
    if rows.placement is None:
        verification = verify_draft(arrays, options=call)
    else:
        verification = verify_over_mesh(arrays, rows.placement, rows.split, options=call)
    return StepInfo(verification, count_drafted(state))


def commit_emitted(state: DecodeState, rows: TargetRows, info: StepInfo) -> DecodeState:
    """Returns the state with the tokens that a step emitted, and all that is counted of them.

    Args:
      state: before the step.
      rows: of the step.
      info: of the step.
    """
    verification, num_drafted = info.verification, info.num_drafted
    settings, emitted = state.settings, verification.token_ids
    token_ids, lengths, finish = append_emitted(
        state.token_ids, state.lengths, verification, settings.eos_token_ids, settings.max_lengths
    )
    num_committed = lengths - state.lengths
    finish = jnp.where(state.finish == 0, finish, state.finish)
    counts, grammar_state = state.counts, state.grammar_state
    if counts is not None:
        counts = add_to_counts(counts, emitted, num_committed)
    if grammar_state is not None:
        assert settings.sampling is not None
        grammar_state = advance(settings.sampling.grammar, grammar_state, emitted, num_committed)
    # The token after the prompt is no step of speculation: nothing could be drafted.
    is_first = state.lengths == settings.prompt_lengths
    metrics = update_metrics(
        state.metrics,
        jnp.where(is_first, -1, num_drafted),
        verification,
        num_committed=num_committed,
        finish=finish,
    )

    def append_each(buffers: Any, values: Any) -> Any:
        """Appends to every array of a pytree, which may be None."""
        return jax.tree.map(
            lambda x, y: append(x, state.lengths, num_committed, y), buffers, values
        )

    return state._replace(
        token_ids=token_ids,
        lengths=lengths,
        logprobs=append_each(state.logprobs, verification.logprobs),
        origins=append_each(state.origins, _origins(info)),
        finish=finish,
        metrics=metrics,
        counts=counts,
        top_logprobs=append_each(state.top_logprobs, _list_logprobs(state, rows, emitted)),
        draft_history=state.k_policy.update(num_drafted, verification.num_accepted, lengths),
        grammar_state=grammar_state,
    )


def _origins(info: StepInfo) -> jax.Array:
    """Returns the `Origin` of each emitted token, i8[B, K + 1]."""
    num_accepted = info.verification.num_accepted[:, None]
    index = jnp.arange(info.verification.token_ids.shape[1], dtype=jnp.int32)[None]
    all_accepted = num_accepted == info.num_drafted[:, None]
    last = jnp.where(all_accepted, Origin.BONUS, Origin.RECOVERED)
    return jnp.where(index < num_accepted, Origin.ACCEPTED, last).astype(jnp.int8)


def _list_logprobs(
    state: DecodeState, rows: TargetRows, token_ids: jax.Array
) -> TopLogprobs | None:
    """Returns the listing of emitted tokens, or None."""
    config, temperature = state.settings.logprobs, state.settings.temperature
    if config is None:
        return None

    def list_rows(k: int, _: Any) -> tuple[None, TopLogprobs | None]:
        raw, logits, cutoff = jax.tree.map(
            lambda x: x[:, : k + 1], (rows.raw_logits, rows.logits, rows.cutoff)
        )
        emitted = token_ids[:, : k + 1]
        if config.mode == "raw":
            return None, list_top_logprobs(raw, emitted, jnp.float32(1), None, n=config.num)
        return None, list_top_logprobs(logits, emitted, temperature, cutoff, n=config.num)

    return run_smallest_k(state, list_rows, None)[1]


def extend_drafter(
    drafter: Drafter | None, before: DecodeState, state: DecodeState, rows: TargetRows
) -> DecodeState:
    """Returns the state of a drafter that has read the committed tokens, if it reads features.

    Other drafters read them when they draft.

    Args:
      drafter: as in `run_step`.
      before: before the step.
      state: after its commit.
      rows: of the step, with the features of the tokens that were fed.
    """
    if drafter is None or not drafter.reads_features:
        return state
    input_ids, positions = step_inputs(before)
    num_committed = state.lengths - before.lengths
    index = jnp.arange(count_rows(before), dtype=jnp.int32)[None]
    positions = jnp.where(index < num_committed[:, None], positions, -1)
    features = rows.features if drafter.taps else rows.hidden
    drafter_state = drafter.extend(
        drafter.params, state.drafter_state, input_ids, positions, features
    )
    return state._replace(drafter_state=drafter_state)
