r"""Makes the table of rules of acceptance from the JSON of their benchmark.

python -m benchmarks.tables.rules benchmarks/results/pair_rules.json --readme docs/rules.md
"""

from typing import Any

from benchmarks.tables.publish import publish_from_json

BEGIN, END = "<!-- rules-table -->", "<!-- /rules-table -->"


def rules_table(result: dict[str, Any]) -> str:
    """Acceptance and total variation of each rule, and where, as markdown."""
    inputs, where = result["inputs"], result["environment"]
    lines = [
        f"{inputs['positions']} positions of {inputs['files']} held-out files, teacher-forced, "
        f"T = {inputs['temperature']:g}; ± one standard error over files.",
        "",
        "| rule | a drafted token is accepted | total variation of the emitted token from p |",
        "|---|---|---|",
    ]
    for case in result["cases"]:
        exact = case["total_variation"] < 1e-6  # What float32 leaves of 0.
        variation = "0" if exact else _cell(case, "total_variation")
        lines.append(f"| `{case['rule']}` | {_cell(case, 'acceptance')} | {variation} |")
    place = f"{where['device']}, {where['cores']} cores, jax {where['jax']}, {where['date'][:10]}"
    return "\n".join([*lines, "", f"{place}: `{where['command']}`"])


def _cell(case: dict[str, Any], what: str) -> str:
    return f"{case[what]:.3f} ± {case[f'{what}_error']:.3f}"


def main() -> None:
    publish_from_json(__doc__, rules_table, BEGIN, END)


if __name__ == "__main__":
    main()
