"""What FlashInfer's ways leave and draw, held to a definition in float64."""

import functools
import math
import sys

import torch

from benchmarks.flashinfer.ways import CLOSE, Way

DRAWS = 16


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
    """Holds a way to the definition on every row."""
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
