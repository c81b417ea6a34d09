r"""Makes the GPU tables and their plot from the JSON that the GPU benchmarks wrote.

python -m benchmarks.tables.gpu benchmarks/results/h200.json --readme docs/speed.md \
    --plot benchmarks/results/h200.png --more docs/measurements.md
"""

import json
import os
import pathlib
from typing import Any

from benchmarks.tables.publish import is_one_session, origin, publish, table, table_parser

BEGIN, END = "<!-- gpu-table -->", "<!-- /gpu-table -->"
MORE_BEGIN, MORE_END = "<!-- gpu-more-table -->", "<!-- /gpu-more-table -->"

# Rows of the table: the label, our case, vLLM's.
ROWS = (
    ("`rejection_sample`, sampled drafts, T = 0.7", "drawn_0.7", "drawn_0.7"),
    ("`rejection_sample`, sampled drafts, T = 1", "drawn_1", "drawn_1"),
    ("`rejection_sample`, one-hot drafts, T = 0.7", "onehot_0.7", "onehot_0.7"),
    ("`rejection_sample`, one-hot drafts, T = 1", "onehot_1", "onehot_1"),
    ("`rejection_sample`, greedy", "greedy", "greedy"),
    ("`rejection_sample`, greedy, without log-probabilities", "greedy_without_logprobs", "greedy"),
    ("`rejection_sample`, greedy, drafts without logits", "greedy_onehot", "greedy"),
    ("`rejection_sample`, synthetic, 0.9 per position", "synthetic_0.9", None),
    ("`rules.block`, sampled drafts, T = 0.7", "block_0.7", None),
    ("`rules.block`, sampled drafts, T = 1", "block_1", None),
    ("`rules.coupled`, T = 0.7", "coupled_0.7", None),
    ("`rules.coupled`, T = 1", "coupled_1", None),
    ("`gumbel_sample`, FP32 noise", "gumbel_fp32", "gumbel_fp32"),
    ("`gumbel_sample`, FP64 noise", "gumbel_fp64", "gumbel_fp64"),
    ("`rejection_sample`, sampled drafts, T = 0.7, plain XLA", "xla_drawn_0.7", None),
    ("`jax.random.categorical`", "categorical", None),
)
FLOORS = (
    ("sampled drafts, T = 0.7", "drawn_0.7"),
    ("greedy, without log-probabilities", "greedy_without_logprobs"),
    ("`rules.block`, T = 0.7", "block_0.7"),
    ("`rules.coupled`, T = 0.7", "coupled_0.7"),
)
PLOTTED = ("drawn_0.7", "onehot_0.7", "greedy", "gumbel_fp32")
LABELS = {
    "drawn_0.7": "rejection_sample, sampled drafts",
    "onehot_0.7": "rejection_sample, one-hot drafts",
    "greedy": "rejection_sample, greedy",
    "gumbel_fp32": "gumbel_sample",
    "gumbel_scalars": "gumbel_sample, scalar arguments",
}

# How drafts d and targets are made, by the name of their rows.
ROWS_OF = {
    "normal": "drafts d = 3 N(0, 1) against targets d + N(0, 1)",
    "zipf": "drafts d = -1.3 log(1 + rank), permuted, against targets d + 0.7 N(0, 1), rows that "
    "fall off as a language model's",
}
# K and V of a call.
Size = tuple[int, int]
Timings = dict[tuple[str, int], dict[str, Any]]


def timings_of(
    section: dict[str, Any] | None, rows: str = "normal", size: Size | None = None
) -> Timings:
    """A section's records that were measured, by case and batch size, of rows and of a size."""
    cases = section["cases"] if section else []
    return {
        (x["case"], x["B"]): x
        for x in cases
        if "median_us" in x
        and x.get("rows", "normal") == rows
        and (size is None or (x.get("K", size[0]), x.get("V", size[1])) == size)
    }


