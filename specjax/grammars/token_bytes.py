"""`token_bytes`: the bytes that each token of a tokenizer stands for."""

import json
import re
from typing import Any

__all__ = ["token_bytes"]

_ESCAPED = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


def token_bytes(tokenizer: Any, vocab_size: int | None = None) -> list[bytes]:
    r"""Returns the bytes of every token, empty for special tokens and for ids without a token.

    Args:
      tokenizer: a `tokenizers.Tokenizer`. Its tokens are bytes as letters (ByteLevel, as in GPT-2,
        Llama 3 and Qwen), or text with "<0x0A>" for other bytes (ByteFallback, as in Llama 2).
      vocab_size: V of the target, which may have more ids than the tokenizer; None is the
        tokenizer's own.

    Returns:
      V byte strings.

    Raises:
      ValueError: for a tokenizer of another kind, or one with more tokens than V.

    Example:
      >>> from specjax.models import load_tokenizer, pretrained_folder
      >>> tokenizer = load_tokenizer(pretrained_folder("draft"))
      >>> vocabulary = specjax.grammars.token_bytes(tokenizer)
      >>> [vocabulary[i] for i in tokenizer.encode("once more").ids]
      [b'on', b'ce', b' more']
    """
    data = json.loads(tokenizer.to_str())
    decoder = data.get("decoder") or {"type": "None"}
    kinds = {part["type"] for part in (decoder, *decoder.get("decoders", ()))}
    if not kinds & {"ByteLevel", "ByteFallback"}:
        raise ValueError(
            f"the tokenizer's decoder is {sorted(kinds)}; bytes are read from ByteLevel and "
            "ByteFallback tokens."
        )
    to_bytes = _from_letters if "ByteLevel" in kinds else _from_text
    added = {token["id"]: token for token in data.get("added_tokens", ())}
    by_id = {index: text for text, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    size = max(by_id) + 1 if vocab_size is None else vocab_size
    if max(by_id) >= size:
        raise ValueError(f"vocab_size is {size}, and the tokenizer has token {max(by_id)}.")
    vocabulary = [b""] * size
    for index, text in by_id.items():
        if index not in added:
            vocabulary[index] = to_bytes(text)
        elif not added[index]["special"]:
            vocabulary[index] = text.encode()
    return vocabulary


def _letters() -> dict[str, int]:
    """Returns the byte of each letter by which GPT-2's tokenizer writes it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    return {chr(value): value for value in printable} | {
        chr(256 + i): value for i, value in enumerate(others)
    }


_BYTE_OF_LETTER = _letters()


def _from_letters(text: str) -> bytes:
    return bytes(_BYTE_OF_LETTER[letter] for letter in text)


def _from_text(text: str) -> bytes:
    escaped = _ESCAPED.fullmatch(text)
    return bytes([int(escaped[1], 16)]) if escaped else text.replace(_SPACE, " ").encode()
