"""The compiled programs of an engine, bound to its models and options, and the bytes they need."""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.decode.drafters import Drafter, reads_chunks
from specjax.decode.init_and_step import PREFILL_CHUNK_SIZE
from specjax.decode.state_and_info import DecodeState, Settings
from specjax.decode.target_rows import count_rows
from specjax.engine import slots
from specjax.engine.rows import find_axes, row_bytes, state_axes
from specjax.engine.slot_data import PromptRow, RequestSettings, StepOutput
from specjax.model import Model

__all__ = [
    "Programs",
    "choose_chunk_size",
    "choose_chunk_sizes",
    "make_programs",
    "row_lengths",
    "warm_up",
]

# A chunk's attention takes little of its time in a row of fewer tokens.
_LEAST_ROW = 512
# A chunk of fewer tokens takes a CPU most of the time of one of this many.
_LEAST_CHUNK = 64


class Programs(NamedTuple):
    """The functions of `specjax.engine.slots` with everything bound that no request changes.

    Attributes:
      new_row: `(*, max_length) -> PromptRow`.
      grow_row: `(row, *, max_length) -> PromptRow` of a greater length.
      row_lengths: lengths of the rows that a prompt is read into, one after another; the last
        is S. A chunk attends to all of its row.
      chunk_sizes: numbers of tokens that are read at once, the least first. What is left of a
        prompt is read in the least that holds it.
      prefill_chunk: `(row, token_ids[1, C], positions[1, C]) -> PromptRow`.
      new_target_row: `() -> PromptRow` of length S, without a drafter's state.
      prefill_target_chunk: `prefill_chunk` of such a row and a chunk of the greatest size.
      admit: `(slots, row, slot, prompt[1, S], request) -> slots`, with a row of any of the lengths.
      step: `(slots, allowed) -> (slots, StepOutput)`.
      release: `(slots, rows: bool[B]) -> slots`.
      park: `(slots, slot) -> DecodeState`, a batch of one.
      resume: `(slots, parked, slot) -> slots`.
      empty_slots: `() -> slots`.
      slot_bytes: bytes that the state of a slot takes, its caches among them.
      vocab_size: of the target's logits.
    """

    new_row: Callable[..., PromptRow]
    grow_row: Callable[..., PromptRow]
    row_lengths: tuple[int, ...]
    chunk_sizes: tuple[int, ...]
    prefill_chunk: Callable[..., PromptRow]
    new_target_row: Callable[[], PromptRow]
    prefill_target_chunk: Callable[..., PromptRow]
    admit: Callable[..., DecodeState]
    step: Callable[..., tuple[DecodeState, StepOutput]]
    release: Callable[..., DecodeState]
    park: Callable[..., DecodeState]
    resume: Callable[..., DecodeState]
    empty_slots: Callable[[], DecodeState]
    slot_bytes: int
    vocab_size: int


def _check_placement(target: Model) -> None:
    """Refuses a mesh that an engine's host cannot move requests over alone."""
    placement = target.placement
    if placement is not None and placement.num_processes > 1:
        raise ValueError(
            f"the target's mesh has devices of {placement.num_processes} processes, and an engine "
            "runs in one process: its host alone knows what was submitted and when. Give each "
            "process an engine on its own devices, or use generate."
        )
    if placement is not None and placement.round_up(1) > 1:
        raise ValueError(
            f"the target's mesh has {placement.round_up(1)} devices on its axis 'data'; an engine "
            "moves requests between slots and needs one: jax.make_mesh((1, N), ('data', 'model'))."
        )


def make_programs(
    target: Model,
    drafter: Drafter | None,
    settings: Settings,
    *,
    num_slots: int,
    max_length: int,
    chunk_size: int,
    **options: Any,
) -> Programs:
    """Returns the programs of an engine; nothing is compiled yet.

    Args:
      target: as in `Engine`.
      drafter: as in `Engine`.
      settings: of one empty request in each slot.
      num_slots: B.
      max_length: S.
      chunk_size: C, the greatest.
      **options: `config` and `implementation`, static options of a step.

    Raises:
      ValueError: if a mesh has several processes or several devices for requests, a cache has a
        leaf without an axis of requests, or drafts say where each request's logits lie.
    """
    _check_placement(target)
    empty = functools.partial(
        slots.empty_slots,
        target,
        drafter,
        settings,
        size=num_slots,
        max_length=max_length,
        **options,
    )
    cache_axes = find_axes(lambda size: target.init_cache(size, max_length), "the target's cache")
    drafter_axes = drafter and find_axes(
        lambda size: drafter.init(drafter.params, size, max_length), "the drafter's state"
    )
    shapes = slots.empty_slots.eval_shape(*empty.args, **empty.keywords)
    if shapes.draft.rows is not None:
        raise ValueError(
            "the drafter's drafts have rows, which say in which request's place logits lie; an "
            "engine moves requests between slots and needs drafts without."
        )
    axes = state_axes(shapes, cache_axes, drafter_axes)
    # What a drafter makes of a whole prompt in a short row is no beginning of that in a longer one.
    drafts = shapes.drafter_state
    is_whole = bool(jax.tree.leaves(drafts)) and not reads_chunks(drafts)
    cache, one = jax.eval_shape(lambda: target.init_cache(1, 2)), np.zeros((1, 1), np.int32)
    hidden, _ = jax.eval_shape(target.apply, target.params, one, one, cache)
    return Programs(
        new_row=functools.partial(slots.new_row, target, drafter),
        grow_row=functools.partial(slots.grow_row, target, drafter),
        row_lengths=(max_length,) if is_whole else row_lengths(max_length, chunk_size),
        chunk_sizes=choose_chunk_sizes(chunk_size),
        prefill_chunk=functools.partial(slots.prefill_chunk, target, drafter),
        new_target_row=functools.partial(slots.new_row, target, None, max_length=max_length),
        prefill_target_chunk=functools.partial(slots.prefill_chunk, target, None),
        admit=functools.partial(slots.admit, target, drafter, axes=axes),
        step=functools.partial(
            slots.step_slots, target, drafter, row_buckets=_row_buckets(shapes), **options
        ),
        release=slots.release,
        park=functools.partial(slots.park, axes=axes),
        resume=functools.partial(slots.resume, axes=axes),
        empty_slots=empty,
        slot_bytes=row_bytes(shapes, axes),
        vocab_size=jax.eval_shape(target.logits, target.params, hidden).shape[-1],
    )


