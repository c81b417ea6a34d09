"""Times calls on a CPU in rounds, which take turns through sets of inputs."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

Name = TypeVar("Name", bound=Hashable)


def time_in_turns(
    calls: Mapping[Name, tuple[Any, Callable[[Any], Any]]],
    sets: Mapping[Any, Sequence[Any]],
    rounds: int,
) -> dict[Name, np.ndarray]:
    """Seconds of every call, [rounds], by name.

    Every round times each call once, in a new order, on inputs that the call before did not touch.
    Each call sees every set equally often.

    calls: kinds of inputs, and functions of one set.
    sets: of inputs, by kind.
    """
    for kind, call in calls.values():
        jax.block_until_ready(call(sets[kind][0]))
    times: dict[Name, list[float]] = {name: [] for name in calls}
    rng = np.random.default_rng(0)
    for number in range(rounds):
        for place in rng.permutation(len(calls)):
            name = list(calls)[place]
            kind, call = calls[name]
            inputs = sets[kind][(number + int(place)) % len(sets[kind])]
            start = time.perf_counter()
            jax.block_until_ready(call(inputs))
            times[name].append(time.perf_counter() - start)
    return {name: np.array(seconds) for name, seconds in times.items()}


def milliseconds(seconds: np.ndarray) -> dict[str, Any]:
    """The median and the quartiles."""
    low, middle, high = 1e3 * np.percentile(seconds, [25, 50, 75])
    return {"median_ms": middle, "quartiles_ms": [low, high]}
