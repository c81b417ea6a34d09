"""The compiled programs of an engine, bound to its models and options, and the bytes they need."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.decode.drafters import Drafter, reads_chunks
from specjax.decode.options import PREFILL_CHUNK_SIZE
from specjax.decode.state import DecodeState, Settings
from specjax.decode.target_step import count_rows, vocabulary_size
from specjax.engine import slots
from specjax.engine.rows import find_axes, row_bytes, state_axes
from specjax.engine.slot_data import PromptRow, StepOutput
from specjax.types import Model

__all__ = [
    "BatchPrograms",
    "Programs",
    "choose_chunk_size",
    "make_programs",
    "row_lengths",
]

# A chunk's attention takes little of its time in a row of fewer tokens.
_LEAST_ROW = 512
# Prompts that are read before a slot is empty, without a batch. Each takes the memory of a slot.
_AHEAD = 2
# Prompts that a CPU reads at once, and the least chunk where it does. A shorter one, and one of
# bfloat16, has other last bits alone than in a batch.
_MOST_PROMPTS, _LEAST_CHUNK = 16, 64


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
    def num_ahead(self) -> int:
        """Prompts that are read before a slot is empty, or are being read.

        While so many are unread that they fill a batch, half as many wait that are read.
        """
        return _AHEAD if self.batch is None else self.batch.size + self.batch.size // 2

    @property
    def num_prompt_slots(self) -> float:
        """How many slots' bytes prompts take that are being read."""
        # Rows of the batch, those read ahead for it, and an empty one.
        num_rows = 0 if self.batch is None else self.batch.size + self.num_ahead - _AHEAD + 1
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
    size = min(_MOST_PROMPTS, num_slots // 4)
    if size < 2 or chunk_size < _LEAST_CHUNK or jax.default_backend() != "cpu":
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
    while (half := -(-lengths[0] // 2)) >= max(_LEAST_ROW, chunk_size):
        lengths.insert(0, half)
    return tuple(lengths)


def _row_buckets(shapes: DecodeState) -> tuple[int, ...]:
    """Returns the numbers of drafted tokens, besides 0 and K, that a step of adaptive K may feed.

    One, half of K: each is one more copy of the target's layers.
    """
    return (count_rows(shapes) // 2,)
