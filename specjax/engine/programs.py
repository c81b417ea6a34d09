"""The compiled programs of an engine: bound to its models, measured in bytes, and warmed up.

    make_programs -> explain_slots_out_of_memory -> warm_up -> a state of empty slots

`Programs` lists them. A row is the models' state of one prompt, and a batch holds rows of several.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode.capacity import format_bytes
from specjax.decode.drafters import Models, reads_chunks
from specjax.decode.options import StepOptions
from specjax.decode.state import DecodeState, Settings
from specjax.decode.target_step import vocabulary_size
from specjax.engine import slots
from specjax.engine.slots import PromptRow, RequestSettings, StepOutput
from specjax.types import Model

__all__ = [
    "BatchShape",
    "Programs",
    "devices_of",
    "empty_chunk",
    "explain_slots_out_of_memory",
    "make_programs",
    "row_lengths",
    "warm_up",
]

# Fewest tokens to which rows are halved. In shorter rows, attention would save a chunk little time.
_MIN_ROW = 512
# Prompts that are read before a slot is empty, without a batch. Each takes a slot's memory.
_PREFILL_AHEAD = 2
# Most prompts that a CPU reads together, and the least `chunk_size` for that. With shorter chunks,
# or in bfloat16, a batch rounds otherwise than a prompt alone.
_MAX_PROMPTS, _MIN_CHUNK = 16, 64
# Most prompts that are read as pieces, and tokens of a piece: one tile of the decoder's attention.
_MAX_PACKED_PROMPTS, _PIECE_SIZE = 8, 16


class BatchShape(NamedTuple):
    """Sizes of the batch in which prompts are read together.

    Attributes:
      num_rows: N, prompts in the batch.
      piece_size: tokens of a prompt in one row of the program's tokens.
      num_pieces: P, pieces of any of the prompts that the program reads; 0 is one of each prompt.
    """

    num_rows: int
    piece_size: int
    num_pieces: int = 0


class Programs(NamedTuple):
    """The functions of `specjax.engine.slots`, bound to an engine's models and options.

    Attributes:
      new_row: `(*, max_length, size=1) -> PromptRow`, of a prompt or of `size` prompts.
      grow_row: `(row, *, max_length) -> PromptRow` of a greater length.
      row_lengths: the lengths that a prompt's row grows through; the last is S. A chunk attends
        to all of its row.
      chunk_size: C, tokens of a prompt that are read at once.
      prefill_chunk: `(row, token_ids[1, C], positions[1, C]) -> PromptRow`.
      new_target_row: `(*, max_length) -> PromptRow` without a drafter's state.
      batch: sizes of the batch of prompts, whose rows have the shortest length; None if each
        prompt is read by itself.
      put_row: `(rows, row, index) -> rows` with the row of one prompt among N.
      prefill_batch: `(rows, token_ids[N, piece_size], positions) -> rows`; for pieces
        `(rows, token_ids[P, piece_size], positions, row_of_piece[P]) -> rows`.
      take_row: `(rows, index) -> PromptRow` of one prompt.
      admit: `(slots, row, slot, prompt[1, S], request) -> slots`, with a row of any of the lengths.
        With one more argument, the place of a row, it takes all rows of the batch instead.
      step: `(slots, allowed) -> (slots, StepOutput)`.
      release: `(slots, is_released: bool[B]) -> slots`.
      park: `(slots, slot) -> DecodeState`, a batch of one.
      resume: `(slots, parked, slot) -> slots`.
      empty_slots: `() -> slots`.
      num_slots: B.
      slot_bytes: bytes that the state of a slot takes, its caches among them.
      vocab_size: V of the target's logits.
    """

    new_row: Callable[..., PromptRow]
    grow_row: Callable[..., PromptRow]
    row_lengths: tuple[int, ...]
    chunk_size: int
    prefill_chunk: Callable[..., PromptRow]
    new_target_row: Callable[..., PromptRow]
    batch: BatchShape | None
    put_row: Callable[..., PromptRow]
    prefill_batch: Callable[..., PromptRow]
    take_row: Callable[..., PromptRow]
    admit: Callable[..., DecodeState]
    step: Callable[..., tuple[DecodeState, StepOutput]]
    release: Callable[..., DecodeState]
    park: Callable[..., DecodeState]
    resume: Callable[..., DecodeState]
    empty_slots: Callable[[], DecodeState]
    num_slots: int
    slot_bytes: int
    vocab_size: int

    @property
    def prefill_depth(self) -> int:
        """Entries of the queue that are read before a slot is empty.

        With a batch, N of them are in it, and N / 2 more are read and wait for a slot. Prompts that
        are read in pieces wait in the batch.
        """
        if self.batch is None:
            return _PREFILL_AHEAD
        num_rows = self.batch.num_rows
        return num_rows if self.batch.num_pieces else num_rows + num_rows // 2

    @property
    def prefills_in_advance(self) -> bool:
        """Whether a second chunk is read between two steps while no slot is empty.

        A chunk of pieces has several prompts, so that one is enough.
        """
        return self.batch is None or not self.batch.num_pieces

    @property
    def prefill_slots(self) -> float:
        """Memory of prompts that are being read or wait for a slot, in slots."""
        # 2.5 = two rows and, while one grows, the row of half its length that it replaces.
        if self.batch is None:
            return 2.5
        num_rows = self.batch.num_rows
        if not self.batch.num_pieces:
            # Rows of prompts that are read and left the batch, and an empty one.
            num_rows += self.prefill_depth - _PREFILL_AHEAD + 1
        return 2.5 + num_rows * self.row_lengths[0] / self.row_lengths[-1]

    def of_target(self) -> "Programs":
        """Returns programs whose rows hold the target's cache alone, in one length."""
        return self._replace(new_row=self.new_target_row, row_lengths=self.row_lengths[-1:])


