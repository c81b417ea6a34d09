"""How a GPU call is timed: a long jitted loop of calls on rotating inputs, read off a trace."""

import collections
import concurrent.futures
import glob
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.spread import spread

# Runs of a loop inside one trace, told apart by their pauses: longer than any gap inside a run.
PAUSE_S, LONGEST_GAP_NS = 0.02, 5e6


class Lowered(NamedTuple):
    """A lowered loop: calls of one iteration, iterations, and options for its compiler."""

    program: Any
    calls: int
    iterations: int
    options: dict[str, Any] | None = None


class Loop(NamedTuple):
    """The loop compiled; `in_hlo` if its text names command buffers."""

    run: Callable[..., Any]
    calls: int
    iterations: int
    in_hlo: bool

    @property
    def total(self) -> int:
        """Calls of one run."""
        return self.calls * self.iterations


class Event(NamedTuple):
    """An activity of the device: nanoseconds."""

    start: float
    duration: float
    name: str


def lower_loop(call: Callable[..., Any], arguments: tuple[Any, ...], iterations: int) -> Any:
    """Lowers a loop of `iterations` over calls, each on its own inputs and keys.

    Args:
      call: `(inputs, keys, positions, options) -> (result, positions of the next call)`. The
        positions chain the calls and every result is carried, so that XLA removes none.
      arguments: a list of inputs, rotated through, as many lists of keys as there are calls to
        an iteration, positions, options.
      iterations: times that the loop's body runs.
    """

    def loop(inputs: list[Any], keys: list[Any], positions: Any, options: Any) -> list[Any]:
        def body(_: Any, carry: Any) -> Any:
            positions, results = carry[0], []
            for j in range(len(keys)):
                result, positions = call(inputs[j % len(inputs)], keys[j], positions, options)
                results.append(result)
            return positions, results

        shapes = jax.eval_shape(body, 0, (positions, None))[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.fori_loop(0, iterations, body, (positions, zeros))[1]

    return jax.jit(loop).lower(*arguments)


def compile_all(lowered: Iterable[tuple[Any, Lowered]]) -> dict[Any, Loop]:
    """Compiles loops side by side, and while the next are lowered; by name."""

    def compile_one(loop: Lowered) -> Loop:
        run = loop.program.compile(compiler_options=loop.options)
        return Loop(run, loop.calls, loop.iterations, "command_buffer" in run.as_text())

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {name: pool.submit(compile_one, loop) for name, loop in lowered}
        return {name: future.result() for name, future in futures.items()}


def time_loop(loop: Loop, arguments: list[tuple[Any, ...]]) -> tuple[dict[str, Any], list[Any]]:
    """Times one run per set of arguments; returns figures per call and the runs' results."""
    for each in arguments[:2]:
        jax.block_until_ready(loop.run(*each))
    clock = []
    for each in arguments:
        start = time.perf_counter()
        jax.block_until_ready(loop.run(*each))
        clock.append(1e6 * (time.perf_counter() - start) / loop.total)
    figures = {"host_clock_us": statistics.median(clock), "calls_per_run": loop.total}
    if jax.default_backend() != "gpu":
        # A rehearsal: a CPU has no device activity to read.
        return figures | spread(clock) | {"kernels_us": 0.0, "kernels": {}}, _run_all(
            loop, arguments
        )
    results, events, launches = trace(loop, arguments)
    runs = split_runs(events)
    if len(runs) != len(arguments):
        raise RuntimeError(
            f"The trace shows {len(runs)} runs of the loop instead of {len(arguments)}."
        )
    wall = [
        (max(e.start + e.duration for e in run) - run[0].start) / 1e3 / loop.total for run in runs
    ]
    total = loop.total * len(runs)
    figures |= spread(wall) | kernel_times(events, total)
    figures["command_buffers"] = {
        "in_hlo": loop.in_hlo,
        **{name: count / total for name, count in launches.items()},
    }
    return figures, results


def _run_all(loop: Loop, arguments: list[tuple[Any, ...]]) -> list[Any]:
    return [jax.block_until_ready(loop.run(*each)) for each in arguments]


def kernel_times(events: list[Event], calls: int, most: int = 10) -> dict[str, Any]:
    """Time and launches per call of every kernel and copy, the longest first, and their sum."""
    time_of, count_of = collections.Counter(), collections.Counter()
    for event in events:
        time_of[event.name] += event.duration
        count_of[event.name] += 1
    kernels = {
        name: {"us": ns / 1e3 / calls, "launches": count_of[name] / calls}
        for name, ns in time_of.most_common(most)
    }
    return {"kernels_us": sum(time_of.values()) / 1e3 / calls, "kernels": kernels}


def split_runs(events: list[Event]) -> list[list[Event]]:
    """Cuts a trace's events, in order of time, where the device rested between two runs."""
    runs: list[list[Event]] = []
    end = -np.inf
    for event in events:
        if event.start - end > LONGEST_GAP_NS:
            runs.append([])
        runs[-1].append(event)
        end = max(end, event.start + event.duration)
    return runs


def trace(
    loop: Loop, arguments: list[tuple[Any, ...]]
) -> tuple[list[Any], list[Event], dict[str, int]]:
    """Runs under the profiler: results, device events, and launches that the host made."""
    options = jax.profiler.ProfileOptions()
    # The host's own events would slow its launches; those of the driver are kept anyway.
    options.python_tracer_level, options.host_tracer_level = 0, 1
    options.enable_hlo_proto = False
    results = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for each in arguments:
                results.append(jax.block_until_ready(loop.run(*each)))
                time.sleep(PAUSE_S)
        (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
        events = sorted(_device_events(profile))
        launches = _host_launches(profile)
    if not events:
        raise RuntimeError("The profiler saw no activity of the GPU; does CUPTI work here?")
    return results, events, launches


def _device_events(profile: Any) -> list[Event]:
    return [
        Event(event.start_ns, event.duration_ns, event.name)
        for plane in profile.planes
        if "GPU" in plane.name
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def _host_launches(profile: Any) -> dict[str, int]:
    counts = {"graph_launches": 0, "kernel_launches": 0}
    for plane in profile.planes:
        if "GPU" in plane.name:
            continue
        for line in plane.lines:
            for event in line.events:
                counts["graph_launches"] += "GraphLaunch" in event.name
                counts["kernel_launches"] += "LaunchKernel" in event.name
    return counts
