"""Folders of the trained pair and its draft head that ship as package data."""

import importlib.resources
import pathlib

__all__ = ["pretrained_folder"]


def pretrained_folder(role: str) -> pathlib.Path:
    """Returns the folder of the embedded target, draft model or draft head.

    Target and draft share a vocabulary; the head is trained for the target.

    Args:
      role: "target", "draft", or "eagle3" for the head of that kind.

    Returns:
      The path of the folder.

    Raises:
      ValueError: if `role` is something else.

    Example:
      >>> pretrained_folder("draft").name
      'draft'
    """
    if role not in ("target", "draft", "eagle3"):
        raise ValueError(f"role is {role!r}; it needs to be 'target', 'draft' or 'eagle3'.")
    return pathlib.Path(str(importlib.resources.files(__package__) / role))
