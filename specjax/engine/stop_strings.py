"""Text of tokens, piece by piece: whole characters, up to the first of the stop strings.

    token ids -> `TextStream` -> text that is final -> `StoppedText` -> text without a stop string

A run is a sequence of tokens such as "<0x0A>" of a ByteFallback decoder, each of which is a byte.
The decoder writes a run as UTF-8; one wrong byte turns all of its characters into U+FFFD.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from specjax.file_io import quote
from specjax.processing.token_bytes import BYTE_TOKEN

__all__ = ["MAX_STOP_CHARACTERS", "StoppedText", "TextStream", "Tokenizer", "check_stop"]

# Most characters of a request's stop strings together; each takes about 0.4 KB of an automaton.
MAX_STOP_CHARACTERS = 2**14
# Tokens before the text that are decoded with it: some decoders treat a first token specially.
_NUM_CONTEXT = 8
# Most tokens that wait for the end of a character; then the text is final as it is.
_MAX_TOKENS = 16
# Most bytes of an incomplete character. A decoder may write U+FFFD for each.
_MAX_BYTES = 3


class Tokenizer(Protocol):
    """Makes text of tokens, such as a tokenizer of the packages tokenizers and transformers."""

    @property
    def decode(self) -> Callable[..., str]:
        """`(ids, skip_special_tokens) -> text`."""


class TextStream:
    """Decodes tokens one by one and returns text as soon as later tokens cannot change it.

    The pieces, joined, are `decode(context + tokens)` without the prefix that it shares with
    `decode(context)`. The decoder has to write a token the same way before any other tokens. The
    cost of a token does not grow with their number.

    A character whose bytes are spread over several tokens is held back until it is complete. A run
    is held back until another token follows.

    Args:
      tokenizer: has `id_to_token` or `convert_ids_to_tokens` if its decoder writes runs.
      context: tokens before the text, which are not returned.

    Attributes:
      ahead: the characters that the last token completed in a run, not yet returned. None if the
        last token is no part of a run.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        names = getattr(tokenizer, "convert_ids_to_tokens", None)
        self._name_of = getattr(tokenizer, "id_to_token", names)
        self._decode_ids = tokenizer.decode
        if names is not None:
            # A tokenizer of transformers cleans up spaces: later tokens would change the text.
            self._decode_ids = functools.partial(
                tokenizer.decode, clean_up_tokenization_spaces=False
            )
        # Results of `_read` for tokens of at most one character.
        self._known: dict[int, tuple[str | None, bytes | None]] = {}
        # None after `read_context`, which may raise, so that the constructor does not call it.
        self._context: list[int] | None = context
        self.ahead: str | None = None
        # Tokens that are decoded with the next one; the text of the first `_num_settled` is final.
        self._ids: list[int] = []
        self._num_settled = 0
        # The part of their text that was returned, or belongs to the context.
        self._shown = ""
        # Most U+FFFD at the end of the text that may still become a character.
        self._max_held = _MAX_BYTES
        # Bytes of the character that a run has begun; None if the run is not UTF-8.
        self._begun: bytes | None = b""

    def read_context(self) -> None:
        """Decodes the end of the context, from a run's beginning on; only at the first call."""
        if self._context is None:
            return
        ids: list[int] = []
        for token_id in reversed(self._context):
            if len(ids) >= _NUM_CONTEXT and self._read(ids[-1])[1] is None:
                break
            if self._read(token_id)[0] is not None:
                ids.append(token_id)
        self._ids, self._num_settled = ids[::-1], len(ids)
        self._shown = self._decode(self._ids)
        for token_id in self._ids:
            self._follow_run(self._read(token_id)[1])
        self._context = None

    def feed(self, token_id: int) -> str:
        """Adds a token and returns the text that is final now, perhaps none."""
        self.read_context()
        was_run = self.ahead is not None
        text, byte = self._read(token_id)
        if text is None:
            # A token without text, such as a special one, does not end a run.
            self.ahead = "" if was_run else None
            return ""
        if byte is not None or was_run:
            self._follow_run(byte)
        if byte is None:
            self._ids.append(token_id)
            return self._take(text)
        piece = "" if was_run else self._take()
        self._ids.append(token_id)
        return piece

    def flush(self) -> str:
        """Returns the text that was held back."""
        self.read_context()
        self._max_held = 0
        return self._take()

    def _decode(self, ids: list[int]) -> str:
        return self._decode_ids(ids, skip_special_tokens=True)

    def _read(self, token_id: int) -> tuple[str | None, bytes | None]:
        """Returns the text of a token alone, and its byte in a run.

        The text is None if the token writes nothing, even after another one. The byte is None if
        the token is no part of a run.
        """
        if token_id in self._known:
            return self._known[token_id]
        text: str | None = self._decode([token_id])
        if text and len(text) > 1:
            return text, None
        # A decoder may leave out a space at the beginning of a text.
        if not text and not self._decode([token_id, token_id]):
            text = None
        name = None if self._name_of is None else self._name_of(token_id)
        escaped = BYTE_TOKEN.fullmatch(name or "")
        self._known[token_id] = text, None if escaped is None else bytes.fromhex(escaped[1])
        return self._known[token_id]

    def _follow_run(self, byte: bytes | None) -> None:
        """Sets `ahead` after a token with text; its byte is None outside of a run."""
        if byte is None:
            self.ahead, self._begun = None, b""
            return
        # A run is decoded by itself: its bytes complete no character before it.
        self.ahead, self._max_held = "", 0
        if self._begun is None:
            return
        self._begun += byte
        try:
            self.ahead = self._begun.decode()
            self._begun = b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                self._begun = None

    def _take(self, last: str | None = None) -> str:
        """Returns the new text, without an incomplete character at its end.

        Args:
          last: the text of the last token alone; None decodes it again.
        """
        text = self._decode(self._ids)
        num_held = min(self._max_held, len(text) - len(text.rstrip("\ufffd")))
        waits = num_held > 0 and len(self._ids) <= _MAX_TOKENS
        num_same = len(self._shown)
        if not text.startswith(self._shown):
            if waits:
                # An incomplete character of the context changes, or a run without token names.
                return ""
            pairs = zip(self._shown, text, strict=False)
            num_same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_final = len(text) - num_held
        piece = text[num_same:num_final]
        if piece:
            self._shown = text[:num_final]
        if waits:
            return piece
        # Later tokens cannot change text before the held part: from now on it is context.
        num_left = max(0, len(text) - len(self._shown))
        self._ids = self._ids[-_NUM_CONTEXT if num_held else self._num_settled :] or self._ids
        self._num_settled = 0 if num_held else len(self._ids)
        text = self._decode(self._ids) if last is None or len(self._ids) > 1 else last
        self._shown = text[: len(text) - num_left]
        return piece


