"""One step of decoding, compiled.

    pending draft -> target's K + 1 rows -> verification -> commit -> next draft

The first step of a request has no pending draft: its row 0 follows the prompt, and gives the first
token. The state is one pytree, and parameters are arguments. Without a drafter K = 0: plain
decoding. Each part of a step is a function of its own, for a host that compiles them apart.
Arguments were checked by `generate`. What the functions of a model or a drafter return is checked
here, where it enters; functions of arrays are called from there on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.config import SpeculativeConfig
from specjax.decode.choose_k import add_step
from specjax.decode.commit import Origin, append, append_emitted
from specjax.decode.draft_next import draft_next, drop_other_draft, most_drafted
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import TopLogprobs, list_logprobs
from specjax.decode.metrics import update_metrics
from specjax.decode.state_and_info import DecodeState, StepInfo
from specjax.decode.target_rows import (
    TargetRows,
    compute_rows,
    count_drafted,
    count_rows,
    fed_tokens,
    on_rows,
    take_at,
)
from specjax.implementation import Implementation, resolve_implementation
from specjax.processing.grammar import advance
from specjax.processing.token_counts import add_to_counts
from specjax.samplers.batch import verify_over_mesh
from specjax.samplers.rejection_sample import verify_draft
from specjax.types import Draft, Model, Verification

__all__ = ["commit_rows", "run_step"]


@functools.partial(jax.jit, static_argnames=("config", "implementation", "row_buckets"))
def run_step(
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
    row_buckets: tuple[int, ...] = (),
) -> tuple[DecodeState, StepInfo]:
    """Returns what `step` returns.

    Args:
      target: as in `step`.
      drafter: as in `step`.
      state: as in `step`.
      config: a compile key.
      implementation: a resolved one if the caller named one, else None.
      row_buckets: as `buckets` of `on_rows`.
    """
    taps = () if drafter is None else drafter.taps

    def compute(k: int, cache: Any) -> tuple[Any, TargetRows]:
        return compute_rows(target, state, cache, k=k, implementation=implementation, taps=taps)

    cache, rows = on_rows(state, compute, state.target_cache, row_buckets)
    options: dict[str, Any] = {"config": config, "implementation": implementation}
    state = state._replace(target_cache=cache)
    state = drop_other_draft(drafter, state, rows.hidden[:, 0], **options)
    state, info, hidden = commit_rows(drafter, state, rows, **options)
    state = draft_next(drafter, state, hidden, **options)
    return state, info


def commit_rows(
    drafter: Drafter | None,
    state: DecodeState,
    rows: TargetRows,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> tuple[DecodeState, StepInfo, jax.Array]:
    """Verifies and commits: the second part of `run_step`.

    Args:
      drafter: as in `run_step`.
      state: before the step, but for the target's cache, which is not read.
      rows: from `compute_rows`; the first alone if nothing was drafted.
      config: as in `run_step`.
      implementation: as in `run_step`.

    Returns:
      The state without a draft, of which `num_tokens` says how many tokens are to be drafted at
      most; what `step` says of the step; and the hidden state [B, D] that decided the last token.
    """
    pending = state.draft
    if rows.hidden.shape[1] < count_rows(state):
        none = Draft(pending.token_ids[:, :0], num_tokens=pending.num_tokens)
        state = state._replace(draft=none)
    lengths, num_drafted = state.lengths, count_drafted(state)
    resolved = resolve_implementation(implementation)
    k, method = count_rows(state) - 1, config.verification_method
    options = CallOptions(config.noise_dtype, resolved, k, method, config.rule if k else None)
    verification = _verify(state, rows, options)
    listed = _list_logprobs(state, rows, verification.token_ids)
    input_ids, positions = fed_tokens(state)
    state = _commit(state, verification, listed, num_drafted)
    num_committed = state.lengths - lengths
    # The token after the prompt is no step of speculation: nothing could be drafted.
    is_first = lengths == state.settings.prompt_lengths
    metrics = update_metrics(
        state.metrics,
        jnp.where(is_first, -1, num_drafted),
        verification,
        num_committed=num_committed,
        finish=state.finish,
    )
    state = state._replace(metrics=metrics)
    if drafter is not None and drafter.reads_features:
        index = jnp.arange(count_rows(state), dtype=jnp.int32)[None]
        positions = jnp.where(index < num_committed[:, None], positions, -1)
        features = rows.features if drafter.taps else rows.hidden
        drafter_state = drafter.extend(
            drafter.params, state.drafter_state, input_ids, positions, features
        )
        state = state._replace(drafter_state=drafter_state)
    if state.draft_history is not None:
        num_accepted = verification.num_accepted
        history = add_step(state.draft_history, num_drafted, num_accepted, state.lengths)
        state = state._replace(draft_history=history)
    num_tokens = most_drafted(drafter, state, config)
    state = state._replace(draft=pending._replace(num_tokens=num_tokens))
    hidden = take_at(rows.hidden, verification.num_accepted)
    return state, StepInfo(verification, num_drafted), hidden


def _verify(state: DecodeState, rows: TargetRows, options: CallOptions) -> Verification:
    """Verifies the pending drafts; without any, the first row alone is read."""
    settings, draft = state.settings, state.draft
    if options.method == "coupled":
        draft = Draft(draft.token_ids, num_tokens=draft.num_tokens)  # nothing else is read
    arrays = VerifyArrays.from_draft(
        draft,
        rows.logits,
        keys=settings.keys,
        positions=state.lengths,
        temperature=settings.temperature,
        cutoff=rows.cutoff,
        conditional_rates=settings.conditional_rates if options.max_draft_tokens else None,
    )
    if rows.placement is None:
        return verify_draft(arrays, options=options)
    return verify_over_mesh(arrays, rows.placement, rows.split, options=options)


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
        return None, list_logprobs(config, emitted, raw, (logits, temperature, cutoff))

    return on_rows(state, list_rows, None)[1]


def _commit(
    state: DecodeState,
    verification: Verification,
    listed: TopLogprobs | None,
    num_drafted: jax.Array,
) -> DecodeState:
    """Appends what a step decided."""
    settings = state.settings
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
    grammar_state = state.grammar_state
    if grammar_state is not None:
        assert settings.sampling is not None
        grammar = settings.sampling.grammar
        grammar_state = advance(grammar, grammar_state, emitted, num_committed)
    return state._replace(
        counts=counts,
        grammar_state=grammar_state,
        top_logprobs=_append_each(state.top_logprobs, state.lengths, num_committed, listed),
        token_ids=token_ids,
        lengths=lengths,
        logprobs=append(state.logprobs, state.lengths, num_committed, verification.logprobs),
        origins=append(state.origins, state.lengths, num_committed, origins),
        finish=jnp.where(state.finish == 0, finish, state.finish),
    )


def _append_each(buffers: Any, lengths: jax.Array, counts: jax.Array, values: Any) -> Any:
    """Appends to every array of a pytree, which may be None."""
    return jax.tree.map(lambda buffer, x: append(buffer, lengths, counts, x), buffers, values)
