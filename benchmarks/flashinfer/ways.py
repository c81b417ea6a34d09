"""FlashInfer's functions, and the ways in which its users ask them for a cutoff."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Call = Callable[[torch.Tensor], torch.Tensor]
# How far sums in float32 may be from those in float64 that they are held to.
CLOSE = 1e-4
# `flashinfer.cake_sampling`: its one launch draws for k up to this, and it needs a top-k.
RADIX, RADIX_MAX_K = "top_k_top_p_sampling_from_probs, by radix in clusters", 64


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

    def radix(self, probs: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """Tokens by the newest sampler: a cluster of programs selects the largest k by radix."""
        b, v = probs.shape
        tokens = torch.empty(b, dtype=torch.int32, device=probs.device)
        values = torch.empty((b, 1024), device=probs.device)
        ids, counts = torch.empty_like(values, dtype=torch.int32), torch.empty_like(tokens)
        self.draws += 1
        arrays = (probs, k, p, tokens, values, ids, counts)
        self.launch("radix_top_k_top_p", *arrays, b, v, 32 * b * self.draws)
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
        if case["top_k"] <= RADIX_MAX_K:
            every = torch.ones_like(k, dtype=torch.float32)
            yield Way(RADIX, lambda probs: kernels.radix(probs, k, every))
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

    yield Way(RADIX, lambda probs: kernels.radix(probs, k, p))
    yield Way(name, lambda probs: top_p(renorm_k(probs, k), p))
    yield sampler(kernels, name, k, p)._replace(name=f"{name}, both at once", joint=True)
    # Its probabilities are bfloat16, as the logits are.
    yield Way("top_k_top_p_sampling_from_logits", from_logits, True, slack=1e-2)
    yield Way("top_k_top_p_sampling_from_logits, one k", from_best, True, False)
    yield Way(
        "top_k_renorm_probs, top_p_renorm_probs", lambda probs: renorm_p(renorm_k(probs, k), p)
    )
