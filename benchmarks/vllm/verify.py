"""Times vLLM's own Triton functions on an NVIDIA GPU: CUDA-graph replay on rotating inputs.

python -m benchmarks.vllm.verify --vllm UNPACKED_WHEEL --out benchmarks/results/h200.json
"""

import argparse
import datetime
import functools
import json
import math
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton

from benchmarks.record import command, save
from benchmarks.spread import spread
from benchmarks.vllm.files import Functions, load

# As gpu/inputs.py has it: what the calls of a replay read lies beyond twice the L2 of an H200.
ROTATING_BYTES = 120e6
K, V = 5, 131072
# As gpu/tile_sizes.py has them.
GREEDY_SIZES = ((16, 7, 201088), (48, 4, 152064), (128, 3, 128256))
RUNS, CALLS = 7, 576


class Inputs(NamedTuple):
    """One set: logits bf16[B * (K + 1), V] and [B, K, V], and the arrays that vLLM indexes by."""

    target: torch.Tensor
    draft: torch.Tensor
    drafted: torch.Tensor
    cu: torch.Tensor
    pos: torch.Tensor
    requests: torch.Tensor
    request_of_row: torch.Tensor
    step_of_row: torch.Tensor
    temperature: torch.Tensor
    seeds: torch.Tensor


class Logits(NamedTuple):
    draft: torch.Tensor
    target: torch.Tensor


def draw_logits(size: tuple[int, int, int], rows: str, number: int, device: str) -> Logits:
    """The distributions of gpu/inputs.py, with torch's random numbers."""
    (b, k, v), rng = size, torch.Generator(device).manual_seed(number)
    shape, noise = (b, k + 1, v), 1.0
    if rows == "normal":
        d = torch.randn(shape, generator=rng, device=device).mul_(3)
    else:
        rank = torch.randperm(v, generator=rng, device=device)
        start = torch.randint(v, (b, k + 1, 1), generator=rng, device=device)
        token = (start + torch.arange(v, device=device)) % v
        d, noise = rank[token].float().log1p_().mul_(-1.3), 0.7
    target = torch.randn(shape, generator=rng, device=device).mul_(noise).add_(d)
    return Logits(d[:, :k].to(torch.bfloat16), target.to(torch.bfloat16))


def with_tokens(logits: Logits, temperature: float, number: int) -> Inputs:
    """Drafts sampled from softmax(d / T), the argmax of d at T = 0."""
    b, k, v = logits.draft.shape
    device = logits.draft.device
    rng = torch.Generator(device).manual_seed(1000 + number)
    # vLLM finds drafted token i next to target row i + 1; the last committed token is first.
    drafted = torch.zeros((b, k + 1), dtype=torch.int64, device=device)
    for i in range(k):
        x = logits.draft[:, i].float()
        if temperature > 0:
            x = x / temperature - torch.empty_like(x).exponential_(generator=rng).log_()
        drafted[:, i + 1] = x.argmax(-1)
    count = functools.partial(torch.arange, device=device)
    rows = b * (k + 1)
    return Inputs(
        target=logits.target.view(rows, v),
        draft=logits.draft,
        drafted=drafted.view(-1),
        cu=count(0, rows + 1, k + 1, dtype=torch.int32),
        pos=count(rows, dtype=torch.int64) % (k + 1) + 100 * number,
        requests=count(b, dtype=torch.int32),
        request_of_row=count(rows, dtype=torch.int32) // (k + 1),
        step_of_row=count(rows, dtype=torch.int32) % (k + 1),
        temperature=torch.full((b,), temperature, device=device),
        seeds=count(b, dtype=torch.int64) + 1000 * number,
    )


def verify_call(functions: Functions, temperature: float, one_hot: bool) -> Callable[..., Any]:
    """What vLLM does of a step: a scaled float32 copy unless T is 0 or 1, then verification."""

    def verify(x: Inputs) -> torch.Tensor:
        target = x.target
        if temperature not in (0.0, 1.0):
            target = torch.empty_like(target, dtype=torch.float32).copy_(target)
            functions.apply_temperature(target, x.request_of_row, x.temperature)
        places = (x.cu, x.pos, x.requests, x.request_of_row, x.step_of_row)
        _, emitted = functions.rejection_sample(
            target,
            None if one_hot else x.draft,
            x.drafted,
            *places,
            x.temperature,
            x.seeds,
            x.draft.shape[1],
        )
        return emitted

    return verify


def sample_call(functions: Functions, fp64: bool) -> Callable[..., Any]:
    """One token per row; the row at the place of the set's number is taken from each request."""

    def sample(x: tuple[torch.Tensor, Inputs]) -> torch.Tensor:
        rows, of = x
        return functions.gumbel_sample(
            rows,
            of.requests,
            of.temperature,
            of.seeds,
            of.pos[: rows.shape[0]],
            apply_temperature=True,
            is_drafting=False,
            use_fp64=fp64,
        )

    return sample


