"""The device's part of an engine: pure functions of a `DecodeState` whose requests are slots.

    caches of a prompt    new_caches -> prefill_chunk, grow_caches
    slots                 empty_slots -> admit -> step_slots -> release
    one of many           take, put: a slot of the state, or one prompt's caches of a batch

A slot is one of the B requests of the state, or empty. While a prompt is read, its caches lie apart
from the slots, by themselves or among those of a batch of N prompts.

A program donates the state that it replaces. Each leaf has its own axis of requests, which
`cache_axes` and `slot_axes` find: caches may have it anywhere. `programs` binds each function to an
engine's models and options, and the scheduler calls it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.drafters import Models
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.decode.options import StepOptions
from specjax.decode.prefill import begin_prefill, read_chunk
from specjax.decode.score import list_next_logprobs
from specjax.decode.state import DecodeState, RequestBatch, Settings
from specjax.decode.step import run_step
from specjax.decode.target_step import count_drafted, count_rows
from specjax.decode.token_info import TokenInfo
from specjax.processing.sampling_params import SamplingParams

_State = TypeVar("_State")
# In place of an axis, for a leaf that all requests share. Axes of other leaves are counted from 0.
NO_BATCH_AXIS = -1
# The `finish` of a slot without a request.
_EMPTY_SLOT = -1


class PromptCaches(NamedTuple):
    """The caches of one prompt while the models read it, or of a batch of N prompts.

    They have room for a number of tokens, their length, which may be less than S.

    Attributes:
      target_cache: the target's cache.
      drafter_state: the drafter's state, None without a drafter.
    """

    target_cache: Any
    drafter_state: Any


class RequestSettings(NamedTuple):
    """One request's own fields of `Settings`, without the batch axis, and its sample index.

    Attributes:
      sample: i32, an index that `admit` folds into the key; -1 folds nothing.
      keys: typed threefry key, ().
      temperature: f32.
      prompt_lengths: i32.
      max_lengths: i32, committed tokens at which the request ends.
      eos_token_ids: i32[E], padded with -2: no token, and not the -1 after a text.
      sampling: `SamplingParams` without a grammar, or None.
    """

    sample: np.integer
    keys: jax.Array
    temperature: np.ndarray
    prompt_lengths: np.integer
    max_lengths: np.integer
    eos_token_ids: np.ndarray
    sampling: SamplingParams | None


class StepOutput(NamedTuple):
    """The tokens that a step committed, on the device or as NumPy arrays.

    Attributes:
      token_ids: i32[B, K + 1], of which the first `num_tokens` of a request are new.
      num_tokens: i32[B], tokens that each request gained.
      logprobs: f32[B, K + 1].
      origins: i8[B, K + 1].
      finish: i8[B], as in `DecodeState`; negative for an empty slot.
      metrics: `Metrics` of the requests so far.
      token_info: what is listed of each, [B, K + 1, ...].
      drafted: i32[B, K], the pending draft, -1 after its end; None unless a host masks rows.
      masks: u32[B, K + 1, ceil(V / 32)] of the kept sets in `token_info`; None if none are listed.
        They stay on the device unless a set has more tokens than ids: see `read_output`.
    """

    token_ids: jax.Array
    num_tokens: jax.Array
    logprobs: jax.Array
    origins: jax.Array
    finish: jax.Array
    metrics: Metrics
    token_info: TokenInfo
    drafted: jax.Array | None
    masks: jax.Array | None = None

    def info_at(self, slot: int, index: int) -> TokenInfo:
        """Returns what is listed of one token, of NumPy arrays; its kept set with a mask if due."""
        if not any(self.token_info):  # The usual case, of every token of a step.
            return self.token_info
        info = self.token_info.at(slot, index)
        kept = info.kept_tokens
        if kept is None or self.masks is None or kept.is_complete():
            return info
        return info._replace(kept_tokens=kept._replace(mask=self.masks[slot, index].copy()))


def without_masks(output: StepOutput) -> StepOutput:
    """Returns the part of an output that a host reads of every step."""
    return output._replace(masks=None)


def read_output(output: StepOutput) -> StepOutput:
    """Returns a step's output as NumPy arrays; its masks only if a committed token needs one."""
    on_host: StepOutput = jax.device_get(without_masks(output))
    kept = on_host.token_info.kept_tokens
    if kept is None or output.masks is None:
        return on_host
    is_new = np.arange(kept.num_kept.shape[1]) < np.asarray(on_host.num_tokens)[:, None]
    if not np.any(is_new & ~np.asarray(kept.is_complete())):
        return on_host
    return on_host._replace(masks=jax.device_get(output.masks))


