"""Loads and saves draft heads as folders of config.json and model.safetensors."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.flax import save as serialize

from specjax.file_io import quote, replace_file
from specjax.models.draft_head import HeadConfig
from specjax.models.hf.checkpoint import resolve_dtype
from specjax.models.hf.config_fields import read_field
from specjax.models.hf.folder import find_folder, read_json_object
from specjax.models.hf.mapped_tensors import MappedTensors
from specjax.models.hf.weight_map import (
    WeightEntry,
    assemble_arrays,
    get_path,
    set_path,
    split_tensors,
    weight_entries,
)

__all__ = ["is_head", "load_head", "load_head_config", "save_head"]

_MODEL_TYPE = "specjax_head"
_REQUIRED_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "rms_norm_eps", "rope_theta"),
)


def _head_entries(config: HeadConfig) -> Iterator[WeightEntry]:
    """Yields the arrays of a head's parameters and their tensors, named like a Llama layer's."""
    hidden = config.hidden_size
    for name in ("token_norm", "hidden_norm"):
        yield WeightEntry((name, "weight"), (f"model.{name}.weight",), ((hidden,),), False)
    yield WeightEntry(("mix",), ("model.mix.weight",), ((hidden, 3 * hidden),), True)
    for entry in weight_entries(config.layer()):
        if entry.path[0] == "layers":
            yield entry._replace(path=("layer", *entry.path[2:]))
        elif entry.path[0] == "norm":
            yield entry


def _read_fields(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    path = find_folder(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; the folder of a draft head needs it.")
    return read_json_object(path, "the fields of a head"), str(path)


def is_head(folder: str | os.PathLike[str]) -> bool:
    """Returns whether a folder holds a draft head rather than a model.

    Args:
      folder: any path.

    Returns:
      A bool; False for a folder without a readable config.json.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> is_head(pretrained_folder("head")), is_head(pretrained_folder("draft"))
      (True, False)
    """
    try:
        return bool(_read_fields(folder)[0].get("model_type") == _MODEL_TYPE)
    except ValueError:
        return False


def load_head_config(folder: str | os.PathLike[str]) -> HeadConfig:
    """Reads the `config.json` of a draft head.

    Args:
      folder: written by `save_head`.

    Returns:
      `HeadConfig` with the dtype that the file names.

    Raises:
      ValueError: if the file is missing, unreadable, or not a head's.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> load_head_config(pretrained_folder("head")).hidden_size
      256
    """
    fields, source = _read_fields(folder)
    if fields.get("model_type") != _MODEL_TYPE:
        raise ValueError(
            f"{source} has model_type {quote(fields.get('model_type'))}; a draft head "
            f"has {_MODEL_TYPE!r}."
        )
    unknown = sorted(fields.keys() - {"model_type", "sliding_window", "dtype", *_REQUIRED_FIELDS})
    if unknown:
        raise ValueError(f"{source} has {', '.join(unknown)}; a draft head has no such field.")
    missing = [name for name in _REQUIRED_FIELDS if fields.get(name) is None]
    if missing:
        raise ValueError(f"{source} has no {', '.join(missing)}; a draft head needs it.")
    read = {name: read_field(name, fields, source) for name in _REQUIRED_FIELDS}
    config = HeadConfig(
        **read,
        window=read_field("sliding_window", fields, source),
        dtype=read_field("dtype", fields, source) or "float32",
    )
    try:
        config.layer()
    except ValueError as error:
        raise ValueError(f"{source} contradicts itself: {error}") from None
    return config


def load_head(
    folder: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[Any, HeadConfig]:
    """Loads the parameters of a draft head, for `head_drafter`.

    Args:
      folder: written by `save_head`.
      dtype: of parameters, activations and cache, such as "bfloat16" or jnp.bfloat16. None is
        float32 on a CPU, where bfloat16 products are slow, and the folder's dtype elsewhere.

    Returns:
      The parameters, and the head's configuration with that dtype.

    Raises:
      ValueError: if a file or a tensor is missing, unreadable or unsupported; the sentence names
        it.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> params, config = load_head(pretrained_folder("head"))
      >>> config.hidden_size
      256
    """
    config = load_head_config(folder)
    if not (pathlib.Path(folder) / "model.safetensors").is_file():
        raise ValueError(f"{folder} has no model.safetensors; the folder of a draft head needs it.")
    config = dataclasses.replace(config, dtype=resolve_dtype(dtype, config.dtype))
    tensors = MappedTensors(folder)
    params: dict[str, Any] = {}
    tensors.check_all_read(name for entry in _head_entries(config) for name in entry.names)
    entries = [
        (entry, list(map(tensors.view, entry.names, entry.shapes)))
        for entry in _head_entries(config)
    ]
    for (entry, _), array in zip(entries, assemble_arrays(entries, config.dtype), strict=True):
        set_path(params, entry.path, array)
    return params, config


def save_head(
    folder: str | os.PathLike[str], params: Any, config: HeadConfig, dtype: str = "bfloat16"
) -> None:
    """Saves a draft head as a folder that `load_head` reads back, up to rounding to `dtype`.

    Args:
      folder: created if absent. Its config.json and model.safetensors are replaced, each after
        the new one is complete.
      params: of the head.
      config: of the head; its dtype is replaced by `dtype`.
      dtype: of the tensors on disk.

    Example:
      >>> import tempfile
      >>> from specjax.models import build_head
      >>> config, folder = HeadConfig(16, 32, 4, 2, 4), tempfile.mkdtemp()
      >>> save_head(folder, build_head(config), config)
      >>> load_head(folder, "float32")[1] == config
      True
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: jnp.asarray(np.ascontiguousarray(array), dtype)
        for entry in _head_entries(config)
        for name, array in zip(
            entry.names, split_tensors(get_path(params, entry.path), entry), strict=True
        )
    }
    fields = {"model_type": _MODEL_TYPE} | {
        name: getattr(config, name) for name in _REQUIRED_FIELDS
    }
    fields |= {"sliding_window": config.window, "dtype": dtype}
    text = json.dumps(fields, indent=2) + "\n"
    with replace_file(path / "model.safetensors") as temporary:
        temporary.write_bytes(serialize(tensors, metadata={"format": "pt"}))
    with replace_file(path / "config.json") as temporary:
        temporary.write_text(text, encoding="utf-8")
