"""What a misspelt word may have meant, as the end of a sentence."""

import difflib
from collections.abc import Iterable

__all__ = ["suggest"]


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns a question with the known word that is closest to a word; "" if none is close.

    Example:
      >>> suggest("--temprature", ["--temperature", "--top-k"]), suggest("x", ["--top-k"])
      (' Did you mean --temperature?', '')
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""