# Caches of a prompt -------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("max_length", "size"))
def new_caches(models: Models, *, max_length: int, size: int = 1) -> PromptCaches:
    """Returns the caches of a prompt of which nothing is read, or of `size` prompts as a batch."""
    return _with_own_buffers(PromptCaches(*models.init_caches(size, max_length)))


@functools.partial(jax.jit, static_argnames="max_length")
def grow_caches(models: Models, caches: PromptCaches, *, max_length: int) -> PromptCaches:
    """Returns caches of the same tokens with room for more.

    Args:
      models: as in `Engine`.
      caches: at most `max_length` long. Each leaf becomes the beginning of a longer one, on every
        axis: caches that are read in chunks have their tokens in order.
      max_length: tokens that the result has room for.
    """

    def put_first(longer: jax.Array, leaf: jax.Array) -> jax.Array:
        if longer.shape == leaf.shape:
            return leaf
        return jax.lax.dynamic_update_slice(longer, leaf, (0,) * leaf.ndim)

    return jax.tree.map(put_first, new_caches(models, max_length=max_length), caches)


@functools.partial(jax.jit, donate_argnames="caches")
def prefill_chunk(
    models: Models,
    caches: PromptCaches,
    token_ids: jax.Array,
    positions: jax.Array,
    places: jax.Array | None = None,
) -> PromptCaches:
    """Returns the caches after the models read a chunk of a prompt, or of each in a batch.

    Args:
      models: as in `Engine`.
      caches: before the chunk. Without a drafter's state, the target alone reads.
      token_ids: i32[1, C], or i32[N, C] of a batch, or i32[P, C] of P pieces.
      positions: of the same shape, -1 where there is no token.
      places: i32[P], the prompt of the batch that each piece continues, the `rows` of
        `specjax.types.Pieces`. None is a chunk of each prompt.
    """
    if caches.drafter_state is None:
        models = models._replace(drafter=None)
    *states, _ = read_chunk(models, *caches, token_ids, positions, rows=places)
    return PromptCaches(*states)


@functools.partial(jax.jit, static_argnames="num_listed", donate_argnames="caches")
def list_chunk(
    models: Models,
    caches: PromptCaches,
    token_ids: jax.Array,
    positions: jax.Array,
    next_ids: jax.Array,
    places: jax.Array | None = None,
    *,
    num_listed: int,
) -> tuple[PromptCaches, TopLogprobs]:
    """Returns the caches after a chunk, as `prefill_chunk`, and `TopLogprobs` of its next tokens.

    Args:
      models: as in `prefill_chunk`, as are the next three and `places`.
      caches: before the chunk.
      token_ids: i32[R, C].
      positions: i32[R, C].
      next_ids: i32[R, C], the token after each; -1 where none is listed.
      places: i32[R], or None.
      num_listed: most likely tokens that are listed for each.
    """
    *states, (hidden, _) = read_chunk(models, *caches, token_ids, positions, rows=places)
    top = list_next_logprobs(models.target, hidden, next_ids, num_listed)
    return PromptCaches(*states), top


# Slots --------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("max_length", "options"))
def empty_slots(
    models: Models, settings: Settings, *, max_length: int, options: StepOptions
) -> DecodeState:
    """Returns a state of slots without requests.

    Args:
      models: as in `Engine`.
      settings: of B equal requests, with [B, E] end-of-sequence ids.
      max_length: S.
      options: as in `run_step`.
    """
    size = settings.prompt_lengths.shape[0]
    # `begin_prefill` needs prompts of at least one token. `release` then empties their slots.
    prompts = jnp.zeros((size, max_length), jnp.int32)
    requests = RequestBatch(prompts, jnp.ones((size,), jnp.int32), settings)
    state = begin_prefill(models, requests, options=options)
    return _with_own_buffers(release(state, jnp.ones(size, bool)))


