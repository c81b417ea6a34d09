"""Times vLLM's Triton top-k and top-p on an NVIDIA GPU, on the rows of gpu/cutoff.py.

python -m benchmarks.vllm.cutoff --vllm UNPACKED_WHEEL --out benchmarks/results/h200_cutoff.json
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.record import save
from benchmarks.vllm.files import load_filters
from benchmarks.vllm.verify import ROTATING_BYTES, time_calls, where

V = 131072
# As in gpu/cutoff.py; vLLM has no min-p with speculation.
CASES = {
    "top-k 50": (1.0, 50, None),
    "top-p 0.9": (0.7, None, 0.9),
    "top-k 50, top-p 0.9": (1.0, 50, 0.9),
    "top-p 0.9, spread": (1.0, None, 0.9),
    "top-k 2000": (1.0, 2000, None),
    "top-p 0.9, flat": (30.0, None, 0.9),
}
RANKED = "ranked: "
CASES |= {f"{RANKED}{name}": case for name, case in CASES.items() if "flat" not in name}


def draw(b: int, v: int, number: int, device: str = "cuda") -> torch.Tensor:
    """Rows 3 N(0, 1) in bfloat16."""
    rng = torch.Generator(device).manual_seed(number)
    return torch.randn((b, v), generator=rng, device=device).mul_(3).to(torch.bfloat16)


def draw_ranked(b: int, v: int, number: int, device: str = "cuda") -> torch.Tensor:
    """Rows like a language model's in bfloat16: -1.3 log(1 + rank), each in an order of its own."""
    rng = torch.Generator(device).manual_seed(number)
    rank = torch.rand((b, v), generator=rng, device=device).argsort(dim=1)
    return rank.float().log1p_().mul_(-1.3).to(torch.bfloat16)


def draw_sets(b: int, v: int, count: int, device: str) -> dict[bool, list[torch.Tensor]]:
    """Rows of `count` calls: normal ones, and by True those like a language model's."""
    draws = {False: draw, True: draw_ranked}
    return {ranked: [one(b, v, n, device) for n in range(count)] for ranked, one in draws.items()}


def scaled(temperature: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The float32 copy that vLLM's filters work on in place."""
    return lambda rows: rows.float().div_(temperature[:, None])


def filtered(
    function: Any, temperature: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The copy, filtered."""
    copy = scaled(temperature)
    return lambda rows: function(copy(rows), k, p)


def check(rows: torch.Tensor, kept: torch.Tensor, k: int | None, p: float | None) -> None:
    """Holds the filter to its definition on one row: else what is timed is not what it says."""
    x = rows[0].double().sort(descending=True).values
    if k is not None:
        x = x[: int((x >= x[k - 1]).sum())]
    wanted = len(x)
    if p is not None:
        mass = x.softmax(0).cumsum(0)
        wanted = 1 + int((mass < p).sum())
    found = int((kept[0] > -math.inf).sum())
    # vLLM keeps some of those that tie with the last.
    ties = int((x == x[min(wanted, len(x)) - 1]).sum())
    if abs(found - wanted) > ties:
        sys.exit(f"vLLM keeps {found} tokens where k = {k}, p = {p} keep {wanted}.")


def measure(function: Any, b: int, v: int) -> Iterator[dict[str, Any]]:
    """A record of each case at one batch size."""
    count = min(48, max(2, math.ceil(ROTATING_BYTES / (b * v * 2))))
    both = draw_sets(b, v, count, "cuda")
    for name, (temperature, k, p) in CASES.items():
        sets = both[name.startswith(RANKED)]
        heat = torch.full((b,), temperature, device="cuda")
        k_rows = None if k is None else torch.full((b,), k, dtype=torch.int32, device="cuda")
        p_rows = None if p is None else torch.full((b,), p, device="cuda")
        call = filtered(function, heat, k_rows, p_rows)
        check(scaled(heat)(sets[0]), call(sets[0]), k, p)
        figures, _ = time_calls(call, sets, False)
        copies, _ = time_calls(scaled(heat), sets, False)
        record = {"case": name, "B": b, "V": v, "dtype": "bfloat16", "temperature": temperature}
        yield record | figures | {"copy_us": copies["median_us"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=pathlib.Path, help="folder of an unpacked wheel's files")
    parser.add_argument("--out", type=pathlib.Path, help='the JSON, whose "vllm" is replaced')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here, and Triton's interpreter does not run vLLM's filters.")
    function, source = load_filters(args.vllm)
    section: dict[str, Any] = {"environment": where(source), "cases": []}
    for b in (64, 8):
        for record in measure(function, b, V):
            section["cases"].append(record)
            print(
                f"{record['case']:28} B={b:<4}{record['median_us']:9.2f} us, of which the float32 "
                f"copy {record['copy_us']:.2f}",
                flush=True,
            )
    save(args.out, {"vllm": section})


if __name__ == "__main__":
    main()
