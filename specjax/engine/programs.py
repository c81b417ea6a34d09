"""The compiled programs of an engine: bound to its models, measured in bytes, and warmed up.

    make_programs -> `Programs`: functions of `slots`, sizes, and the batch of prompts or None
    warm_up       -> empty slots, after each program was compiled, if the device has room

The constructor of `Engine` calls both. "Caches" are those of a prompt that is being read, by itself
or in a batch of several; see `slots.PromptCaches`.
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
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.memory import MemoryNeeds, devices_of, free_bytes, needs_of_state
from specjax.decode.options import StepOptions
from specjax.decode.state import DecodeState, Settings
from specjax.decode.target_step import vocabulary_size
from specjax.engine import slots
from specjax.engine.slots import PromptCaches, RequestSettings, StepOutput
from specjax.engine.step_sizes import check_reads_rows, step_chosen
from specjax.types import Draft, Model

# Fewest tokens of halved caches. In shorter ones, attention would save a chunk little time.
_MIN_CACHE_LENGTH = 512
# Prompts that are read before a slot is empty, without a batch. Each takes the memory of a slot.
_PREFILL_AHEAD = 2
# Most prompts in a batch on a CPU, and the least `chunk_size` for that. With shorter chunks, or in
# bfloat16, a batch rounds otherwise than a prompt alone.
_MAX_PROMPTS, _MIN_CHUNK = 16, 64
# Most prompts in a batch on a GPU, and tokens of a piece: one tile of the decoder's attention.
_MAX_PACKED_PROMPTS, _PIECE_SIZE = 8, 16


class BatchShape(NamedTuple):
    """Sizes of the batch in which prompts are read together, a piece at a time.

    Attributes:
      num_prompts: N, prompts in the batch.
      piece_size: most tokens of a piece: successive tokens of one prompt.
      num_pieces: P, pieces of any of the prompts that the program reads; 0 is one of each prompt.
    """

    num_prompts: int
    piece_size: int
    num_pieces: int = 0

    @property
    def packs_pieces(self) -> bool:
        """Whether a chunk is P pieces of any of the prompts, rather than one piece of each."""
        return self.num_pieces > 0

    @property
    def num_tokens(self) -> int:
        """Tokens of a chunk of all prompts together."""
        return (self.num_pieces or self.num_prompts) * self.piece_size


class Programs(NamedTuple):
    """The functions of `specjax.engine.slots`, bound to an engine's models and options.

    Attributes:
      new_caches: `(*, max_length, size=1) -> caches`, of a prompt or of a batch of `size`.
      grow_caches: `(caches, *, max_length) -> caches` of a greater length.
      cache_lengths: the lengths that a prompt's caches grow through; the last is S. Growth saves
        time, because a chunk attends to the whole length.
      chunk_size: C, tokens of a prompt that are read at once.
      prefill_chunk: `(caches, token_ids[1, C], positions[1, C]) -> caches` of a prompt, or
        `(batch_caches, token_ids[N, piece_size], positions) -> batch_caches`; for pieces
        `(batch_caches, token_ids[P, piece_size], positions, places[P]) -> batch_caches`.
      list_chunk: `(caches, token_ids, positions, next_ids, *places) -> (caches, TopLogprobs)`, for
        chunks of a prompt and of a batch; None if no prompt is listed.
      new_target_caches: `(*, max_length) -> caches` without a drafter's state.
      batch: sizes of the batch of prompts, whose caches have the shortest length; None if each
        prompt is read by itself.
      put_caches: `(batch_caches, caches, place) -> batch_caches`, with one prompt in a place.
      take_caches: `(batch_caches, place) -> caches` of one prompt.
      admit: `(slots, caches, slot, prompt[1, S], request) -> slots`, with caches of any length. Or
        `(slots, batch_caches, slot, prompt[1, S], request, place) -> slots`.
      step: `(slots, allowed, chosen) -> (slots, StepOutput)` of the slots chosen, i32[n].
      step_sizes: the n for which `step` is compiled, rising; the last is B.
      release: `(slots, is_released: bool[B]) -> slots`.
      park: `(slots, slot) -> DecodeState`, a batch of one.
      resume: `(slots, parked, slot) -> slots`.
      empty_slots: `() -> slots`.
      num_slots: B.
      needs: bytes of a slot, its caches among them, of a step and of a chunk.
      vocab_size: V of the target's logits.
    """

    new_caches: Callable[..., PromptCaches]
    grow_caches: Callable[..., PromptCaches]
    cache_lengths: tuple[int, ...]
    chunk_size: int
    prefill_chunk: Callable[..., PromptCaches]
    list_chunk: Callable[..., tuple[PromptCaches, TopLogprobs]] | None
    new_target_caches: Callable[..., PromptCaches]
    batch: BatchShape | None
    put_caches: Callable[..., PromptCaches]
    take_caches: Callable[..., PromptCaches]
    admit: Callable[..., DecodeState]
    step: Callable[..., tuple[DecodeState, StepOutput]]
    step_sizes: tuple[int, ...]
    release: Callable[..., DecodeState]
    park: Callable[..., DecodeState]
    resume: Callable[..., DecodeState]
    empty_slots: Callable[[], DecodeState]
    num_slots: int
    needs: MemoryNeeds
    vocab_size: int

    @property
    def prefill_depth(self) -> int:
        """First entries of the queue that may be read before a slot is empty.

        With a batch of one piece of each, N of them are in it, and N / 2 more wait for a slot.
        Prompts that are read in pieces wait in the batch.
        """
        if self.batch is None:
            return _PREFILL_AHEAD
        num_prompts = self.batch.num_prompts
        return num_prompts if self.batch.packs_pieces else num_prompts + num_prompts // 2

    @property
    def chunks_in_advance(self) -> int:
        """Chunks that are read between two steps while no slot is empty: 2, or 1 of packed pieces.

        Packed pieces are of several prompts, so that one chunk is enough.
        """
        return 1 if self.batch is not None and self.batch.packs_pieces else 2

    @property
    def prefill_slots(self) -> float:
        """Memory of prompts that are being read or wait for a slot, as a number of slots."""
        # 2.5: the caches of two prompts and, while those of one grow, the half that they replace.
        if self.batch is None:
            return 2.5
        num_prompts = self.batch.num_prompts
        if not self.batch.packs_pieces:
            # Those that are read and left the batch, and the caches of an empty prompt.
            num_prompts += self.prefill_depth - _PREFILL_AHEAD + 1
        return 2.5 + num_prompts * self.cache_lengths[0] / self.cache_lengths[-1]


def make_programs(
    models: Models,
    settings: Settings,
    *,
    max_length: int,
    chunk_size: int,
    options: StepOptions,
    step_sizes: tuple[int, ...],
    num_listed: int | None = None,
) -> Programs:
    """Returns the programs of an engine; nothing is compiled yet.

    Args:
      models: as in `Engine`.
      settings: of B equal requests, as `slots.empty_slots` takes them.
      max_length: S.
      chunk_size: C.
      options: as in `run_step`.
      step_sizes: from `read_sizes`.
      num_listed: likeliest tokens listed of each token of a prompt; None if no prompt is listed.

    Raises:
      ValueError: for a mesh with several processes or several devices for requests. Also for a
        cache with a leaf without an axis of requests, and for drafts with `rows`. For several sizes
        of steps also for models that read no pieces.
    """
    _check_placement(models.target)
    check_reads_rows(models, step_sizes)
    empty = functools.partial(
        slots.empty_slots, models, settings, max_length=max_length, options=options
    )
    axes_of_caches = slots.cache_axes(models, max_length)
    num_slots, num_rows = settings.prompt_lengths.size, options.num_rows(models.drafter)
    # First, because this refuses outputs of a faulty target. The state's shapes depend on them.
    vocab_size = vocabulary_size(models.target, num_slots, num_rows, max_length)
    shapes = slots.empty_slots.eval_shape(*empty.args, **empty.keywords)
    _check_draft(shapes.draft)
    axes = slots.slot_axes(shapes, axes_of_caches)
    # The state of a whole-prompt drafter cannot be grown, so that its caches begin with length S.
    drafter_state = shapes.drafter_state
    is_whole = bool(jax.tree.leaves(drafter_state)) and not reads_chunks(drafter_state)
    leaf_axes = tuple(jax.tree.leaves(axes_of_caches))
    new_caches = functools.partial(slots.new_caches, models)
    batch = _choose_pieces(models, num_slots, chunk_size)
    is_fixed = is_whole or batch is not None
    lengths = (max_length,) if is_fixed else cache_lengths(max_length, chunk_size)
    batch = batch or _choose_batch(new_caches, num_slots, lengths[0], chunk_size)
    batch_tokens = 0 if batch is None else batch.num_tokens
    needs = needs_of_state(models, shapes, max(chunk_size, batch_tokens), num_listed is not None)
    list_chunk = functools.partial(slots.list_chunk, models, num_listed=num_listed)
    return Programs(
        new_caches=new_caches,
        grow_caches=functools.partial(slots.grow_caches, models),
        cache_lengths=lengths,
        chunk_size=chunk_size,
        prefill_chunk=functools.partial(slots.prefill_chunk, models),
        list_chunk=None if num_listed is None else list_chunk,
        new_target_caches=functools.partial(slots.new_caches, models._replace(drafter=None)),
        batch=batch,
        put_caches=functools.partial(slots.put, axes=leaf_axes),
        take_caches=functools.partial(slots.take, axes=leaf_axes),
        admit=functools.partial(
            slots.admit, models, axes=axes, cache_axes=leaf_axes, options=options
        ),
        step=functools.partial(step_chosen, models, options=options),
        step_sizes=step_sizes,
        release=slots.release,
        park=functools.partial(slots.take, axes=axes),
        resume=functools.partial(slots.put, axes=axes),
        empty_slots=empty,
        num_slots=num_slots,
        needs=needs._replace(slot_bytes=slots.slot_bytes(shapes, axes)),
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


def _check_draft(draft: Draft) -> None:
    """Refuses drafts of which one request's may lie in another's place."""
    if draft.rows is not None:
        raise ValueError(
            "the drafter's drafts have rows, which say in which request's place logits lie; an "
            "engine moves requests between slots and needs drafts without."
        )


def _choose_pieces(models: Models, num_slots: int, chunk_size: int) -> BatchShape | None:
    """Returns the batch whose prompts are read in pieces, on a GPU by models that can; or None.

    A chunk then holds the next tokens of several prompts without padding. Its program has one
    shape, and a piece's bits do not depend on the others. So every prompt is read by it.
    """
    num_prompts = min(_MAX_PACKED_PROMPTS, num_slots // 4)
    if num_prompts < 2 or not models.reads_pieces or jax.default_backend() != "gpu":
        return None
    return BatchShape(num_prompts, _PIECE_SIZE, -(-chunk_size // _PIECE_SIZE))


def _choose_batch(
    new_caches: Callable[..., PromptCaches], num_slots: int, max_length: int, chunk_size: int
) -> BatchShape | None:
    """Returns the batch whose prompts are read together, a piece of each, on a CPU; or None.

    A CPU reads the weights from memory once for all prompts. A piece of a quarter chunk needs
    less padding than a whole chunk. It is longer where all pieces together would be less than two
    chunks. On a GPU, other prompts in a batch would change a prompt's last bits.
    """
    num_prompts = min(_MAX_PROMPTS, num_slots // 4)
    if num_prompts < 2 or chunk_size < _MIN_CHUNK or jax.default_backend() != "cpu":
        return None
    caches = jax.eval_shape(functools.partial(new_caches, max_length=max_length))
    if any(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(caches)):
        return None
    return BatchShape(num_prompts, max(-(-chunk_size // 4), -(-2 * chunk_size // num_prompts)))


def cache_lengths(max_length: int, chunk_size: int) -> tuple[int, ...]:
    """Returns the lengths that the caches of a prompt grow through: S and its halves, rising.

    Each is one more copy of the models' layers to compile.

    Args:
      max_length: S.
      chunk_size: C, the least length.

    Example:
      >>> cache_lengths(2500, 128), cache_lengths(2500, 1024), cache_lengths(1000, 128)
      ((625, 1250, 2500), (1250, 2500), (1000,))
    """
    lengths = [max_length]
    while (half := -(-lengths[0] // 2)) >= max(_MIN_CACHE_LENGTH, chunk_size):
        lengths.insert(0, half)
    return tuple(lengths)


# The start of an engine ---------------------------------------------------------------------------


@contextlib.contextmanager
def explain_slots_out_of_memory(
    devices: Iterable[jax.Device], programs: Programs
) -> Iterator[None]:
    """Refuses slots that the devices have no room for, before the block makes them or when it does.

    Raises:
      MemoryError: with the bytes of a slot.
    """
    needs, prefill_slots = programs.needs, programs.prefill_slots
    needed, free = needs.of_slots(programs.num_slots + prefill_slots), free_bytes(devices)
    room = "" if free is None else f", and {format_bytes(free)} are free"
    error = MemoryError(
        f"The device has no room for {programs.num_slots} slots: each takes "
        f"{format_bytes(needs.slot_bytes)} at max_length {programs.cache_lengths[-1]}, and prompts "
        f"that are read {prefill_slots:.1f} more; a step takes {format_bytes(needs.step_bytes)} "
        f"for its logits, a chunk {format_bytes(needs.chunk_bytes)}; {format_bytes(needed)} "
        f"together{room}. Fewer num_slots or a smaller max_length take less."
    )
    if free is not None and needed > free:
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
      allowed: from `engine.all_allowed_masks`.

    Raises:
      MemoryError: if the target's devices have no room for the slots.
    """
    first, length = np.int32(0), programs.cache_lengths[-1]
    operands = first, np.zeros((1, length), np.int32), request
    with explain_slots_out_of_memory(devices_of(target), programs):
        state = programs.empty_slots()
        for _ in range(2):
            for caches, *place in _caches_of_each_length(programs):
                state = programs.admit(state, caches, *operands, *place)
            for size in programs.step_sizes:
                state, output = programs.step(state, allowed, np.arange(size, dtype=np.int32))
            # Caches of no more than two prompts at a time, as in a round of the scheduler.
            caches = programs.new_target_caches(max_length=length)
            caches = programs.prefill_chunk(caches, *empty_chunk(1, programs.chunk_size))
            parked = programs.park(state, first)
            state = programs.resume(state, parked, first)
            read_again = parked._replace(target_cache=caches.target_cache)
            state = programs.resume(state, read_again, first)
            state = programs.release(state, np.ones(programs.num_slots, bool))
            jax.device_get(output)
    return state


