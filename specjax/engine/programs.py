"""The compiled programs of an engine, bound to its models and options, and the bytes they need."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.capacity import format_bytes
from specjax.decode.drafters import Drafter, reads_chunks
from specjax.decode.options import PREFILL_CHUNK_SIZE
from specjax.decode.state import DecodeState, Settings
from specjax.decode.target_step import count_rows, vocabulary_size
from specjax.engine import slots
from specjax.engine.slots import (
    PromptRow,
    RequestSettings,
    StepOutput,
    find_axes,
    row_bytes,
    state_axes,
)
from specjax.types import Model

__all__ = [
    "BatchPrograms",
    "Programs",
    "choose_chunk_size",
    "devices_of",
    "explain_slots_out_of_memory",
    "make_programs",
    "row_lengths",
    "warm_up",
]

# A chunk's attention takes little of its time in a row of fewer tokens.
_MIN_ROW = 512
# Prompts that are read before a slot is empty, without a batch. Each takes the memory of a slot.
_PREFILL_AHEAD = 2
# Prompts that a CPU reads at once, and the least chunk where it does. A shorter one, and one of
# bfloat16, has other last bits alone than in a batch.
_MAX_PROMPTS, _MIN_CHUNK = 16, 64


class BatchPrograms(NamedTuple):
    """The functions that read several prompts at once, as rows of a batch.

    Attributes:
      size: N, prompts that are read at once.
      num_tokens: tokens of each.
      new_rows: `() -> PromptRow` of N prompts, each of the least of `Programs.row_lengths`.
      put: `(rows, row, index) -> rows` with the row of one prompt among them.
      prefill: `(rows, token_ids[N, num_tokens], positions) -> rows`.
      take: `(rows, index) -> PromptRow` of one prompt.
    """

    size: int
    num_tokens: int
    new_rows: Callable[[], PromptRow]
    put: Callable[..., PromptRow]
    prefill: Callable[..., PromptRow]
    take: Callable[..., PromptRow]


class Programs(NamedTuple):
    """The functions of `specjax.engine.slots` with everything bound that no request changes.

    Attributes:
      new_row: `(*, max_length) -> PromptRow`.
      grow_row: `(row, *, max_length) -> PromptRow` of a greater length.
      row_lengths: lengths of the rows that a prompt is read into, one after another; the last
        is S. A chunk attends to all of its row.
      chunk_size: C, tokens of a prompt that are read at once.
      prefill_chunk: `(row, token_ids[1, C], positions[1, C]) -> PromptRow`.
      new_target_row: `() -> PromptRow` of length S, without a drafter's state.
      prefill_target_chunk: `prefill_chunk` of such a row.
      batch: of prompts that are read together, or None.
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
    chunk_size: int
    prefill_chunk: Callable[..., PromptRow]
    new_target_row: Callable[[], PromptRow]
    prefill_target_chunk: Callable[..., PromptRow]
    batch: BatchPrograms | None
    admit: Callable[..., DecodeState]
    step: Callable[..., tuple[DecodeState, StepOutput]]
    release: Callable[..., DecodeState]
    park: Callable[..., DecodeState]
    resume: Callable[..., DecodeState]
    empty_slots: Callable[[], DecodeState]
    slot_bytes: int
    vocab_size: int

    @property
    def prefill_depth(self) -> int:
        """Prompts that are read before a slot is empty, or are being read.

        While so many are unread that they fill a batch, half as many wait that are read.
        """
        return _PREFILL_AHEAD if self.batch is None else self.batch.size + self.batch.size // 2

    @property
    def prefill_slots(self) -> float:
        """How many slots' bytes prompts take that are being read."""
        # Rows of the batch, those read ahead for it, and an empty one.
        num_rows = (
            0 if self.batch is None else self.batch.size + self.prefill_depth - _PREFILL_AHEAD + 1
        )
        # Two more rows, one of which grows out of one of half its length.
        return 2.5 + num_rows * self.row_lengths[0] / self.row_lengths[-1]


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
      chunk_size: C.
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
    lengths = (max_length,) if is_whole else row_lengths(max_length, chunk_size)
    row_axes = tuple(jax.tree.leaves((cache_axes, drafter_axes)))
    new_row = functools.partial(slots.new_row, target, drafter)
    prefill_chunk = functools.partial(slots.prefill_chunk, target, drafter)
    return Programs(
        new_row=new_row,
        grow_row=functools.partial(slots.grow_row, target, drafter),
        row_lengths=lengths,
        chunk_size=chunk_size,
        prefill_chunk=prefill_chunk,
        new_target_row=functools.partial(slots.new_row, target, None, max_length=max_length),
        prefill_target_chunk=functools.partial(slots.prefill_chunk, target, None),
        batch=_batch_programs(new_row, prefill_chunk, row_axes, num_slots, lengths[0], chunk_size),
        admit=functools.partial(slots.admit, target, drafter, axes=axes),
        step=functools.partial(
            slots.step_slots, target, drafter, row_buckets=_row_buckets(shapes), **options
        ),
        release=slots.release,
        park=functools.partial(slots.take, axes=axes),
        resume=functools.partial(slots.put, axes=axes),
        empty_slots=empty,
        slot_bytes=row_bytes(shapes, axes),
        vocab_size=vocabulary_size(target, 1, 1, 2),
    )


def choose_chunk_size(given: int | None) -> int:
    """Returns how many tokens of a prompt are read at once: as given, or by the device.

    An H200 reads 256 of them with 8B and 1B shapes in 12 to 18 ms, 128 in 9 to 13. A CPU reads
    padding as slowly as tokens.
    """
    if given is not None:
        return given
    return 2 * PREFILL_CHUNK_SIZE if jax.default_backend() == "gpu" else PREFILL_CHUNK_SIZE


