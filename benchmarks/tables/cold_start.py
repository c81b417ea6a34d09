"""Makes the tables of the first text from the JSON that the cold-start benchmarks wrote.

python -m benchmarks.tables.cold_start benchmarks/results/cpu_cold_start.json \
    --readme docs/measurements.md
python -m benchmarks.tables.cold_start benchmarks/results/h200_cold_start.json --gpu \
    --readme docs/measurements.md
"""

import json
from typing import Any

from benchmarks.tables.publish import origin, publish, table, table_parser

BEGIN, END = "<!-- cold-start-table -->", "<!-- /cold-start-table -->"
GPU_BEGIN, GPU_END = "<!-- gpu-cold-start-table -->", "<!-- /gpu-cold-start-table -->"


def cold_start_table(result: dict[str, Any]) -> str:
    """Times of the command on a CPU, next to an older version, as markdown."""
    cases = {name: case["median"] for name, case in result["cases"].items()}
    rows = []
    for name, median in cases.items():
        cells = [f"{median[f'{part}_s']:.2f}" for part in ("first_text", "end", "cpu")]
        rows.append((name, *cells, f"{median['num_programs']:g}"))
    for name in ("before, --no-baseline", "before"):
        ratios = [cases["now"][part] / cases[name][part] for part in ("first_text_s", "end_s")]
        rows.append((f"now over {name}", f"{ratios[0]:.2f}", f"{ratios[1]:.2f} | |"))
    head = (
        "| a process, medians | first text, s | end, s | processor time, s "
        "| programs compiled or read |"
    )
    where, rounds = result["environment"], len(result["cases"]["now"]["runs"])
    lines = [
        *table(head, rows),
        "",
        f"{rounds} rounds on {where['cores']} cores of {where['device']}, jax {where['jax']}, "
        f"{where['date'][:10]}: `{where['command']}`",
    ]
    return "\n".join(lines)


def gpu_cold_start_table(result: dict[str, Any]) -> str:
    """Times of the first and the second `generate` of a process on a GPU, as markdown."""
    (section,) = result.values()
    head = (
        "| `generate` | cache | trace, s | lowering, s | compilation, s | in all, s "
        "| another prompt, s | programs it compiles |"
    )
    rows = []
    for case in section["cases"]:
        first, other = case["calls"]["first"], case["calls"]["other prompt"]
        parts = ("trace", "lowering", "compilation", "total")
        cells = [f"{first[f'{part}_s']:.1f}" for part in parts]
        cells += [f"{other['total_s']:.2f}", other["num_compilations"]]
        rows.append((case["case"], case["cache"], *cells))
    return "\n".join([*table(head, rows), "", origin(section["environment"])])


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--gpu", action="store_true", help="the JSON is of gpu/cold_start.py")
    args = parser.parse_args()
    result = json.loads(args.json.read_text(encoding="utf-8"))
    if args.gpu:
        publish(gpu_cold_start_table(result), args.readme, GPU_BEGIN, GPU_END)
    else:
        publish(cold_start_table(result), args.readme, BEGIN, END)


if __name__ == "__main__":
    main()
