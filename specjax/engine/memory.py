"""Memory of an engine: says at the start what a slot needs, and whether the slots fit."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from specjax.model import Model

__all__ = ["devices_of", "explain_slots_out_of_memory"]


def devices_of(target: Model) -> set[Any]:
    """Returns the devices that a target's parameters are on; JAX's first if they are on a host."""
    leaves = (leaf for leaf in jax.tree.leaves(target.params) if isinstance(leaf, jax.Array))
    return {device for leaf in leaves for device in leaf.devices()} or {jax.devices()[0]}


@contextlib.contextmanager
def explain_slots_out_of_memory(
    devices: Iterable[Any], slot_bytes: int, num_slots: int, max_length: int
) -> Iterator[None]:
    """Refuses slots that the devices have no room for, before or when they are made.

    Args:
      devices: that hold the slots together.
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
