"""Where the trained pair and the head lie that ship as package data."""

import importlib.resources
import pathlib

__all__ = ["pretrained_folder"]


def pretrained_folder(role: str) -> pathlib.Path:
    """The Hugging Face folder of one model of the pair, or the folder of the target's head.

    Target and draft share one vocabulary.

    Args:
      role: "target", "draft" or "head".

    Raises:
      ValueError: on another role.

    Example:
      >>> pretrained_folder("draft").name
      'draft'
    """
    if role not in ("target", "draft", "head"):
        raise ValueError(f"role is {role!r}; it needs to be 'head', 'target' or 'draft'.")
    return pathlib.Path(str(importlib.resources.files(__package__) / role))