def make_programs(
    models: Models, settings: Settings, *, max_length: int, chunk_size: int, options: StepOptions
) -> Programs:
    """Returns the programs of an engine; nothing is compiled yet.

    Args:
      models: as in `Engine`.
      settings: of B equal requests.
      max_length: S.
      chunk_size: C.
      options: as in `run_step`.

    Raises:
      ValueError: for a mesh with several processes or several devices for requests. Also for a
        cache with a leaf without an axis of requests, and for drafts with `rows`.
    """
    _check_placement(models.target)
    empty = functools.partial(
        slots.empty_slots, models, settings, max_length=max_length, options=options
    )
    axes_of_row = slots.row_axes(models, max_length)
    # It refuses outputs of a faulty target, before the state's shapes are made of them.
    num_slots, num_rows = settings.prompt_lengths.size, options.num_rows(models.drafter)
    vocab_size = vocabulary_size(models.target, num_slots, num_rows, max_length)
    shapes = slots.empty_slots.eval_shape(*empty.args, **empty.keywords)
    if shapes.draft.rows is not None:
        raise ValueError(
            "the drafter's drafts have rows, which say in which request's place logits lie; an "
            "engine moves requests between slots and needs drafts without."
        )
    axes = slots.slot_axes(shapes, axes_of_row)
    # The state of a whole-prompt drafter cannot be grown: use rows of full length.
    drafts = shapes.drafter_state
    is_whole = bool(jax.tree.leaves(drafts)) and not reads_chunks(drafts)
    leaf_axes = tuple(jax.tree.leaves(axes_of_row))
    new_row = functools.partial(slots.new_row, models)
    prefill_chunk = functools.partial(slots.prefill_chunk, models)
    batch = _choose_pieces(models, num_slots, chunk_size)
    is_fixed = is_whole or batch is not None
    lengths = (max_length,) if is_fixed else row_lengths(max_length, chunk_size)
    batch = batch or _choose_batch(new_row, num_slots, lengths[0], chunk_size)
    return Programs(
        new_row=new_row,
        grow_row=functools.partial(slots.grow_row, models),
        row_lengths=lengths,
        chunk_size=chunk_size,
        prefill_chunk=prefill_chunk,
        new_target_row=functools.partial(slots.new_row, models._replace(drafter=None)),
        batch=batch,
        put_row=functools.partial(slots.put, axes=leaf_axes),
        prefill_batch=prefill_chunk,
        take_row=functools.partial(slots.take, axes=leaf_axes),
        admit=functools.partial(
            slots.admit, models, axes=axes, row_axes=leaf_axes, options=options
        ),
        step=functools.partial(slots.step_slots, models, options=options),
        release=slots.release,
        park=functools.partial(slots.take, axes=axes),
        resume=functools.partial(slots.put, axes=axes),
        empty_slots=empty,
        num_slots=num_slots,
        slot_bytes=slots.slot_bytes(shapes, axes),
        vocab_size=vocab_size,
    )


