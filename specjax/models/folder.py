"""A Hugging Face folder as a caller names it: it is there, or is refused in a sentence."""

import os
import pathlib

__all__ = ["read_folder"]

_NEEDED = "a Hugging Face folder with config.json, model.safetensors and tokenizer.json"


def read_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a folder that is there.

    Args:
      folder: "." is the current one; the empty string is none.

    Raises:
      ValueError: if there is no such folder.

    Example:
      >>> read_folder("")
      Traceback (most recent call last):
        ...
      ValueError: the name of the folder is empty; it needs to be that of a Hugging Face folder \
with config.json, model.safetensors and tokenizer.json.
    """
    # As a shell gives a variable that is not set; to pathlib it is the current folder.
    if not os.fspath(folder):
        raise ValueError(f"the name of the folder is empty; it needs to be that of {_NEEDED}.")
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; it needs to be {_NEEDED}.")
    return path
