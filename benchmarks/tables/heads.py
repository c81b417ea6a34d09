"""Makes the tables of decoding with draft heads from the JSON that the benchmark wrote.

python -m benchmarks.tables.heads benchmarks/results/h200_heads.json --readme docs/measurements.md
"""

from typing import Any

from benchmarks.tables.decode import KINDS, REST, shares
from benchmarks.tables.publish import publish_from_json

BEGIN, END = "<!-- heads-table -->", "<!-- /heads-table -->"


def heads_table(result: dict[str, Any]) -> str:
    """Times against the weights' bytes, and where they go, for each head, as markdown."""
    return "\n\n".join(f"{_steps(name, x)}\n\n{_profiles(x)}" for name, x in result.items())


def _steps(name: str, section: dict[str, Any]) -> str:
    """A line for each case, under the head's name."""
    lines = [
        f"| {name} | B | ms (quartiles) | ms to read the weights | times that "
        "| tokens a step | tokens/s of a request | launches |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in section["cases"]:
        quartiles = " to ".join(f"{x:.3f}" for x in case["quartiles_ms"])
        rate = ["", ""]
        if "length" in case:
            rate = [f"{case['length']:.1f}", f"{case['tokens_per_s']:.0f}"]
        cells = [
            case["case"],
            str(case["B"]),
            f"{case['median_ms']:.3f} ({quartiles})",
            f"{case['read_ms']:.2f}",
            f"{case['median_ms'] / case['read_ms']:.2f}",
            *rate,
            f"{case['profile']['num_events']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    where = section["environment"]
    place = f"{where['device']}, jax {where['jax']}, {where['date'][:10]}: `{where['command']}`"
    return "\n".join([*lines, "", place])


def _profiles(section: dict[str, Any]) -> str:
    """Milliseconds of each case by what its kernels do, and to read the weights alone."""
    cases = section["cases"]
    columns = [shares(case["profile"]) for case in cases]
    head = [f"{case['case']}, B = {case['B']}" for case in cases]
    lines = [f"| ms | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for kind in [*dict.fromkeys(KINDS.values()), REST]:
        shown = [f"{column[kind]:.3f}" if kind in column else "" for column in columns]
        lines.append(f"| {kind} | {' | '.join(shown)} |")
    total = [f"{case['profile']['kernels_us'] / 1e3:.3f}" for case in cases]
    read = [f"{case['read_ms']:.3f}" for case in cases]
    lines.append(f"| all kernels | {' | '.join(total)} |")
    return "\n".join([*lines, f"| the weights' bytes | {' | '.join(read)} |"])


if __name__ == "__main__":
    publish_from_json(__doc__, heads_table, BEGIN, END)
