"""The tensors of a draft head's folder, under the names of any format."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from specjax.models.hf.folder import find_folder
from specjax.models.hf.mapped_tensors import MappedTensors, has_weights
from specjax.models.hf.weight_map import WeightEntry, assemble_arrays, set_path

__all__ = ["HeadTensors"]

# Only training reads these: which target tokens the draft has.
_UNREAD = ("t2d",)
_MAX_ID = 2**31


class HeadTensors:
    """The tensors of a head, named as in `speculators`: `layers.0.self_attn.q_proj.weight`.

    A file may write `midlayer.` for `layers.0.`, and `model.` before any name.

    Args:
      folder: with model.safetensors, or with model.safetensors.index.json and its files.

    Raises:
      ValueError: if it holds no safetensors, or unreadable ones.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = find_folder(folder)
        if not has_weights(path):
            _refuse_weights(path)
        self._tensors = MappedTensors(path)
        self._names: dict[str, str] = {}
        for stored in self._tensors.names():
            self._names.setdefault(_plain_name(stored), stored)
        self._read = set(_UNREAD)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def view(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a read-only view of a tensor of floats, as `MappedTensors.view` does.

        Args:
          name: of the tensor.
          shape: that config.json gives it.

        Raises:
          ValueError: if the tensor is missing, has another shape, or is not of a float dtype.
        """
        self._read.add(name)
        return self._tensors.view(self._names.get(name, name), shape)

    def load(self, entries: Iterable[WeightEntry], dtype: str) -> dict[str, Any]:
        """Returns the parameters of entries, and refuses a folder that holds other tensors.

        Args:
          entries: arrays of the parameters, and the tensors that each concatenates.
          dtype: of the arrays.

        Raises:
          ValueError: as `view`, or if there is a tensor that nothing has read.
        """
        params: dict[str, Any] = {}
        views = [(entry, list(map(self.view, entry.names, entry.shapes))) for entry in entries]
        self._tensors.check_all_read(self._names.get(name, name) for name in self._read)
        for (entry, _), array in zip(views, assemble_arrays(views, dtype), strict=True):
            set_path(params, entry.path, array)
        return params

    def read_token_map(self, draft_vocab_size: int, vocab_size: int) -> np.ndarray | None:
        """Returns the target's id of each draft token, i32[V_d]; None where the two are one.

        `d2t` holds offsets: token i of the draft is token i + d2t[i] of the target.

        Args:
          draft_vocab_size: V_d.
          vocab_size: of the target.

        Raises:
          ValueError: if `d2t` is missing, or maps to ids that repeat or that the target has not.
        """
        if "d2t" not in self:
            if draft_vocab_size == vocab_size:
                return None
            raise ValueError(
                f"{self._tensors.source} has no tensor d2t; config.json gives the draft "
                f"{draft_vocab_size} of the target's {vocab_size} tokens, and d2t says which."
            )
        self._read.add("d2t")
        offsets = self._tensors.view_integers(self._names["d2t"], (draft_vocab_size,))
        ids = np.arange(draft_vocab_size, dtype=np.int64) + offsets
        outside = (ids < 0) | (ids >= vocab_size)
        if outside.any():
            token = int(np.argmax(outside))
            raise ValueError(
                f"{self._tensors.source} maps draft token {token} to token {ids[token]} by d2t; "
                f"the target has tokens 0 to {vocab_size - 1}, so this head is another target's."
            )
        tokens, counts = np.unique(ids, return_counts=True)
        if counts.max() > 1:
            token = tokens[np.argmax(counts)]
            raise ValueError(
                f"{self._tensors.source} maps {counts.max()} draft tokens to token {token} by "
                "d2t; d2t holds offsets, and each target token may be that of one draft token."
            )
        is_identity = draft_vocab_size == vocab_size and not offsets.any()
        return None if is_identity else ids.astype(np.int32)


def _plain_name(stored: str) -> str:
    """Returns the name of a tensor without what formats add to it."""
    name = stored.removeprefix("model.")
    return f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name


def _refuse_weights(path: Any) -> None:
    """Refuses a folder without safetensors; a pickle would run code when it is read."""
    if not any(path.glob("*.bin")) and not any(path.glob("*.pt")):
        raise ValueError(f"{path} has no model.safetensors; the folder of a draft head needs it.")
    name = sorted([*path.glob("*.bin"), *path.glob("*.pt")])[0].name
    raise ValueError(
        f"{path} has its weights in {name}, a pickle, which may run any code when it is read. "
        'Convert it where you trust it, in its folder: python -c "import torch; from '
        "safetensors.torch import save_file; save_file({n: t.contiguous() for n, t in "
        f"torch.load('{name}', weights_only=True).items()}}, 'model.safetensors')\""
    )
