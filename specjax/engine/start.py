"""The start of an engine: runs every program, and refuses what has no room with its bytes."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from specjax.decode.capacity import format_bytes
from specjax.decode.state import DecodeState
from specjax.engine.programs import BatchPrograms, Programs
from specjax.engine.slot_data import PromptRow, RequestSettings
from specjax.types import Model

__all__ = ["devices_of", "explain_slots_out_of_memory", "warm_up"]


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
    num_prompt_slots: float,
) -> Iterator[None]:
    """Refuses slots that the devices have no room for, before or when they are made.

    Args:
      devices: that hold the slots together.
      slot_bytes: of one slot.
      num_slots: B.
      max_length: S.
      num_prompt_slots: how many slots' bytes prompts take that are being read.

    Raises:
      MemoryError: with the bytes of a slot.
    """
    needed = int(slot_bytes * (num_slots + num_prompt_slots))
    error = MemoryError(
        f"The device has no room for {num_slots} slots: each takes {format_bytes(slot_bytes)} at "
        f"max_length {max_length}, and prompts that are read {num_prompt_slots:.1f} more, "
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
