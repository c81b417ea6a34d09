"""Log-probabilities in OpenAI's two forms, of entries that both share.

`TokenScore` of each token -> `completion_logprobs`    lists, and a dict of likely texts
                           -> `chat_logprobs`          an object for each token
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from specjax.contrib.serve.token_texts import TokenTexts

# What OpenAI writes for a token of probability 0: JSON has no infinity.
_NO_PROBABILITY = -9999.0


class TokenScore(NamedTuple):
    """A token, its log-probability, and those of the likeliest tokens in its place.

    Attributes:
      token_id: the token.
      logprob: None for the first token of a prompt.
      top: (token, log-probability), likeliest first. The token itself has the same float there.
    """

    token_id: int
    logprob: float | None
    top: list[tuple[int, float]]


def score_tokens(
    token_ids: Sequence[int], logprobs: Sequence[float | None], top: Sequence[Any], num_listed: int
) -> list[TokenScore]:
    """Returns a `TokenScore` for each token.

    Args:
      token_ids: the tokens.
      logprobs: of each, or None.
      top: a `TopLogprobs` for each, or None; or nothing at all.
      num_listed: tokens of `top` that are kept.
    """
    listings = top or [None] * len(token_ids)
    return [
        _score(token_id, logprob, listing, num_listed)
        for token_id, logprob, listing in zip(token_ids, logprobs, listings, strict=True)
    ]


def _score(token_id: int, logprob: float | None, listing: Any, num_listed: int) -> TokenScore:
    if logprob is None:
        return TokenScore(token_id, None, [])
    own = _finite(logprob)
    if listing is None:
        return TokenScore(token_id, own, [])
    ids, values = listing.token_ids[:num_listed].tolist(), listing.logprobs.tolist()
    pairs = zip(ids, values, strict=False)
    top = [(i, own if i == token_id else _finite(x)) for i, x in pairs if i >= 0]
    return TokenScore(token_id, own, top)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _NO_PROBABILITY


def completion_logprobs(
    scores: Sequence[TokenScore], offsets: Sequence[int], texts: TokenTexts
) -> dict[str, list[Any]]:
    """Returns the `logprobs` of a completion.

    A dict of likely tokens is keyed by text, and holds the token itself. Where tokens have equal
    texts, the larger value stays.

    Args:
      scores: of each token.
      offsets: of each, from `TokenTexts.offsets`.
      texts: of single tokens.
    """
    return {
        "tokens": [texts.text_of(score.token_id) for score in scores],
        "token_logprobs": [score.logprob for score in scores],
        "top_logprobs": [_by_text(score, texts) for score in scores],
        "text_offset": list(offsets),
    }


def _by_text(score: TokenScore, texts: TokenTexts) -> dict[str, float] | None:
    if score.logprob is None:
        return None
    values: dict[str, float] = {}
    for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
        text = texts.text_of(token_id)
        values[text] = max(logprob, values.get(text, -math.inf))
    return values


def chat_logprobs(scores: Sequence[TokenScore], texts: TokenTexts) -> dict[str, Any]:
    """Returns the `logprobs` of a chat's choice: an object for each token."""

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        data = list(texts.bytes_of(token_id))
        return {"token": texts.text_of(token_id), "logprob": logprob, "bytes": data}

    content = [
        entry(score.token_id, score.logprob)
        | {"top_logprobs": [entry(*pair) for pair in score.top]}
        for score in scores
    ]
    return {"content": content, "refusal": None}
