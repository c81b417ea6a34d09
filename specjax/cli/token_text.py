"""Log-probabilities of generated tokens as plain values, beside the text of each token."""

import math
from typing import Any

from specjax.decode.logprobs import TopLogprobs

__all__ = ["list_logprobs"]


def list_logprobs(tokenizer: Any, token_ids: list[int], top: TopLogprobs) -> list[dict[str, Any]]:
    """What is known of each token, and of the likeliest in its place, likeliest first.

    Args:
      tokenizer: with `decode(ids, skip_special_tokens)`.
      token_ids: the generated tokens.
      top: theirs, a leading axis of as many.

    Returns:
      Of each token `token_id`, `token` (its text), `logprob` (None for no probability),
      `rank` (1 is the likeliest), and in `top` the first three of the others.
    """

    def named(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        finite = logprob if math.isfinite(logprob) else None
        return {"token_id": token_id, "token": text, "logprob": finite}

    ids, logprobs, ranks, own = (values.tolist() for values in top)
    listed = []
    for place, token_id in enumerate(token_ids):
        pairs = zip(ids[place], logprobs[place], strict=True)
        others = [named(other, logprob) for other, logprob in pairs if other >= 0]
        listed.append({**named(token_id, own[place]), "rank": ranks[place], "top": others})
    return listed
