"""`llguidance_matchers`: matchers for `RowMasks` of any grammar that llguidance reads."""

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specjax.decode.matchers import Matcher


def llguidance_matchers(
    grammars: Sequence[str | Mapping[str, Any]],
    vocabulary: Sequence[bytes],
    eos_token_ids: Iterable[int],
    encode: Callable[[str], Sequence[int]],
) -> list[Matcher]:
    r"""Returns one matcher of llguidance for each grammar; needs ``pip install specjax[grammar]``.

    Args:
      grammars: for each request a JSON schema as a mapping, or a grammar as
        ``llguidance.LLMatcher.grammar_from_json_schema``, ``grammar_from_lark`` or
        ``grammar_from_regex`` returns it.
      vocabulary: the bytes of each of the V tokens, as `token_bytes` returns them.
      eos_token_ids: tokens that end a text; pass equal ones to `init`.
      encode: the tokens of a text, such as ``lambda text: tokenizer.encode(text).ids``.
        If only one text can follow, llguidance allows these tokens of it.

    Returns:
      Matchers that have read nothing.

    Raises:
      ValueError: for a grammar that llguidance does not read, a JSON schema that no text of the
        vocabulary begins, or no end-of-sequence token.
      ImportError: if llguidance is not installed.

    Example:
      >>> vocabulary = [b"", b"0", b"1", b"2", b"-"]
      >>> encode = lambda text: [vocabulary.index(letter.encode()) for letter in text]
      >>> matcher, = llguidance_matchers([{"type": "integer"}], vocabulary, [0], encode)
      >>> matcher.try_consume_tokens([4]), matcher.compute_bitmask()[0]
      (1, 14)
    """
    matcher_of = llguidance_reader(vocabulary, eos_token_ids, encode)
    return [matcher_of(grammar) for grammar in grammars]


def llguidance_reader(
    vocabulary: Sequence[bytes],
    eos_token_ids: Iterable[int],
    encode: Callable[[str], Sequence[int]],
) -> Callable[[str | Mapping[str, Any]], Matcher]:
    """Returns a function that makes a matcher of one grammar, for grammars that come one by one.

    Reading the vocabulary takes a second for 128,000 tokens, and is done once.

    Args:
      vocabulary: as in `llguidance_matchers`.
      eos_token_ids: as in `llguidance_matchers`.
      encode: as in `llguidance_matchers`.

    Raises:
      ValueError: for no end-of-sequence token. The function raises it for the grammars for which
        `llguidance_matchers` does.
      ImportError: if llguidance is not installed.
    """
    try:
        llguidance = importlib.import_module("llguidance")
    except ImportError as error:
        raise ImportError("llguidance is not installed: pip install 'specjax[grammar]'.") from error
    eos = sorted(set(eos_token_ids))
    if not eos:
        raise ValueError("eos_token_ids is empty; a text that is complete ends by one.")
    tokenizer = llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(_Tokens(vocabulary, eos[0], encode)),
        n_vocab=len(vocabulary),
        eos_token=eos,
    )
    ends = sum(1 << token for token in eos)
    return functools.partial(_matcher, llguidance.LLMatcher, tokenizer, ends)


def _matcher(kind: Any, tokenizer: Any, ends: int, grammar: str | Mapping[str, Any]) -> Matcher:
    is_schema = not isinstance(grammar, str)
    if not isinstance(grammar, str):
        grammar = kind.grammar_from_json_schema(dict(grammar))
    is_error, messages = kind.validate_grammar_with_warnings(grammar, tokenizer)
    if is_error:
        raise ValueError(f"llguidance does not read the grammar: {messages[0]}")
    matcher: Matcher = kind(tokenizer, grammar, log_level=0)
    # No JSON is empty; llguidance ends the text of a schema that refers to itself alone.
    if is_schema and not int.from_bytes(matcher.compute_bitmask(), "little") & ~ends:
        raise ValueError(
            "the JSON schema lets no token begin a text; it may refer to itself alone."
        )
    return matcher


class _Tokens:
    """A tokenizer with the attributes that llguidance reads."""

    def __init__(
        self, vocabulary: Sequence[bytes], eos: int, encode: Callable[[str], Sequence[int]]
    ) -> None:
        self.tokens = list(vocabulary)
        self.eos_token_id, self.bos_token_id = eos, None
        self.special_token_ids = [i for i, text in enumerate(vocabulary) if not text or i == eos]
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        text = text.decode() if isinstance(text, bytes) else text
        return list(self._encode(text))
