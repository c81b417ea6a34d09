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

from specjax.models.hf.folder import read_member, refuse_pointer

__all__ = ["MappedTensors"]

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {
    "BF16": np.dtype(jnp.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
# What a model's tensors begin with: alone, and inside models that see, newer and older.
_PREFIXES = ("model.", "model.language_model.", "language_model.model.")
# Buffers that older checkpoints hold, and that follow from config.json.
_ROTARY = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
# What only a model that sees has, and that its text model does without.
_SIGHT = ("vision_tower.", "multi_modal_projector.")
# Numbers that are compared at a time.
_PIECE = 2**22


class _Tensor(NamedTuple):
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
            self._places = _places(self.source)
            self._held = {file: _mapped(file) for file in sorted(set(self._places.values()))}
        else:
            self._held = {self.source: _mapped(self.source)}
            self._places = dict.fromkeys(self._held[self.source], self.source)
        begin = [p for p in _PREFIXES if p + "embed_tokens.weight" in self._places]
        self._prefix = begin[0] if begin else "model."

    def _name(self, name: str) -> str:
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        outer = self._prefix.removesuffix("model.")
        return outer + name if outer + name in self._places else name

    def _find(self, name: str) -> _Tensor | None:
        # From the file that the index names, and no other: there a stale one may lie.
        place = self._places.get(name)
        return None if place is None else self._held[place].get(name)

    def check_tied(self, name: str, tied: str) -> None:
        """Refuses a tensor that is there although another stands for it, unless they are equal.

        Args:
          name: as in `view`.
          tied: of the tensor that stands for it.

        Raises:
          ValueError: if both are there and differ; which is meant, loaders do not agree on.
        """
        name, tied = self._name(name), self._name(tied)
        one, other = self._find(name), self._find(tied)
        if one is not None and other is not None and not _same(one, other):
            raise ValueError(
                f"{one.path} holds {name}, which differs from {tied} to which config.json ties "
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
        known = set(map(self._name, names))
        if tied is not None and self._find(self._name(tied)) is not None:
            known.add(self._name(tied))
        rest = {
            name: path
            for path, held in self._held.items()
            for name in held
            if name not in known and not _ROTARY.search(name) and not self._is_sight(name)
        }
        if rest:
            name = next(iter(rest))
            more = f", and {len(rest) - 1} more that are not read" if len(rest) > 1 else ""
            raise ValueError(
                f"{rest[name]} holds {name}{more}; config.json asks for no such tensor, and the "
                "logits may need it. Mend config.json, or drop from the file what is no part of "
                "the model."
            )

    def _is_sight(self, name: str) -> bool:
        return self._prefix != "model." and name.removeprefix("model.").startswith(_SIGHT)

    def view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor as it lies in its file, read-only.

        Args:
          name: as it is when the model stands alone.
          shape: that it needs to have.

        Raises:
          ValueError: if there is none, or one of another shape or of no float.
        """
        name = self._name(name)
        tensor = self._find(name)
        if tensor is None and name in self._places:
            raise ValueError(
                f"{self.source} names '{self._places[name].name}' for the tensor {name}, which "
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


def _places(index: pathlib.Path) -> dict[str, pathlib.Path]:
    """The file that an index names for each tensor, each of them there."""
    data = read_member(index)
    try:
        places = json.loads(data.decode())["weight_map"]
        names = {tensor: pathlib.PurePath(name) for tensor, name in places.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{index} cannot be read as an index; it needs a weight_map from tensors to files."
        ) from None
    for name in sorted(set(names.values())):
        # A name alone: an index is no way out of its folder.
        if name.name != str(name) or not (index.parent / name).is_file():
            raise ValueError(f"{index} names '{name}'; there is no such file beside it.")
    return {tensor: index.parent / name for tensor, name in names.items()}


def _mapped(path: pathlib.Path) -> dict[str, _Tensor]:
    refuse_pointer(path)
    try:
        # The library checks the whole header: what is cut out below lies inside the file.
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} cannot be read as safetensors ({error}).") from None
    pages = np.memmap(path, mode="r")
    start = 8 + int.from_bytes(pages[:8].tobytes(), "little")
    header: dict[str, Any] = json.loads(pages[8:start].tobytes())
    header.pop("__metadata__", None)
    return {
        name: _Tensor(path, lies["dtype"], tuple(lies["shape"]), _cut(pages, start, lies))
        for name, lies in header.items()
    }


def _same(one: _Tensor, other: _Tensor) -> bool:
    """Compares in pieces, of which alone there are copies."""
    if one.shape != other.shape:
        return False
    if one.dtype == other.dtype:
        return _equal(one.data, other.data)
    if not {one.dtype, other.dtype} <= set(_FLOATS):
        return False
    return _equal(one.data.view(_FLOATS[one.dtype]), other.data.view(_FLOATS[other.dtype]))


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    dtype = one.dtype if one.dtype == other.dtype else np.float64
    for start in range(0, one.size, _PIECE):
        piece = slice(start, start + _PIECE)
        a, b = one[piece].astype(dtype, copy=False), other[piece].astype(dtype, copy=False)
        if not np.array_equal(a, b):
            return False
    return True


def _cut(pages: np.ndarray, start: int, lies: dict[str, Any]) -> np.ndarray:
    begin, end = lies["data_offsets"]
    return pages[start + begin : start + end]