def _batch_programs(
    new_row: Callable[..., PromptRow],
    prefill_chunk: Callable[..., PromptRow],
    axes: tuple[int, ...],
    num_slots: int,
    row_length: int,
    chunk_size: int,
) -> BatchPrograms | None:
    """Returns what reads several prompts at once, together two chunks or more; None but on a CPU.

    A CPU reads the weights from memory once for all of them, and less padding: pieces are short. On
    a GPU, rows of other prompts would change a prompt's last bits.
    """
    size = min(_MAX_PROMPTS, num_slots // 4)
    if size < 2 or chunk_size < _MIN_CHUNK or jax.default_backend() != "cpu":
        return None
    row = jax.eval_shape(functools.partial(new_row, max_length=row_length))
    if any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(row)):
        return None
    return BatchPrograms(
        size=size,
        num_tokens=max(-(-chunk_size // 4), -(-2 * chunk_size // size)),
        new_rows=functools.partial(new_row, max_length=row_length, size=size),
        put=functools.partial(slots.put, axes=axes),
        prefill=prefill_chunk,
        take=functools.partial(slots.take, axes=axes),
    )


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
    while (half := -(-lengths[0] // 2)) >= max(_MIN_ROW, chunk_size):
        lengths.insert(0, half)
    return tuple(lengths)


def _row_buckets(shapes: DecodeState) -> tuple[int, ...]:
    """Returns the numbers of drafted tokens, besides 0 and K, that a step of adaptive K may feed.

    One, half of K: each is one more copy of the target's layers.
    """
    return (count_rows(shapes) // 2,)


def devices_of(target: Model) -> set[Any]:
    """Returns the devices that a target's parameters are on; JAX's first if they are on a host."""
    leaves = (leaf for leaf in jax.tree.leaves(target.params) if isinstance(leaf, jax.Array))
    return {device for leaf in leaves for device in leaf.devices()} or {jax.devices()[0]}


@contextlib.contextmanager
def explain_slots_out_of_memory(
    devices: Iterable[Any],
    slot_bytes: int,
    num_slots: int,
    max_length: int,
    prefill_slots: float,
) -> Iterator[None]:
    """Refuses slots that the devices have no room for, before or when they are made.

    Args:
      devices: that hold the slots together.
      slot_bytes: of one slot.
      num_slots: B.
      max_length: S.
      prefill_slots: how many slots' bytes prompts take that are being read.

    Raises:
      MemoryError: with the bytes of a slot.
    """
    needed = int(slot_bytes * (num_slots + prefill_slots))
    error = MemoryError(
        f"The device has no room for {num_slots} slots: each takes {format_bytes(slot_bytes)} at "
        f"max_length {max_length}, and prompts that are read {prefill_slots:.1f} more, "
        f"{format_bytes(needed)} together. Fewer num_slots or a smaller max_length take less."
    )
    # None on a CPU, whose allocator says only when it is asked.
    facts = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in fact for fact in facts):
        free = sum(fact["bytes_limit"] - fact.get("bytes_in_use", 0) for fact in facts)
        if needed > free:
            raise error
    try:
        yield
    except jax.errors.JaxRuntimeError as failure:
        if "RESOURCE_EXHAUSTED" not in str(failure):
            raise
        raise error from failure


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
    first, nothing = np.int32(0), _empty_chunk(1, programs.chunk_size)
    for _ in range(2):
        for row in _rows_of_each_length(programs):
            state = programs.admit(state, row, first, np.zeros((1, max_length), np.int32), request)
        state, output = programs.step(state, allowed)
        # No more than two rows at a time, as when prompts are read.
        row = programs.prefill_target_chunk(programs.new_target_row(), *nothing)
        parked = programs.park(state, first)
        state = programs.resume(state, parked, first)
        parked = parked._replace(target_cache=row.target_cache)
        state = programs.resume(state, parked, first)
        state = programs.release(state, np.ones(num_slots, bool))
        jax.device_get(output)
    return state


def _empty_chunk(num_prompts: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens and positions of a chunk that holds no token."""
    shape = (num_prompts, num_tokens)
    return np.zeros(shape, np.int32), np.full(shape, -1, np.int32)


def _rows_of_each_length(programs: Programs) -> Iterator[PromptRow]:
    """Yields the rows that a prompt without tokens is read into."""
    row = programs.new_row(max_length=programs.row_lengths[0])
    yield row
    nothing = _empty_chunk(1, programs.chunk_size)
    for i, length in enumerate(programs.row_lengths):
        if i:
            row = programs.grow_row(row, max_length=length)
        # The second chunk's row is one that a program returned.
        row = programs.prefill_chunk(programs.prefill_chunk(row, *nothing), *nothing)
        if i == 0 and programs.batch is not None:
            row = _through_batch(programs.batch, row)
            yield row
            row = programs.prefill_chunk(row, *nothing)
        for longer in programs.row_lengths[i + 2 :]:
            programs.grow_row(row, max_length=longer)
        yield row


def _through_batch(batch: BatchPrograms, row: PromptRow) -> PromptRow:
    """Returns a row that was one of a batch."""
    nothing = _empty_chunk(batch.size, batch.num_tokens)
    rows = batch.new_rows()
    for _ in range(2):
        rows = batch.prefill(batch.put(rows, row, np.int32(0)), *nothing)
    return batch.take(rows, np.int32(0))
