"""Times verification and sampling on an NVIDIA GPU: the kernels, plain XLA, what JAX offers.

python -m benchmarks.gpu.verify --out benchmarks/results/h200.json
"""

import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.calls import REHEARSAL, Effort, measure_shape
from benchmarks.gpu.inputs import BYTES_PER_US, Shape
from benchmarks.gpu.tile_sizes import GREEDY_SIZES, sweep
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save

K, V, DTYPE = 5, 131072, "bfloat16"
VERIFY = [
    "drawn_0.7",
    "drawn_1",
    "onehot_0.7",
    "onehot_1",
    "greedy",
    "greedy_without_logprobs",
    "greedy_onehot",
    "synthetic_as_drawn_0.7",
    "synthetic_0.9",
    "block_0.7",
    "block_1",
    "coupled_0.7",
    "coupled_1",
]
SAMPLE = ["gumbel_fp32", "gumbel_fp64"]
GRAPHS = ["drawn_0.7_graphs", "gumbel_fp32_graphs"]
XLA = ["xla_drawn_0.7", "xla_gumbel_fp32", "categorical"]
FEW = ["drawn_0.7", "greedy"]
GREEDY = ["greedy", "greedy_without_logprobs", "greedy_onehot"]

# Cases at a shape, and the rows of its logits: those of one shape share their programs.
Work = tuple[Shape, list[str], tuple[str, ...]]
NORMAL, ZIPF, BOTH = ("normal",), ("zipf",), ("normal", "zipf")
MAIN: list[Work] = [
    *[(Shape(b, K, V, DTYPE), [*VERIFY, *SAMPLE], BOTH) for b in (8, 64, 256)],
    *[(Shape(*size, DTYPE), GREEDY, ZIPF) for size in GREEDY_SIZES],
    (Shape(8, K, V, DTYPE), GRAPHS, NORMAL),
]
# What JAX offers takes as long to compile as all kernels, and changes with JAX alone.
PLAIN: list[Work] = [(Shape(b, K, V, DTYPE), XLA, NORMAL) for b in (64, 8)]
MORE: list[Work] = [
    *[
        (Shape(64, K, v, DTYPE), [*FEW, "onehot_0.7", "gumbel_fp32"], NORMAL)
        for v in (32000, 151936, 262144)
    ],
    *[(Shape(64, k, V, DTYPE), FEW, NORMAL) for k in (1, 3, 7)],
    (Shape(64, K, V, "float32"), [*FEW, "onehot_0.7", "gumbel_fp32"], NORMAL),
    (Shape(1, K, V, DTYPE), [*FEW, "onehot_0.7", "gumbel_fp32"], NORMAL),
    (Shape(64, K, V, DTYPE), ["gumbel_scalars"], NORMAL),
]
SMALL: list[Work] = [
    (Shape(2, 2, 300, DTYPE), [*VERIFY, *SAMPLE, *GRAPHS], BOTH),
    (Shape(2, 2, 300, DTYPE), XLA, NORMAL),
    (Shape(1, 1, 130, "float32"), [*FEW, "block_0.7", "coupled_0.7", "gumbel_scalars"], BOTH),
]
SECTIONS = ("main", "xla", "more", "tiles")


def measure(work: list[Work], effort: Effort) -> Iterator[dict[str, Any]]:
    """A record of each case of each shape; one shape's inputs go before the next's are made."""
    for shape, names, kinds in work:
        yield from measure_shape(shape, names, kinds, effort)


def describe(record: dict[str, Any]) -> str:
    """One line of the printed table."""
    size = f"B={record['B']} K={record['K']} V={record['V']} {record['dtype']} {record['rows']}"
    if "error" in record:
        return f"{record['case']:24}{size:41}FAILED: {record['error'][:200]}"
    low, high = record["quartiles_us"]
    accepted = record.get("mean_accepted")
    line = f"{record['case']:24}{size:41}{record['median_us']:9.2f} ({low:.2f} to {high:.2f})"
    line += f"  kernels {record['kernels_us']:.2f}  host {record['host_clock_us']:.2f}"
    line += f"  floor {record['floor_us']:.2f}"
    return line if accepted is None else line + f"  accepted {accepted:.2f}"


def run_section(
    name: str, records: Iterator[dict[str, Any]], out: pathlib.Path | None
) -> list[dict[str, Any]]:
    """Measures a section and saves it after every record."""
    start = time.perf_counter()
    section = {"environment": environment(), "bytes_per_us": BYTES_PER_US, "cases": []}
    for record in records:
        section["cases"].append(record)
        section["seconds"] = round(time.perf_counter() - start, 1)
        save(out, {name: section})
        print(f"{section['seconds']:6.1f} s  {describe(record)}", flush=True)
    return section["cases"]


def main() -> None:
    parser = gpu_parser(__doc__)
    parser.add_argument("--only", choices=SECTIONS, help="one section of four")
    parser.add_argument("--seconds", type=float, default=180, help="stop the sweep of tiles then")
    args = parse_on_gpu(parser)
    effort = REHEARSAL if args.smoke else Effort()
    shapes = {"main": MAIN, "xla": PLAIN, "more": MORE}
    if args.smoke:
        shapes = {"main": SMALL[:1], "xla": SMALL[1:2], "more": SMALL[2:]}
    records = []
    for name in SECTIONS:
        if args.only in (None, name):
            source = (
                sweep(effort, args.seconds, small=args.smoke)
                if name == "tiles"
                else measure(shapes[name], effort)
            )
            records += run_section(name, source, args.out)
    print("\nmicroseconds per call, median (quartiles) of the device; rows that decide at 4.3 TB/s")
    for record in records:
        print(f"{describe(record)}  {record.get('tiles', '')}")
    compare_synthetic(records)
    if any("error" in record for record in records):
        sys.exit("A case failed.")


def compare_synthetic(records: list[dict[str, Any]]) -> None:
    """Prints the time of synthetic verification over that of the real one."""
    median = {(x["case"], x["B"], x["rows"]): x["median_us"] for x in records if "median_us" in x}
    for (case, size, rows), real in median.items():
        synthetic = median.get((f"synthetic_as_{case}", size, rows))
        if synthetic is not None:
            print(f"B={size}, {rows} rows: synthetic over {case}: {synthetic / real:.3f}")


if __name__ == "__main__":
    main()