def time_calls(
    call: Callable[..., Any], sets: list[Any], smoke: bool
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Microseconds per call by replay of one graph, and what the calls of it returned."""
    calls = sets * max(1, -(-12 // len(sets)))
    if smoke:
        start = time.perf_counter()
        results = [call(x) for x in sets]
        return spread([1e6 * (time.perf_counter() - start) / len(sets)]), results
    # The first calls compile, which a capture must not.
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for x in calls[:2]:
            call(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call(x) for x in calls]
    replays = math.ceil(CALLS / len(calls))
    graph.replay()
    torch.cuda.synchronize()
    runs = []
    for _ in range(RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        runs.append(1e3 * begin.elapsed_time(end) / replays / len(calls))
    return spread(runs) | {"calls_per_run": replays * len(calls)}, results


CASES = {
    "drawn_0.7": (0.7, False),
    "drawn_1": (1.0, False),
    "onehot_0.7": (0.7, True),
    "onehot_1": (1.0, True),
    "greedy": (0.0, False),
}


def measure(
    functions: Functions, size: tuple[int, int, int], rows: str, names: list[str], smoke: bool
) -> Iterator[Any]:
    """A record of each case at one size, with one kind of rows."""
    b, k, v = size
    device = "cpu" if smoke else "cuda"
    # Verification reads about every row; a token, one row of its set.
    count = 2 if smoke else min(48, max(2, math.ceil(ROTATING_BYTES / (3 * b * v * 2))))
    logits = [draw_logits(size, rows, number, device) for number in range(count)]
    shape = {"B": b, "K": k, "V": v, "dtype": "bfloat16", "rows": rows}
    for name, (temperature, one_hot) in CASES.items():
        if name not in names:
            continue
        sets = [with_tokens(x, temperature, number) for number, x in enumerate(logits)]
        call = verify_call(functions, temperature, one_hot)
        figures, emitted = time_calls(call, sets, smoke)
        accepted = float(torch.cat(emitted).float().mean()) - 1
        yield {
            "case": name,
            **shape,
            "temperature": temperature,
            "mean_accepted": accepted,
            **figures,
        }
    of = with_tokens(logits[0], 0.7, 0)
    enough = max(2, math.ceil(ROTATING_BYTES / (b * v * 2)))
    drawn = [x.target[:, i].contiguous() for x in logits for i in range(k + 1)][: min(48, enough)]
    for name, fp64 in (("gumbel_fp32", False), ("gumbel_fp64", True)):
        if name not in names:
            continue
        figures, _ = time_calls(sample_call(functions, fp64), [(x, of) for x in drawn], smoke)
        yield {"case": name, **shape, "temperature": 0.7, **figures}


def where(source: str) -> dict[str, Any]:
    """Birthplace of figures."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": source,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
    }


def parts(smoke: bool) -> list[tuple[tuple[int, int, int], str, list[str]]]:
    """Sizes, kinds of rows and names of cases; each part is measured by a process of its own."""
    every = [*CASES, "gumbel_fp32", "gumbel_fp64"]
    sizes = [(2, 2, 300)] if smoke else [(b, K, V) for b in (8, 64, 256)]
    work = [(size, rows, every) for size in sizes for rows in ("normal", "zipf")]
    return work if smoke else [*work, *((size, "zipf", ["greedy"]) for size in GREEDY_SIZES)]


def run_part(number: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The records of a part, from a process of its own: a fault takes no other part's figures."""
    command = [sys.executable, "-m", "benchmarks.vllm.verify", "--part", str(number)]
    command += ["--vllm", str(args.vllm)] if args.vllm else []
    command += ["--smoke"] if args.smoke else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise RuntimeError(f"part {number} ended with {process.returncode}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=pathlib.Path, help="folder of an unpacked wheel's files")
    parser.add_argument("--out", type=pathlib.Path, help='the JSON, whose "vllm" is replaced')
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: TRITON_INTERPRET=1")
    parser.add_argument("--part", type=int, help="only this, in this process, as lines of JSON")
    args = parser.parse_args()
    functions, work = load(args.vllm), parts(args.smoke)
    if args.part is not None:
        for record in measure(functions, *work[args.part], args.smoke):
            print(json.dumps(record), flush=True)
        return
    section: dict[str, Any] = {"environment": where(functions.source), "cases": []}
    failed = []
    for number in range(len(work)):
        try:
            for record in run_part(number, args):
                section["cases"].append(record)
                print(
                    f"{record['case']:14} B={record['B']:<5}{record['rows']:8}"
                    f"{record['median_us']:9.2f} us  "
                    f"accepted {record.get('mean_accepted', math.nan):.2f}",
                    flush=True,
                )
        except RuntimeError as error:
            failed.append(str(error))
        save(None if args.smoke else args.out, {"vllm": section})
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
