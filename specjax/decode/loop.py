"""One step of decoding, and the loop of them, compiled.

    init:  prompt -> target's last row -> first token -> first draft
    step:  pending draft -> target's K + 1 rows -> verification -> commit -> next draft
    generate: init and steps until every request has ended, under one `jit`

State is one pytree; parameters are arguments. Plain decoding is the loop without drafts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.core.acceptance import num_valid_drafts
from specjax.core.noise import fold_in_rows
from specjax.decode.commit import append, commit
from specjax.decode.logprobs import TopLogprobs, check_listed, top_logprobs
from specjax.decode.metrics import init_metrics, update_metrics
from specjax.decode.state import DecodeState, Generation, Settings, StepInfo
from specjax.mesh import pvary_like
from specjax.processing.apply_sampling import apply_sampling
from specjax.processing.token_counts import History, TokenCounts, count_tokens, update_counts
from specjax.samplers.api import rejection_sample
from specjax.typing import Draft, Drafter, Model, Origin

__all__ = ["run_generate", "run_init", "run_step"]


@functools.partial(jax.jit, static_argnames=("config", "room"))
def run_init(
    target: Model,
    drafter: Drafter | None,
    *,
    prompt: jax.Array,
    lengths: jax.Array,
    settings: Settings,
    config: SpeculativeConfig,
    room: int,
) -> DecodeState:
    """`init` on checked arguments."""
    size, longest = prompt.shape
    settings = settings._replace(
        keys=settings.keys if settings.keys.shape else fold_in_rows(settings.keys, size),
        temperature=jnp.broadcast_to(settings.temperature, (size,)),
    )
    place = jnp.arange(longest, dtype=jnp.int32)[None]
    inside = place < lengths[:, None]
    fed = jnp.where(inside, prompt, 0)
    cache = target.init_cache(size, room)
    hidden, cache = target.apply(target.params, fed, jnp.where(inside, place, -1), cache)
    hidden = _take_place(hidden, lengths - 1)
    buffer = jnp.pad(
        jnp.where(inside, prompt, -1), ((0, 0), (0, room - longest)), constant_values=-1
    )
    k = 0 if drafter is None else config.num_speculative_tokens
    state = DecodeState(
        token_ids=buffer,
        lengths=lengths,
        logprobs=jnp.zeros(buffer.shape, jnp.float32),
        origins=jnp.zeros(buffer.shape, jnp.int8),
        finish=jnp.zeros((size,), jnp.int8),
        draft=Draft(jnp.zeros((size, 0), jnp.int32), num_tokens=jnp.zeros((size,), jnp.int32)),
        target_cache=cache,
        drafter_state=None if drafter is None else drafter.init(drafter.params, fed, lengths, room),
        metrics=init_metrics(size, k),
        settings=settings,
    )
    # The first token is the bonus of a step without drafts.
    logits = target.logits(target.params, hidden)[:, None]
    state = state._replace(
        counts=_first_counts(settings, prompt, lengths, logits.shape[-1]),
        top_logprobs=_no_logprobs(settings, buffer.shape),
    )
    state, _ = _verify_and_commit(state, logits, config)
    return _propose(drafter, state, hidden, config)


@functools.partial(jax.jit, static_argnames="config")
def run_step(
    target: Model, drafter: Drafter | None, state: DecodeState, *, config: SpeculativeConfig
) -> tuple[DecodeState, StepInfo]:
    """`step` on a compile key."""
    draft = state.draft
    k = draft.token_ids.shape[1]
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    last = _take_place(state.token_ids, state.lengths - 1)
    fed = jnp.maximum(jnp.concatenate([last[:, None], draft.token_ids], axis=1), 0)
    place = jnp.arange(k + 1, dtype=jnp.int32)[None]
    positions = jnp.where(
        place <= num_drafted[:, None], state.lengths[:, None] - 1 + place, jnp.int32(-1)
    )
    hidden, cache = target.apply(target.params, fed, positions, state.target_cache)
    logits = target.logits(target.params, hidden)
    before = state.lengths
    state, info = _verify_and_commit(state._replace(target_cache=cache), logits, config)
    metrics = update_metrics(
        state.metrics,
        num_drafted,
        info.verification,
        num_committed=state.lengths - before,
        finish=state.finish,
    )
    state = state._replace(metrics=metrics)
    deciding = _take_place(hidden, info.verification.num_accepted)
    return _propose(drafter, state, deciding, config), info


def _verify_and_commit(
    state: DecodeState, logits: jax.Array, config: SpeculativeConfig
) -> tuple[DecodeState, StepInfo]:
    """Verifies the pending draft against rows of target logits and commits the outcome."""
    settings, draft = state.settings, state.draft
    k = draft.token_ids.shape[1]
    asked, cutoff = apply_sampling(
        logits,
        settings.sampling,
        temperature=settings.temperature,
        history=_history(state),
        drafted_token_ids=draft.token_ids,
    )
    verification = rejection_sample(
        draft,
        asked,
        cutoff=cutoff,
        keys=settings.keys,
        positions=state.lengths,
        temperature=settings.temperature,
        conditional_rates=settings.conditional_rates if k else None,
        noise_dtype=config.noise_dtype,
    )
    token_ids, lengths, finish = commit(
        state.token_ids,
        state.lengths,
        verification,
        eos_token_ids=settings.eos_token_ids,
        max_lengths=settings.max_lengths,
    )
    num_drafted = num_valid_drafts(draft.token_ids, draft.num_tokens)
    accepted = verification.num_accepted[:, None]
    place = jnp.arange(k + 1, dtype=jnp.int32)[None]
    last = jnp.where(accepted == num_drafted[:, None], Origin.BONUS, Origin.RECOVERED)
    origins = jnp.where(place < accepted, Origin.ACCEPTED, last).astype(jnp.int8)
    counts, emitted = lengths - state.lengths, verification.token_ids
    law = (asked, settings.temperature, cutoff)
    state = state._replace(
        counts=None if state.counts is None else update_counts(state.counts, emitted, counts),
        top_logprobs=_append_logprobs(state, logits, law, emitted, counts),
        token_ids=token_ids,
        lengths=lengths,
        logprobs=append(state.logprobs, state.lengths, counts, verification.logprobs),
        origins=append(state.origins, state.lengths, counts, origins),
        finish=jnp.where(state.finish == 0, finish, state.finish),
    )
    return state, StepInfo(verification, num_drafted)


def _history(state: DecodeState) -> History:
    return History(state.token_ids, state.lengths, state.counts)


def _first_counts(
    settings: Settings, prompt: jax.Array, lengths: jax.Array, vocab_size: int
) -> TokenCounts | None:
    """Counts of the prompt, as far as a penalty reads them."""
    asked = settings.sampling
    if asked is None:
        return None
    penalties = (asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty)
    if all(penalty is None for penalty in penalties):
        return None
    counts = count_tokens(prompt, lengths, vocab_size)
    return counts if asked.repetition_penalty is not None else counts._replace(prompt=None)


def _no_logprobs(settings: Settings, shape: tuple[int, ...]) -> TopLogprobs | None:
    if settings.logprobs is None:
        return None
    listed = (*shape, settings.logprobs.num)
    return TopLogprobs(
        token_ids=jnp.full(listed, -1, jnp.int32),
        logprobs=jnp.zeros(listed, jnp.float32),
        rank=jnp.zeros(shape, jnp.int32),
        logprob=jnp.zeros(shape, jnp.float32),
    )


def _append_logprobs(
    state: DecodeState,
    logits: jax.Array,
    law: tuple[jax.Array, jax.Array, jax.Array | None],
    token_ids: jax.Array,
    counts: jax.Array,
) -> TopLogprobs | None:
    """With those of the emitted tokens [B, K + 1], of the raw logits or of the processed law."""
    kept, asked = state.top_logprobs, state.settings.logprobs
    if kept is None or asked is None:
        return None
    check_listed("num_logprobs", asked.num, logits.shape[-1])
    if asked.mode == "raw":
        found = top_logprobs(logits, token_ids, asked.num)
    else:
        processed, temperature, cutoff = law
        found = top_logprobs(
            processed, token_ids, asked.num, temperature=temperature, cutoff=cutoff
        )
    pairs = zip(kept, found, strict=True)
    return TopLogprobs(*(append(old, state.lengths, counts, new) for old, new in pairs))


def _propose(
    drafter: Drafter | None, state: DecodeState, hidden: jax.Array, config: SpeculativeConfig
) -> DecodeState:
    """Puts the next draft into the state; ended requests are inactive from here on."""
    settings = state.settings
    # One token is always emitted besides the drafts, so that as many fit as room less one.
    room = settings.max_lengths - state.lengths - 1
    k = 0 if drafter is None else config.num_speculative_tokens
    wanted = jnp.where(state.finish == 0, jnp.clip(room, 0, k), jnp.int32(-1))
    if drafter is None:
        draft = Draft(jnp.zeros((state.lengths.shape[0], 0), jnp.int32), num_tokens=wanted)
        return state._replace(draft=draft)
    asked: dict[str, Any] = {}
    if settings.sampling is not None:
        asked = {"sampling": settings.sampling, "history": _history(state)}
    draft, drafter_state = drafter.propose(
        drafter.params,
        state.drafter_state,
        state.token_ids,
        hidden,
        keys=settings.keys,
        positions=state.lengths,
        num_tokens=wanted,
        temperature=settings.temperature,
        config=config,
        **asked,
    )
    # Whatever the drafter says, an ended request drafts nothing, another goes on, and the room is
    # kept.
    usable = num_valid_drafts(draft.token_ids, draft.num_tokens)
    num_tokens = jnp.minimum(jnp.maximum(usable, 0), wanted)
    return state._replace(draft=draft._replace(num_tokens=num_tokens), drafter_state=drafter_state)


def _take_place(values: jax.Array, index: jax.Array) -> jax.Array:
    """Entry `index[b]` of row b: [B, L, ...] -> [B, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(
        values, index
    )


@functools.partial(jax.jit, static_argnames=("config", "room"))
def run_generate(
    target: Model, drafter: Drafter | None, *, config: SpeculativeConfig, **prompt: Any
) -> Generation:
    """`generate` on checked arguments."""
    state = run_init(target, drafter, config=config, **prompt)
    state = jax.lax.while_loop(
        lambda state: jnp.any(state.finish == 0),
        lambda state: pvary_like(run_step(target, drafter, state, config=config)[0], state),
        pvary_like(state, state, target, drafter),
    )
    return Generation(*(getattr(state, name) for name in Generation._fields))
