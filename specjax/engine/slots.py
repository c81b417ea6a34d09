"""The device's part: pure functions of a state of slots and of the row of a prompt being read."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from specjax.config import SpeculativeConfig
from specjax.decode.adaptive_k import init_history
from specjax.decode.drafters import Drafter
from specjax.decode.logprobs import TopLogprobs, empty_logprobs
from specjax.decode.metrics import Metrics, init_metrics
from specjax.decode.options import StaticOptions
from specjax.decode.prefill import run_prefill
from specjax.decode.state import DecodeState, RequestBatch, Settings
from specjax.decode.step import run_step
from specjax.decode.target_step import apply_model, count_drafted, count_rows
from specjax.implementation import Implementation
from specjax.processing.grammar import start_states
from specjax.processing.sampling_params import SamplingParams
from specjax.processing.token_counts import count_committed
from specjax.types import Model

__all__ = [
    "PromptRow",
    "RequestSettings",
    "StepOutput",
    "admit",
    "empty_slots",
    "find_axes",
    "grow_row",
    "new_row",
    "prefill_chunk",
    "put",
    "put_beginning",
    "put_row",
    "release",
    "row_bytes",
    "state_axes",
    "step_slots",
    "take",
    "take_row",
]

_State = TypeVar("_State")
# Of a leaf that all requests share.
_NO_BATCH_AXIS = -1
# The `finish` of a slot that no request is in, and of one that was taken from its request.
_EMPTY_SLOT = -1


class PromptRow(NamedTuple):
    """What the models know of a prompt while it is read: states of a batch of one, or of several.

    Attributes:
      target_cache: the target's cache.
      drafter_state: the drafter's state, None without a drafter.
    """

    target_cache: Any
    drafter_state: Any


class RequestSettings(NamedTuple):
    """What a request asks for, as data.

    Attributes:
      key: typed threefry key, ().
      sample: i32, the index of a sample, folded into the key; -1 folds nothing.
      temperature: f32.
      prompt_length: i32.
      max_length: i32, committed tokens at which the request ends.
      stop_token_ids: i32[E], tokens that end the request, filled up with -2.
      sampling: `SamplingParams` of one request without a batch axis, or None.
    """

    key: jax.Array
    sample: Any
    temperature: Any
    prompt_length: Any
    max_length: Any
    stop_token_ids: Any
    sampling: SamplingParams | None


class StepOutput(NamedTuple):
    """What a step committed, for the host.

    Attributes:
      token_ids: i32[B, K + 1], of which the first `num_tokens` of a request are new.
      num_tokens: i32[B], tokens that each request gained.
      logprobs: f32[B, K + 1].
      origins: i8[B, K + 1].
      finish: i8[B], as in `DecodeState`; negative for an empty slot.
      metrics: `Metrics` of the requests so far.
      top_logprobs: `TopLogprobs` [B, K + 1, ...], or None.
      drafted: i32[B, K], the pending draft, -1 after its end; None unless a host masks rows.
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    metrics: Metrics
    top_logprobs: TopLogprobs | None
    drafted: jax.Array | None


def find_axes(make: Callable[[int], Any], name: str) -> Any:
    """Returns the axis of each leaf of `make(batch_size)` that holds the requests.

    Args:
      make: returns a pytree of arrays for a batch size; it is traced, and nothing is made.
      name: of the pytree, for the error.

    Returns:
      The pytree with an int for each leaf.

    Raises:
      ValueError: for a leaf with no such axis. A row of it cannot be given to another request.

    Example:
      >>> import jax.numpy as jnp
      >>> find_axes(lambda size: (jnp.zeros((4, size, 9)), jnp.zeros(size)), "the cache")
      (1, 0)
    """
    small, large = (jax.eval_shape(lambda size=size: make(size)) for size in (2, 3))

    def axis_of(one: Any, other: Any) -> int:
        pairs = enumerate(zip(one.shape, other.shape, strict=True))
        axes = [axis for axis, sizes in pairs if sizes == (2, 3)]
        if len(axes) != 1:
            raise ValueError(
                f"{name} has a leaf of shape {one.shape} for two requests and {other.shape} for "
                "three; an engine gives one request's row to the next, so each leaf needs one axis "
                "of the batch size."
            )
        return axes[0]

    return jax.tree.map(axis_of, small, large)


