"""A Hugging Face folder as a caller names it, and its files: there, or refused in a sentence."""

import json
import os
import pathlib
from typing import Any

from specjax.files import read_file

__all__ = ["find_folder", "read_json_object", "read_small_file", "refuse_lfs_pointer"]

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Bytes of a file that is read whole: configurations have thousands, tokenizers up to 40 million.
_MAX_BYTES = 2**28
_FOLDER_CONTENT = "a Hugging Face folder with config.json, model.safetensors and tokenizer.json"


def find_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a folder that is there.

    Args:
      folder: "." is the current one; the empty string is none.

    Raises:
      ValueError: if there is no such folder.

    Example:
      >>> find_folder("")
      Traceback (most recent call last):
        ...
      ValueError: the name of the folder is empty; it needs to be that of a Hugging Face folder \
with config.json, model.safetensors and tokenizer.json.
    """
    # As a shell gives a variable that is not set; to pathlib it is the current folder.
    if not os.fspath(folder):
        raise ValueError(
            f"the name of the folder is empty; it needs to be that of {_FOLDER_CONTENT}."
        )
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; it needs to be {_FOLDER_CONTENT}.")
    return path


def refuse_lfs_pointer(path: pathlib.Path) -> None:
    """Refuses a file that only names what Git LFS did not download.

    Args:
      path: of a file that is there.

    Raises:
      ValueError: if it is such a pointer.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "tokenizer.json")
      >>> _ = path.write_text("{}")
      >>> refuse_lfs_pointer(path)
    """
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, a few lines that stand for the file; `git lfs pull` "
                "in its folder downloads the file itself."
            )


def read_small_file(path: pathlib.Path) -> bytes:
    """Reads a file of a folder that holds no weights.

    Args:
      path: of the file, which is there.

    Raises:
      ValueError: if it is a Git LFS pointer, or has more than 256 MiB, which no such file has.
      OSError: if it cannot be read.
    """
    refuse_lfs_pointer(path)
    return read_file(path, _MAX_BYTES)


def read_json_object(path: pathlib.Path, expected: str) -> dict[str, Any]:
    """The object that a JSON file holds.

    Args:
      path: of the file.
      expected: what the object is, for a refusal.

    Raises:
      ValueError: if the file holds anything else, or more than 256 MiB.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "config.json")
      >>> _ = path.write_text('{"vocab_size": 64}')
      >>> read_json_object(path, "the fields of a configuration")
      {'vocab_size': 64}
    """
    data = read_small_file(path)
    try:
        content = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object; it needs {expected}.")
    return content
