"""Maps the tensors of a folder into memory, from one safetensors file or several."""

import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors

from specjax.file_io import JsonObject, shorten
from specjax.models.hf.folder import read_small_file, refuse_lfs_pointer
from specjax.models.hf.weight_map import WeightEntry

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
# Prefixes of tensor names: text models, and multimodal ones of newer and older transformers.
_MODEL_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
# Rotary buffers in older checkpoints, which config.json determines.
_ROTARY_BUFFER = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# Tensors of a multimodal model that its text model does not need.
_VISION_PREFIXES = ("vision_tower.", "multi_modal_projector.")
# Elements compared at a time.
_COMPARE_CHUNK = 2**22


def has_weights(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder holds safetensors, or an index of them.

    Args:
      folder: any path.
    """
    return any(pathlib.Path(folder, name).is_file() for name in (_FILE, _INDEX))


class _MappedTensor(NamedTuple):
    path: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class MappedTensors:
    """Read-only views of a folder's tensors, without copies.

    Args:
      folder: with model.safetensors, or with model.safetensors.index.json and its files.

    Raises:
      ValueError: if a file is missing or not in safetensors format.
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

    def names(self) -> list[str]:
        """Returns the names of all tensors in the files or the index."""
        return sorted(self._files)

    def stored_name(self, name: str) -> str:
        """Returns the name in the files of a tensor that `view` is asked for."""
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        outer = self._prefix.removesuffix("model.")
        return outer + name if outer + name in self._files else name

    def _find_tensor(self, name: str) -> _MappedTensor | None:
        # Only from the file that the index names: another may hold a stale copy.
        path = self._files.get(name)
        return None if path is None else self._tensors[path].get(name)

    def check_tied(self, name: str, tied: str) -> None:
        """Refuses a stored tensor that differs from the tensor that config.json ties it to.

        Args:
          name: of the tensor, as in `view`.
          tied: name of the tensor that is used instead.

        Raises:
          ValueError: if both are stored and differ; other loaders disagree on which one counts.
        """
        name, tied = self.stored_name(name), self.stored_name(tied)
        first, second = self._find_tensor(name), self._find_tensor(tied)
        if first is not None and second is not None and not _tensors_equal(first, second):
            raise ValueError(
                f"{first.path} holds {name}, which differs from {tied}, to which config.json ties "
                "it; set tie_word_embeddings to false there, or remove the tensor."
            )

    def check_all_read(self, names: Iterable[str], tied: str | None = None) -> None:
        """Refuses stored tensors that are not read and may change the logits.

        Args:
          names: of the tensors that are read, as in `view`.
          tied: name of a tensor that `check_tied` compared.

        Raises:
          ValueError: if there is another tensor, except rotary buffers and the vision tensors
            of a multimodal model.
        """
        accounted_for = set(map(self.stored_name, names))
        if tied is not None and self._find_tensor(self.stored_name(tied)) is not None:
            accounted_for.add(self.stored_name(tied))
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
                f"{unread[name]} holds {shorten(name)}{more}; config.json asks for no such tensor, "
                "but the logits may depend on it. Correct config.json, or remove from the file "
                "what is not part of the model."
            )

    def _is_vision_tensor(self, name: str) -> bool:
        return self._prefix != "model." and name.removeprefix("model.").startswith(_VISION_PREFIXES)

    def view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a read-only view of a tensor.

        Args:
          name: of the tensor in a text model.
          shape: that config.json gives it.

        Raises:
          ValueError: if the tensor is missing, has another shape, or is not of a float dtype.
        """
        tensor = self._tensor(name, shape)
        if tensor.dtype not in _FLOATS:
            raise ValueError(
                f"{tensor.path} holds {self.stored_name(name)} in {tensor.dtype}; quantised "
                f"weights are not supported, it needs to be one of {', '.join(_FLOATS)}."
            )
        return tensor.data.view(_FLOATS[tensor.dtype]).reshape(shape)

    def views(self, entries: Iterable[WeightEntry]) -> list[tuple[WeightEntry, list[np.ndarray]]]:
        """Returns the entries, each with views of its tensors, after a check of shapes."""
        return [(entry, list(map(self.view, entry.names, entry.shapes))) for entry in entries]

    def view_integers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a read-only view of a tensor of integers.

        Args:
          name: as in `view`.
          shape: as in `view`.

        Raises:
          ValueError: if the tensor is missing, has another shape, or is not of I32 or I64.
        """
        tensor = self._tensor(name, shape)
        if tensor.dtype not in _INTEGERS:
            needed = " or ".join(_INTEGERS)
            raise ValueError(f"{tensor.path} holds {name} in {tensor.dtype}; it needs {needed}.")
        return tensor.data.view(_INTEGERS[tensor.dtype]).reshape(shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> _MappedTensor:
        """Returns an existing tensor of the given shape."""
        name = self.stored_name(name)
        tensor = self._find_tensor(name)
        if tensor is None and name in self._files:
            raise ValueError(
                f"{self.source} names '{shorten(self._files[name].name)}' for the tensor "
                f"{name}, which that file does not hold."
            )
        if tensor is None:
            raise ValueError(f"{self.source} has no tensor {name}; config.json asks for it.")
        if tensor.shape != shape:
            raise ValueError(
                f"{tensor.path} holds {name} with shape {tensor.shape}; by config.json it needs to "
                f"be {shape}."
            )
        return tensor


def _read_index(index: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the file of each tensor in an index; checks that the files exist."""
    data = read_small_file(index)
    try:
        weight_map = json.loads(data.decode())["weight_map"]
        names = {tensor: pathlib.PurePath(name) for tensor, name in weight_map.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{index} cannot be read as an index; it needs a weight_map from tensors to files."
        ) from None
    for name in sorted(set(names.values())):
        # Only names, no paths: an index must not point outside its folder.
        if name.name != str(name) or not os.path.isfile(index.parent / name):
            raise ValueError(
                f"{index} names '{shorten(name)}'; there is no such file in its folder."
            )
    return {tensor: index.parent / name for tensor, name in names.items()}


def _map_file(path: pathlib.Path) -> dict[str, _MappedTensor]:
    refuse_lfs_pointer(path)
    try:
        # The library checks the header, so the slices below lie inside the file.
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors ({shorten(error)}).") from None
    file_bytes = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(file_bytes[:8].tobytes(), "little")
    header: JsonObject = json.loads(file_bytes[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = file_bytes[start:]
    return {
        name: _MappedTensor(
            path, entry["dtype"], tuple(entry["shape"]), tensors[slice(*entry["data_offsets"])]
        )
        for name, entry in header.items()
    }


def _tensors_equal(first: _MappedTensor, second: _MappedTensor) -> bool:
    """Compares two tensors in chunks, so that copies stay small."""
    if first.shape != second.shape:
        return False
    a, b = first.data, second.data
    if first.dtype != second.dtype:
        if not {first.dtype, second.dtype} <= set(_FLOATS):
            return False
        a, b = a.view(_FLOATS[first.dtype]), b.view(_FLOATS[second.dtype])
    dtype = a.dtype if a.dtype == b.dtype else np.dtype(np.float64)
    for start in range(0, a.size, _COMPARE_CHUNK):
        chunk = slice(start, start + _COMPARE_CHUNK)
        if not np.array_equal(a[chunk].astype(dtype), b[chunk].astype(dtype)):
            return False
    return True
