"""Finds a Hugging Face folder, reads its small files, and writes one; errors name the file."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import save as serialize

from specjax.file_io import read_file, replace_file

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Maximum bytes of a file without weights. Configurations have thousands, tokenizers 40 million.
_MAX_BYTES = 2**28
_FOLDER_CONTENT = "a Hugging Face folder with config.json, model.safetensors and tokenizer.json"


def find_folder(folder: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of an existing folder.

    Args:
      folder: "." is the current one; the empty string is refused.

    Raises:
      ValueError: if there is no such folder.

    Example:
      >>> find_folder("")
      Traceback (most recent call last):
        ...
      ValueError: the name of the folder is empty; it needs to be that of a Hugging Face folder \
with config.json, model.safetensors and tokenizer.json.
    """
    # An unset shell variable arrives as ""; for pathlib that is the current folder.
    if not os.fspath(folder):
        raise ValueError(
            f"the name of the folder is empty; it needs to be that of {_FOLDER_CONTENT}."
        )
    path = pathlib.Path(folder)
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; it needs to be {_FOLDER_CONTENT}.")
    return path


def find_member(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    """Returns the path of a file in a Hugging Face folder, which has it or an index of its shards.

    Args:
      folder: an existing folder.
      name: of the file.

    Raises:
      ValueError: if the folder holds neither the file nor its index.
    """
    path = find_folder(folder)
    if not (path / name).is_file() and not (path / f"{name}.index.json").is_file():
        raise ValueError(f"{path} has no {name}; a Hugging Face folder needs it to be read.")
    return path / name


def refuse_lfs_pointer(path: pathlib.Path) -> None:
    """Refuses a Git LFS pointer, the placeholder of a file that was not downloaded.

    Args:
      path: of an existing file.

    Raises:
      ValueError: if the file is a pointer.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "tokenizer.json")
      >>> _ = path.write_text("{}")
      >>> refuse_lfs_pointer(path)
    """
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ValueError(
                f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its "
                "folder to download the file."
            )


def read_small_file(path: pathlib.Path) -> bytes:
    """Reads a file that holds no weights, of at most 256 MiB.

    Args:
      path: of an existing file.

    Raises:
      ValueError: if the file is a Git LFS pointer or larger.
      OSError: if it cannot be read.
    """
    refuse_lfs_pointer(path)
    return read_file(path, _MAX_BYTES)


def read_json_object(path: pathlib.Path, expected: str) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Args:
      path: of the file.
      expected: describes the object in an error.

    Raises:
      ValueError: if the file holds no JSON object, or more than 256 MiB.

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
        raise ValueError(f"{path} holds no JSON object; it needs to be an object with {expected}.")
    return content


def write_folder(
    folder: str | os.PathLike[str], fields: Mapping[str, object], tensors: Mapping[str, np.ndarray]
) -> pathlib.Path:
    """Writes config.json and model.safetensors, each after the new one is complete.

    Args:
      folder: created if absent.
      fields: of config.json.
      tensors: of model.safetensors, by name.

    Returns:
      The path of the folder.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with replace_file(path / "model.safetensors") as temporary:
        temporary.write_bytes(serialize(dict(tensors), metadata={"format": "pt"}))
    with replace_file(path / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return path
