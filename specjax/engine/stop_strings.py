"""Text of tokens, piece by piece: whole characters, up to the first of the stop strings.

    token ids -> `TextStream` -> text that is final -> `StoppedText` -> text without a stop string

A run is a sequence of tokens such as "<0x0A>", each of which is a byte; decoders with ByteFallback
have them. The decoder writes a run as UTF-8. One wrong byte turns all of its characters into
U+FFFD, so a run is final only when another token follows.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

from specjax.file_io import quote
from specjax.processing.token_bytes import BYTE_TOKEN

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
      completed: the characters that the last token completed in a run, not yet returned. None if
        the last token is no part of a run.
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
        # Token -> result of `_read`, for tokens of at most one character.
        self._tokens: dict[int, tuple[str | None, bytes | None]] = {}
        # None after `read_context`. That may raise, so the constructor does not call it.
        self._context: list[int] | None = context
        self.completed: str | None = None
        # The last tokens, which are decoded again with the next one. The text of the first
        # `_num_settled` is final, so that they are dropped once the next text is final, too.
        self._ids: list[int] = []
        self._num_settled = 0
        # The part of the text of `_ids` that was returned, or belongs to the context.
        self._returned = ""
        # Most U+FFFD at the end of the text that later tokens may still make a character.
        self._max_held = _MAX_BYTES
        # Bytes of a run's last character so far; None if the run is not UTF-8.
        self._character: bytes | None = b""

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
        self._returned = self._decode(self._ids)
        for token_id in self._ids:
            self._follow_run(self._read(token_id)[1])
        self._context = None

    def feed(self, token_id: int) -> str:
        """Adds a token and returns the text that is final now, perhaps none."""
        self.read_context()
        was_run = self.completed is not None
        text, byte = self._read(token_id)
        if text is None:
            # A token without text, such as a special one, does not end a run.
            self.completed = "" if was_run else None
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
        """Returns the text of a token decoded alone, and its byte if it is part of a run.

        The text is None if the token writes nothing, even after another one. The byte is None if
        the token is no part of a run.
        """
        if token_id in self._tokens:
            return self._tokens[token_id]
        text: str | None = self._decode([token_id])
        if text and len(text) > 1:
            return text, None
        # A decoder may leave out a space at the beginning of a text.
        if not text and not self._decode([token_id, token_id]):
            text = None
        name = None if self._name_of is None else self._name_of(token_id)
        escaped = BYTE_TOKEN.fullmatch(name or "")
        self._tokens[token_id] = text, None if escaped is None else bytes.fromhex(escaped[1])
        return self._tokens[token_id]

    def _follow_run(self, byte: bytes | None) -> None:
        """Sets `completed` after a token with text, whose byte is None outside of a run."""
        if byte is None:
            self.completed, self._character = None, b""
            return
        # A run is decoded by itself: its bytes complete no character before it.
        self.completed, self._max_held = "", 0
        if self._character is None:
            return
        self._character += byte
        try:
            self.completed = self._character.decode()
            self._character = b""
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":
                self._character = None

    def _take(self, last: str | None = None) -> str:
        """Returns the text of `_ids` after what was returned, but for an incomplete character.

        Args:
          last: the text of the last token alone; None decodes it again.
        """
        text = self._decode(self._ids)
        num_held = min(self._max_held, len(text) - len(text.rstrip("\ufffd")))
        is_incomplete = num_held > 0 and len(self._ids) <= _MAX_TOKENS
        num_same = len(self._returned)
        if not text.startswith(self._returned):
            if is_incomplete:
                # Returned text may change only in an incomplete character of the context, or in a
                # run if the tokenizer does not name its tokens.
                return ""
            pairs = zip(self._returned, text, strict=False)
            num_same = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        num_final = len(text) - num_held
        piece = text[num_same:num_final]
        if piece:
            self._returned = text[:num_final]
        if is_incomplete:
            return piece
        # Later tokens cannot change this text: the last tokens are kept as context of the next.
        num_left = max(0, len(text) - len(self._returned))
        self._ids = self._ids[-_NUM_CONTEXT if num_held else self._num_settled :] or self._ids
        self._num_settled = 0 if num_held else len(self._ids)
        text = self._decode(self._ids) if last is None or len(self._ids) > 1 else last
        self._returned = text[: len(text) - num_left]
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
        # The automaton's nodes after the text, and after the text with `TextStream.completed`.
        self._node = self._completed_node = 0
        # The end of the text that may begin a stop string, not yet in `text`.
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
        piece, completed = self._release(text), self._stream.completed
        if text:
            self._completed_node = self._node
        if self.stopped or completed is None:
            return piece
        # A stop string may end in the run's characters. Then the run is final as it is.
        self._completed_node, _, size = self._stops.find(self._completed_node, completed)
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
        """Adds final text, and returns what is no beginning of a stop string."""
        held = self._held + text
        self._node, num_read, size = self._stops.find(self._node, text)
        if size:
            self.stopped = True
            # The text ends before the stop string that ends first; of those, before the longest.
            piece, self._held = held[: len(self._held) + num_read - size], ""
        else:
            num_shown = len(held) - self._stops.depths[self._node]
            piece, self._held = held[:num_shown], held[num_shown:]
        self.text += piece
        return piece


class _StopAutomaton(NamedTuple):
    """Finds the first of several strings in a text, and reads each character once (Aho-Corasick).

    A node is a prefix of one of the strings: the longest that the text read so far ends with.
    Node 0 is the empty prefix. Lists are indexed by node.

    Attributes:
      children: of each node, character -> the node that is one character longer.
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
        """Reads text from a node on, up to the end of the first string in it.

        Returns:
          The node after it, the number of characters read, and the string's size, 0 if the text
          has none.
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
    # In the order of their depths, since a node's link is found by those of shorter nodes.
    nodes = list(automaton.children[0].values())
    for node in nodes:
        for character, child in automaton.children[node].items():
            shorter = automaton.next_node(automaton.shorter[node], character)
            automaton.shorter[child] = shorter
            automaton.sizes[child] = automaton.sizes[child] or automaton.sizes[shorter]
            nodes.append(child)
    return automaton


def check_stop(stop: str | Iterable[str] | None, name: str = "stop") -> tuple[str, ...]:
    """Returns stop strings as a tuple.

    Args:
      stop: one string or several; None is none.
      name: of the argument, for an error.

    Raises:
      ValueError: for an empty string, a value that is no string, and too many characters.

    Example:
      >>> check_stop("end"), check_stop(["a", "b"]), check_stop(None)
      (('end',), ('a', 'b'), ())
    """
    if stop is None:
        return ()
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
