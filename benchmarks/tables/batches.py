"""Makes the tables of full batches from the JSON that the benchmark wrote.

python -m benchmarks.tables.batches benchmarks/results/h100_batches.json
"""

from typing import Any

from benchmarks.tables.decode import KINDS, REST, shares
from benchmarks.tables.publish import publish_from_json

BEGIN, END = "<!-- batches-table -->", "<!-- /batches-table -->"


def batches_table(result: dict[str, Any]) -> str:
    """Returns two tables as markdown: times by batch size, and full steps by kind of kernel."""
    section = result["specjax"]
    cases = section["cases"]
    lines = [
        "| | B | ms a step (quartiles) | ms to read prompts of 1024 tokens |",
        "|---|---|---|---|",
    ]
    for case in cases:
        quartiles = " to ".join(f"{x:.2f}" for x in case["quartiles_ms"])
        step = f"{case['median_ms']:.2f} ({quartiles})"
        lines.append(f"| {case['case']} | {case['B']} | {step} | {case['prefill_ms']:.0f} |")
    profiled = [case for case in cases if "profile" in case]
    columns = [shares(case["profile"]) for case in profiled]
    head = [f"{case['case']}, B = {case['B']}" for case in profiled]
    lines += ["", f"| ms | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for kind in [*dict.fromkeys(KINDS.values()), REST]:
        shown = [f"{column[kind]:.3f}" if kind in column else "" for column in columns]
        lines.append(f"| {kind} | {' | '.join(shown)} |")
    where = section["environment"]
    place = f"{where['device']}, jax {where['jax']}, {where['date'][:10]}: `{where['command']}`"
    return "\n".join([*lines, "", place])


if __name__ == "__main__":
    publish_from_json(__doc__, batches_table, BEGIN, END)
