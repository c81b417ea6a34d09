"""Turns generated tokens into text, piece by piece, and lists their log-probabilities."""

import math
from typing import Any

from specjax.decode.logprobs import TopLogprobs

__all__ = ["TextStream", "list_logprobs"]


class TextStream:
    """Decodes tokens one by one and returns text as soon as later tokens cannot change it.

    A character whose bytes are spread over several tokens is held back until it is complete. The
    tokens of the last piece are decoded again as context: some decoders treat the first token of
    a text specially.

    Args:
      tokenizer: with `decode(ids, skip_special_tokens)`.
      context: tokens before the text, which are not returned.
    """

    def __init__(self, tokenizer: Any, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(context)
        self._context_start, self._num_settled = max(0, len(context) - 8), len(context)

    def _pending_text(self) -> str:
        before = self._decode(self._ids[self._context_start : self._num_settled])
        return self._decode(self._ids[self._context_start :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def feed(self, token_id: int) -> str:
        """Adds a token and returns the text that is final now, perhaps none."""
        self._ids.append(token_id)
        text = self._pending_text()
        # An incomplete sequence of bytes decodes to the replacement character.
        if not text or text.endswith("\ufffd"):
            return ""
        self._context_start, self._num_settled = self._num_settled, len(self._ids)
        return text

    def flush(self) -> str:
        """Returns the text that was held back."""
        text = self._pending_text()
        self._context_start = self._num_settled = len(self._ids)
        return text


def list_logprobs(tokenizer: Any, token_ids: list[int], top: TopLogprobs) -> list[dict[str, Any]]:
    """Lists each generated token with its log-probability and its most probable alternatives.

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
