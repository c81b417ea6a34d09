"""Makes the tables of the first text from the JSON that the cold-start benchmarks wrote.

python -m benchmarks.tables.cold_start benchmarks/results/cpu_cold_start.json \
    --readme docs/measurements.md
python -m benchmarks.tables.cold_start benchmarks/results/h200_cold_start.json --gpu \
    --readme docs/measurements.md
"""

import argparse
import json
import pathlib
from typing import Any

from benchmarks.tables.publish import publish

BEGIN, END = "<!-- cold-start-table -->", "<!-- /cold-start-table -->"
GPU_BEGIN, GPU_END = "<!-- gpu-cold-start-table -->", "<!-- /gpu-cold-start-table -->"


def cold_start_table(result: dict[str, Any]) -> str:
    """Times of the command on a CPU, next to an older version, as markdown."""
    cases = {name: case["median"] for name, case in result["cases"].items()}
    lines = [
        "| a process, medians | first text, s | end, s | processor time, s "
        "| programs compiled or read |",
        "|---|---|---|---|---|",
    ]
    for name, median in cases.items():
        cells = [f"{median[f'{part}_s']:.2f}" for part in ("first_text", "end", "cpu")]
        lines.append(f"| {name} | {' | '.join(cells)} | {median['num_programs']:g} |")
    for name in ("before, --no-baseline", "before"):
        ratios = [cases["now"][part] / cases[name][part] for part in ("first_text_s", "end_s")]
        lines.append(f"| now over {name} | {ratios[0]:.2f} | {ratios[1]:.2f} | | |")
    where, rounds = result["environment"], len(result["cases"]["now"]["runs"])
    lines += [
        "",
        f"{rounds} rounds on {where['cores']} cores of {where['device']}, jax {where['jax']}, "
        f"{where['date'][:10]}: `{where['command']}`",
    ]
    return "\n".join(lines)


def gpu_cold_start_table(result: dict[str, Any]) -> str:
    """Times of the first and the second `generate` of a process on a GPU, as markdown."""
    (section,) = result.values()
    lines = [
        "| `generate` | cache | trace, s | lowering, s | compilation, s | in all, s "
        "| another prompt, s | programs it compiles |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in section["cases"]:
        first, other = case["calls"]["first"], case["calls"]["other prompt"]
        parts = ("trace", "lowering", "compilation", "total")
        cells = " | ".join(f"{first[f'{part}_s']:.1f}" for part in parts)
        lines.append(
            f"| {case['case']} | {case['cache']} | {cells} "
            f"| {other['total_s']:.2f} | {other['num_compilations']} |"
        )
    where = section["environment"]
    origin = f"{where['device']}, jax {where['jax']}, {where['date'][:10]}: `{where['command']}`"
    return "\n".join([*lines, "", origin])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("--gpu", action="store_true", help="the JSON is of gpu/cold_start.py")
    parser.add_argument("--readme", type=pathlib.Path, help="the document to put the table into")
    args = parser.parse_args()
    result = json.loads(args.json.read_text(encoding="utf-8"))
    if args.gpu:
        publish(gpu_cold_start_table(result), args.readme, GPU_BEGIN, GPU_END)
    else:
        publish(cold_start_table(result), args.readme, BEGIN, END)


if __name__ == "__main__":
    main()
