"""Times the demo's text with two drafts in turn, for several seeds: tokens per second and step.

python -m benchmarks.pair.demo --out benchmarks/results/pair_demo.json
"""

import argparse
import itertools
import json
import pathlib
import shlex
import statistics
import sys
import types
from typing import Any

import jax

import specjax
from benchmarks.cpu.verify import environment
from specjax.cli.generate import GenerateJob, begin_programs, stream_text
from specjax.cli.model_pair import load_pair, read_pair
from specjax.file_io import replace_file

ROOT = pathlib.Path(__file__).parent.parent.parent
# What `specjax generate` is given as --draft.
DRAFTS = {"draft model": "model", "EAGLE-3 head": "head"}


def jobs_of(seeds: list[int], num_tokens: int) -> dict[tuple[str, int], GenerateJob]:
    """The command of `make demo` with each draft and seed, compiled; K is auto."""
    text = (ROOT / "examples" / "prompt.txt").read_text(encoding="utf-8")
    jobs = {}
    for name, draft in DRAFTS.items():
        pair = read_pair(types.SimpleNamespace(target=None, draft=draft))
        target, drafter = load_pair(pair)
        for seed in seeds:
            job = GenerateJob(
                name,
                target,
                drafter,
                pair.tokenizer,
                text,
                pair.tokenizer.encode(text).ids,
                specjax.SpeculativeConfig("auto"),
                jax.random.key(seed),
                max_new_tokens=num_tokens,
                temperature=0.4,
                eos_token_ids=pair.target_config.eos_token_ids,
            )
            jobs[name, seed] = job._replace(programs=begin_programs(job))
    return jobs


def measure(seeds: list[int], num_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """A record of each draft and seed, of texts that are decoded in turn."""
    jobs = jobs_of(seeds, num_tokens)
    records = {}
    # The first decoding of each is not counted.
    for repeat in range(repeats + 1):
        for seed, name in itertools.product(seeds, DRAFTS):
            result, timings = stream_text(jobs[name, seed], waits_for_all=True)
            if repeat == 0:
                length = float(result.metrics.mean_acceptance_length)
                first = {"draft": name, "seed": seed, "tokens_per_step": length}
                records[name, seed] = first | {"tokens_per_s": []}
            else:
                records[name, seed]["tokens_per_s"].append(timings.tokens_per_second)
    return list(records.values())


def describe(records: list[dict[str, Any]]) -> str:
    """Returns lines: medians over the seeds of each one's fastest text, and the drafts' ratio."""
    best = {(r["draft"], r["seed"]): max(r["tokens_per_s"]) for r in records}
    lines = []
    for name in DRAFTS:
        speed = statistics.median(best[each] for each in best if each[0] == name)
        length = statistics.median(r["tokens_per_step"] for r in records if r["draft"] == name)
        lines.append(f"{name:14} {speed:7.1f} tokens/s  {length:.2f} tokens per step")
    model, head = DRAFTS
    times = [best[head, seed] / best[model, seed] for name, seed in best if name == head]
    shown = ", ".join(f"{each:.2f}" for each in times)
    return "\n".join([*lines, f"head over model: {statistics.median(times):.2f} ({shown})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    specjax.enable_compilation_cache()
    records = measure(args.seeds, args.max_new_tokens, args.repeats)
    print(describe(records))
    if args.out is not None:
        command = shlex.join(["python", "-m", "benchmarks.pair.demo", *sys.argv[1:]])
        result = {"environment": environment() | {"command": command}, "cases": records}
        with replace_file(args.out) as temporary:
            temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
