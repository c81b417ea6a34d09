"""One step of decoding, compiled: compute rows, verify, commit, extend, draft.

    compute_rows      last token, pending draft -> `TargetRows`: K + 1 logits rows of each request
    verify_pending    logits rows, draft        -> emitted tokens
    commit_emitted    emitted tokens            -> the state's buffers
    extend_drafter    committed tokens          -> the drafter's state, if it reads features
    draft_next        the drafter's state       -> the next pending draft, by `draft_step`

`run_step` calls all five. "Rows" are logits rows throughout: row 0 holds the logits after the last
committed token, row i those after the i-th drafted token. Without a drafter K = 0: plain decoding.
A request that has ended is inactive: `draft_next` gives it a draft of -1 tokens, so that nothing of
it is fed or emitted.

These are the fields of `TargetRows`; all but `hidden` and `logits` may be None:

    hidden            [B, K + 1, D]        hidden states of the tokens fed
    features          [B, K + 1, A * D]    states after the layers that the drafter taps, if any
    raw_logits        [B, K + 1, V]        of the model, if they are to be listed
    logits            [B, K + 1, V]        after the sampling rules
    cutoff            f32[B, K + 1]        lower logits are not sampled
    split, placement                       how logits and requests lie over a mesh of devices

The step that gives a request its first token has no draft, and uses row 0 alone: the logits after
the prompt's last token. One of two programs computes them:

    generate    prefill reads all but the last token. `run_step` feeds it as any last token, with a
                draft of 0 tokens, so that this step has K + 1 rows, too
    init        prefill reads the last token, too. `run_first_step` takes over its hidden state, and
                has row 0 alone

An engine's slots begin in the way of `generate`. `cli.stream_programs` calls `compute_rows` and
`verify_and_commit` in programs of its own. The other parts are called here alone.

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
from specjax.decode.token_info import TokenInfo, list_rows
from specjax.implementation import resolve_implementation
from specjax.processing.grammar import advance
from specjax.processing.token_counts import add_to_counts
from specjax.samplers.batch import verify_over_mesh
from specjax.samplers.rejection_sample import verify_draft
from specjax.types import Draft


@functools.partial(jax.jit, static_argnames="options")
def run_step(
    models: Models, state: DecodeState, *, options: StepOptions
) -> tuple[DecodeState, StepInfo]:
    """Computes rows, verifies, commits, extends and drafts; returns the next state and the info.

    The parameters in `models` are traced arguments, not constants of the program.

    Args:
      models: the target, and a drafter or None.
      state: from `prefill.run_prefill`, `run_first_step` or this function. `state.DecodeState`
        lists its fields with their shapes.
      options: checked options, compiled in.
    """
    state, rows = compute_rows(models, state, options)
    state, info = verify_and_commit(models.drafter, state, rows, options)
    return draft_next(models.drafter, state, rows, info, options), info


@functools.partial(jax.jit, static_argnames="options")
def run_first_step(
    models: Models,
    prefilled: tuple[DecodeState, tuple[jax.Array, jax.Array | None]],
    *,
    options: StepOptions,
) -> DecodeState:
    """Returns the state with the first generated token of each request, and drafts after it.

    The target is not run: `run_prefill` has fed it the last tokens of the prompts.

    Args:
      models: as in `run_step`.
      prefilled: from `prefill.run_prefill` with `reads_last`: the state, and a pair of the last
        tokens' hidden states [B, 1, D] and features [B, 1, A * D] or None.
      options: as in `run_step`.
    """
    state, outputs = prefilled
    rows = score_hidden(models.target, state, options.implementation, *outputs)
    state, info = verify_and_commit(models.drafter, state, rows, options)
    return draft_next(models.drafter, state, rows, info, options)


def verify_and_commit(
    drafter: Drafter | None, state: DecodeState, rows: TargetRows, options: StepOptions
) -> tuple[DecodeState, StepInfo]:
    """Verifies the pending drafts, commits what is emitted, and lets the drafter read it.

    Args:
      drafter: a drafter or None.
      state: from `compute_rows`; in `run_first_step`, from the prefill.
      rows: K + 1 rows from `compute_rows`; in `run_first_step`, row 0 alone.
      options: as in `run_step`.

    Returns:
      The state, whose draft is still the one just verified, and the info of the step.
    """
    pending_draft = state.draft
    if rows.hidden.shape[1] < count_rows(state):
        # From `run_first_step`: row 0 alone verifies a draft of width 0. The first step of
        # `generate` has K + 1 rows, and a draft of width K with 0 tokens.
        no_draft = Draft(pending_draft.token_ids[:, :0], num_tokens=pending_draft.num_tokens)
        state = state._replace(draft=no_draft)
    info = verify_pending(state, rows, options)
    committed, info = commit_emitted(state, rows, info)
    # The draft of width K goes back: the states of all steps have one structure.
    return extend_drafter(drafter, state, committed, rows)._replace(draft=pending_draft), info


def compute_rows(
    models: Models, state: DecodeState, options: StepOptions
) -> tuple[DecodeState, TargetRows]:
    """Returns the state with the target's cache after the tokens fed, and their K + 1 rows.

    The target is fed the last committed token and the pending draft.

    The draft is then discarded if the caller of `specjax.step` changed the method, so that drafts
    now have other fields: for instance no q. In that case only row 0 is used. K is never changed:
    `specjax.step` refuses that.

    Args:
      models: as in `run_step`.
      state: as in `run_step`.
      options: as in `run_step`.
    """
    target, drafter = models

    def score(k: int, cache: Any) -> tuple[Any, TargetRows]:
        """Returns the cache and the rows [B, k + 1, ...] of drafts of at most k tokens."""
        input_ids, positions = (x[:, : k + 1] for x in step_inputs(state))
        hidden, features, cache = apply_model(target, input_ids, positions, cache, models.taps)
        return cache, score_hidden(target, state, options.implementation, hidden, features)

    # Where K is adaptive, `score` is compiled for 0, K and the `draft_buckets`. The smallest that
    # holds the batch's longest draft runs, and its rows are padded with zeros to K + 1.
    cache, rows = run_smallest_k(state, score, state.target_cache, options.draft_buckets)
    state = state._replace(target_cache=cache)
    # Only the shape and the dtype of these hidden states [B, D] are read.
    return discard_incompatible_draft(drafter, state, rows.hidden[:, 0], options), rows


def verify_pending(state: DecodeState, rows: TargetRows, options: StepOptions) -> StepInfo:
    """Returns the verification of the pending drafts by the target's rows.

    Args:
      state: as in `verify_and_commit`, with a draft of K tokens for K + 1 rows.
      rows: as in `verify_and_commit`.
      options: as in `run_step`.
    """
    config, settings, draft = options.config, state.settings, state.draft
    resolved = resolve_implementation(options.implementation)
    k = count_rows(state) - 1
    rule = static_rule(config.verification_rule(settings.conditional_rates))
    # What the verifier is compiled for. The arrays in `inputs` are data: other values do not
    # recompile. Among them are `conditional_rates` f32[K], which method "synthetic" imitates.
    call = CallOptions(config.noise_dtype, resolved, k, rule)
    if rule == COUPLED:
        # Coupling compares drafted tokens with the target's own draws, and reads no probabilities.
        draft = draft.without_q()
    # In `run_first_step` the draft has width 0, which rates f32[K] do not fit.
    inputs = VerifyInputs(
        draft,
        rows.logits,
        rows.cutoff,
        keys=settings.keys,
        positions=state.lengths,
        temperature=settings.temperature,
        conditional_rates=settings.conditional_rates if k else None,
    )
    # A model with a placement has its rows over the devices of a mesh.
    if rows.placement is None:
        verification = verify_draft(inputs, options=call)
    else:
        verification = verify_over_mesh(inputs, rows.placement, rows.split, options=call)
    return StepInfo(verification, count_drafted(state))


def commit_emitted(
    state: DecodeState, rows: TargetRows, info: StepInfo
) -> tuple[DecodeState, StepInfo]:
    """Returns the state with a step's emitted tokens committed, and the info with what is listed.

    Everything that the state keeps of committed tokens grows with them, up to the end of each text:
    log-probabilities, origins, counts for penalties, the grammar's state, metrics, what is listed,
    and the history of drafts.

    Args:
      state: as in `verify_pending`.
      rows: as in `verify_pending`, for what is listed of each token.
      info: from `verify_pending`.
    """
    verification, num_drafted = info.verification, info.num_drafted
    settings, emitted = state.settings, verification.token_ids
    token_ids, lengths, finish = append_emitted(
        state.token_ids, state.lengths, verification, settings.eos_token_ids, settings.max_lengths
    )
    num_committed = lengths - state.lengths
    # 0 is a request that goes on. One that ended in an earlier step keeps its reason.
    finish = jnp.where(state.finish == 0, finish, state.finish)
    counts, grammar_state = state.counts, state.grammar_state
    if counts is not None:
        counts = add_to_counts(counts, emitted, num_committed)
    if grammar_state is not None:
        assert settings.sampling is not None
        grammar_state = advance(settings.sampling.grammar, grammar_state, emitted, num_committed)
    # Metrics leave out the step that gave a request its first token, because it has no draft. -1
    # makes `update_metrics` skip a request, as it does inactive ones.
    is_first = state.lengths == settings.prompt_lengths
    metrics = update_metrics(
        state.metrics,
        jnp.where(is_first, -1, num_drafted),
        verification,
        num_committed=num_committed,
        finish=finish,
    )

    def append_each(buffers: Any, values: Any) -> Any:
        """Appends [B, K + 1, ...] to the buffers [B, S, ...] of a pytree, which may be None."""
        return jax.tree.map(
            lambda x, y: append(x, state.lengths, num_committed, y), buffers, values
        )

    logprobs = append_each(state.logprobs, verification.logprobs)
    origins = append_each(state.origins, _origins(info))
    listed = _list_token_info(state, rows, emitted)
    # A state that stores nothing of them has no buffers: a host reads them of each step.
    stored = append_each(state.token_info, listed) if any(state.token_info) else state.token_info
    committed = state._replace(
        token_ids=token_ids,
        lengths=lengths,
        logprobs=logprobs,
        origins=origins,
        finish=finish,
        metrics=metrics,
        counts=counts,
        # `k_policy` is made from the state's `draft_history`. `update` returns this history with
        # the step added; None if K is fixed.
        draft_history=state.k_policy.update(num_drafted, verification.num_accepted, lengths),
        grammar_state=grammar_state,
        **stored._asdict(),
    )
    return committed, info._replace(token_info=listed)


def _origins(info: StepInfo) -> jax.Array:
    """Returns the `Origin` of each emitted token, i8[B, K + 1]."""
    num_accepted = info.verification.num_accepted[:, None]
    index = jnp.arange(info.verification.token_ids.shape[1], dtype=jnp.int32)[None]
    # A request emits its accepted tokens and one more. That is the bonus token after a whole draft,
    # or the token recovered in place of the rejected one. Later columns are not committed.
    all_accepted = num_accepted == info.num_drafted[:, None]
    last = jnp.where(all_accepted, Origin.BONUS, Origin.RECOVERED)
    return jnp.where(index < num_accepted, Origin.ACCEPTED, last).astype(jnp.int8)


def _list_token_info(state: DecodeState, rows: TargetRows, token_ids: jax.Array) -> TokenInfo:
    """Returns what is listed of the emitted tokens, [B, K + 1, ...].

    Args:
      state: as in `commit_emitted`.
      rows: as in `commit_emitted`.
      token_ids: i32[B, K + 1], the emitted tokens.
    """
    config, temperature = state.settings.token_info, state.settings.temperature
    if config is None:
        return TokenInfo()

    def list_first(k: int, _: Any) -> tuple[None, TokenInfo]:
        """Lists rows 0 to k; `run_smallest_k` pads, and has nothing to update here."""
        arrays = (token_ids, rows.raw_logits, rows.logits, rows.cutoff)
        ids, raw, logits, cutoff = jax.tree.map(lambda x: x[:, : k + 1], arrays)
        return None, list_rows(config, ids, raw, logits, cutoff, temperature)

    # Without `draft_buckets`: they save time in the target's layers, and listing runs none. Where K
    # is adaptive, 0 and K are enough.
    listed: TokenInfo = run_smallest_k(state, list_first, None)[1]
    return listed


def extend_drafter(
    drafter: Drafter | None, state: DecodeState, committed: DecodeState, rows: TargetRows
) -> DecodeState:
    """Returns the committed state, in which a drafter that reads features has read the tokens fed.

    The features of a token are the target's hidden states at it, of the layers that the drafter
    taps. Without taps they are the last hidden states, `rows.hidden`, and `rows.features` is None.
    A drafter that reads no features reads the committed tokens later, in `draft_next`.

    Args:
      drafter: a drafter or None.
      state: before the commit, as in `commit_emitted`.
      committed: from `commit_emitted`.
      rows: as in `verify_and_commit`; one for each token fed.
    """
    if drafter is None or not drafter.reads_features:
        return committed
    input_ids, positions = step_inputs(state)
    num_committed = committed.lengths - state.lengths
    index = jnp.arange(count_rows(state), dtype=jnp.int32)[None]
    # The target was fed the last token and the draft. A step that accepts n drafted tokens commits
    # n + 1, and the drafter reads the first n + 1 tokens fed. Position -1 is no token. Column i has
    # a token and the target's state at this token. A drafter that pairs otherwise shifts by itself.
    positions = jnp.where(index < num_committed[:, None], positions, -1)
    features = rows.features if drafter.taps else rows.hidden
    drafter_state = drafter.extend(
        drafter.params, committed.drafter_state, input_ids, positions, features
    )
    return committed._replace(drafter_state=drafter_state)
