"""The text and the bytes of single tokens, and where each begins in a text."""

import codecs
from collections.abc import Iterable
from typing import Any

from specjax.processing.token_bytes import token_bytes


class TokenTexts:
    """Texts of the tokens of a vocabulary.

    A token that is a part of a character has its bytes, and U+FFFD as text. A special token has
    its name, and no character of the text that a request returns.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
      vocab_size: V, of the target.

    Example:
      >>> from specjax.models import load_tokenizer, pretrained_folder
      >>> texts = TokenTexts(load_tokenizer(pretrained_folder("target")), 4096)
      >>> ids = texts.tokenizer.encode("a é").ids
      >>> [texts.bytes_of(i).hex() for i in ids]
      ['61', '20', 'c3', 'a9']
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        try:
            self.bytes = token_bytes(tokenizer, vocab_size)
        except ValueError:  # A decoder of another kind: each token is decoded alone.
            ids = [[i] for i in range(vocab_size)]
            self.bytes = [text.encode() for text in tokenizer.decode_batch(ids)]

    def text_of(self, token_id: int) -> str:
        """Returns the text of a token, or the name of a special one."""
        data = self.bytes[token_id]
        if not data:
            return self.tokenizer.id_to_token(token_id) or ""
        return data.decode(errors="replace")

    def bytes_of(self, token_id: int) -> bytes:
        """Returns the bytes of a token, or those of a special one's name."""
        return self.bytes[token_id] or self.text_of(token_id).encode()


class Offsets:
    """Counts where each token of one text begins, in characters.

    Args:
      texts: of the vocabulary.

    Example:
      >>> from specjax.models import load_tokenizer, pretrained_folder
      >>> texts = TokenTexts(load_tokenizer(pretrained_folder("target")), 4096)
      >>> offsets = Offsets(texts)
      >>> offsets.take(texts.tokenizer.encode("a é").ids), offsets.take([0])
      ([0, 1, 2, 2], [3])
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._bytes = texts.bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def take(self, token_ids: Iterable[int]) -> list[int]:
        """Returns the index of each token's first character; the tokens follow those before."""
        offsets = []
        for token_id in token_ids:
            # A character that is not complete yet begins at the end of those that are.
            offsets.append(self._num_characters)
            self._num_characters += len(self._decoder.decode(self._bytes[token_id]))
        return offsets
