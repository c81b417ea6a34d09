"""Times the first `generate` of a process at real size: trace, lowering, compilation, run.

python -m benchmarks.gpu.cold_start --out benchmarks/results/h200_cold_start.json

Every case is a process of its own, once with an empty compilation cache and once with the first
run's cache. Weights are made before the clock starts.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.cpu.cold_start import EVENTS
from benchmarks.gpu.decode import DRAFT, SMALL, TARGET, K
from benchmarks.record import environment, save
from specjax.models import build

CASES = ("drafts by a model", "plain")
PROGRAMS = ("run_prefill", "run_loop")


def first_calls(case: str, smoke: bool) -> dict[str, Any]:
    """Seconds of the first call and of two others, and what JAX spent where in them."""
    configs = [dataclasses.replace(c, **SMALL) if smoke else c for c in (TARGET, DRAFT)]
    target, draft = (build(config, seed=seed) for seed, config in enumerate(configs))
    jax.block_until_ready((target.params, draft.params))
    drafter = specjax.model_drafter(draft) if case == CASES[0] else None
    events: list[tuple[str, str, float]] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, fun_name="", **_: events.append((event, fun_name, seconds))
    )

    def call(num_prompt_tokens: int, max_new_tokens: int) -> dict[str, Any]:
        ids = np.random.default_rng(0).integers(0, 100, (1, num_prompt_tokens))
        events.clear()
        start = time.perf_counter()
        output = specjax.generate(
            target,
            drafter,
            (ids, [num_prompt_tokens]),
            keys=jax.random.key(0),
            config=specjax.SpeculativeConfig(num_speculative_tokens=K),
            max_new_tokens=max_new_tokens,
            temperature=0.7,
        )
        lengths = np.asarray(output.lengths).tolist()
        total = time.perf_counter() - start
        spent = {
            name: [s for event, _, s in events if event == key] for name, key in EVENTS.items()
        }
        # Traces of inner functions lie in those of the two programs.
        traces = [s for event, name, s in events if event == EVENTS["trace"] and name in PROGRAMS]
        return {
            "total_s": total,
            "trace_s": sum(traces),
            "lowering_s": sum(spent["lowering"]),
            # The two programs are compiled at once: the longer one is waited for.
            "compilation_s": max(spent["compilation"], default=0.0),
            "compilations_s": spent["compilation"],
            "num_compilations": len(spent["compilation"]),
            "lengths": lengths,
        }

    sizes = (20, 12) if smoke else (300, 64)
    return {
        "first": call(*sizes),
        "other prompt": call(sizes[0] + 23, sizes[1] - 5),
        "again": call(sizes[0] + 23, sizes[1] - 5),
    }


def measure(case: str, cache: str, smoke: bool) -> dict[str, Any]:
    """What a process of its own finds that keeps its programs in a folder."""
    command = [sys.executable, "-m", "benchmarks.gpu.cold_start", "--case", case]
    kept = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [*command, *(["--smoke"] if smoke else [])],
        env=os.environ | kept,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--smoke", action="store_true", help="rehearse: tiny, on a CPU, no file")
    parser.add_argument("--case", choices=CASES, help="only this, in this process, as JSON")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(first_calls(args.case, args.smoke)))
        return
    records = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as cache:
            for kept in ("empty", "filled"):
                record = {"case": case, "cache": kept, "calls": measure(case, cache, args.smoke)}
                records.append(record)
                for name, figures in record["calls"].items():
                    parts = ("total", "trace", "lowering", "compilation")
                    seconds = ", ".join(f"{part} {figures[part + '_s']:.2f}" for part in parts)
                    compiled = f"{figures['num_compilations']} compiled"
                    print(f"{case}, cache {kept}, {name}: {seconds} s, {compiled}", flush=True)
    # Last: the processes need the GPU's memory, which this one would take.
    section = {"environment": environment(), "K": K, "B": 1}
    save(None if args.smoke else args.out, {"cold start": section | {"cases": records}})


if __name__ == "__main__":
    main()
