"""Times FlashInfer's sort-free sampling on an NVIDIA GPU, on the rows of gpu_cutoff.py.

python benchmarks/flashinfer_cutoff.py --library LIBRARY --out benchmarks/results/h200_cutoff.json
"""

import argparse
import functools
import json
import math
import pathlib
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flashinfer_library
import torch
from vllm_cutoff import V, draw
from vllm_triton import ROTATING_BYTES, time_calls, where

# As in gpu_cutoff.py.
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
Call = Callable[[torch.Tensor], torch.Tensor]
DRAWS = 16
# How far sums in float32 may be from those in float64 that they are held to.
CLOSE = 1e-4


class Kernels:
    """FlashInfer's functions of these names, with the buffers that its Python keeps for them."""

    def __init__(self, library: Any, device: str = "cuda") -> None:
        self.library = library
        self.draws = 0
        buffer = functools.partial(torch.zeros, 1 << 20, dtype=torch.uint8, device=device)
        self.workspace, self.masks, self.sums, self.best = (buffer() for _ in range(4))

    def launch(self, name: str, *arguments: torch.Tensor | int) -> None:
        """Calls a function of the library on the current stream."""
        plain = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
        status = getattr(self.library, name)(*plain, torch.cuda.current_stream().cuda_stream)
        if status != 0:
            sys.exit(f"FlashInfer's {name} fails with CUDA's error {status}.")

    def softmax(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """Probabilities of a float32 copy of the logits."""
        copy = logits.float()
        probs = torch.empty_like(copy)
        self.launch("softmax", copy, probs, temperature, self.workspace, *copy.shape)
        return probs

    def sample(self, name: str, probs: torch.Tensor, *filters: torch.Tensor) -> torch.Tensor:
        """Tokens by one of the samplers; every call draws anew, and in a graph every one of it."""
        tokens = torch.empty(len(probs), dtype=torch.int32, device=probs.device)
        valid = torch.empty(len(probs), dtype=torch.bool, device=probs.device)
        self.draws += 1
        offset = 32 * len(probs) * self.draws
        self.launch(name, probs, tokens, valid, *filters, *probs.shape, offset)
        return tokens

    def top_k_mask_logits(self, logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Logits, -inf where they are not among the largest k."""
        masked = torch.empty_like(logits)
        self.launch("top_k_mask_logits", logits, masked, k, self.masks, *logits.shape)
        return masked

    def top_k_renorm_probs(self, probs: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Probabilities of the largest k, divided by their sum."""
        kept = torch.empty_like(probs)
        self.launch("top_k_renorm_probs", probs, kept, k, self.sums, *probs.shape)
        return kept

    def top_p_renorm_probs(self, probs: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Probabilities of what top-p keeps, divided by their sum."""
        b, v = probs.shape
        kept = torch.empty_like(probs)
        # Counters, two histograms of 2048 and two buffers of a 32nd of the row.
        size = b * (512 + 2 * 4 * 2048 + 2 * 4 * max(256, v // 32 + 256)) + 5 * 256
        workspace = torch.empty(size, dtype=torch.uint8, device=probs.device)
        self.launch("top_p_renorm_probs", probs, kept, p, workspace, b, v)
        return kept

    def top_k(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest k logits of each row in order, and whose they are."""
        size = (len(logits), k)
        values = torch.empty(size, dtype=logits.dtype, device=logits.device)
        token_ids = torch.empty(size, dtype=torch.int32, device=logits.device)
        self.launch("top_k", logits, token_ids, values, self.best, *logits.shape, k)
        return values, token_ids.long()


class Way(NamedTuple):
    """One way to ask FlashInfer for a case, by the names of the functions it takes."""

    name: str
    run: Call
    of_logits: bool = False
    # Whether every row has a parameter of its own.
    per_request: bool = True
    # Whether top-p counts the mass of all tokens, and not of those that top-k leaves.
    joint: bool = False
    # What may be missing of, or too much in, the mass that is kept.
    slack: float = CLOSE


def sampler(kernels: Kernels, name: str, *filters: torch.Tensor) -> Way:
    """A way by one of the samplers from probabilities."""
    return Way(name, lambda probs: kernels.sample(name, probs, *filters))


def ways(kernels: Kernels, case: dict[str, float], of: dict[str, torch.Tensor]) -> Iterator[Way]:
    """How a user of FlashInfer asks for a case; `of` has the parameters as arrays of [B]."""
    renorm_k, renorm_p = kernels.top_k_renorm_probs, kernels.top_p_renorm_probs
    top_p, min_p = "top_p_sampling_from_probs", "min_p_sampling_from_probs"
    asked = list(case)
    if asked == ["top_k"]:
        k = of["top_k"]
        yield sampler(kernels, "top_k_sampling_from_probs", k)
        yield Way("top_k_renorm_probs", lambda probs: renorm_k(probs, k))
        yield Way("top_k_mask_logits", lambda rows: kernels.top_k_mask_logits(rows, k), True)
    elif asked == ["top_p"]:
        p = of["top_p"]
        yield sampler(kernels, top_p, p)
        yield Way("top_p_renorm_probs", lambda probs: renorm_p(probs, p))
    elif asked == ["min_p"]:
        yield sampler(kernels, min_p, of["min_p"])
    elif asked == ["top_k", "top_p"]:
        yield from both(kernels, int(case["top_k"]), of["top_k"], of["top_p"])
    else:
        k, p, m = of.values()
        yield Way(
            f"top_k_renorm_probs, top_p_renorm_probs, {min_p}",
            lambda probs: kernels.sample(min_p, renorm_p(renorm_k(probs, k), p), m),
        )


def both(kernels: Kernels, one_k: int, k: torch.Tensor, p: torch.Tensor) -> Iterator[Way]:
    """Top-k and top-p: FlashInfer's default order, which is ours, and what else it offers."""
    renorm_k, renorm_p = kernels.top_k_renorm_probs, kernels.top_p_renorm_probs
    top_p = functools.partial(kernels.sample, "top_p_sampling_from_probs")
    name = "top_k_top_p_sampling_from_probs"

    def from_logits(rows: torch.Tensor) -> torch.Tensor:
        probs = torch.softmax(kernels.top_k_mask_logits(rows, k), dim=-1)
        return top_p(probs.float(), p)

    def from_best(rows: torch.Tensor) -> torch.Tensor:
        values, token_ids = kernels.top_k(rows, one_k)
        place = top_p(torch.softmax(values.float(), dim=-1), p)
        return token_ids.gather(1, place.view(-1, 1).long()).squeeze(1).to(torch.int32)

    yield Way(name, lambda probs: top_p(renorm_k(probs, k), p))
    yield sampler(kernels, name, k, p)._replace(name=f"{name}, both at once", joint=True)
    # Its probabilities are bfloat16, as the logits are.
    yield Way("top_k_top_p_sampling_from_logits", from_logits, True, slack=1e-2)
    yield Way("top_k_top_p_sampling_from_logits, one k", from_best, True, False)
    yield Way(
        "top_k_renorm_probs, top_p_renorm_probs", lambda probs: renorm_p(renorm_k(probs, k), p)
    )


def reaching(x: torch.Tensor, p: float) -> torch.Tensor:
    """Where x is not below the logit at which the mass from the largest on reaches p."""
    ranked = x.sort(dim=-1, descending=True).values
    before = (ranked.softmax(-1).cumsum(-1) < p).sum(-1, keepdim=True)
    return x >= ranked.gather(1, before.clamp(max=x.shape[1] - 1))


def keeping(
    x: torch.Tensor, case: dict[str, float], slack: float = 0.0, joint: bool = False
) -> torch.Tensor:
    """Float64 logits, -inf where the filters drop them, by their definition and a sort."""
    whole = x
    if "top_k" in case:
        x = x.masked_fill(x < x.topk(int(case["top_k"])).values[:, -1:], -math.inf)
    if "top_p" in case:
        enough = reaching(whole if joint else x, case["top_p"] + slack)
        x = x.masked_fill(~enough, -math.inf)
    if "min_p" in case:
        least = x.amax(-1, keepdim=True) + math.log(case["min_p"]) - slack
        x = x.masked_fill(x < least, -math.inf)
    return x


def check(way: Way, given: torch.Tensor, x: torch.Tensor, case: dict[str, float]) -> None:
    """Holds a way to the definition on every row: else what is timed is not what it says."""
    keep = functools.partial(keeping, x, case, joint=way.joint)
    most = keep(way.slack) > -math.inf
    found = way.run(given)
    if found.ndim == 1:
        tokens = torch.stack([found, *(way.run(given) for _ in range(DRAWS - 1))]).long()
        rows = torch.arange(len(x), device=x.device).expand_as(tokens)
        wrong = int((~most[rows, tokens]).sum())
        # Of what is kept, the more likely half has to come up as often as it should.
        kept = keep()
        half = reaching(kept, 0.5)
        share = (kept.softmax(-1) * half).sum(-1)
        surplus = float(half[rows, tokens].sum() - DRAWS * share.sum())
        error = math.sqrt(DRAWS * float((share * (1 - share)).sum()))
        if wrong or abs(surplus) > 5 * error + way.slack * tokens.numel():
            sys.exit(
                f"{way.name} drew {wrong} of {tokens.numel()} tokens that {case} drop, and the "
                f"likelier half {surplus:.0f} times too often, of which {error:.1f} is chance."
            )
        return
    lowest = -math.inf if way.of_logits else 0.0
    kept = found > lowest
    missing = int(((keep(-way.slack) > -math.inf) & ~kept).sum())
    surplus = int((kept & ~most).sum())
    if way.of_logits:
        wanted = given.double()
    else:
        wanted = x.masked_fill(~kept, -math.inf).softmax(-1)
    right = (found.double() - wanted).abs() <= 10 * CLOSE * wanted.abs()
    wrong = int((kept & ~right).sum())
    if missing or surplus or wrong:
        sys.exit(
            f"{way.name} lacks {missing} tokens that {case} keep, has {surplus} that they drop, "
            f"and {wrong} at a wrong value."
        )


def check_softmax(probs: torch.Tensor, x: torch.Tensor) -> None:
    """Holds the softmax to float64."""
    wanted = x.softmax(-1)
    off = float(((probs.double() - wanted).abs() / wanted).max())
    if not off < CLOSE:
        sys.exit(f"FlashInfer's softmax is up to {off:.1e} from that in float64.")


def parameters(case: dict[str, float], b: int, device: str) -> dict[str, torch.Tensor]:
    """Parameters [B]: data, as in a batch of many users."""
    kinds = {"top_k": torch.int32}
    return {
        name: torch.full((b,), value, dtype=kinds.get(name, torch.float32), device=device)
        for name, value in case.items()
    }


def behind(first: Call, second: Call) -> Call:
    """The second of what the first returns."""
    return lambda rows: second(first(rows))


def measure(
    kernels: Kernels, names: list[str], b: int, v: int, smoke: bool = False
) -> Iterator[dict[str, Any]]:
    """A record of each way through each case at one batch size."""
    device = "cpu" if smoke else "cuda"
    count = 2 if smoke else min(48, max(2, math.ceil(ROTATING_BYTES / (b * v * 2))))
    sets = [draw(b, v, number, device) for number in range(count)]
    shape = {"B": b, "V": v, "dtype": "bfloat16"}
    for name in names:
        temperature, case = CASES[name]
        heat = torch.full((b,), temperature, device=device)
        softmax = functools.partial(kernels.softmax, temperature=heat)
        probs = [softmax(rows) for rows in sets]
        x = sets[0].double() / temperature
        check_softmax(probs[0], x)
        for way in ways(kernels, case, parameters(case, b, device)):
            check(way, sets[0] if way.of_logits else probs[0], x, case)
            whole = way.run if way.of_logits else behind(softmax, way.run)
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
        "float32 copy, softmax": sets,
        "softmax": [x.float() for x in sets],
    }.items():
        figures, _ = time_calls(softmax, inputs, smoke)
        yield {"case": "softmax", "call": call, **shape, "per_request": True, **figures}


def describe(record: dict[str, Any]) -> str:
    """One line of the printed table."""
    alone = f" ({record['alone_us']:.2f} by itself)" if "alone_us" in record else ""
    return (
        f"{record['case']:20} B={record['B']:<4}{record['median_us']:9.2f} us{alone}  "
        f"{record['call']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flashinfer_library.add_arguments(parser)
    parser.add_argument("--library", type=pathlib.Path, help="built before; else it is built here")
    parser.add_argument("--only", nargs="+", choices=CASES, metavar="CASE", help="some cases")
    parser.add_argument("--out", type=pathlib.Path, help='the JSON, whose "flashinfer" is replaced')
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU here.")
    if args.library is not None:
        functions, source = flashinfer_library.load(args.library)
    else:
        # What is loaded stays when its file goes.
        with tempfile.TemporaryDirectory() as folder:
            library = pathlib.Path(folder) / "flashinfer.so"
            package = flashinfer_library.find(args.flashinfer)
            flashinfer_library.build(package, library, args.include)
            functions, source = flashinfer_library.load(library)
    # Folders of one machine are none of the figures' birthplace.
    known = {str(args.library): "LIBRARY", str(args.flashinfer): "UNPACKED_WHEEL"}
    known |= {str(folder): "HEADERS" for folder in args.include}
    given = [part for word in sys.argv[1:] for part in word.split("=", 1)]
    words = [known.get(str(pathlib.Path(word)), word) for word in given]
    command = shlex.join(["python", "benchmarks/flashinfer_cutoff.py", *words])
    environment = {**where(source, command), "flashinfer": source}
    del environment["vllm"], environment["triton"]
    section: dict[str, Any] = {"environment": environment, "cases": []}
    kernels = Kernels(functions)
    for b in (64, 8):
        for record in measure(kernels, args.only or list(CASES), b, V):
            section["cases"].append(record)
            print(describe(record), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        there = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(json.dumps(there | {"flashinfer": section}, indent=1) + "\n")


if __name__ == "__main__":
    main()
