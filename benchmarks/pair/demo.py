"""Runs the demo's command for several seeds: its text, and its speed with each embedded draft.

python -m benchmarks.pair.demo --out benchmarks/results/pair_demo.json

The command is the one in `Makefile`. Both drafts and all seeds take turns; the first round, which
compiles, is not counted.
"""

import argparse
import contextlib
import io
import itertools
import json
import pathlib
import re
import shlex
import statistics
from typing import Any

from benchmarks.pair.text_quality import distinct_share, unfinished_lines
from benchmarks.record import environment, save
from specjax.cli import main as specjax_command

ROOT = pathlib.Path(__file__).parent.parent.parent
# What `specjax generate` is given as --draft.
DRAFTS = {"draft model": "model", "EAGLE-3 head": "head"}


def demo_arguments() -> list[str]:
    """Returns the arguments of the demo's command, with `--prompt-file` as an absolute path."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    [line] = re.findall(r"^\t\$\(VENV\)/bin/specjax (generate .*)$", makefile, re.MULTILINE)
    arguments = shlex.split(line)
    place = arguments.index("--prompt-file") + 1
    arguments[place] = str(ROOT / arguments[place])
    return arguments


def run_command(draft: str, seed: int) -> dict[str, Any]:
    """Returns the JSON of the demo's command with a draft and a seed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = specjax_command([*demo_arguments(), "--draft", draft, "--seed", str(seed), "--json"])
    if code:
        raise RuntimeError(f"The demo's command ended with {code}.")
    return json.loads(output.getvalue())


def measure(seeds: list[int], repeats: int) -> list[dict[str, Any]]:
    """Returns a record of each draft and seed."""
    prompt = (ROOT / "examples" / "prompt.txt").read_text(encoding="utf-8")
    records: dict[tuple[str, int], dict[str, Any]] = {}
    for repeat in range(repeats + 1):
        for seed, (name, draft) in itertools.product(seeds, DRAFTS.items()):
            report = run_command(draft, seed)
            timings = report["timings"]
            if repeat:
                records[name, seed]["tokens_per_s"].append(timings["tokens_per_second"])
                records[name, seed]["speedup"].append(timings["speedup"])
                continue
            records[name, seed] = {
                "draft": name,
                "seed": seed,
                "tokens_per_step": report["metrics"]["mean_acceptance_length"],
                "distinct_lines": distinct_share(report["text"]),
                "unfinished_lines": unfinished_lines(prompt + report["text"]),
                "tokens_per_s": [],
                "speedup": [],
                "text": report["text"],
            }
    return list(records.values())


def describe(records: list[dict[str, Any]]) -> str:
    """Returns a line for each draft: medians over the seeds of each seed's median."""
    lines = []
    for name in DRAFTS:
        own = [record for record in records if record["draft"] == name]
        speed = statistics.median(statistics.median(record["tokens_per_s"]) for record in own)
        length = statistics.median(record["tokens_per_step"] for record in own)
        gains = [statistics.median(record["speedup"]) for record in own]
        lines.append(
            f"{name:14} {speed:7.1f} tokens/s, {length:.2f} tokens per step, "
            f"{statistics.median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f}) times plain; "
            f"distinct lines {min(record['distinct_lines'] for record in own):.2f} or more"
        )
    model, head = DRAFTS
    best = {(r["draft"], r["seed"]): statistics.median(r["tokens_per_s"]) for r in records}
    times = [best[head, seed] / best[model, seed] for name, seed in best if name == head]
    shown = ", ".join(f"{each:.2f}" for each in times)
    return "\n".join([*lines, f"head over model: {statistics.median(times):.2f} ({shown})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    records = measure(args.seeds, args.repeats)
    print(describe(records))
    result = {
        "environment": environment(),
        "demo": shlex.join(["specjax", *demo_arguments()]).replace(f"{ROOT}/", ""),
        "prompt": (ROOT / "examples" / "prompt.txt").read_text(encoding="utf-8"),
        "cases": records,
    }
    save(args.out, result)


if __name__ == "__main__":
    main()
