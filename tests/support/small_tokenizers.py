"""Tokenizers of each kind, of a few tokens: bytes of characters, parts of them, spaces, added."""

import functools

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

# Whole characters of one to four bytes, and a byte that is no part of any.
_BYTES = sorted({*"\n A東é🙂".encode(), 0xFF})
_SPECIAL = ["<s>", "</s>"]
_SPACE = "\u2581"
# GPT-2 writes a byte by the letter of that number, or by one of the letters after all of these.
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_LETTERS = {ord(letter): letter for letter in _ALPHABET if ord(letter) < 256}
_OTHERS = (byte for byte in range(256) if byte not in {*_LETTERS})
_LETTERS |= dict(zip([*_OTHERS], _ALPHABET[len(_LETTERS) :], strict=True))
KINDS = ("byte-level", "llama", "gemma", "metaspace", "wordpiece")


@functools.cache
def make(kind: str) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the special tokens 0 and 1."""
    tokenizer, added = _MAKERS[kind]()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    return tokenizer


def _numbered(texts):
    return {text: index for index, text in enumerate(dict.fromkeys([*_SPECIAL, *texts]))}


def _byte_level():
    letter = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def letters(data):
        return "".join(_LETTERS[byte] for byte in data)

    parts = ["東".encode()[:2], "東".encode()[2:] + b"A", b" A", "\ufffd".encode()]
    vocab = _numbered(letters(data) for data in [*(bytes([byte]) for byte in _BYTES), *parts])
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = letter, decoders.ByteLevel()
    return tokenizer, ["  ", "é", "<think>"]


def _with_byte_fallback(*last):
    texts = [*(f"<0x{byte:02X}>" for byte in _BYTES), _SPACE, _SPACE + "A", "b", "語", "\ufffd"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(_numbered(texts), [], unk_token="<s>", byte_fallback=True)
    )
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer, [_SPACE * 2, "<think>"]


def _metaspace():
    texts = [_SPACE, _SPACE + "A", "b", "東", "\ufffd"]
    vocab = [(text, -1.0) for text in _numbered(texts)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer, [_SPACE * 2, "<think>"]


def _wordpiece():
    vocab = _numbered(["he", "##llo", "東", ".", "##s"])
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="<s>"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer, ["<think>"]


_MAKERS = {
    "byte-level": _byte_level,
    "llama": lambda: _with_byte_fallback(decoders.Strip(" ", 1, 0)),
    "gemma": _with_byte_fallback,
    "metaspace": _metaspace,
    "wordpiece": _wordpiece,
}
