"""Folders of the trained pair and its draft heads that ship as package data."""

import importlib.resources
import pathlib

__all__ = ["pretrained_folder"]


def pretrained_folder(role: str) -> pathlib.Path:
    """Returns the folder of the embedded target, draft model or a draft head.

    Target and draft share a vocabulary; the heads are trained for the target.

    Args:
      role: "target", "draft", "eagle3" for the head of that kind, or "head" for the one that reads
        the last state alone.

    Returns:
      The path of the folder.

    Raises:
      ValueError: if `role` is something else.

    Example:
      >>> pretrained_folder("draft").name
      'draft'
    """
    if role not in ("target", "draft", "eagle3", "head"):
        raise ValueError(f"role is {role!r}; it needs to be 'target', 'draft', 'eagle3' or 'head'.")
    return pathlib.Path(str(importlib.resources.files(__package__) / role))
