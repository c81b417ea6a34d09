"""Makes the table of CPU figures in docs/speed.md from the JSON that the benchmark wrote.

python -m benchmarks.tables.cpu                           # prints it
python -m benchmarks.tables.cpu --readme docs/speed.md    # puts it between the two markers there
"""

import argparse
import json
import pathlib
from typing import Any

from benchmarks.tables.publish import publish, table

RESULTS = pathlib.Path(__file__).parents[1] / "results"
BEGIN, END = "<!-- cpu table: begin -->", "<!-- cpu table: end -->"


def _milliseconds(timing: dict[str, Any]) -> str:
    low, high = timing["quartiles_ms"]
    return f"{timing['median_ms']:.1f} ({low:.1f} to {high:.1f})"


def cpu_table(result: dict[str, Any]) -> str:
    """The table, with its inputs above and where it was measured below, as markdown."""
    where, inputs, timings = result["environment"], result["inputs"], result["timings"]
    ratios = {entry["name"]: entry["ratio"] for entry in result["ratios"]}
    small, large = inputs["V"]

    def row(call: str, timing: str, ratio: str) -> tuple[str, ...]:
        return call, _milliseconds(timings[timing]), ratio

    rows = [
        row("`jax.nn.logsumexp` over the target rows", "logsumexp", ""),
        row(
            "`rejection_sample`",
            "rejection_sample",
            f"{ratios['rejection_sample over logsumexp']:.2f} of that logsumexp",
        ),
        row(
            "plain JAX: `log_softmax` of both, gather, `categorical` of the residual",
            "obvious",
            f"{ratios['obvious JAX over rejection_sample']:.1f} times `rejection_sample`",
        ),
        row("`gumbel_sample`, one row per request", "gumbel_sample", ""),
        row(
            "`jax.random.categorical`, the same rows",
            "categorical",
            f"{ratios['jax.random.categorical over gumbel_sample']:.1f} times `gumbel_sample`",
        ),
        row(
            f"`rejection_sample`, V = {large}",
            f"rejection_sample@{large}",
            f"{ratios['rejection_sample, per element']:.2f} per element of V = {small}",
        ),
        row(
            f"`gumbel_sample`, V = {large}",
            f"gumbel_sample@{large}",
            f"{ratios['gumbel_sample, per element']:.2f} per element of V = {small}",
        ),
    ]
    lines = [
        f"B = {inputs['B']}, K = {inputs['K']}, V = {small}, {inputs['dtype']}, temperature "
        f"{inputs['temperature']}, drafts d = 3 N(0, 1) against targets d + N(0, 1), statistics "
        f"carried: a mean acceptance of {inputs['mean_acceptance']:.2f}, "
        f"{inputs['mean_tokens_per_step']:.2f} tokens per step.",
        "",
        *table("| call | ms, median (quartiles) | ratio |", rows),
        "",
        f"{where['device']}, {where['cores']} cores, jax {where['jax']}, Python "
        f"{where['python']}, {where['date'][:10]}: `{where['command']}`",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--readme", type=pathlib.Path, help="the document to put the table into")
    args = parser.parse_args()
    path = args.results / "cpu_verify.json"
    publish(cpu_table(json.loads(path.read_text(encoding="utf-8"))), args.readme, BEGIN, END)


if __name__ == "__main__":
    main()
