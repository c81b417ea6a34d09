r"""Makes the table and the plot of what block verification gains, from the JSON of its benchmark.

python -m benchmarks.tables.block_gain benchmarks/results/pair_block_gain.json \
    --readme docs/measurements.md --plot benchmarks/results/pair_block_gain.svg
"""

import json
import pathlib
from typing import Any

from benchmarks.tables.publish import origin, publish, table, table_parser

BEGIN, END = "<!-- block-gain-table -->", "<!-- /block-gain-table -->"


def block_gain_table(result: dict[str, Any]) -> str:
    """Tokens per step by K and temperature, what `generate` counts, and where, as markdown."""
    inputs = result["inputs"]
    records = {(x["K"], x["temperature"]): x for x in result["expected"]}
    ks, temperatures = (sorted(set(axis)) for axis in zip(*records, strict=True))
    heads = [f"T = {t:g}: standard | block | gain" for t in temperatures]
    lines = [
        f"Expected tokens per step over {inputs['texts']} texts of {inputs['new_tokens']} tokens, "
        f"each after {inputs['context']} tokens of {inputs['files']} held-out files; ± one "
        "standard error over files.",
        "",
        *table(
            f"| K | {' | '.join(heads)} |",
            ([k, *(_cells(records[k, t]) for t in temperatures)] for k in ks),
        ),
        "",
        *table(
            f"| counted by `generate`, {inputs['counted_texts']} texts | standard | block | gain |",
            ((f"K = {x['K']}, T = {x['temperature']:g}", _cells(x)) for x in result["counted"]),
        ),
    ]
    return "\n".join([*lines, "", origin(result["environment"])])


def _cells(record: dict[str, Any]) -> str:
    """Three cells: tokens per step of both methods, and the gain in percent."""
    tokens = [f"{record[m]:.2f} ± {record[f'{m}_error']:.2f}" for m in ("standard", "block")]
    gain, error = (100 * record[name] for name in ("gain", "gain_error"))
    # Of one drafted token both rules are the same.
    return " | ".join([*tokens, f"{gain:.2f} ± {error:.2f} %" if error else "0"])


def points_of(result: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """By panel the curves of the plot: [K, value, standard error]."""
    panels: dict[str, dict[str, list[list[float]]]] = {"tokens per step": {}, "gain, percent": {}}
    tokens, gains = panels.values()
    for x in result["expected"]:
        name = f"T = {x['temperature']:g}"
        for method in ("standard", "block"):
            curve = tokens.setdefault(f"{method}, {name}", [])
            curve.append([x["K"], x[method], x[f"{method}_error"]])
        gains.setdefault(name, []).append([x["K"], 100 * x["gain"], 100 * x["gain_error"]])
    return panels


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws both panels against K; the file's description holds the points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    matplotlib.rcParams["svg.hashsalt"] = "specjax"  # Equal points make equal files.
    points = points_of(result)
    figure, panels = matplotlib.pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, (label, curves) in zip(panels, points.items(), strict=True):
        for name, curve in curves.items():
            number = sorted({n.split("T = ")[1] for n in curves}).index(name.split("T = ")[1])
            style = "o--" if name.startswith("standard") else "o-"
            xs, ys, errors = zip(*curve, strict=True)
            axes.errorbar(
                xs, ys, errors, fmt=style, ms=4, capsize=2, color=f"C{number}", label=name
            )
        axes.set(xlabel="K, drafted tokens of a step", ylabel=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, handlelength=4)
    figure.savefig(path, metadata={"Description": json.dumps(points), "Date": None})


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--plot", type=pathlib.Path, help="write the plot there, an SVG")
    args = parser.parse_args()
    result = json.loads(args.json.read_text(encoding="utf-8"))
    if args.plot is not None:
        plot(result, args.plot)
    publish(block_gain_table(result), args.readme, BEGIN, END)


if __name__ == "__main__":
    main()
