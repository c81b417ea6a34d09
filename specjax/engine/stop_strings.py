"""Text of tokens, piece by piece: whole characters, up to the first of the stop strings."""

from typing import Any

__all__ = ["StoppedText", "TextStream"]


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


class StoppedText:
    """The text of a request, piece by piece, and whether a stop string ended it.

    Text that may be the beginning of a stop string is held back until that is decided, so that no
    piece shows a part of one.

    Args:
      tokenizer: with `decode(ids, skip_special_tokens)`.
      context: tokens of the prompt.
      stop: strings that end the text; not empty strings.

    Attributes:
      text: the text so far, without the stop string.
      stopped: whether a stop string ended it.

    Example:
      >>> class Letters:
      ...     def decode(self, ids, skip_special_tokens):
      ...         return "".join(chr(97 + i) for i in ids)
      >>> text = StoppedText(Letters(), [0], ("cd",))
      >>> [text.feed(token) for token in (1, 2, 2, 3, 4)]
      ['b', '', 'c', '', '']
      >>> text.text, text.stopped
      ('bc', True)
    """

    def __init__(self, tokenizer: Any, context: list[int], stop: tuple[str, ...]) -> None:
        self._stream = TextStream(tokenizer, context)
        self._stop = stop
        self._held = ""
        self.text = ""
        self.stopped = False

    def feed(self, token_id: int) -> str:
        """Adds a token and returns the text that is final now, perhaps none."""
        return "" if self.stopped else self._release(self._stream.feed(token_id))

    def flush(self) -> str:
        """Returns the text that was held back, at the end of the request."""
        if self.stopped:
            return ""
        piece = self._release(self._stream.flush())
        held, self._held = self._held, ""
        self.text += held
        return piece + held

    def _release(self, text: str) -> str:
        held = self._held + text
        ends = [(at + len(stop), at) for stop in self._stop if (at := held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            # The first to be complete, of several the longest: whatever tokens spell them.
            piece, self._held = held[: min(ends)[1]], ""
        else:
            size = max((_overlap(held, stop) for stop in self._stop), default=0)
            piece, self._held = held[: len(held) - size], held[len(held) - size :]
        self.text += piece
        return piece


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of the text that begins the stop string."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
