"""Reads `tokenizer.json` of a Hugging Face folder."""

import os

import tokenizers

from specjax.file_io import shorten
from specjax.models.hf.folder import find_member, read_small_file

__all__ = ["load_tokenizer"]


def load_tokenizer(folder: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Reads `tokenizer.json` as a tokenizer that neither truncates nor pads.

    Args:
      folder: a Hugging Face folder.

    Returns:
      The tokenizer.

    Raises:
      ValueError: if the file is missing or unreadable.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> load_tokenizer(pretrained_folder("draft")).get_vocab_size()
      4096
    """
    path = find_member(folder, "tokenizer.json")
    data = read_small_file(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"{path} cannot be read as a tokenizer ({shorten(error)}).") from None
    # The file may hold lengths of the training, which would cut prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
