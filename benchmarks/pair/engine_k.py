"""Times an engine on a mixed load at every fixed K, and where each request or the load chooses K.

python -m benchmarks.pair.engine_k --out benchmarks/results/cpu_engine_k.json

The embedded target continues pieces of held-out files, of 20 to 200 tokens, by 16 to 96 new ones. A
third each has temperature 0, 0.7 and 1.2, fixed by a seed. Two things are measured before: the
costs of steps with k drafted tokens, relative to plain ones, and the acceptance rate of as many
other requests. "auto" gets both, "auto, no rate" the costs alone. All contenders take turns in one
process, each round in another order. On a CPU it records processor time, which other work lengthens
least, on a GPU wall time.
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import time
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax
from benchmarks.cpu.engine import CHUNK, LONGEST, read_prompts
from benchmarks.record import environment, save
from specjax import models

MAX_NEW, TEMPERATURES = 96, (0.0, 0.7, 1.2)


class Load(NamedTuple):
    """Requests: prompts and what is asked for each."""

    prompts: list[list[int]]
    values: list[dict[str, Any]]


def mixed_load(number: int, seed: int = 1) -> Load:
    """Requests of several lengths and temperatures, others for each seed."""
    rng = np.random.default_rng(seed)
    values: list[dict[str, Any]] = [
        {
            "key": jax.random.key(i + (seed - 1) * number),
            "max_new_tokens": int(rng.integers(16, MAX_NEW + 1)),
            "temperature": TEMPERATURES[i % 3],
        }
        for i in range(number)
    ]
    return Load(read_prompts(seed * number)[-number:], values)


def make_engines(
    pair: Any, num_slots: int, configs: list[tuple[Any, bool]]
) -> list[specjax.Engine]:
    """Engines for the load, compiled side by side: plain, then by configs and `k_by_load`."""
    target, drafter = pair

    def make(given: tuple[Any, bool]) -> specjax.Engine:
        config, by_load = given
        return specjax.Engine(
            target,
            None if config is None else drafter,
            num_slots=num_slots,
            options=specjax.LoopOptions(LONGEST + MAX_NEW, prefill_chunk_size=CHUNK),
            config=config,
            k_by_load=by_load,
        )

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(make, [(None, False), *configs]))


def run(engine: specjax.Engine, load: Load) -> tuple[dict[str, float], list[specjax.Request]]:
    """Seconds of the load through an engine, and its requests."""
    wall, cpu, steps = time.perf_counter(), time.process_time(), engine.num_steps
    requests = [
        engine.submit(prompt, **values)
        for prompt, values in zip(load.prompts, load.values, strict=True)
    ]
    engine.run()
    seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return seconds | {"steps": engine.num_steps - steps}, requests


def measure_costs_and_rate(
    pair: Any, num_slots: int, most: int, rounds: int, sample: Load
) -> tuple[dict[str, tuple[float, ...]], float]:
    """Full steps' times that draft 0, ..., `most` tokens, by each clock, and a load's usual rate.

    The times are relative to plain steps. The rate is the r of which 1 + r + ... + r^most is the
    mean number of tokens that a step of a request commits.
    """
    # No prompts: chunks of them would be in the time.
    values = {"max_new_tokens": MAX_NEW, "temperature": 0.7}
    each = [{"key": jax.random.key(i), **values} for i in range(4 * num_slots)]
    load = Load([[257] for _ in each], each)
    configs: list[tuple[Any, bool]] = []
    for k in range(1, most + 1):
        # Alone worth drafting, and at any rate.
        costs = tuple(1e-6 if i == k else 1.0 for i in range(most + 1))
        configs.append((specjax.SpeculativeConfig("auto", step_costs=costs), False))
    engines = make_engines(pair, num_slots, configs)
    found: list[list[dict[str, float]]] = [[] for _ in engines]
    for _ in range(rounds):
        for engine, records in zip(engines, found, strict=True):
            records.append(run(engine, load)[0])
    table: dict[str, tuple[float, ...]] = {}
    for clock in ("wall", "cpu"):
        # The fastest of the runs: what else the host does only lengthens one.
        times = [min(record[clock] / record["steps"] for record in x) for x in found]
        table[clock] = tuple(round(float(x / times[0]), 3) for x in times)
    counts = [request.metrics for request in run(engines[-1], sample)[1]]
    length = sum(x.num_emitted for x in counts) / sum(x.num_steps for x in counts)
    rates = np.linspace(0, 1, 1001)
    lengths = (rates[:, None] ** np.arange(most + 1)).sum(1)
    return table, float(rates[np.argmin(abs(lengths - length))])


def contenders(
    pair: Any, num_slots: int, costs: tuple[float, ...], rate: float
) -> dict[str, specjax.Engine]:
    """An engine for each way to choose K."""
    alone = specjax.SpeculativeConfig("auto", step_costs=costs)
    auto = dataclasses.replace(alone, usual_acceptance_rate=rate)
    configs: dict[str, tuple[Any, bool]] = {
        f"K = {k}": (specjax.SpeculativeConfig(num_speculative_tokens=k), False)
        for k in range(1, len(costs))
    }
    configs |= {
        "auto": (auto, False),
        "auto, no rate": (alone, False),
        "auto, by load": (auto, True),
    }
    engines = make_engines(pair, num_slots, list(configs.values()))
    return dict(zip(["plain", *configs], engines, strict=True))


def summarise(seconds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and how many times as fast as plain decoding and as the best fixed K."""
    medians = {
        clock: {name: float(np.median([x[clock] for x in runs])) for name, runs in seconds.items()}
        for clock in ("wall", "cpu")
    }
    fixed = [name for name in seconds if not name.startswith("auto")]
    summary: dict[str, Any] = {"median_seconds": medians}
    for clock, each in medians.items():
        best = min(fixed, key=each.__getitem__)
        summary[f"best_fixed_by_{clock}"] = best
        for name in (name for name in seconds if name.startswith("auto")):
            for other in ("plain", best):
                pairs = zip(seconds[other], seconds[name], strict=True)
                ratios = [slow[clock] / fast[clock] for slow, fast in pairs]
                key = f"{name}: times as fast as {other}, {clock}"
                summary[key] = [round(x, 3) for x in np.percentile(ratios, [25, 50, 75])]
    return summary