def state_axes(state: DecodeState, cache_axes: Any, drafter_axes: Any) -> tuple[int, ...]:
    """Returns the axis of each leaf of a state that holds the requests; hashable, so static.

    Args:
      state: of arrays or of their shapes.
      cache_axes: of the target's cache, from `find_axes`.
      drafter_axes: of the drafter's state.
    """
    axes = jax.tree.map(lambda _: 0, state)
    names = ("conditional_rates", "k_by_rate")
    shared: dict[str, Any] = {
        name: _NO_BATCH_AXIS for name in names if getattr(axes.settings, name) is not None
    }
    sampling = axes.settings.sampling
    if sampling is not None:
        grammar = jax.tree.map(lambda _: _NO_BATCH_AXIS, sampling.grammar)
        shared["sampling"] = sampling._replace(grammar=grammar)
    draft = axes.draft
    if draft.token_map is not None:
        draft = draft._replace(token_map=_NO_BATCH_AXIS)
    axes = axes._replace(
        target_cache=cache_axes,
        drafter_state=drafter_axes,
        draft=draft,
        settings=axes.settings._replace(**shared),
    )
    return tuple(jax.tree.leaves(axes))


def take_row(state: _State, axes: tuple[int, ...], slot: jax.Array) -> _State:
    """Returns the state of the request in a slot: a batch of one."""
    leaves, structure = jax.tree.flatten(state)

    def take(leaf: jax.Array, axis: int) -> jax.Array:
        return leaf if axis == _NO_BATCH_AXIS else jax.lax.dynamic_slice_in_dim(leaf, slot, 1, axis)

    return jax.tree.unflatten(structure, map(take, leaves, axes))


def put_row(state: _State, row: _State, axes: tuple[int, ...], slot: jax.Array) -> _State:
    """Returns the state with the request of a batch of one in a slot.

    Args:
      state: of all slots.
      row: of one request; what all requests share is not read.
      axes: from `state_axes`.
      slot: i32.
    """
    leaves, structure = jax.tree.flatten(state)

    def put(leaf: jax.Array, value: jax.Array, axis: int) -> jax.Array:
        if axis == _NO_BATCH_AXIS:
            return leaf
        return jax.lax.dynamic_update_slice_in_dim(leaf, value, slot, axis)

    return jax.tree.unflatten(structure, map(put, leaves, jax.tree.leaves(row), axes))


def put_beginning(whole: _State, part: _State) -> _State:
    """Returns a pytree of arrays with another, of a shorter length, at the beginning of each leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> put_beginning([jnp.zeros((1, 4)), jnp.zeros(2)], [jnp.ones((1, 2)), jnp.ones(2)])
      [Array([[1., 1., 0., 0.]], dtype=float32), Array([1., 1.], dtype=float32)]
    """

    def put(leaf: jax.Array, value: jax.Array) -> jax.Array:
        if leaf.shape == value.shape:
            return value
        return jax.lax.dynamic_update_slice(leaf, value, (0,) * leaf.ndim)

    return jax.tree.map(put, whole, part)


def row_bytes(state: Any, axes: tuple[int, ...]) -> int:
    """Returns how many bytes of a state belong to one request."""
    leaves = zip(jax.tree.leaves(state), axes, strict=True)
    return sum(
        leaf.size * leaf.dtype.itemsize // leaf.shape[axis]
        for leaf, axis in leaves
        if axis != _NO_BATCH_AXIS
    )


@functools.partial(jax.jit, static_argnames=("size", "max_length", "config", "implementation"))
def empty_slots(
    target: Model,
    drafter: Drafter | None,
    settings: Settings,
    *,
    size: int,
    max_length: int,
    config: SpeculativeConfig,
    implementation: Implementation | None,
) -> DecodeState:
    """Returns a state of `size` slots with no request in any.

    Args:
      target: as in `Engine`.
      drafter: as in `Engine`.
      settings: of one empty request in each slot, with [B, E] end-of-sequence ids.
      size: B.
      max_length: S.
      config: a compile key.
      implementation: as in `run_step`.
    """
    ones = jnp.ones((size,), jnp.int32)
    requests = RequestBatch(jnp.zeros((size, max_length), jnp.int32), ones, settings)
    options = StaticOptions(config, implementation, chunk_size=1)
    shapes = run_prefill.eval_shape(target, drafter, requests, options=options)
    others = shapes._replace(target_cache=None, drafter_state=None, settings=None)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), others)
    draft = state.draft._replace(num_tokens=jnp.full((size,), -1, jnp.int32))
    state = state._replace(
        lengths=ones,
        finish=jnp.full((size,), _EMPTY_SLOT, jnp.int8),
        draft=draft,
        target_cache=target.init_cache(size, max_length),
        drafter_state=_init_drafter(drafter, size, max_length),
        settings=settings,
    )
    return _in_buffers_of_their_own(state)


