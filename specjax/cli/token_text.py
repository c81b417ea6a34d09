"""Generated tokens as text, as it streams, and with their log-probabilities."""

import math
from typing import Any

from specjax.decode.logprobs import TopLogprobs

__all__ = ["TextStream", "list_logprobs"]


class TextStream:
    """Text of tokens that come one by one, given out as soon as no later token can change it.

    A character whose bytes are spread over tokens is held back until it is whole. The tokens
    of the last piece stay as context, for decoders that treat the first token of a text apart.

    Args:
      tokenizer: with `decode(ids, skip_special_tokens)`.
      context: tokens that stand before the text and are no part of it.
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
        """The text that this token settles, often empty or more than its own."""
        self._ids.append(token_id)
        text = self._pending_text()
        # The replacement character is what an unfinished sequence of bytes decodes to.
        if not text or text.endswith("\ufffd"):
            return ""
        self._context_start, self._num_settled = self._num_settled, len(self._ids)
        return text

    def flush(self) -> str:
        """The text still held back, as it is."""
        text = self._pending_text()
        self._context_start = self._num_settled = len(self._ids)
        return text


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