def choose_chunk_size(given: int | None) -> int:
    """Returns how many tokens of a prompt are read at once: as given, or by the device.

    An H200 reads 256 of them with 8B and 1B shapes in 12 to 18 ms, 128 in 9 to 13. A CPU reads the
    padding of a chunk as slowly as its tokens.
    """
    if given is not None:
        return given
    return 2 * PREFILL_CHUNK_SIZE if jax.default_backend() == "gpu" else PREFILL_CHUNK_SIZE


def choose_chunk_sizes(chunk_size: int) -> tuple[int, ...]:
    """Returns the sizes of chunks, the least first: C and, on a CPU, half of it for a prompt's end.

    Each is one more copy of the models' layers to compile.

    Args:
      chunk_size: C.

    Example:
      >>> choose_chunk_sizes(128), choose_chunk_sizes(96)  # on a CPU
      ((64, 128), (96,))
    """
    half = -(-chunk_size // 2)
    has_half = jax.default_backend() == "cpu" and half >= _LEAST_CHUNK
    return (half, chunk_size) if has_half else (chunk_size,)


def row_lengths(max_length: int, chunk_size: int) -> tuple[int, ...]:
    """Returns the lengths of the rows that prompts are read into: S and its halves.

    Each is one more copy of the models' layers to compile.

    Args:
      max_length: S.
      chunk_size: C, the least length.

    Example:
      >>> row_lengths(2500, 128), row_lengths(2500, 1024), row_lengths(1000, 128)
      ((625, 1250, 2500), (1250, 2500), (1000,))
    """
    lengths = [max_length]
    while (half := -(-lengths[0] // 2)) >= max(_LEAST_ROW, chunk_size):
        lengths.insert(0, half)
    return tuple(lengths)


def _row_buckets(shapes: DecodeState) -> tuple[int, ...]:
    """Returns the numbers of drafted tokens, besides 0 and K, of which a step has a program.

    One, half of K: each holds the target's layers once more.
    """
    return () if shapes.draft_history is None else (count_rows(shapes) // 2,)


def warm_up(programs: Programs, request: RequestSettings, allowed: Any) -> DecodeState:
    """Runs every program, so that each is compiled, and returns slots with no request in any.

    Twice, as arrays that a program returned may be placed otherwise than those it was first given.

    Args:
      programs: of an engine.
      request: settings of any request of two tokens.
      allowed: masks that allow all tokens, if a host masks rows; else None.
    """
    state = programs.empty_slots()
    num_slots, max_length = state.token_ids.shape
    first = np.int32(0)
    for _ in range(2):
        for row in _rows_of_each_length(programs):
            state = programs.admit(state, row, first, np.zeros((1, max_length), np.int32), request)
        state, output = programs.step(state, allowed)
        # No more than two rows at a time, as when prompts are read.
        *_, largest = _empty_chunks(programs)
        row = programs.prefill_target_chunk(programs.new_target_row(), *largest)
        parked = programs.park(state, first)
        state = programs.resume(state, parked, first)
        parked = parked._replace(target_cache=row.target_cache)
        state = programs.resume(state, parked, first)
        state = programs.release(state, np.ones(num_slots, bool))
        jax.device_get(output)
    return state


def _empty_chunks(programs: Programs) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields tokens and positions of a chunk of each size that holds no token."""
    for size in programs.chunk_sizes:
        yield np.zeros((1, size), np.int32), np.full((1, size), -1, np.int32)


def _rows_of_each_length(programs: Programs) -> Iterator[PromptRow]:
    """Yields the rows that a prompt without tokens is read into."""
    row = programs.new_row(max_length=programs.row_lengths[0])
    yield row
    for i, length in enumerate(programs.row_lengths):
        if i:
            row = programs.grow_row(row, max_length=length)
        # The second chunk's row is one that a program returned.
        for nothing in _empty_chunks(programs):
            row = programs.prefill_chunk(programs.prefill_chunk(row, *nothing), *nothing)
        for longer in programs.row_lengths[i + 2 :]:
            programs.grow_row(row, max_length=longer)
        yield row
