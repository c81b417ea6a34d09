"""One step of decoding, compiled: compute rows, verify, commit, extend, draft.

    compute rows    last token, pending draft -> the target's logits, K + 1 rows
    verify          rows, draft               -> emitted tokens
    commit          emitted tokens            -> buffers of the request
    extend          committed tokens          -> the drafter's state, if it reads features
    draft           drafter's state           -> the next pending draft

Row 0 holds the logits after the last committed token, row i those after the i-th drafted token.

In a request's first step nothing is drafted, so that there is row 0 alone: the logits after the
prompt's last token. The step feeds that token, unless the prefill has read it already
(`run_first_step`). Without a drafter K = 0: plain decoding. The state is one pytree. The models'
parameters are traced arguments, not constants of the program. A host can compile each part by
itself.

The callers have checked the arguments. `target_step` checks what the target returns, and
`draft_step` what the drafter returns.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import VerifyInputs
from specjax.call_options import CallOptions
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
from specjax.types import Draft

__all__ = [
    "commit_emitted",
    "commit_rows",
    "compute_rows",
    "extend_drafter",
    "run_first_step",
    "run_step",
    "verify_pending",
]


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
    # The state after the target has run: its cache already holds the tokens that were fed.
    scored, rows = compute_rows(models, state, options)
    state, info = commit_rows(models.drafter, scored, rows, options)
    return draft_next(models.drafter, state, rows, info, options), info


@functools.partial(jax.jit, static_argnames="options")
def run_first_step(
    models: Models,
    prefilled: tuple[DecodeState, tuple[jax.Array, jax.Array | None]],
    *,
    options: StepOptions,
) -> DecodeState:
    """Returns the state with the first generated token of each request, and drafts after it.

    The target is not run: `run_prefill` has done it, and its caches are returned as they are.

    Args:
      models: as in `run_step`.
      prefilled: from `prefill.run_prefill` with `reads_last`: the state, and the hidden states and
        features of the last tokens.
      options: of the step.
    """
    state, outputs = prefilled
    rows = score_hidden(models.target, state, options.implementation, *outputs)
    state, info = commit_rows(models.drafter, state, rows, options)
    return draft_next(models.drafter, state, rows, info, options)


def commit_rows(
    drafter: Drafter | None, state: DecodeState, rows: TargetRows, options: StepOptions
) -> tuple[DecodeState, StepInfo]:
    """Verifies the pending drafts, commits what is emitted, and lets the drafter read it.

    Args:
      drafter: as in `run_step`.
      state: from `compute_rows`, or after a prompt.
      rows: of the last token and the draft; of the last token alone no draft is verified.
      options: of the step.

    Returns:
      The state, whose draft is still the one just verified, and the info of the step.
    """
    pending = state.draft
    if rows.hidden.shape[1] < count_rows(state):
        none = Draft(pending.token_ids[:, :0], num_tokens=pending.num_tokens)
        state = state._replace(draft=none)
    info = verify_pending(state, rows, options)
    after = commit_emitted(state, rows, info)
    return extend_drafter(drafter, state, after, rows)._replace(draft=pending), info


def compute_rows(
    models: Models, state: DecodeState, options: StepOptions
) -> tuple[DecodeState, TargetRows]:
    """Returns the state with the target's cache after the step's tokens, and their rows.

    The target is fed the last committed token and the pending draft. The draft is then discarded
    if the drafter, with this config, draws drafts of another structure: for instance without q. In
    that case only row 0 is used.

    Args:
      models: as in `run_step`.
      state: as in `run_step`.
      options: of the step.
    """
    target, drafter = models

    def score(k: int, cache: Any) -> tuple[Any, TargetRows]:
        input_ids, positions = (fed[:, : k + 1] for fed in step_inputs(state))
        hidden, features, cache = apply_model(target, input_ids, positions, cache, models.taps)
        return cache, score_hidden(target, state, options.implementation, hidden, features)

    # One branch is compiled for each size. The smallest that holds the batch's longest draft runs,
    # and its rows are padded to K + 1.
    cache, rows = run_smallest_k(state, score, state.target_cache, options.row_buckets)
    state = state._replace(target_cache=cache)
    # The state of any row serves: its shape tells which drafts the drafter draws.
    return discard_incompatible_draft(drafter, state, rows.hidden[:, 0], options), rows


def verify_pending(state: DecodeState, rows: TargetRows, options: StepOptions) -> StepInfo:
    """Verifies the pending drafts against the target's rows.

    Args:
      state: from `compute_rows`; the target's cache is not read.
      rows: from `compute_rows`.
      options: of the step.
    """
    # `options` are static: `config` is the part that a user chose, and `call` (`CallOptions`) what
    # the verifier is compiled for. `settings` are the requests' arrays, synthetic rates among them:
    # other values do not recompile.
    config, settings, draft = options.config, state.settings, state.draft
    resolved = resolve_implementation(options.implementation)
    k = count_rows(state) - 1
    rule = static_rule(config.verification_rule(settings.conditional_rates))
    call = CallOptions(config.noise_dtype, resolved, k, rule)
    if rule == COUPLED:
        # Coupling compares drafted tokens with the target's own draws, and reads no probabilities.
        draft = draft.without_q()
    inputs = VerifyInputs(
        draft,
        rows.logits,
        rows.cutoff,
        keys=settings.keys,
        positions=state.lengths,
        temperature=settings.temperature,
        conditional_rates=settings.conditional_rates if k else None,
    )
    # With a placement, the rows lie over the devices of a mesh.
    if rows.placement is None:
        verification = verify_draft(inputs, options=call)
    else:
        verification = verify_over_mesh(inputs, rows.placement, rows.split, options=call)
    return StepInfo(verification, count_drafted(state))


def commit_emitted(state: DecodeState, rows: TargetRows, info: StepInfo) -> DecodeState:
    """Returns the state with the tokens that a step emitted, and with their counts.

    Args:
      state: from `compute_rows`, which has committed nothing.
      rows: from `compute_rows`.
      info: from `verify_pending`.
    """
    verification, num_drafted = info.verification, info.num_drafted
    settings, emitted = state.settings, verification.token_ids
    token_ids, lengths, finish = append_emitted(
        state.token_ids, state.lengths, verification, settings.eos_token_ids, settings.max_lengths
    )
    num_committed = lengths - state.lengths
    # 0 is a request that goes on; one that has ended keeps its first reason.
    finish = jnp.where(state.finish == 0, finish, state.finish)
    counts, grammar_state = state.counts, state.grammar_state
    if counts is not None:
        counts = add_to_counts(counts, emitted, num_committed)
    if grammar_state is not None:
        assert settings.sampling is not None
        grammar_state = advance(settings.sampling.grammar, grammar_state, emitted, num_committed)
    # The token after the prompt is no step of speculation: nothing could be drafted. Metrics count
    # -1 as an inactive request, which adds nothing.
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
        # The acceptance that adaptive K goes by; None if K is fixed.
        draft_history=state.k_policy.update(num_drafted, verification.num_accepted, lengths),
        grammar_state=grammar_state,
    )


def _origins(info: StepInfo) -> jax.Array:
    """Returns the `Origin` of each emitted token, i8[B, K + 1]."""
    num_accepted = info.verification.num_accepted[:, None]
    index = jnp.arange(info.verification.token_ids.shape[1], dtype=jnp.int32)[None]
    # The last emitted token follows accepted ones: the bonus token after a whole draft, or the one
    # recovered in place of the rejected token.
    all_accepted = num_accepted == info.num_drafted[:, None]
    last = jnp.where(all_accepted, Origin.BONUS, Origin.RECOVERED)
    return jnp.where(index < num_accepted, Origin.ACCEPTED, last).astype(jnp.int8)


def _list_logprobs(
    state: DecodeState, rows: TargetRows, token_ids: jax.Array
) -> TopLogprobs | None:
    """Returns the log-probabilities to list of the emitted tokens and of the likeliest, or None."""
    listing, temperature = state.settings.logprobs, state.settings.temperature
    if listing is None:
        return None

    def list_rows(k: int, _: Any) -> tuple[None, TopLogprobs | None]:
        raw, logits, cutoff = jax.tree.map(
            lambda x: x[:, : k + 1], (rows.raw_logits, rows.logits, rows.cutoff)
        )
        emitted = token_ids[:, : k + 1]
        if listing.mode == "raw":
            return None, list_top_logprobs(raw, emitted, jnp.float32(1), None, n=listing.num)
        # A token below the cutoff is not sampled: its probability is 0.
        return None, list_top_logprobs(logits, emitted, temperature, cutoff, n=listing.num)

    return run_smallest_k(state, list_rows, None)[1]


def extend_drafter(
    drafter: Drafter | None, scored: DecodeState, state: DecodeState, rows: TargetRows
) -> DecodeState:
    """Returns the decode state, in which a drafter of features has read the committed tokens.

    Features are the target's hidden states, of its last layer or of the layers that the drafter
    taps. A drafter that reads none reads the tokens when it drafts.

    Args:
      drafter: as in `run_step`.
      scored: from `compute_rows`.
      state: from `commit_emitted`.
      rows: from `compute_rows`, with the features of the tokens that were fed.
    """
    if drafter is None or not drafter.reads_features:
        return state
    input_ids, positions = step_inputs(scored)
    num_committed = state.lengths - scored.lengths
    index = jnp.arange(count_rows(scored), dtype=jnp.int32)[None]
    # The target was fed the token before the draft, and the draft. A step that accepts n drafted
    # tokens commits n + 1, and the first n + 1 fed ones are read: position -1 is no token.
    positions = jnp.where(index < num_committed[:, None], positions, -1)
    features = rows.features if drafter.taps else rows.hidden
    drafter_state = drafter.extend(
        drafter.params, state.drafter_state, input_ids, positions, features
    )
    return state._replace(drafter_state=drafter_state)
