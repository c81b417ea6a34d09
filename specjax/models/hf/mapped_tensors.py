"""The tensors of a folder, in one safetensors file or several, mapped rather than read."""

import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from specjax.models.hf.folder import read_small_file, refuse_lfs_pointer

__all__ = ["MappedTensors"]

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# What a model's tensors begin with: alone, and inside models that see, newer and older.
_MODEL_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
# Buffers that older checkpoints hold, and that follow from config.json.
_ROTARY_BUFFER = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# What only a model that sees has, and that its text model does without.
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")
# Numbers that are compared at a time.
_COMPARE_CHUNK = 2**22


class _MappedTensor(NamedTuple):
    path: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class MappedTensors:
    """Views of a folder's tensors: the pages of the files, which nothing here copies.

    Args:
      folder: with model.safetensors, or with several such files and their index.

    Raises:
      ValueError: on a file that is missing or is no safetensors.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = pathlib.Path(folder)
        self.source = path / _FILE
        if not self.source.is_file() and (path / _INDEX).is_file():
            self.source = path / _INDEX
            self._files = _read_index(self.source)
            self._tensors = {file: _map_file(file) for file in sorted(set(self._files.values()))}
        else:
            self._tensors = {self.source: _map_file(self.source)}
            self._files = dict.fromkeys(self._tensors[self.source], self.source)
        prefixes = [p for p in _MODEL_PREFIXES if p + "embed_tokens.weight" in self._files]
        self._prefix = prefixes[0] if prefixes else "model."

    def _stored_name(self, name: str) -> str:
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        outer = self._prefix.removesuffix("model.")
        return outer + name if outer + name in self._files else name

    def _find_tensor(self, name: str) -> _MappedTensor | None:
        # From the file that the index names, and no other: there a stale one may lie.
        path = self._files.get(name)
        return None if path is None else self._tensors[path].get(name)

    def check_tied(self, name: str, tied: str) -> None:
        """Refuses a tensor that is there although another stands for it, unless they are equal.

        Args:
          name: as in `view`.
          tied: of the tensor that stands for it.

        Raises:
          ValueError: if both are there and differ; which is meant, loaders do not agree on.
        """
        name, tied = self._stored_name(name), self._stored_name(tied)
        first, second = self._find_tensor(name), self._find_tensor(tied)
        if first is not None and second is not None and not _tensors_equal(first, second):
            raise ValueError(
                f"{first.path} holds {name}, which differs from {tied} to which config.json ties "
                "it; set tie_word_embeddings to false there, or drop the tensor."
            )

    def check_all_read(self, names: Iterable[str], tied: str | None = None) -> None:
        """Refuses tensors that are neither read nor known to change no logits.

        Args:
          names: of those that are read, as in `view`.
          tied: of one that `check_tied` compared.

        Raises:
          ValueError: on any other but rotary buffers and, in a model that sees, its sight.
        """
        accounted_for = set(map(self._stored_name, names))
        if tied is not None and self._find_tensor(self._stored_name(tied)) is not None:
            accounted_for.add(self._stored_name(tied))
        unread = {
            name: path
            for path, tensors in self._tensors.items()
            for name in tensors
            if name not in accounted_for
            and not _ROTARY_BUFFER.search(name)
            and not self._is_vision_tensor(name)
        }
        if unread:
            name = next(iter(unread))
            more = f", and {len(unread) - 1} more that are not read" if len(unread) > 1 else ""
            raise ValueError(
                f"{unread[name]} holds {name}{more}; config.json asks for no such tensor, and the "
                "logits may need it. Mend config.json, or drop from the file what is no part of "
                "the model."
            )

    def _is_vision_tensor(self, name: str) -> bool:
        return self._prefix != "model." and name.removeprefix("model.").startswith(_VISION_PREFIXES)

    def view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as it lies in its file, read-only.

        Args:
          name: as it is when the model stands alone.
          shape: that it needs to have.

        Raises:
          ValueError: if there is none, or one of another shape or of no float.
        """
        name = self._stored_name(name)
        tensor = self._find_tensor(name)
        if tensor is None and name in self._files:
            raise ValueError(
                f"{self.source} names '{self._files[name].name}' for the tensor {name}, which "
                "that file does not hold."
            )
        if tensor is None:
            raise ValueError(f"{self.source} has no tensor {name}; config.json asks for it.")
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.path} holds {name} with shape {tensor.shape}; config.json makes it "
                f"{shape}."
            )
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{tensor.path} holds {name} in {tensor.dtype}; quantised weights are not read "
                f"here, it needs to be one of {', '.join(_FLOATS)}."
            )
        return tensor.data.view(_FLOATS[tensor.dtype]).reshape(shape)


def _read_index(index: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file that an index names for each tensor, each of them there."""
    data = read_small_file(index)
    try:
        weight_map = json.loads(data.decode())["weight_map"]
        names = {tensor: pathlib.PurePath(name) for tensor, name in weight_map.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{index} cannot be read as an index; it needs a weight_map from tensors to files."
        ) from None
    for name in sorted(set(names.values())):
        # A name alone: an index is no way out of its folder.
        if name.name != str(name) or not (index.parent / name).is_file():
            raise ValueError(f"{index} names '{name}'; there is no such file beside it.")
    return {tensor: index.parent / name for tensor, name in names.items()}


def _map_file(path: pathlib.Path) -> dict[str, _MappedTensor]:
    refuse_lfs_pointer(path)
    try:
        # The library checks the whole header: what is cut out below lies inside the file.
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}).") from None
    file_bytes = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(file_bytes[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(file_bytes[8:start].tobytes())
    header.pop("__metadata__", None)
    return {
        name: _MappedTensor(
            path, entry["dtype"], tuple(entry["shape"]), _tensor_bytes(file_bytes, start, entry)
        )
        for name, entry in header.items()
    }


def _tensors_equal(first: _MappedTensor, second: _MappedTensor) -> bool:
    """Compares in pieces, of which alone there are copies."""
    if first.shape != second.shape:
        return False
    if first.dtype == second.dtype:
        return _arrays_equal(first.data, second.data)
    if not {first.dtype, second.dtype} <= set(_FLOATS):
        return False
    return _arrays_equal(
        first.data.view(_FLOATS[first.dtype]), second.data.view(_FLOATS[second.dtype])
    )


def _arrays_equal(first: np.ndarray, second: np.ndarray) -> bool:
    dtype = first.dtype if first.dtype == second.dtype else np.float64
    for start in range(0, first.size, _COMPARE_CHUNK):
        chunk = slice(start, start + _COMPARE_CHUNK)
        a, b = first[chunk].astype(dtype, copy=False), second[chunk].astype(dtype, copy=False)
        if not np.array_equal(a, b):
            return False
    return True


def _tensor_bytes(file_bytes: np.ndarray, start: int, entry: dict[str, Any]) -> np.ndarray:
    begin, end = entry["data_offsets"]
    return file_bytes[start + begin : start + end]