def measure(pair: Any, num_slots: int, most: int, load: Load, rounds: int) -> dict[str, Any]:
    """Everything for one number of slots."""
    sample = mixed_load(len(load.prompts), seed=2)
    costs, rate = measure_costs_and_rate(pair, num_slots, most, rounds, sample)
    clock = "cpu" if jax.default_backend() == "cpu" else "wall"
    engines = contenders(pair, num_slots, costs[clock], rate)
    few = Load(load.prompts[:num_slots], load.values[:num_slots])
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for engine in engines.values():
        run(engine, few)
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for name in rng.permutation(list(engines)):
            seconds[name].append(run(engines[name], load)[0])
    record = {"slots": num_slots, "step_costs": costs, "usual_acceptance_rate": rate}
    return record | {"clock": clock, "seconds": seconds} | summarise(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--most", type=int, default=4)
    parser.add_argument("--draft", choices=("draft", "eagle3"), default="draft")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    target, _ = models.load(models.pretrained_folder("target"))
    pair = target, models.load_drafter(models.pretrained_folder(args.draft), target)
    where = environment()
    where["load_average"] = os.getloadavg()
    setting = {"draft": args.draft, "prompts": args.prompts, "chunk": CHUNK, "most": args.most}
    setting |= {"temperatures": TEMPERATURES, "most_new_tokens": MAX_NEW}
    load = mixed_load(args.prompts)
    whole: dict[str, Any] = {"environment": where, "setting": setting, "runs": []}
    for num_slots in args.slots:
        record = measure(pair, num_slots, args.most, load, args.rounds)
        whole["runs"].append(record)
        print(json.dumps({name: x for name, x in record.items() if name != "seconds"}, indent=1))
        save(args.out, whole)


if __name__ == "__main__":
    main()
