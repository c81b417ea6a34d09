"""Makes the table of CPU figures in docs/speed.md from the JSON that the benchmark wrote.

python benchmarks/table.py                      # prints it
python benchmarks/table.py --readme docs/speed.md   # puts it between the two markers there
"""

import argparse
import datetime
import json
import pathlib
import re
from collections.abc import Callable
from typing import Any

# Figures of two programs are put side by side if they were measured that soon after one another.
SESSION = datetime.timedelta(hours=1)
RESULTS = pathlib.Path(__file__).parent / "results"
BEGIN, END = "<!-- cpu table: begin -->", "<!-- cpu table: end -->"


def _milliseconds(timing: dict[str, Any]) -> str:
    low, high = timing["quartiles_ms"]
    return f"{timing['median_ms']:.1f} ({low:.1f} to {high:.1f})"


def cpu_table(result: dict[str, Any]) -> str:
    """The table, with the inputs above it and its birthplace below, as markdown."""
    where, inputs, timings = result["environment"], result["inputs"], result["timings"]
    ratio = {entry["name"]: entry["ratio"] for entry in result["ratios"]}
    small, large = inputs["V"]

    def row(call: str, timing: str, beside: str) -> str:
        return f"| {call} | {_milliseconds(timings[timing])} | {beside} |"

    rows = [
        row("`jax.nn.logsumexp` over the target rows", "logsumexp", ""),
        row(
            "`rejection_sample`",
            "rejection_sample",
            f"{ratio['rejection_sample over logsumexp']:.2f} of that logsumexp",
        ),
        row(
            "the obvious JAX: `log_softmax` of both, gather, `categorical` of the residual",
            "obvious",
            f"{ratio['obvious JAX over rejection_sample']:.1f} times `rejection_sample`",
        ),
        row("`gumbel_sample`, one row per request", "gumbel_sample", ""),
        row(
            "`jax.random.categorical`, the same rows",
            "categorical",
            f"{ratio['jax.random.categorical over gumbel_sample']:.1f} times `gumbel_sample`",
        ),
        row(
            f"`rejection_sample`, V = {large}",
            f"rejection_sample@{large}",
            f"{ratio['rejection_sample, per element']:.2f} per element of V = {small}",
        ),
        row(
            f"`gumbel_sample`, V = {large}",
            f"gumbel_sample@{large}",
            f"{ratio['gumbel_sample, per element']:.2f} per element of V = {small}",
        ),
    ]
    lines = [
        f"B = {inputs['B']}, K = {inputs['K']}, V = {small}, {inputs['dtype']}, temperature "
        f"{inputs['temperature']}, drafts d = 3 N(0, 1) against targets d + N(0, 1), statistics "
        f"carried: a mean acceptance of {inputs['mean_acceptance']:.2f}, "
        f"{inputs['mean_tokens_per_step']:.2f} tokens per step.",
        "",
        "| call | ms, median (quartiles) | beside |",
        "|---|---|---|",
        *rows,
        "",
        f"{where['device']}, {where['cores']} cores, jax {where['jax']}, Python "
        f"{where['python']}, {where['date']}: `{where['command']}`",
    ]
    return "\n".join(lines)


def is_one_session(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two environments are those of one session on the same kind of device."""
    dates = [datetime.datetime.fromisoformat(each["date"]) for each in (ours, theirs)]
    return ours["device"] == theirs["device"] and abs(dates[0] - dates[1]) <= SESSION


def put_between_markers(text: str, table: str, begin: str = BEGIN, end: str = END) -> str:
    """`text` with what stands between two markers replaced by the table.

    Raises:
      ValueError: if the two markers are not there, once each and in order.
    """
    between = re.compile(f"({re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if len(between.findall(text)) != 1:
        raise ValueError(f"The document needs the lines {begin} and {end}, once each, in order.")
    return between.sub(lambda match: f"{match[1]}{table}\n", text)


def publish(table: str, document: pathlib.Path | None, begin: str, end: str) -> None:
    """Prints a table, or puts it into a document between two markers."""
    if document is None:
        print(table)
        return
    text = document.read_text(encoding="utf-8")
    document.write_text(put_between_markers(text, table, begin, end), encoding="utf-8")


Make = Callable[[dict[str, Any]], str]


def publish_from_json(
    description: str, make: Make, begin: str, end: str, brief: Make | None = None
) -> None:
    """The command of a program that makes one table of one JSON, and maybe a brief one."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("--readme", type=pathlib.Path, help="the document to put the table into")
    if brief is not None:
        parser.add_argument("--brief", action="store_true", help="the brief table instead")
    args = parser.parse_args()
    if brief is not None and args.brief:
        make = brief
    publish(make(json.loads(args.json.read_text(encoding="utf-8"))), args.readme, begin, end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder of the JSON")
    parser.add_argument("--readme", type=pathlib.Path, help="the document to put the table into")
    args = parser.parse_args()
    path = args.results / "cpu_verify.json"
    publish(cpu_table(json.loads(path.read_text(encoding="utf-8"))), args.readme, BEGIN, END)


if __name__ == "__main__":
    main()