def _in_buffers_of_their_own(tree: Any) -> Any:
    """Returns copies: a buffer that two leaves share cannot be donated."""
    return jax.tree.map(jnp.copy, tree)


@functools.partial(jax.jit, static_argnames=("max_length", "size"))
def new_row(target: Model, drafter: Drafter | None, *, max_length: int, size: int = 1) -> PromptRow:
    """Returns a row in which nothing was read, or `size` of them as one batch."""
    drafter_state = _init_drafter(drafter, size, max_length)
    return _in_buffers_of_their_own(PromptRow(target.init_cache(size, max_length), drafter_state))


def _init_drafter(drafter: Drafter | None, size: int, max_length: int) -> Any:
    return None if drafter is None else drafter.init(drafter.params, size, max_length)


@functools.partial(jax.jit, static_argnames="max_length")
def grow_row(
    target: Model, drafter: Drafter | None, row: PromptRow, *, max_length: int
) -> PromptRow:
    """Returns a row of a greater length that has read what a shorter one has."""
    return put_beginning(new_row(target, drafter, max_length=max_length), row)


@functools.partial(jax.jit, donate_argnames="row")
def prefill_chunk(
    target: Model,
    drafter: Drafter | None,
    row: PromptRow,
    token_ids: jax.Array,
    positions: jax.Array,
) -> PromptRow:
    """Returns the row after the models read a chunk of its prompt; or the rows of a batch.

    Args:
      target: as in `Engine`.
      drafter: as in `Engine`.
      row: before the chunk.
      token_ids: i32[1, C], or i32[N, C] of a batch.
      positions: of the same shape, -1 where there is no token.
    """
    taps = () if drafter is None else drafter.taps
    hidden, features, cache = apply_model(target, token_ids, positions, row.target_cache, taps)
    if drafter is None:
        return PromptRow(cache, None)
    given = (features if taps else hidden) if drafter.reads_features else None
    state = drafter.extend(drafter.params, row.drafter_state, token_ids, positions, given)
    return PromptRow(cache, state)


@functools.partial(jax.jit, static_argnames="axes", donate_argnames="slots")
def admit(
    target: Model,
    drafter: Drafter | None,
    slots: DecodeState,
    row: PromptRow,
    slot: jax.Array,
    prompt: jax.Array,
    request: RequestSettings,
    *,
    axes: tuple[int, ...],
) -> DecodeState:
    """Returns the slots with a request in one of them, which begins with the next step.

    Args:
      target: as in `Engine`.
      drafter: as in `Engine`.
      slots: before.
      row: that has read the prompt but for its last token, of any length that holds it.
      slot: i32.
      prompt: i32[1, S]; what follows the prompt is ignored.
      request: its settings.
      axes: from `state_axes`.
    """
    last = take_row(slots, axes, slot)
    row = grow_row(target, drafter, row, max_length=prompt.shape[1])
    lengths = jnp.asarray(request.prompt_length)[None]
    index = jnp.arange(prompt.shape[1], dtype=jnp.int32)[None]
    token_ids = jnp.where(index < lengths[:, None], prompt, -1)
    folded = jax.random.fold_in(request.key, jnp.maximum(request.sample, 0))
    own = (request.temperature, request.max_length, request.stop_token_ids, request.sampling)
    temperature, max_lengths, stop_token_ids, sampling = jax.tree.map(
        lambda x: jnp.asarray(x)[None], own
    )
    shared = last.settings.sampling
    if sampling is not None and shared is not None:
        # The tables of a grammar are no request's own.
        sampling = sampling._replace(grammar=shared.grammar)
    counts = last.counts
    if counts is not None:
        counted = count_committed(token_ids, lengths, lengths, counts.generated.shape[1])
        counts = counted if counts.prompt is not None else counted._replace(prompt=None)
    one = last._replace(
        token_ids=token_ids,
        lengths=lengths,
        logprobs=jnp.zeros_like(last.logprobs),
        origins=jnp.zeros_like(last.origins),
        finish=jnp.zeros_like(last.finish),
        draft=jax.tree.map(jnp.zeros_like, last.draft)._replace(token_map=last.draft.token_map),
        target_cache=row.target_cache,
        drafter_state=row.drafter_state,
        metrics=init_metrics(1, last.metrics.num_drafted.shape[1]),
        settings=last.settings._replace(
            keys=jnp.where(request.sample < 0, request.key, folded)[None],
            temperature=temperature,
            prompt_lengths=lengths,
            max_lengths=max_lengths,
            eos_token_ids=stop_token_ids,
            sampling=sampling,
        ),
        counts=counts,
        grammar_state=start_states(sampling, 1),
        top_logprobs=empty_logprobs(last.settings.logprobs, prompt.shape),
        draft_history=init_history(last.settings.k_by_rate, lengths),
    )
    return put_row(slots, one, axes, slot)


