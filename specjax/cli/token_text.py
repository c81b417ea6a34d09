"""Generated tokens with their log-probabilities, as text and as JSON."""

import math
from typing import Any

from specjax.decode.logprobs import TopLogprobs

__all__ = ["list_logprobs"]


def list_logprobs(tokenizer: Any, token_ids: list[int], top: TopLogprobs) -> list[dict[str, Any]]:
    """Returns each generated token with its log-probability and most probable alternatives.

    Args:
      tokenizer: with `decode(ids, skip_special_tokens)`.
      token_ids: N generated tokens.
      top: with a leading axis of N.

    Returns:
      N dicts: `token_id`, `token` (text), `logprob` (None for -inf), `rank` (1 for the most
      probable token) and `top`, the most probable tokens in descending order, each with
      `token_id`, `token` and `logprob`.
    """

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        finite = logprob if math.isfinite(logprob) else None
        return {"token_id": token_id, "token": text, "logprob": finite}

    ids, logprobs, ranks, token_logprobs = (values.tolist() for values in top)
    descriptions = []
    for index, token_id in enumerate(token_ids):
        pairs = zip(ids[index], logprobs[index], strict=True)
        others = [describe(other_id, logprob) for other_id, logprob in pairs if other_id >= 0]
        descriptions.append(
            {**describe(token_id, token_logprobs[index]), "rank": ranks[index], "top": others}
        )
    return descriptions