def peer_of(result: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM's section, if it was measured in the session of the main one."""
    ours, theirs = result["main"]["environment"], result.get("vllm", {}).get("environment")
    return result["vllm"] if theirs is not None and is_one_session(ours, theirs) else None


def gpu_table(result: dict[str, Any]) -> str:
    """The tables, each with its inputs above, and where they were measured below, as markdown."""
    main, peer, xla = result["main"], peer_of(result), result.get("xla")
    main = main | {"cases": [*main["cases"], *(xla["cases"] if xla else [])]}
    first = (main["cases"][0]["K"], main["cases"][0]["V"])
    sizes = {(x["K"], x["V"]) for x in main["cases"]}
    lines: list[str] = []
    for rows in ROWS_OF:
        for size in sorted(sizes, key=lambda size: (size != first, size)):
            part = _rows_table(main, peer, rows, size)
            lines += [*([""] if lines and part else []), *part]
    place = _origin_of_both(main["environment"], peer)
    if xla:
        place += f"; plain XLA: {origin(xla['environment'])}"
    return "\n".join([*lines, "", place])


def _rows_table(
    main: dict[str, Any], peer: dict[str, Any] | None, rows: str, size: Size
) -> list[str]:
    """Lines of the table of one kind of rows at one size; none where nothing was measured."""
    ours, theirs = timings_of(main, rows, size), timings_of(peer, rows, size)
    batches = sorted({b for _, b in ours})
    if not batches:
        return []
    dtype = next(iter(ours.values()))["dtype"]
    peers = ", in brackets those of vLLM's function in that session" if peer else ""
    found = []
    for label, case, other in ROWS:
        cells = [_cell(ours.get((case, b)), theirs.get((other, b))) for b in batches]
        if any(cells):
            found.append((label, *cells))
    rate = main["bytes_per_us"] / 1e6
    for label, case in FLOORS:
        if all((case, b) in ours for b in batches):
            floors = [f"{ours[case, b]['floor_us']:.1f}" for b in batches]
            found.append((f"bytes of the rows that decide, {label}, at {rate:g} TB/s", *floors))
    return [
        f"K = {size[0]}, V = {size[1]}, {dtype} logits, {ROWS_OF[rows]}, "
        f"statistics carried{_accepted(ours, batches)}. Microseconds per call{peers}.",
        "",
        *table(f"| | {' | '.join(f'B = {b}' for b in batches)} |", found),
    ]


def more_table(result: dict[str, Any]) -> str:
    """Other vocabularies, numbers of drafts, dtypes and batches, a line each, as markdown."""
    section = result["more"]
    records = [record for record in section["cases"] if "median_us" in record]
    names = list(dict.fromkeys(record["case"] for record in records))
    found: dict[tuple[Any, ...], dict[str, str]] = {}
    for record in records:
        place = tuple(record[axis] for axis in ("B", "K", "V", "dtype"))
        found.setdefault(place, {})[record["case"]] = f"{record['median_us']:.1f}"
    lines = table(
        f"| B | K | V | dtype | {' | '.join(LABELS.get(name, name) for name in names)} |",
        ((*place, *(cells.get(name, "") for name in names)) for place, cells in found.items()),
    )
    return "\n".join([*lines, "", origin(section["environment"])])


def _accepted(ours: Timings, sizes: list[int]) -> str:
    known = [ours.get((case, sizes[-1])) for case in ("drawn_0.7", "drawn_1")]
    if None in known:
        return ""
    means = [f"{x['mean_accepted']:.2f}" for x in known]
    return (
        f"; at B = {sizes[-1]} a mean of {means[0]} drafts is accepted at T = 0.7, "
        f"{means[1]} at T = 1"
    )


def _cell(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    if ours is None:
        return ""
    text = f"{ours['median_us']:.1f}"
    if theirs is None:
        return text
    return (
        f"{text} ({theirs['median_us']:.1f}: {theirs['median_us'] / ours['median_us']:.1f} times)"
    )


def _origin_of_both(where: dict[str, Any], peer: dict[str, Any] | None) -> str:
    if peer is None:
        return origin(where)
    other = peer["environment"]
    return (
        f"{origin(where)}; {other['vllm']}, torch {other['torch']}, triton {other['triton']}: "
        f"`{other['command']}`"
    )


def points_of(result: dict[str, Any]) -> dict[str, dict[str, list[list[float]]]]:
    """By case the curves of the plot: ours, vLLM's of that session, the byte floor; [size, us]."""
    main = result["main"]
    size = (main["cases"][0]["K"], main["cases"][0]["V"])
    ours, theirs = timings_of(main, size=size), timings_of(peer_of(result), size=size)
    sources = ((ours, "median_us", ""), (theirs, "median_us", ", vLLM"))
    sources += ((ours, "floor_us", ", byte floor"),)
    return {
        case: {
            LABELS[case] + suffix: points
            for source, field, suffix in sources
            if (points := [[b, x[field]] for (name, b), x in source.items() if name == case])
        }
        for case in PLOTTED
    }


def plot(result: dict[str, Any], path: pathlib.Path) -> None:
    """Draws time against batch size; the file's description holds the points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    points = points_of(result)
    sizes = sorted({size for _, size in timings_of(result["main"])})
    figure, axes = matplotlib.pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for number, curves in enumerate(points.values()):
        for label, curve in curves.items():
            style = "s--" if "vLLM" in label else ":" if "floor" in label else "o-"
            axes.loglog(*zip(*curve, strict=True), style, color=f"C{number}", label=label)
    axes.set(xlabel="batch size", ylabel="microseconds per call", xticks=sizes, xticklabels=sizes)
    axes.set_title(f"{result['main']['environment']['device']}, temperature 0.7")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=130, metadata={"Description": json.dumps(points)})


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--plot", type=pathlib.Path, help="write the plot there")
    parser.add_argument("--more", type=pathlib.Path, help="the document for other sizes' table")
    args = parser.parse_args()
    result = json.loads(args.json.read_text(encoding="utf-8"))
    table = gpu_table(result)
    if args.plot is not None:
        plot(result, args.plot)
        here = args.readme.parent if args.readme else pathlib.Path.cwd()
        link = pathlib.Path(os.path.relpath(args.plot, here)).as_posix()
        table += f"\n\n![Time against batch size]({link})"
    publish(table, args.readme, BEGIN, END)
    if args.more is not None:
        if "more" not in result:
            parser.error(
                f"{args.json} has no section of other sizes; benchmarks.gpu.verify measures it."
            )
        publish(more_table(result), args.more, MORE_BEGIN, MORE_END)


if __name__ == "__main__":
    main()
