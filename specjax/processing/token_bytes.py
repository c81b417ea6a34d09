"""`token_bytes`: the bytes that each token of a tokenizer stands for."""

import json
import re
from typing import Any

# How ByteFallback names the token of a byte.
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_CHARACTER = "\ufffd"
# Decoders that write a token alike whatever follows.
_KINDS = ("ByteFallback", "ByteLevel", "Metaspace", "WordPiece")


def token_bytes(tokenizer: Any, vocab_size: int | None = None) -> list[bytes]:
    r"""Returns the bytes of every token, empty for special tokens and for ids without a token.

    These are the bytes that the tokenizer's decoder writes for the token after another one. At the
    beginning of a text some decoders leave out a space.

    Args:
      tokenizer: a `tokenizers.Tokenizer`. Its decoder is of kind ByteLevel (as in GPT-2, Llama 3
        and Qwen), ByteFallback (as in Llama 2 and Gemma), Metaspace or WordPiece.
      vocab_size: V of the target, which may have more ids than the tokenizer; None is the
        tokenizer's own.

    Returns:
      V byte strings.

    Raises:
      ValueError: for a tokenizer of another kind, or one with more tokens than V.

    Example:
      >>> from specjax.models import load_tokenizer, pretrained_folder
      >>> tokenizer = load_tokenizer(pretrained_folder("draft"))
      >>> vocabulary = specjax.contrib.grammars.token_bytes(tokenizer)
      >>> [vocabulary[i] for i in tokenizer.encode("once more").ids]
      [b'on', b'ce', b' more']
    """
    kinds = _decoder_kinds(tokenizer)
    if not kinds.intersection(_KINDS):
        raise ValueError(
            f"the tokenizer's decoder is {sorted(kinds)}; bytes are read from {', '.join(_KINDS)} "
            "tokens."
        )
    names = {index: name for name, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    size = max(names) + 1 if vocab_size is None else vocab_size
    if max(names) >= size:
        raise ValueError(f"vocab_size is {size}, and the tokenizer has token {max(names)}.")
    before = _first_text(tokenizer, names)
    num_before = len(tokenizer.decode(before))
    texts = tokenizer.decode_batch([[*before, index] for index in names], skip_special_tokens=True)
    vocabulary = [b""] * size
    for (index, name), text in zip(names.items(), texts, strict=True):
        vocabulary[index] = _bytes_of(name, text[num_before:], "ByteLevel" in kinds)
    return vocabulary


def _decoder_kinds(tokenizer: Any) -> set[str]:
    """Returns the types of the decoder and its parts."""
    state = b"{}" if tokenizer.decoder is None else tokenizer.decoder.__getstate__()
    decoder = json.loads(state)
    return {part.get("type", "None") for part in (decoder, *decoder.get("decoders", ()))}


def _first_text(tokenizer: Any, names: dict[int, str]) -> list[int]:
    """Returns a token that is written as whole characters, none if there is no such token."""
    for index in sorted(names):
        text = tokenizer.decode([index], skip_special_tokens=True)
        if text and _NO_CHARACTER not in text and not BYTE_TOKEN.fullmatch(names[index]):
            return [index]
    return []


def _bytes_of(name: str, text: str, has_letters: bool) -> bytes:
    """Returns the bytes of a token that is written as a text, where U+FFFD may be any byte."""
    if _NO_CHARACTER in text:
        escaped = BYTE_TOKEN.fullmatch(name)
        if escaped is not None:
            return bytes.fromhex(escaped[1])
        if has_letters and all(letter in _BYTE_OF_LETTER for letter in name):
            return bytes(_BYTE_OF_LETTER[letter] for letter in name)
    return text.encode()


def _letters() -> dict[str, int]:
    """Returns the byte of each letter by which GPT-2's tokenizer writes it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + i): value for i, value in enumerate(unprintable)
    }


_BYTE_OF_LETTER = _letters()
