"""Where the trained pair lies that ships as package data."""

import importlib.resources
import pathlib

__all__ = ["pretrained_folder"]


def pretrained_folder(role: str) -> pathlib.Path:
    """The Hugging Face folder of one model of the pair; both share one vocabulary.

    Args:
      role: "target" or "draft".

    Raises:
      ValueError: on another role.

    Example:
      >>> pretrained_folder("draft").name
      'draft'
    """
    if role not in ("target", "draft"):
        raise ValueError(f"role is {role!r}; it needs to be 'target' or 'draft'.")
    return pathlib.Path(str(importlib.resources.files(__package__) / role))
