"""Memory of an engine: says at the start what a slot needs, and whether the slots fit."""

import contextlib
from collections.abc import Iterator

import jax

__all__ = ["explain_slots_out_of_memory"]


@contextlib.contextmanager
def explain_slots_out_of_memory(slot_bytes: int, num_slots: int, max_length: int) -> Iterator[None]:
    """Refuses slots that the device has no room for, before or when they are made.

    Args:
      slot_bytes: of one slot.
      num_slots: B.
      max_length: S.

    Raises:
      MemoryError: with the bytes of a slot.
    """
    # Two prompts are read, one of them into a row that grows out of one of half its length.
    needed = slot_bytes * (2 * num_slots + 5) // 2
    error = MemoryError(
        f"The device has no room for {num_slots} slots: each takes {slot_bytes / 2**30:.2f} GiB "
        f"({slot_bytes} bytes) at max_length {max_length}, and prompts that are read two and "
        f"a half more, {needed / 2**30:.2f} GiB together. Fewer num_slots or a smaller max_length "
        "take less."
    )
    # None on a CPU, whose allocator says only when it is asked.
    facts = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in facts and needed > facts["bytes_limit"] - facts.get("bytes_in_use", 0):
        raise error
    try:
        yield
    except jax.errors.JaxRuntimeError as failure:
        if "RESOURCE_EXHAUSTED" not in str(failure):
            raise
        raise error from failure
