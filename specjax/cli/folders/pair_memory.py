"""What a pair takes of the memory that is free, known from shapes before weights are read.

needed = weights + requests * slot_bytes + max(step_bytes, chunk_bytes)
"""

import math
import os
import pathlib
from typing import Any

import jax

from specjax import models
from specjax.cli.model_pair import ModelPair
from specjax.decode.capacity import format_bytes
from specjax.decode.drafters import Drafter, model_drafter, ngram_drafter
from specjax.decode.memory import free_bytes, memory_needs
from specjax.decode.options import LoopOptions

# Bytes of a target's files. A smaller one is loaded before a sentence is read.
_LEAST_SHOWN = 2**30


def report_memory(pair: ModelPair, terminal: Any, **size: int) -> None:
    """Prints the sentence of `describe_memory`, unless the options ask for texts alone."""
    sentence = describe_memory(pair, **size)
    if sentence is not None and not (pair.options.quiet or pair.options.json):
        terminal.print_note(sentence)


def describe_memory(pair: ModelPair, *, num_requests: int, max_length: int) -> str | None:
    """Returns a sentence of what a pair takes and what is free; None for a small pair.

    Args:
      pair: whose weights are not read yet. Of a draft head the size of its files counts.
      num_requests: that are decoded at once.
      max_length: tokens of each.

    Raises:
      MemoryError: if weights and requests do not fit.
    """
    if _size_of_files(pair.folder) < _LEAST_SHOWN:
        return None
    dtype = pair.load_target.get("dtype")
    target = models.load_shapes(pair.folder, dtype)[0]
    drafter, draft_bytes = _draft_shapes(pair, dtype)
    weights = _num_bytes(target.params) + draft_bytes
    needs = memory_needs(
        target,
        drafter,
        batch_size=num_requests,
        options=LoopOptions(max_length=max_length),
        config=pair.config,
    )
    rest = needs.of_slots(num_requests)
    free = _free_bytes(pair.load_target.get("mesh"))
    parts = (
        f"weights take {_short(weights)}, {num_requests} of {max_length} tokens at once "
        f"{_short(rest)}"
    )
    if free is not None and weights + rest > free:
        raise MemoryError(
            f"there is no room for this pair: {parts}, and {_short(free)} are free. It needs "
            "--dtype bfloat16, fewer or shorter texts, a smaller model, or --mesh over more "
            "devices."
        )
    if free is None:
        return parts
    room = (free - weights - max(needs.step_bytes, needs.chunk_bytes)) // needs.slot_bytes
    return f"{parts}; {_short(free)} are free, room for {room}"


def _draft_shapes(pair: ModelPair, dtype: str | None) -> tuple[Drafter | None, int]:
    """Returns a drafter with shapes for weights, or None, and the bytes of the weights."""
    if pair.draft is None:
        return ngram_drafter() if pair.draft_spec == "ngram" else None, 0
    if pair.draft.kind == "model":
        draft = models.load_shapes(pair.draft_spec, dtype)[0]
        return model_drafter(draft), _num_bytes(draft.params)
    return None, _size_of_files(pair.draft_spec)


def _size_of_files(folder: str | os.PathLike[str]) -> int:
    return sum(file.stat().st_size for file in pathlib.Path(folder).glob("*.safetensors"))


def _num_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _free_bytes(mesh: jax.sharding.Mesh | None) -> int | None:
    """Returns the bytes that the devices have free; on a CPU those of the machine, if it tells."""
    devices = list(jax.devices()[:1] if mesh is None else mesh.devices.flat)
    free = free_bytes(devices)
    if free is not None or devices[0].platform != "cpu":
        return free
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _short(size: int) -> str:
    """Returns bytes in the largest unit, without their number."""
    return format_bytes(size).partition(" (")[0]
