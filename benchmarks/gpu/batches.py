"""Times full batches on an NVIDIA GPU: steps with and without drafts, and prompts of 1024 tokens.

python -m benchmarks.gpu.batches --out benchmarks/results/h100_batches.json --vllm vllm.jsonl
"""

import argparse
import json
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

import specjax
from benchmarks.gpu.decode import Effort, clock, profile, speculate
from benchmarks.gpu.heads import Setup, eagle3
from benchmarks.gpu.verify import environment, save

K, LENGTH = 3, 3.0
# From here on two caches of the default length, which is a power of two, do not fit next to the
# weights: `init` returns a state that no longer shares its memory with the one before.
LARGE = 128


def prefill_ms(setup: Setup, drafter: specjax.Drafter | None, batch: int, effort: Effort) -> float:
    """Milliseconds of `init`, which reads prompts of `context` tokens; a median of runs."""
    prompt = jax.random.randint(jax.random.key(2), (batch, effort.context), 0, 100, jnp.int32)
    lengths = jnp.full((batch,), effort.context, jnp.int32)
    taken = []
    for _ in range(effort.runs):
        start = time.perf_counter()
        jax.block_until_ready(
            specjax.init(
                setup.target,
                drafter,
                (prompt, lengths),
                keys=jax.random.key(0),
                max_new_tokens=effort.room,
                options=specjax.LoopOptions(max_length=effort.context + effort.room),
            )
        )
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def cases(setup: Setup, batch: int, effort: Effort) -> Iterator[dict[str, Any]]:
    """A record of plain and of speculative decoding of one batch size."""
    for name, drafter in (("plain", None), ("EAGLE-3, K = 3", setup.drafter)):
        max_length = effort.context + effort.room if batch >= LARGE else None
        timed = speculate(setup.target, drafter, batch, effort, K, LENGTH, max_length)
        figures, _ = clock(timed, effort)
        record = {"case": name, "B": batch, "context": effort.context} | figures
        if jax.default_backend() == "gpu" and batch >= 32:
            record["profile"] = profile(timed)
        del timed
        yield record | {"prefill_ms": prefill_ms(setup, drafter, batch, effort)}


def vllm_section(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The records of vLLM's whole engine, as lines of JSON of its own program hold them."""
    where = next(line for line in lines if line.get("env"))
    names = {"plain": "plain", "eagle3": "EAGLE-3, K = 3"}
    found = [line for line in lines if "ms_step" in line]
    records = [
        {
            "case": names[line["mode"]],
            "B": line["B"],
            "median_ms": line["ms_step"],
            "prefill_ms": 1e3 * line["prefill_s"],
        }
        for line in found
    ]
    return {"environment": where, "cases": records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--vllm", type=pathlib.Path, help="lines of JSON of vLLM's engine, only")
    parser.add_argument("--smoke", action="store_true", help="rehearse: tiny, on a CPU, no file")
    args = parser.parse_args()
    if args.vllm is not None:
        lines = [json.loads(line) for line in args.vllm.read_text().splitlines() if line[:1] == "{"]
        save(args.out, "vllm", vllm_section(lines))
        return
    if not args.smoke and jax.default_backend() != "gpu":
        sys.exit("JAX sees no GPU here; --smoke rehearses on a CPU.")
    effort = Effort(16, 64, 3, 2) if args.smoke else Effort(1024, 256, 48, 5)
    setup = eagle3(args.smoke)
    command = shlex.join(["python", "-m", "benchmarks.gpu.batches", *sys.argv[1:]])
    section: dict[str, Any] = {"environment": environment() | {"command": command}, "cases": []}
    for batch in args.batch:
        for record in cases(setup, batch, effort):
            section["cases"].append(record)
            save(None if args.smoke else args.out, "specjax", section)
            line = f"{record['case']:16} B={batch:<4}{record['median_ms']:8.3f} ms a step"
            print(f"{line}, prompts {record['prefill_ms']:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
