r"""Makes the table of rules of acceptance from the JSON of their benchmark.

python -m benchmarks.tables.rules benchmarks/results/pair_rules.json --readme docs/rules.md
"""

from typing import Any

from benchmarks.tables.publish import origin, publish_from_json, table

BEGIN, END = "<!-- rules-table -->", "<!-- /rules-table -->"


def rules_table(result: dict[str, Any]) -> str:
    """Acceptance and total variation of each rule, and where, as markdown."""
    inputs, rows = result["inputs"], []
    for case in result["cases"]:
        exact = case["total_variation"] < 1e-6  # What float32 leaves of 0.
        variation = "0" if exact else _cell(case, "total_variation")
        rows.append((f"`{case['rule']}`", _cell(case, "acceptance"), variation))
    lines = [
        f"{inputs['positions']} positions of {inputs['files']} held-out files, teacher-forced, "
        f"T = {inputs['temperature']:g}; ± one standard error over files.",
        "",
        *table(
            "| rule | a drafted token is accepted | total variation of the emitted token from p |",
            rows,
        ),
    ]
    return "\n".join([*lines, "", origin(result["environment"])])


def _cell(case: dict[str, Any], what: str) -> str:
    return f"{case[what]:.3f} ± {case[f'{what}_error']:.3f}"


if __name__ == "__main__":
    publish_from_json(__doc__, rules_table, BEGIN, END)
