"""A Hugging Face folder as a caller names it, and its files: there, or refused in a sentence."""

import json
import os
import pathlib
from typing import Any

from specjax.files import read_file

__all__ = ["read_folder", "read_member", "read_object", "refuse_pointer"]

_POINTER = b"version https://git-lfs.github.com/spec/"
# Bytes of a file that is read whole: configurations have thousands, tokenizers up to 40 million.
_LARGEST = 2**28
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


def refuse_pointer(path: pathlib.Path) -> None:
    """Refuses a file that only names what Git LFS did not download.

    Args:
      path: of a file that is there.

    Raises:
      ValueError: if it is such a pointer.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "tokenizer.json")
      >>> _ = path.write_text("{}")
      >>> refuse_pointer(path)
    """
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, a few lines that stand for the file; `git lfs pull` "
                "in its folder downloads the file itself."
            )


def read_member(path: pathlib.Path) -> bytes:
    """Reads a file of a folder that holds no weights.

    Args:
      path: of the file, which is there.

    Raises:
      ValueError: if it is a Git LFS pointer, or has more than 256 MiB, which no such file has.
      OSError: if it cannot be read.
    """
    refuse_pointer(path)
    return read_file(path, _LARGEST)


def read_object(path: pathlib.Path, needed: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
      path: of the file.
      needed: what the object is, for a refusal.

    Raises:
      ValueError: if the file holds anything else, or more than 256 MiB.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "config.json")
      >>> _ = path.write_text('{"vocab_size": 64}')
      >>> read_object(path, "the fields of a configuration")
      {'vocab_size': 64}
    """
    data = read_member(path)
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; it needs {needed}.")
    return found