class StoppedText:
    """The text of a request, piece by piece, and whether a stop string ended it.

    A piece never shows a part of a stop string: text that may be the beginning of one is held back.

    Args:
      tokenizer: as in `TextStream`.
      context: tokens of the prompt.
      stop: strings that end the text, from `check_stop`.

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

    def __init__(self, tokenizer: Tokenizer, context: list[int], stop: tuple[str, ...]) -> None:
        self._stream = TextStream(tokenizer, context)
        self._stops = _make_automaton(stop)
        # The automaton's nodes after the text, and after the text with `TextStream.ahead`.
        self._node = self._ahead = 0
        self._held = ""
        self.text = ""
        self.stopped = False

    def read_context(self) -> None:
        """Decodes the end of the prompt now, rather than with the first token."""
        self._stream.read_context()

    def feed(self, token_id: int) -> str:
        """Adds a token and returns the text that is final now, perhaps none."""
        if self.stopped:
            return ""
        text = self._stream.feed(token_id)
        piece, ahead = self._release(text), self._stream.ahead
        if text:
            self._ahead = self._node
        if self.stopped or ahead is None:
            return piece
        # If the text ended here, the run's characters would be part of it.
        self._ahead, _, size = self._stops.find(self._ahead, ahead)
        return piece + self._release(self._stream.flush()) if size else piece

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
        self._node, num_read, size = self._stops.find(self._node, text)
        if size:
            self.stopped = True
            # The text ends before the stop string that is complete first; of several, the longest.
            piece, self._held = held[: len(self._held) + num_read - size], ""
        else:
            num_shown = len(held) - self._stops.depths[self._node]
            piece, self._held = held[:num_shown], held[num_shown:]
        self.text += piece
        return piece


class _StopAutomaton(NamedTuple):
    """Finds the first of several strings in a text, and reads each character once.

    A node is the longest suffix of the text read so far that is a prefix of one of the strings.
    Node 0 is the empty prefix.

    Attributes:
      children: of each node, the node that a character leads to.
      shorter: of each node, the node of its longest shorter suffix (the failure link).
      depths: of each node, its number of characters.
      sizes: of each node, the size of the longest string that ends there; 0 for none.

    References:
      Aho and Corasick, 1975, "Efficient string matching: an aid to bibliographic search".
    """

    children: list[dict[str, int]]
    shorter: list[int]
    depths: list[int]
    sizes: list[int]

    def next_node(self, node: int, character: str) -> int:
        """Returns the node after one more character."""
        while node and character not in self.children[node]:
            node = self.shorter[node]
        return self.children[node].get(character, 0)

    def find(self, node: int, text: str) -> tuple[int, int, int]:
        """Reads text up to the end of the first string in it.

        Returns:
          The node after it, the number of characters read, and the string's size; 0 for none.
        """
        if not self.children[0]:
            return 0, len(text), 0
        for number, character in enumerate(text, start=1):
            node = self.next_node(node, character)
            if self.sizes[node]:
                return node, number, self.sizes[node]
        return node, len(text), 0


@functools.lru_cache(maxsize=16)
def _make_automaton(strings: tuple[str, ...]) -> _StopAutomaton:
    """Returns the automaton of the strings, which requests with the same strings share."""
    automaton = _StopAutomaton([{}], [0], [0], [0])
    for string in strings:
        node = 0
        for depth, character in enumerate(string, start=1):
            if character not in automaton.children[node]:
                automaton.children[node][character] = len(automaton.children)
                automaton.children.append({})
                automaton.shorter.append(0)
                automaton.depths.append(depth)
                automaton.sizes.append(0)
            node = automaton.children[node][character]
        automaton.sizes[node] = len(string)
    # Nodes in the order of their depths: the links of shorter ones are known then.
    nodes = list(automaton.children[0].values())
    for node in nodes:
        for character, child in automaton.children[node].items():
            shorter = automaton.next_node(automaton.shorter[node], character)
            automaton.shorter[child] = shorter
            automaton.sizes[child] = automaton.sizes[child] or automaton.sizes[shorter]
            nodes.append(child)
    return automaton


def check_stop(stop: str | Iterable[str], name: str = "stop") -> tuple[str, ...]:
    """Returns stop strings as a tuple.

    Args:
      stop: one string or several.
      name: of the argument, for an error.

    Raises:
      ValueError: for an empty string, a value that is no string, and too many characters.

    Example:
      >>> check_stop("end"), check_stop(["a", "b"])
      (('end',), ('a', 'b'))
    """
    # The keys of a mapping are not meant as stop strings.
    is_many = isinstance(stop, Iterable) and not isinstance(stop, str | Mapping)
    strings: tuple[object, ...] = tuple(stop) if is_many else (stop,)
    checked = tuple(string for string in strings if isinstance(string, str) and string)
    if len(checked) < len(strings):
        quoted_value = quote(strings if is_many else stop)
        raise ValueError(f"{name} is {quoted_value}; it needs strings that are not empty.")
    size = sum(map(len, checked))
    if size > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"{name} has {size} characters in {len(checked)} strings; it takes at most "
            f"{MAX_STOP_CHARACTERS} in all."
        )
    return checked