@functools.partial(
    jax.jit, static_argnames=("options", "axes", "cache_axes"), donate_argnames="slots"
)
def admit(
    models: Models,
    slots: DecodeState,
    caches: PromptCaches,
    slot: jax.Array,
    prompt: jax.Array,
    request: RequestSettings,
    place: jax.Array | None = None,
    *,
    options: StepOptions,
    axes: tuple[int, ...],
    cache_axes: tuple[int, ...],
) -> DecodeState:
    """Returns the slots with a request in one of them; its first step is the next one.

    Args:
      models: as in `Engine`.
      slots: the state before.
      caches: of all tokens of the prompt but the last; of any length that holds it.
      slot: i32, index of an empty slot.
      prompt: i32[1, S]; tokens after the prompt are ignored.
      request: its settings.
      place: i32, which of a batch's N prompts it is; None if `caches` are its own.
      options: as in `run_step`.
      axes: from `slot_axes`.
      cache_axes: the leaves of the result of `cache_axes`.
    """
    if place is not None:
        caches = take(caches, place, axes=cache_axes)
    fields = request._asdict()
    sample, key = fields.pop("sample"), request.keys
    folded = jax.random.fold_in(key, jnp.maximum(sample, 0))
    fields["keys"] = jnp.where(sample < 0, key, folded)
    settings = slots.settings._replace(**jax.tree.map(lambda x: x[None], fields))
    if settings.sampling is not None and slots.settings.sampling is not None:
        # The slots share the grammar's tables.
        sampling = settings.sampling._replace(grammar=slots.settings.sampling.grammar)
        settings = settings._replace(sampling=sampling)
    requests = RequestBatch(prompt, settings.prompt_lengths, settings)
    # `caches` replace those of `one`, which nothing reads: XLA never makes them.
    one = begin_prefill(models, requests, options=options)
    caches = grow_caches(models, caches, max_length=prompt.shape[1])
    return put(slots, one._replace(**caches._asdict()), slot, axes=axes)


@functools.partial(jax.jit, static_argnames="options", donate_argnames="slots")
def step_slots(
    models: Models, slots: DecodeState, allowed: jax.Array | None, *, options: StepOptions
) -> tuple[DecodeState, StepOutput]:
    """Returns the slots after one step of every request, and the tokens that were committed.

    Args:
      models: as in `Engine`.
      slots: the state before.
      allowed: u32[B, K + 1, ceil(V / 32)], a host's masks of this step's logits rows; or None.
      options: as in `run_step`.
    """
    before, sampling = slots.lengths, slots.settings.sampling
    # The host's masks hold for this step alone: the slots returned have none.
    masked = sampling
    if allowed is not None:
        masked = (SamplingParams() if sampling is None else sampling)._replace(allowed=allowed)
    slots, info = run_step(models, _with_sampling(slots, masked), options=options)
    slots = _with_sampling(slots, sampling)
    index = before[:, None] + jnp.arange(count_rows(slots), dtype=jnp.int32)[None]
    index = jnp.minimum(index, slots.token_ids.shape[1] - 1)

    def gather(buffer: jax.Array) -> jax.Array:
        return jax.vmap(lambda row, at: row[at])(buffer, index)

    listed, masks = info.token_info.split_masks()
    output = StepOutput(
        token_ids=gather(slots.token_ids),
        num_tokens=slots.lengths - before,
        logprobs=gather(slots.logprobs),
        origins=gather(slots.origins),
        finish=slots.finish,
        metrics=slots.metrics,
        token_info=listed,
        drafted=None if allowed is None else _pending_draft(slots),
        masks=masks,
    )
    # The host reads the output after the next step has taken the slots' buffers.
    return slots, _with_own_buffers(output)


def _with_sampling(slots: DecodeState, sampling: SamplingParams | None) -> DecodeState:
    return slots._replace(settings=slots.settings._replace(sampling=sampling))


def _pending_draft(slots: DecodeState) -> jax.Array:
    """Returns the tokens of each pending draft i32[B, K], -1 after its end."""
    ids = slots.draft.token_ids
    index = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    return jnp.where(index < count_drafted(slots)[:, None], ids, -1)


@functools.partial(jax.jit, donate_argnames="slots")
def release(slots: DecodeState, is_released: jax.Array) -> DecodeState:
    """Returns the slots, without a request in those where `is_released`, bool[B], is true."""
    num_tokens = slots.draft.num_tokens
    assert num_tokens is not None
    return slots._replace(
        finish=jnp.where(is_released, jnp.int8(_EMPTY_SLOT), slots.finish),
        draft=slots.draft.replace(num_tokens=jnp.where(is_released, jnp.int32(-1), num_tokens)),
    )


def _with_own_buffers(tree: _State) -> _State:
    """Returns copies: a buffer that two leaves share cannot be donated."""
    return jax.tree.map(jnp.copy, tree)


