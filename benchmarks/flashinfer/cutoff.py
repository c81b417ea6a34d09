"""Times FlashInfer's sort-free sampling on an NVIDIA GPU, on the rows of gpu/cutoff.py.

python -m benchmarks.flashinfer.cutoff --library LIBRARY --out benchmarks/results/h200_cutoff.json
"""

import argparse
import functools
import math
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.flashinfer import library
from benchmarks.flashinfer.check import check, check_softmax
from benchmarks.flashinfer.ways import Call, Kernels, ways
from benchmarks.record import save
from benchmarks.vllm.cutoff import RANKED, V, draw_sets
from benchmarks.vllm.verify import ROTATING_BYTES, time_calls, where

# As in gpu/cutoff.py.
CASES: dict[str, tuple[float, dict[str, float]]] = {
    "top-k 50": (1.0, {"top_k": 50}),
    "top-p 0.9": (0.7, {"top_p": 0.9}),
    "top-k 50, top-p 0.9": (1.0, {"top_k": 50, "top_p": 0.9}),
    "min-p 0.05": (1.0, {"min_p": 0.05}),
    "all three": (1.0, {"top_k": 50, "top_p": 0.9, "min_p": 0.05}),
    "top-p 0.9, spread": (1.0, {"top_p": 0.9}),
    "top-k 2000": (1.0, {"top_k": 2000}),
    "top-p 0.9, flat": (30.0, {"top_p": 0.9}),
}
LIKEWISE = ["top-k 50", "top-p 0.9", "top-k 50, top-p 0.9", "top-p 0.9, spread", "top-k 2000"]
CASES |= {f"{RANKED}{name}": CASES[name] for name in LIKEWISE}


def parameters(case: dict[str, float], b: int, device: str) -> dict[str, torch.Tensor]:
    """Parameters [B]: data, as in a batch of many users."""
    kinds = {"top_k": torch.int32}
    return {
        name: torch.full((b,), value, dtype=kinds.get(name, torch.float32), device=device)
        for name, value in case.items()
    }


def followed_by(first: Call, second: Call) -> Call:
    """The second of what the first returns."""
    return lambda rows: second(first(rows))


def measure(
    kernels: Kernels, names: list[str], b: int, v: int, smoke: bool = False
) -> Iterator[dict[str, Any]]:
    """A record of each way through each case at one batch size."""
    device = "cpu" if smoke else "cuda"
    count = 2 if smoke else min(48, max(2, math.ceil(ROTATING_BYTES / (b * v * 2))))
    both = draw_sets(b, v, count, device)
    shape = {"B": b, "V": v, "dtype": "bfloat16"}
    for name in names:
        temperature, case = CASES[name]
        heat = torch.full((b,), temperature, device=device)
        softmax = functools.partial(kernels.softmax, temperature=heat)
        sets = both[name.startswith(RANKED)]
        probs = [softmax(rows) for rows in sets]
        x = sets[0].double() / temperature
        check_softmax(probs[0], x)
        for way in ways(kernels, case, parameters(case, b, device)):
            check(way, sets[0] if way.of_logits else probs[0], x, case)
            whole = way.run if way.of_logits else followed_by(softmax, way.run)
            figures, _ = time_calls(whole, sets, smoke)
            record = {"case": name, "call": way.name, **shape, "temperature": temperature}
            record |= {"per_request": way.per_request, **figures}
            if not way.of_logits:
                alone, _ = time_calls(way.run, probs, smoke)
                record |= {"alone_us": alone["median_us"]}
                record |= {"alone_quartiles_us": alone["quartiles_us"]}
            yield record
    # What every way from probabilities begins with, and the same without the copy.
    for call, inputs in {
        "float32 copy, softmax": both[False],
        "softmax": [x.float() for x in both[False]],
    }.items():
        figures, _ = time_calls(softmax, inputs, smoke)
        yield {"case": "softmax", "call": call, **shape, "per_request": True, **figures}


def describe(record: dict[str, Any]) -> str:
    """One line of the printed table."""
    alone = f" ({record['alone_us']:.2f} by itself)" if "alone_us" in record else ""
    return (
        f"{record['case']:28} B={record['B']:<4}{record['median_us']:9.2f} us{alone}  "
        f"{record['call']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    library.add_arguments(parser)
    parser.add_argument("--library", type=pathlib.Path, help="built before; else it is built here")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="some cases")
    parser.add_argument("--out", type=pathlib.Path, help='the JSON, whose "flashinfer" is replaced')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here.")
    if args.library is not None:
        functions, source = library.load(args.library)
    else:
        # What is loaded stays when its file goes.
        with tempfile.TemporaryDirectory() as folder:
            built = pathlib.Path(folder) / "flashinfer.so"
            package = library.find(args.flashinfer)
            library.build(package, built, args.include)
            functions, source = library.load(built)
    # Folders of one machine are none of the figures' birthplace.
    known = {str(args.library): "LIBRARY", str(args.flashinfer): "UNPACKED_WHEEL"}
    known |= {str(folder): "HEADERS" for folder in args.include}
    given = [part for word in sys.argv[1:] for part in word.split("=", 1)]
    words = [known.get(str(pathlib.Path(word)), word) for word in given]
    command = shlex.join(["python", "-m", "benchmarks.flashinfer.cutoff", *words])
    environment = where(source) | {"command": command, "flashinfer": source}
    del environment["vllm"], environment["triton"]
    section: dict[str, Any] = {"environment": environment, "cases": []}
    kernels = Kernels(functions)
    for b in (64, 8):
        for record in measure(kernels, args.only or list(CASES), b, V):
            section["cases"].append(record)
            print(describe(record), flush=True)
    save(args.out, {"flashinfer": section})


if __name__ == "__main__":
    main()