@functools.partial(
    jax.jit, static_argnames=("config", "implementation", "row_buckets"), donate_argnames="slots"
)
def step_slots(
    target: Model,
    drafter: Drafter | None,
    slots: DecodeState,
    allowed: jax.Array | None,
    *,
    config: SpeculativeConfig,
    implementation: Implementation | None,
    row_buckets: tuple[int, ...],
) -> tuple[DecodeState, StepOutput]:
    """Returns the slots after one step of every request in them, and what it committed.

    Args:
      target: as in `Engine`.
      drafter: as in `Engine`.
      slots: before.
      allowed: u32[B, K + 1, ceil(V / 32)], a host's masks of the rows of this step; or None.
      config: as in `run_step`.
      implementation: as in `run_step`.
      row_buckets: as in `run_step`.
    """
    before = slots.lengths
    index = before[:, None] + jnp.arange(count_rows(slots), dtype=jnp.int32)[None]
    options: dict[str, Any] = {"implementation": implementation, "row_buckets": row_buckets}
    sampling = slots.settings.sampling
    if allowed is not None:
        masked = (SamplingParams() if sampling is None else sampling)._replace(allowed=allowed)
        slots = slots._replace(settings=slots.settings._replace(sampling=masked))
    slots, _ = run_step(target, drafter, slots, config=config, **options)
    slots = slots._replace(settings=slots.settings._replace(sampling=sampling))
    drafted = None if allowed is None else _pending_draft(slots)
    index = jnp.minimum(index, slots.token_ids.shape[1] - 1)

    def take(buffer: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, at: row[at])(buffer, index)

    output = StepOutput(
        token_ids=take(slots.token_ids),
        num_tokens=slots.lengths - before,
        logprobs=take(slots.logprobs),
        origins=take(slots.origins),
        finish=slots.finish,
        metrics=slots.metrics,
        top_logprobs=jax.tree.map(take, slots.top_logprobs),
        drafted=drafted,
    )
    # The host reads these after the next step has taken the buffers of the slots.
    return slots, _in_buffers_of_their_own(output)


def _pending_draft(slots: DecodeState) -> jax.Array:
    """Returns the tokens of each pending draft i32[B, K], -1 after its end."""
    ids = slots.draft.token_ids
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index < count_drafted(slots)[:, None], ids, -1)


@functools.partial(jax.jit, donate_argnames="slots")
def release(slots: DecodeState, rows: jax.Array) -> DecodeState:
    """Returns the slots with those of the rows bool[B] empty."""
    num_tokens = slots.draft.num_tokens
    assert num_tokens is not None
    return slots._replace(
        finish=jnp.where(rows, jnp.int8(_EMPTY_SLOT), slots.finish),
        draft=slots.draft._replace(num_tokens=jnp.where(rows, jnp.int32(-1), num_tokens)),
    )


@functools.partial(jax.jit, static_argnames="axes")
def take(slots: _State, slot: jax.Array, *, axes: tuple[int, ...]) -> _State:
    """Returns what is in one slot, or in one row of a batch of prompts, as a batch of one."""
    return take_row(slots, axes, slot)


@functools.partial(jax.jit, static_argnames="axes", donate_argnames="slots")
def put(slots: _State, one: _State, slot: jax.Array, *, axes: tuple[int, ...]) -> _State:
    """Returns the slots with what was taken in one of them."""
    return put_row(slots, one, axes, slot)
