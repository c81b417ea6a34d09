"""Prompts as they are given: as an argument, in a file, on standard input, or not at all."""

import argparse
import sys

from specjax.files import read_file, read_stream

__all__ = ["read_prompt", "read_prompts"]

# Bytes: several million tokens, for which no target has room.
_MAX_BYTES = 2**24

# What a sweep decodes if nothing is given: what the embedded pair was trained for, and beginnings
# that any model of code goes on with.
_BUILT_IN_PROMPTS = (
    "def fibonacci(n):\n",
    "import unittest\n\nfrom queue import Queue\n\n\nclass TestQueue(unittest.TestCase):\n"
    "    def setUp(self):",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir(sys.argv[1]):\n",
)


def read_prompt(options: argparse.Namespace) -> str:
    """The prompt of `generate`; a `ValueError` if there is none, or no text."""
    prompt, path = options.prompt, options.prompt_file
    if path is not None:
        source, data = path, read_file(path, _MAX_BYTES)
    elif prompt not in (None, "-"):
        source, data = "the prompt", prompt.encode(errors="surrogateescape")
    elif prompt is None and sys.stdin.isatty():
        raise ValueError(
            "no prompt came; give one as an argument, with --prompt-file, or on standard input."
        )
    else:
        source = "standard input"
        data = read_stream(sys.stdin.buffer, source, _MAX_BYTES)
    return _decode_text(source, data)


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of `sweep`, those of its arguments first; built-in ones if there are none."""
    prompts = [("a prompt", text.encode(errors="surrogateescape")) for text in options.prompt]
    prompts += [(path, read_file(path, _MAX_BYTES)) for path in options.prompt_file or ()]
    return [_decode_text(source, data) for source, data in prompts] or list(_BUILT_IN_PROMPTS)


def _decode_text(source: str, data: bytes) -> str:
    """Bytes as a prompt; a `ValueError` that names their source if they are none."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not UTF-8 text.") from None
    if not text:
        raise ValueError(f"{source} is empty; a model needs something to continue.")
    if "\0" in text:
        # UTF-16 of ASCII is UTF-8, too, and every other character of it is this one.
        raise ValueError(f"{source} holds NUL characters; it needs to be UTF-8 text.")
    return text
