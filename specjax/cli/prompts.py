"""Reads prompts from arguments, files or standard input."""

import argparse
import sys

from specjax.file_io import read_file, read_stream

# Several million tokens, more than any target takes.
_MAX_BYTES = 2**24

# Default prompts of a sweep: beginnings of Python files, which the embedded pair was trained for.
# Any model of code can continue them.
_BUILT_IN_PROMPTS = (
    "def fibonacci(n):\n",
    "import unittest\n\nfrom queue import Queue\n\n\nclass TestQueue(unittest.TestCase):\n"
    "    def setUp(self):",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n    for name in os.listdir(sys.argv[1]):\n",
)


def read_prompts_of_generate(options: argparse.Namespace) -> list[str]:
    """Returns the prompts of `generate`: arguments or files; without both, standard input.

    Raises:
      ValueError: without a prompt, or if one is not text.
    """
    if options.prompt_file is not None:
        return [_decode_text(path, read_file(path, _MAX_BYTES)) for path in options.prompt_file]
    if not options.prompt and sys.stdin.isatty():
        raise ValueError(
            "there is no prompt; give one as an argument, by --prompt-file or on standard input."
        )
    return [_read_argument(text) for text in options.prompt or ["-"]]


def read_prompts(options: argparse.Namespace) -> list[str]:
    """Returns the prompts of `sweep`: arguments, then files; without both, built-in ones."""
    prompts = [("a prompt", text.encode(errors="surrogateescape")) for text in options.prompt]
    prompts += [(path, read_file(path, _MAX_BYTES)) for path in options.prompt_file or ()]
    return [_decode_text(source, data) for source, data in prompts] or list(_BUILT_IN_PROMPTS)


def _read_argument(text: str) -> str:
    """Returns the text of an argument; - stands for standard input."""
    if text == "-":
        name = "standard input"
        return _decode_text(name, read_stream(sys.stdin.buffer, name, _MAX_BYTES))
    return _decode_text("the prompt", text.encode(errors="surrogateescape"))


def _decode_text(source: str, data: bytes) -> str:
    """Decodes a prompt; raises a `ValueError` that names `source` if `data` is not text."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise ValueError(f"{source} is not UTF-8 text.") from None
    if not text:
        raise ValueError(f"{source} is empty; it needs to hold text to continue.")
    if "\0" in text:
        # ASCII in UTF-16 is valid UTF-8 as well, with NUL as every other character.
        raise ValueError(f"{source} holds NUL characters; it needs to be UTF-8 text.")
    return text
