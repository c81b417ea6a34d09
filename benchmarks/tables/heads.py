"""Makes the tables of decoding with draft heads from the JSON that the benchmark wrote.

python -m benchmarks.tables.heads benchmarks/results/h200_heads.json --readme docs/measurements.md
"""

from typing import Any

from benchmarks.tables.decode import kind_rows
from benchmarks.tables.publish import origin, publish_from_json, table

BEGIN, END = "<!-- heads-table -->", "<!-- /heads-table -->"


def heads_table(result: dict[str, Any]) -> str:
    """Times against the weights' bytes, and where they go, for each head, as markdown."""
    return "\n\n".join(f"{_steps(name, x)}\n\n{_profiles(x)}" for name, x in result.items())


def _steps(name: str, section: dict[str, Any]) -> str:
    """A line for each case, under the head's name."""
    head = (
        f"| {name} | B | ms (quartiles) | ms to read the weights | times that "
        "| tokens a step | tokens/s of a request | launches |"
    )
    rows = []
    for case in section["cases"]:
        quartiles = " to ".join(f"{x:.3f}" for x in case["quartiles_ms"])
        rate = ["", ""]
        if "length" in case:
            rate = [f"{case['length']:.1f}", f"{case['tokens_per_s']:.0f}"]
        cells = [
            case["case"],
            case["B"],
            f"{case['median_ms']:.3f} ({quartiles})",
            f"{case['read_ms']:.2f}",
            f"{case['median_ms'] / case['read_ms']:.2f}",
            *rate,
            f"{case['profile']['num_events']:.0f}",
        ]
        rows.append(cells)
    return "\n".join([*table(head, rows), "", origin(section["environment"])])


def _profiles(section: dict[str, Any]) -> str:
    """Milliseconds of each case by what its kernels do, and to read the weights alone."""
    head, rows = kind_rows(section["cases"])
    read = [f"{case['read_ms']:.3f}" for case in section["cases"]]
    return "\n".join(table(f"| ms | {head} |", [*rows, ["the weights' bytes", *read]]))


if __name__ == "__main__":
    publish_from_json(__doc__, heads_table, BEGIN, END)
