"""vLLM's Triton kernels on an NVIDIA GPU, by samples; prints one line of JSON.

python3 -m benchmarks.peers.vllm_kernels --vllm build/peers/vllm

The folder holds a few files of the wheel, as `benchmarks/vllm/files.py` reads them. Drafts are
drawn by vLLM's `gumbel_sample`, with the arguments that its speculator gives, from unfiltered draft
logits at the request's temperature; "argmax" drafts come without logits. Temperature and top-p are
applied to the target's rows by vLLM's kernels, as `Sampler.apply_sampling_params` does.
"""

import argparse
import datetime
import importlib
import json
import pathlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from benchmarks.peers.inputs import MIXED, ROWS, Array, Kind, Rows, count_outcomes
from benchmarks.peers.measure import measure
from benchmarks.record import command
from benchmarks.vllm.files import SAMPLER, Functions, load, load_filters

NAME = "vLLM"
CALL = "v1.worker.gpu.spec_decode.rejection_sampler_utils.rejection_sample"


class Size(NamedTuple):
    """How many requests a call has, and how many calls a case."""

    batch: int = 2**20
    calls: int = 16


class Kernels(NamedTuple):
    functions: Functions
    filter_rows: Callable[..., Any]


class Batch:
    """Requests of some kinds in turn; rows of logits are laid end to end, the bonus row last."""

    def __init__(self, rows: Rows, kinds: list[Kind], batch: int, device: str) -> None:
        self.rows, self.device = rows, device
        self.each = np.arange(batch) % len(kinds)
        lengths = [rows.k if kind.num_tokens is None else kind.num_tokens for kind in kinds]
        self.lengths = np.array(lengths)[self.each]
        start = np.concatenate([[0], np.cumsum(self.lengths + 1)])
        request = np.repeat(np.arange(batch), self.lengths + 1)
        step = np.arange(start[-1]) - start[request]
        self.cu = self.tensor(start, torch.int32)
        self.request_of_row = self.tensor(request, torch.int32)
        self.step_of_row = self.tensor(step, torch.int32)
        self.pos = self.tensor(100 + step, torch.int64)
        self.requests = self.tensor(np.arange(batch), torch.int32)
        temperature = np.array([kind.temperature for kind in kinds])[self.each]
        self.temperature = self.tensor(temperature, torch.float32)
        self.top_p = self.tensor(np.array([k.top_p for k in kinds])[self.each][request])
        self.has_top_p = any(kind.top_p < 1 for kind in kinds)
        target, draft = (self.tensor(x) for x in rows)
        self.target = target[self.step_of_row.long()]
        self.draft = draft.expand(batch, -1, -1).contiguous()

    def tensor(self, values: Array, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def processed(self, kernels: Kernels) -> torch.Tensor:
        """A copy of the target's rows after temperature and top-p."""
        rows = self.target.clone()
        kernels.functions.apply_temperature(rows, self.request_of_row, self.temperature)
        return kernels.filter_rows(rows, None, self.top_p) if self.has_top_p else rows

    def drafts(self, functions: Functions, seeds: torch.Tensor) -> torch.Tensor:
        """Tokens [B, K] of vLLM's draws; seeds are mixed with the step as `spec_step_seed` does."""
        tokens = []
        for i in range(self.rows.k):
            drawn = functions.gumbel_sample(
                self.draft[:, i].contiguous(),
                self.requests,
                self.temperature,
                seeds ^ (i << 32),
                torch.full_like(seeds, 100 + i),
                apply_temperature=True,
                is_drafting=True,
            )
            tokens.append(drawn)
        return torch.stack(tokens, dim=1)

    def step(self, kernels: Kernels, call: int, is_sampled: bool, block: bool) -> Array:
        """Tokens [B, K + 1] of a step, -1 after the emitted ones."""
        batch, k = self.draft.shape[:2]
        seeds = torch.arange(batch, dtype=torch.int64, device=self.device) + call * batch
        drafted = self.draft.argmax(dim=-1)
        if is_sampled:
            drafted = self.drafts(kernels.functions, seeds)
        # Drafted token i stands next to row i + 1; next to row 0 is the last committed token.
        padded = torch.cat([torch.zeros_like(drafted[:, :1]), drafted], dim=1)
        laid = padded[self.request_of_row.long(), self.step_of_row.long()]
        sampled, count = kernels.functions.rejection_sample(
            self.processed(kernels),
            self.draft if is_sampled else None,
            laid,
            self.cu,
            self.pos,
            self.requests,
            self.request_of_row,
            self.step_of_row,
            self.temperature,
            seeds,
            k,
            use_block_verification=block,
        )
        place = torch.arange(k + 1, device=self.device)
        return torch.where(place < count[:, None], sampled, -1).cpu().numpy()


def cases(kernels: Kernels, size: Size, device: str) -> Iterator[dict[str, Any]]:
    def run(case: str, rows: Rows, kinds: dict[str, Kind], on: str, block: bool = False) -> Any:
        batch = Batch(rows, list(kinds.values()), size.batch, device)
        counts: list[Any] = [0.0] * len(kinds)
        for call in range(size.calls):
            tokens = batch.step(kernels, call, case.startswith("sampled"), block)
            for i in range(len(kinds)):
                counts[i] = counts[i] + count_outcomes(tokens[i :: len(kinds)], rows.vocab_size)
        for (name, kind), outcomes in zip(kinds.items(), counts, strict=True):
            title = f"{case}{', mixed batch: ' if name else ''}{name}"
            how = f"{CALL}{', use_block_verification' if block else ''}"
            number = int(outcomes.sum())
            yield measure(title, how, outcomes, rows, kind, size=on, num_samples=number)

    one = {
        "sampled": Kind(),
        "sampled, T = 0.7": Kind(0.7),
        "sampled, T = 0.7, top-p 0.8": Kind(0.7, 0.8),
        "argmax, without logits": Kind(),
        "argmax, without logits, T = 0.7, top-p 0.8": Kind(0.7, 0.8),
        "greedy": Kind(0.0),
    }
    for on, make in ROWS.items():
        rows = make()
        for case, kind in one.items():
            yield from run(case, rows, {"": kind}, on)
        if on == "usual":
            for case in ("sampled", "sampled, T = 0.7, top-p 0.8", "argmax, without logits"):
                yield from run(case, rows, {"": one[case]}, on, block=True)
            for case in ("sampled", "argmax, without logits"):
                yield from run(case, rows, MIXED, on)


def filter_by_sorting(rows: torch.Tensor, _: None, top_p: torch.Tensor) -> torch.Tensor:
    """Top-p for a rehearsal: Triton's interpreter does not run vLLM's filter."""
    probs, order = rows.softmax(dim=-1).sort(dim=-1, descending=True)
    is_cut = probs.cumsum(dim=-1) - probs >= top_p[:, None]
    return rows.masked_fill(is_cut.gather(1, order.argsort(dim=-1)), -torch.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", type=pathlib.Path, help="folder of files of an unpacked wheel")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: TRITON_INTERPRET=1")
    args = parser.parse_args()
    functions = load(args.vllm)
    if args.smoke:
        # Triton's interpreter has no functions of libdevice.
        sampler = importlib.import_module(SAMPLER)
        sampler.tldevice = types.SimpleNamespace(log1p=lambda x: tl.log(1.0 + x))
    filter_rows = filter_by_sorting if args.smoke else load_filters(args.vllm)[0]
    kernels = Kernels(functions, filter_rows)
    device, size = ("cpu", Size(12, 1)) if args.smoke else ("cuda", Size())
    name = "cpu" if args.smoke else torch.cuda.get_device_name()
    version = f"{functions.source}, torch {torch.__version__}, triton {triton.__version__}"
    found = list(cases(kernels, size, device))
    section = {
        "peer": NAME,
        "version": version,
        "device": name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command(),
    }
    print(json.dumps(section | {"cases": found}))


if __name__ == "__main__":
    main()
