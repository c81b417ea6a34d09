"""`write_head`: the files of a head in the format of `speculators`, which both kinds share."""

import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save as serialize

from specjax.file_io import replace_file
from specjax.models.hf.weight_map import WeightEntry, get_path, split_tensors

__all__ = ["speculators_config", "write_head"]


def speculators_config(algorithm: str, k: int | None, verifier: str | None) -> dict[str, Any]:
    """Returns the field of config.json that says how a head drafts, and for which target.

    Args:
      algorithm: the kind of the head.
      k: drafted tokens of a step, or None.
      verifier: the name of the target, or None.
    """
    method = {"proposal_type": "greedy"} | ({} if k is None else {"speculative_tokens": k})
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [method],
        "verifier": {"name_or_path": verifier, "architectures": []},
    }


def write_head(
    folder: str | os.PathLike[str],
    fields: dict[str, Any],
    params: Any,
    entries: Iterable[WeightEntry],
    *,
    dtype: str,
    vocab_size: int,
) -> None:
    """Writes config.json and model.safetensors, each after the new one is complete.

    Args:
      folder: created if absent.
      fields: of config.json.
      params: of the head, with a `token_map` if it drafts from a part of the vocabulary.
      entries: arrays of the parameters, and the tensors that each concatenates.
      dtype: of the tensors on disk.
      vocab_size: of the target.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: np.ascontiguousarray(jnp.asarray(array, dtype))
        for entry in entries
        for name, array in zip(
            entry.names, split_tensors(get_path(params, entry.path), entry), strict=True
        )
    }
    if "token_map" in params:
        ids = np.asarray(params["token_map"], np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(vocab_size), ids)
    with replace_file(path / "model.safetensors") as temporary:
        temporary.write_bytes(serialize(tensors, metadata={"format": "pt"}))
    text = json.dumps(fields, indent=2) + "\n"
    with replace_file(path / "config.json") as temporary:
        temporary.write_text(text, encoding="utf-8")
