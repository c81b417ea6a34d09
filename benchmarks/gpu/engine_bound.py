"""The least time of a queue, first come, first served, by the chunks and steps an engine takes.

    bound = sum of chunk_ms[row length]  +  sum over steps of step_ms(tokens in all slots then)

Chunks are timed in rows of each length. Steps are timed with empty slots and with slots of unequal
lengths, like the queue's: attention takes longer for them than for as many tokens in equal rows. No
host waits between. Times between two sums of lengths are interpolated. Copies of rows into slots
count nothing. The number of steps of each request gives the step in which the next one has its
slot.
"""

import heapq
import time
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax


class Times(NamedTuple):
    """Milliseconds of what an engine runs.

    Attributes:
      chunk_ms: of a chunk, by the length of its row.
      step_ms: of a step, next to the tokens in all slots, the fewest first.
    """

    chunk_ms: dict[int, float]
    step_ms: list[tuple[float, float]]


def fill(
    engine: specjax.Engine, prompts: list[list[int]], new: int | None
) -> list[specjax.Request]:
    """Submits a prompt for each slot, and steps until all have been read."""
    requests = [
        engine.submit(prompt, key=jax.random.key(seed), max_new_tokens=new)
        for seed, prompt in enumerate(prompts)
    ]
    while engine.num_running < engine.num_slots and engine.step():
        pass
    return requests


def measure_times(engine: specjax.Engine, lengths: list[list[int]], runs: int) -> Times:
    """Times chunks and steps of an engine without requests.

    Args:
      engine: with nothing to do.
      lengths: of prompts that fill its slots, the fewest tokens first.
      runs: chunks or steps of each kind.
    """
    scheduler = engine._scheduler
    programs = scheduler._programs
    size = programs.chunk_size
    chunk_ms = {}
    ids = np.zeros((1, size), np.int32)
    for length in programs.cache_lengths:
        positions = np.arange(length - size, length, dtype=np.int32)[None]
        row = programs.prefill_chunk(programs.new_caches(max_length=length), ids, positions)
        jax.block_until_ready(row)
        start = time.perf_counter()
        for _ in range(runs):
            row = programs.prefill_chunk(row, ids, positions)
        jax.block_until_ready(row)
        chunk_ms[length] = 1e3 * (time.perf_counter() - start) / runs
        del row
    step_ms = [(0.0, bare_step_ms(engine, runs))]
    for each in lengths:
        prompts = [[seed % 97] * length for seed, length in enumerate(each)]
        requests = fill(engine, prompts, None)
        before = int(np.sum(scheduler._slots.lengths))
        taken = bare_step_ms(engine, runs)
        after = int(np.sum(scheduler._slots.lengths))
        step_ms.append(((before + after) / 2, taken))
        for request in requests:
            engine.abort(request)
        engine.run()
    return Times(chunk_ms, step_ms)


def bare_step_ms(engine: specjax.Engine, runs: int) -> float:
    """Milliseconds of a step that no host reads, with the requests that are in the slots."""
    scheduler = engine._scheduler
    jax.block_until_ready(scheduler._slots)
    start = time.perf_counter()
    for _ in range(runs):
        scheduler._slots, output = scheduler._programs.step(
            scheduler._slots, scheduler._fill_masks(), np.arange(engine.num_slots)
        )
    jax.block_until_ready(output)
    return 1e3 * (time.perf_counter() - start) / runs


def list_schedule(lasting: list[int], num_slots: int) -> list[int]:
    """Returns when each request begins, in the first slot that is empty, in their order."""
    free, begins = [0] * num_slots, []
    for steps in lasting:
        begins.append(heapq.heappop(free))
        heapq.heappush(free, begins[-1] + steps)
    return begins


def bound_seconds(
    times: Times, requests: list[tuple[int, int, int]], num_slots: int, chunk_size: int
) -> dict[str, Any]:
    """Returns the bound of a queue, and of what it is made.

    Args:
      times: of the engine.
      requests: tokens of the prompt, of the text, and steps that it took, in their order.
      num_slots: of the engine.
      chunk_size: of the engine.
    """
    chunks = [
        min(length for length in times.chunk_ms if length >= min(begin + chunk_size, prompt - 1))
        for prompt, _, _ in requests
        for begin in range(0, prompt - 1, chunk_size)
    ]
    lasting = [steps for _, _, steps in requests]
    begins = list_schedule(lasting, num_slots)
    tokens = np.zeros(max(begin + steps for begin, steps in zip(begins, lasting, strict=True)))
    for begin, (prompt, new, steps) in zip(begins, requests, strict=True):
        tokens[begin : begin + steps] += prompt + new * np.arange(steps) / max(steps, 1)
    chunks_ms = sum(times.chunk_ms[length] for length in chunks)
    steps_ms = float(np.interp(tokens, *zip(*times.step_ms, strict=True)).sum())
    return {
        "bound_seconds": (chunks_ms + steps_ms) / 1e3,
        "bound_of_chunks": chunks_ms / 1e3,
        "chunks": len(chunks),
        "least_steps": len(tokens),
        "chunk_ms": times.chunk_ms,
        "step_ms": times.step_ms,
    }