def _check_placement(target: Model) -> None:
    """Refuses a mesh over which one host cannot move requests alone."""
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


def _choose_pieces(models: Models, num_slots: int, chunk_size: int) -> BatchShape | None:
    """Returns the batch whose prompts are read in pieces, on a GPU by models that can; or None.

    A chunk then holds the next tokens of several prompts without padding. Its program has one
    shape, and a piece's bits do not depend on the others. So every prompt is read by it.
    """
    num_rows = min(_MAX_PACKED_PROMPTS, num_slots // 4)
    if num_rows < 2 or not models.reads_pieces or jax.default_backend() != "gpu":
        return None
    return BatchShape(num_rows, _PIECE_SIZE, -(-chunk_size // _PIECE_SIZE))


def _choose_batch(
    new_row: Callable[..., PromptRow], num_slots: int, row_length: int, chunk_size: int
) -> BatchShape | None:
    """Returns the batch whose prompts are read together, a piece of each; None off CPU.

    A CPU reads the weights from memory once for all prompts. A piece of a quarter chunk needs
    less padding than a whole chunk. It is longer where all pieces together would be less than two
    chunks. On a GPU, other prompts in a batch would change a prompt's last bits.
    """
    size = min(_MAX_PROMPTS, num_slots // 4)
    if size < 2 or chunk_size < _MIN_CHUNK or jax.default_backend() != "cpu":
        return None
    row = jax.eval_shape(functools.partial(new_row, max_length=row_length))
    if any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(row)):
        return None
    return BatchShape(size, max(-(-chunk_size // 4), -(-2 * chunk_size // size)))


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


# The start of an engine ---------------------------------------------------------------------------


def devices_of(target: Model) -> set[jax.Device]:
    """Returns the devices that a target's parameters are on; JAX's first if they are on a host."""
    leaves = (leaf for leaf in jax.tree.leaves(target.params) if isinstance(leaf, jax.Array))
    return {device for leaf in leaves for device in leaf.devices()} or {jax.devices()[0]}


@contextlib.contextmanager
def explain_slots_out_of_memory(
    devices: Iterable[jax.Device], programs: Programs
) -> Iterator[None]:
    """Refuses slots that the devices have no room for, before the block makes them or when it does.

    Raises:
      MemoryError: with the bytes of a slot.
    """
    slot_bytes, prefill_slots = programs.slot_bytes, programs.prefill_slots
    needed_bytes = int(slot_bytes * (programs.num_slots + prefill_slots))
    error = MemoryError(
        f"The device has no room for {programs.num_slots} slots: each takes "
        f"{format_bytes(slot_bytes)} at max_length {programs.row_lengths[-1]}, and prompts that "
        f"are read {prefill_slots:.1f} more, {format_bytes(needed_bytes)} together. "
        "Fewer num_slots or a smaller max_length take less."
    )
    # A CPU has no statistics: its allocator fails when it is asked.
    stats = [device.memory_stats() or {} for device in devices]
    if all("bytes_limit" in each for each in stats):
        free_bytes = sum(each["bytes_limit"] - each.get("bytes_in_use", 0) for each in stats)
        if needed_bytes > free_bytes:
            raise error
    try:
        yield
    except jax.errors.JaxRuntimeError as failure:
        if "RESOURCE_EXHAUSTED" not in str(failure):
            raise
        raise error from failure


def warm_up(
    programs: Programs, target: Model, request: RequestSettings, allowed: np.ndarray | None
) -> DecodeState:
    """Runs every program, so that each is compiled, and returns empty slots.

    Each runs twice: arrays that a program returned may be placed otherwise than its first inputs.

    Args:
      programs: of an engine.
      target: as in `Engine`.
      request: settings of any request of two tokens.
      allowed: masks that allow all tokens, if a host masks rows; else None.

    Raises:
      MemoryError: if the target's devices have no room for the slots.
    """
    first, length = np.int32(0), programs.row_lengths[-1]
    operands = first, np.zeros((1, length), np.int32), request
    with explain_slots_out_of_memory(devices_of(target), programs):
        state = programs.empty_slots()
        for _ in range(2):
            for row, *place in _rows_of_each_length(programs):
                state = programs.admit(state, row, *operands, *place)
            state, output = programs.step(state, allowed)
            # No more than two rows at a time, as in a round of the scheduler.
            row = programs.new_target_row(max_length=length)
            row = programs.prefill_chunk(row, *empty_chunk(1, programs.chunk_size))
            parked = programs.park(state, first)
            state = programs.resume(state, parked, first)
            state = programs.resume(state, parked._replace(target_cache=row.target_cache), first)
            state = programs.release(state, np.ones(programs.num_slots, bool))
            jax.device_get(output)
    return state


def empty_chunk(num_prompts: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids 0 and positions -1 of a chunk without tokens, two i32[N, C]."""
    shape = (num_prompts, num_tokens)
    return np.zeros(shape, np.int32), np.full(shape, -1, np.int32)


def _rows_of_each_length(programs: Programs) -> Iterator[tuple[Any, ...]]:
    """Yields rows of an empty prompt, by every program that makes one; or a batch and a place."""
    row = programs.new_row(max_length=programs.row_lengths[0])
    yield (row,)
    if programs.batch is not None and programs.batch.num_pieces:
        # No prompt is read in a row of its own.
        rows, place = _read_batch(programs, row), np.int32(0)
        yield rows, place
        yield (programs.take_row(rows, place),)
        return
    nothing = empty_chunk(1, programs.chunk_size)
    for i, length in enumerate(programs.row_lengths):
        if i:
            row = programs.grow_row(row, max_length=length)
        # The second chunk's row is one that a program returned.
        row = programs.prefill_chunk(programs.prefill_chunk(row, *nothing), *nothing)
        if i == 0 and programs.batch is not None:
            row = programs.take_row(_read_batch(programs, row), np.int32(0))
            yield (row,)
            row = programs.prefill_chunk(row, *nothing)
        for longer in programs.row_lengths[i + 2 :]:
            programs.grow_row(row, max_length=longer)
        yield (row,)


def _read_batch(programs: Programs, row: PromptRow) -> PromptRow:
    """Returns the rows of a batch with a row in its first place."""
    assert programs.batch is not None
    (size, piece_size, num_pieces), first = programs.batch, np.int32(0)
    rows = programs.new_row(max_length=programs.row_lengths[0], size=size)
    for _ in range(2):
        if num_pieces:
            pieces = (*empty_chunk(num_pieces, piece_size), np.zeros(num_pieces, np.int32))
            rows = programs.prefill_batch(rows, *pieces)
        else:
            rows = programs.put_row(rows, row, first)
            rows = programs.prefill_batch(rows, *empty_chunk(size, piece_size))
    return rows
