"""The decode loop: prefill, then verify the pending draft, commit, propose the next.

    init:  prompt -> target's last row -> first token -> first draft
    step:  pending draft -> target's K + 1 rows -> verification -> commit -> next draft
    generate: init and steps until every request has ended, under one `jit`

State is one pytree; parameters are arguments. Plain decoding is the loop without drafts.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.acceptance import num_usable
from specjax.api import rejection_sample
from specjax.checks import check_keys, check_prompt, check_shape, read_array
from specjax.tokens import append, commit
from specjax.config import SpeculativeConfig
from specjax.metrics import Metrics, init_metrics, update_metrics
from specjax.typing import Draft, Drafter, Model, Origin, Verification

__all__ = ["DecodeState", "Generation", "Settings", "StepInfo", "generate", "init", "step"]


class Settings(NamedTuple):
    """What stays the same from step to step; data, so that no change of it recompiles.

    Attributes:
      keys: typed threefry keys, [B].
      temperature: f32[B].
      max_lengths: i32[B].
      eos_token_ids: i32[E].
      conditional_rates: f32[K] of synthetic acceptance, or None.
    """

    keys: jax.Array
    temperature: jax.Array
    max_lengths: jax.Array
    eos_token_ids: jax.Array
    conditional_rates: jax.Array | None


class DecodeState(NamedTuple):
    """All that a step needs and gives back.

    Attributes:
      token_ids: i32[B, L], committed tokens, -1 behind them.
      lengths: i32[B].
      logprobs: f32[B, L], log p of each generated token, 0 elsewhere.
      origins: i8[B, L], 0 for the prompt and padding, else one of `Origin`.
      finish: i8[B], 0 or one of `Finish`.
      draft: the pending `Draft`.
      target_cache: the target's cache.
      drafter_state: the drafter's, None without a drafter.
      metrics: what speculation achieved so far.
      settings: keys, temperatures, limits.
    """

    token_ids: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    draft: Draft
    target_cache: Any
    drafter_state: Any
    metrics: Metrics
    settings: Settings


class StepInfo(NamedTuple):
    """What one step did: its `verification`, and `num_drafted` i32[B], -1 if inactive."""

    verification: Verification
    num_drafted: jax.Array


class Generation(NamedTuple):
    """The outcome of `generate`: the fields of `DecodeState` that outlive the loop."""

    token_ids: jax.Array
    lengths: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    metrics: Metrics


def init(
    target: Model,
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    *,
    keys: jax.Array,
    config: SpeculativeConfig | None = None,
    max_new_tokens: int,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
) -> DecodeState:
    """Reads the prompts, draws the first token of each request and the first draft.

    Arguments are those of `generate`; `step` goes on from the state.

    Args:
      target: the model whose law the output follows.
      drafter: what proposes tokens, or None.
      prompt_token_ids: i32[B, L].
      prompt_lengths: i32[B], in [1, L].
      keys: typed threefry keys, [B] or ().
      config: a `SpeculativeConfig`; None is the default one.
      max_new_tokens: a Python int >= 1.
      temperature: f32, [B] or scalar.
      eos_token_ids: ints or i32[E].

    Returns:
      `DecodeState` with one token generated.

    Raises:
      ValueError: for what `generate` refuses.
    """
    arguments = _read_arguments(
        drafter,
        prompt_token_ids,
        prompt_lengths,
        keys,
        config,
        max_new_tokens,
        temperature,
        eos_token_ids,
    )
    return _init(target, drafter, **arguments)


@functools.partial(jax.jit, static_argnames=("config", "room"))
def _init(
    target: Model,
    drafter: Drafter | None,
    *,
    prompt: jax.Array,
    lengths: jax.Array,
    settings: Settings,
    config: SpeculativeConfig,
    room: int,
) -> DecodeState:
    size, longest = prompt.shape
    settings = settings._replace(
        keys=_request_keys(settings.keys, size),
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
    state, _ = _verify_and_commit(state, logits, config)
    return _propose(drafter, state, hidden, config)


def step(
    target: Model,
    drafter: Drafter | None,
    state: DecodeState,
    *,
    config: SpeculativeConfig | None = None,
) -> tuple[DecodeState, StepInfo]:
    """One speculative step of every request that has not ended.

    Args:
      target: as in `init`.
      drafter: as in `init`.
      state: from `init` or `step`.
      config: as in `init`.

    Returns:
      The next state, and what the step did.
    """
    config = SpeculativeConfig() if config is None else config
    return _step(target, drafter, state, config=config.compile_key())


@functools.partial(jax.jit, static_argnames="config")
def _step(
    target: Model, drafter: Drafter | None, state: DecodeState, *, config: SpeculativeConfig
) -> tuple[DecodeState, StepInfo]:
    draft = state.draft
    k = draft.token_ids.shape[1]
    num_drafted = num_usable(draft.token_ids, draft.num_tokens)
    last = _take_place(state.token_ids, state.lengths - 1)
    fed = jnp.maximum(jnp.concatenate([last[:, None], draft.token_ids], axis=1), 0)
    place = jnp.arange(k + 1, dtype=jnp.int32)[None]
    positions = jnp.where(
        place <= num_drafted[:, None], state.lengths[:, None] - 1 + place, jnp.int32(-1)
    )
    hidden, cache = target.apply(target.params, fed, positions, state.target_cache)
    logits = target.logits(target.params, hidden)
    state, info = _verify_and_commit(state._replace(target_cache=cache), logits, config)
    state = state._replace(metrics=update_metrics(state.metrics, num_drafted, info.verification))
    deciding = _take_place(hidden, info.verification.num_accepted)
    return _propose(drafter, state, deciding, config), info


def _verify_and_commit(
    state: DecodeState, logits: jax.Array, config: SpeculativeConfig
) -> tuple[DecodeState, StepInfo]:
    """Verifies the pending draft against rows of target logits and commits the outcome."""
    settings, draft = state.settings, state.draft
    k = draft.token_ids.shape[1]
    verification = rejection_sample(
        draft,
        logits,
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
    num_drafted = num_usable(draft.token_ids, draft.num_tokens)
    accepted = verification.num_accepted[:, None]
    place = jnp.arange(k + 1, dtype=jnp.int32)[None]
    last = jnp.where(accepted == num_drafted[:, None], Origin.BONUS, Origin.RECOVERED)
    origins = jnp.where(place < accepted, Origin.ACCEPTED, last).astype(jnp.int8)
    counts = lengths - state.lengths
    state = state._replace(
        token_ids=token_ids,
        lengths=lengths,
        logprobs=append(state.logprobs, state.lengths, counts, verification.logprobs),
        origins=append(state.origins, state.lengths, counts, origins),
        finish=jnp.where(state.finish == 0, finish, state.finish),
    )
    return state, StepInfo(verification, num_drafted)


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
    )
    return state._replace(draft=draft, drafter_state=drafter_state)


def _request_keys(keys: jax.Array, size: int) -> jax.Array:
    """One key per request, whichever came: a single one folds in each row index."""
    if keys.shape:
        return keys
    return jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(size, dtype=jnp.uint32))


def _take_place(values: jax.Array, index: jax.Array) -> jax.Array:
    """Entry `index[b]` of row b: [B, L, ...] -> [B, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(
        values, index
    )


def generate(
    target: Model,
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    *,
    keys: jax.Array,
    config: SpeculativeConfig | None = None,
    max_new_tokens: int,
    temperature: Any = 1.0,
    eos_token_ids: Any = (),
) -> Generation:
    """Generates with speculation; the output follows the target's law exactly.

    A request's tokens depend on its key, prompt and temperature alone, and with
    temperature 0 they are those of plain greedy decoding.

    Args:
      target: the model whose law the output follows.
      drafter: `model_drafter(model)`, `ngram_drafter()`, one of your own, or None for plain
        decoding through the same code.
      prompt_token_ids: i32[B, L], padded behind each prompt with anything.
      prompt_lengths: i32[B], in [1, L].
      keys: typed threefry keys, [B] or (). With () each request folds in its index.
      config: a `SpeculativeConfig`; None is the default one.
      max_new_tokens: most tokens generated per request, a Python int >= 1.
      temperature: f32, [B] or scalar, >= 0; below 1e-5 the request is greedy.
      eos_token_ids: ints or i32[E], tokens that end a request; they are kept.

    Returns:
      `Generation` with buffers of L + max_new_tokens places.

    Raises:
      ValueError: for empty prompts, wrong shapes or keys, max_new_tokens < 1.
    """
    arguments = _read_arguments(
        drafter,
        prompt_token_ids,
        prompt_lengths,
        keys,
        config,
        max_new_tokens,
        temperature,
        eos_token_ids,
    )
    return _generate(target, drafter, **arguments)


@functools.partial(jax.jit, static_argnames=("config", "room"))
def _generate(
    target: Model, drafter: Drafter | None, *, config: SpeculativeConfig, **prompt: Any
) -> Generation:
    state = jax.lax.while_loop(
        lambda state: jnp.any(state.finish == 0),
        lambda state: _step(target, drafter, state, config=config)[0],
        _init(target, drafter, config=config, **prompt),
    )
    return Generation(*(getattr(state, name) for name in Generation._fields))


def _read_arguments(
    drafter: Drafter | None,
    prompt_token_ids: Any,
    prompt_lengths: Any,
    keys: jax.Array,
    config: SpeculativeConfig | None,
    max_new_tokens: int,
    temperature: Any,
    eos_token_ids: Any,
) -> dict[str, Any]:
    """The checked arguments of `_init`."""
    config = SpeculativeConfig() if config is None else config
    prompt, lengths = check_prompt(prompt_token_ids, prompt_lengths, max_new_tokens)
    size = prompt.shape[0]
    temperature = read_array("temperature", temperature, jnp.float32, (), (size,))
    settings = Settings(
        keys=check_keys(keys, size),
        temperature=temperature,
        max_lengths=lengths + max_new_tokens,
        eos_token_ids=jnp.asarray(eos_token_ids, jnp.int32).reshape(-1),
        conditional_rates=None if drafter is None else config.conditional_rates(),
    )
    return {
        "prompt": prompt,
        "lengths": lengths,
        "settings": settings,
        "config": config.compile_key(),
        "room": prompt.shape[1] + max_new_tokens,
    }
