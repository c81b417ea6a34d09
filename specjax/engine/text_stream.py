"""Turns generated tokens into text, piece by piece; no piece ends inside a character."""

from typing import Any

__all__ = ["TextStream"]


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