# One request of many ------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames="axes")
def take(state: _State, index: jax.Array, *, axes: tuple[int, ...]) -> _State:
    """Returns one slot of a state, or one prompt's caches of a batch, as a batch of one.

    Args:
      state: a `DecodeState` of slots, or the `PromptCaches` of a batch.
      index: i32, a slot or a place.
      axes: the axis of the requests for each leaf, in the order of `jax.tree.leaves`; from
        `slot_axes`, or the leaves of `cache_axes`. A leaf without one is returned whole.
    """
    leaves, structure = jax.tree.flatten(state)
    taken = (
        leaf if axis == NO_BATCH_AXIS else jax.lax.dynamic_slice_in_dim(leaf, index, 1, axis)
        for leaf, axis in zip(leaves, axes, strict=True)
    )
    return jax.tree.unflatten(structure, taken)


@functools.partial(jax.jit, static_argnames="axes", donate_argnames="state")
def put(state: _State, one: _State, index: jax.Array, *, axes: tuple[int, ...]) -> _State:
    """Returns the state with a batch of one at an index; leaves that requests share stay.

    Args:
      state: as in `take`.
      one: of the same structure, a batch of one.
      index: i32, the slot or the place that it replaces.
      axes: as in `take`.
    """
    leaves, structure = jax.tree.flatten(state)

    def put_leaf(leaf: jax.Array, value: jax.Array, axis: int) -> jax.Array:
        if axis == NO_BATCH_AXIS:
            return leaf
        return jax.lax.dynamic_update_slice_in_dim(leaf, value, index, axis)

    return jax.tree.unflatten(structure, map(put_leaf, leaves, jax.tree.leaves(one), axes))


def _find_axes(make: Callable[[int], Any], name: str) -> Any:
    """Returns the axis of each leaf of `make(batch_size)` that holds the requests.

    Args:
      make: returns a pytree of arrays for a batch size; it is traced, and nothing is made.
      name: of the pytree, for the error.

    Returns:
      The pytree with an int for each leaf.

    Raises:
      ValueError: for a leaf with no such axis, no part of which can be given to another request.

    Example:
      >>> import jax.numpy as jnp
      >>> _find_axes(lambda size: (jnp.zeros((4, size, 9)), jnp.zeros(size)), "the cache")
      (1, 0)
    """
    small, large = (jax.eval_shape(lambda size=size: make(size)) for size in (2, 3))

    def axis_of(one: jax.ShapeDtypeStruct, other: jax.ShapeDtypeStruct) -> int:
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


def cache_axes(models: Models, max_length: int) -> PromptCaches:
    """Returns the axis of each leaf of `PromptCaches` that holds the prompts.

    Raises:
      ValueError: for a cache or a drafter's state with a leaf without such an axis.
    """
    target, drafter = models
    cache = _find_axes(lambda size: target.init_cache(size, max_length), "the target's cache")
    state = drafter and _find_axes(
        lambda size: drafter.init(drafter.params, size, max_length), "the drafter's state"
    )
    return PromptCaches(cache, state)


def slot_axes(slots: DecodeState, axes_of_caches: PromptCaches) -> tuple[int, ...]:
    """Returns the axis of each leaf that holds the slots; hashable, so that programs take it.

    Args:
      slots: the state of all slots, or its shapes.
      axes_of_caches: from `cache_axes`.
    """

    def shared(axes: Any) -> Any:
        return jax.tree.map(lambda _: NO_BATCH_AXIS, axes)

    axes = jax.tree.map(lambda _: 0, slots)
    settings = axes.settings._replace(
        conditional_rates=shared(axes.settings.conditional_rates),
        k_by_rate=shared(axes.settings.k_by_rate),
    )
    if settings.sampling is not None:
        grammar = shared(settings.sampling.grammar)
        settings = settings._replace(sampling=settings.sampling._replace(grammar=grammar))
    draft = axes.draft.replace(token_map=shared(axes.draft.token_map))
    axes = axes._replace(**axes_of_caches._asdict(), draft=draft, settings=settings)
    return tuple(jax.tree.leaves(axes))


def slot_bytes(slots: DecodeState, axes: tuple[int, ...]) -> int:
    """Returns how many bytes of a state belong to one slot."""
    leaves = zip(jax.tree.leaves(slots), axes, strict=True)
    return sum(
        leaf.size * leaf.dtype.itemsize // leaf.shape[axis]
        for leaf, axis in leaves
        if axis != NO_BATCH_AXIS
    )