def empty_chunk(num_prompts: int, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns token ids 0 and positions -1 of a chunk without tokens, two i32[N, C]."""
    shape = (num_prompts, num_tokens)
    return np.zeros(shape, np.int32), np.full(shape, -1, np.int32)


def _caches_of_each_length(programs: Programs) -> Iterator[tuple[Any, ...]]:
    """Yields arguments of `Programs.admit`: caches from each program that returns some.

    They are the caches of a prompt without tokens, or those of a batch and a place.
    """
    caches = programs.new_caches(max_length=programs.cache_lengths[0])
    yield (caches,)
    if programs.batch is not None and programs.batch.packs_pieces:
        # Every prompt is read in the batch.
        batch_caches, place = _read_batch(programs, caches), np.int32(0)
        yield batch_caches, place
        yield (programs.take_caches(batch_caches, place),)
        return
    nothing = empty_chunk(1, programs.chunk_size)
    for i, length in enumerate(programs.cache_lengths):
        if i:
            caches = programs.grow_caches(caches, max_length=length)
        _list_chunk(programs, programs.new_caches(max_length=length), nothing)
        # The second chunk takes caches that a program returned.
        caches = _list_chunk(programs, programs.prefill_chunk(caches, *nothing), nothing)
        caches = programs.prefill_chunk(caches, *nothing)
        if i == 0 and programs.batch is not None:
            caches = programs.take_caches(_read_batch(programs, caches), np.int32(0))
            yield (caches,)
            caches = programs.prefill_chunk(caches, *nothing)
        # Lengths are rounded up from halves: the next may be too short for one more chunk.
        for longer in programs.cache_lengths[i + 2 :]:
            programs.grow_caches(caches, max_length=longer)
        yield (caches,)


def _read_batch(programs: Programs, caches: PromptCaches) -> PromptCaches:
    """Returns the caches of a batch by each program that makes them, a prompt's in place 0."""
    assert programs.batch is not None
    (num_prompts, piece_size, num_pieces), first = programs.batch, np.int32(0)
    chunk: tuple[np.ndarray, ...] = empty_chunk(num_pieces or num_prompts, piece_size)
    if num_pieces:
        chunk = (*chunk, np.zeros(num_pieces, np.int32))
    empty = functools.partial(
        programs.new_caches, max_length=programs.cache_lengths[0], size=num_prompts
    )
    _list_chunk(programs, empty(), chunk)
    batch = empty()
    for _ in range(2):
        if not num_pieces:
            batch = programs.put_caches(batch, caches, first)
        batch = _list_chunk(programs, programs.prefill_chunk(batch, *chunk), chunk)
    return batch


def _list_chunk(
    programs: Programs, caches: PromptCaches, chunk: tuple[np.ndarray, ...]
) -> PromptCaches:
    """Returns caches after a chunk that is listed; as they were if no prompt may be."""
    if programs.list_chunk is None:
        return caches
    token_ids, positions, *places = chunk
    caches, _ = programs.list_chunk(caches, token_ids, positions, positions, *places)
    return caches
