"""Loads and saves models as Hugging Face folders."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.typing import DTypeLike
from safetensors.flax import save as serialize

from specjax.file_io import replace_file
from specjax.models.config import DTYPES, TransformerConfig
from specjax.models.hf.config_fields import read_field
from specjax.models.hf.config_reader import read_fields
from specjax.models.hf.config_writer import write_fields
from specjax.models.hf.folder import find_folder, read_json_object, read_small_file
from specjax.models.hf.mapped_tensors import MappedTensors
from specjax.models.hf.progress import loading_bar
from specjax.models.hf.weight_map import (
    concatenate_tensors,
    get_path,
    set_path,
    split_tensors,
    weight_entries,
)
from specjax.models.transformer import build
from specjax.typing import Model

__all__ = ["load", "load_config", "load_tokenizer", "resolve_dtype", "save"]

_WEIGHTS, _CONFIG_CONTENT = "model.safetensors", "the fields of a configuration"
_ADAPTER = "adapter_config.json"
# Compiled, so that transposing, concatenating and casting make no copies in between.
_concatenate = jax.jit(concatenate_tensors, static_argnums=(1, 2))


def _find_member(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    path = find_folder(folder)
    if not (path / name).is_file() and not (path / f"{name}.index.json").is_file():
        raise ValueError(f"{path} has no {name}; a Hugging Face folder needs it to be read.")
    return path / name


def load_config(folder: str | os.PathLike[str]) -> TransformerConfig:
    """Reads `config.json`; EOS tokens come from `generation_config.json` if there is one.

    Args:
      folder: a Hugging Face folder of a supported family.

    Returns:
      The configuration, with the dtype that the file names.

    Raises:
      ValueError: if a file is missing or unreadable, or asks for something unsupported.
    """
    path = _find_member(folder, "config.json")
    config = read_fields(read_json_object(path, _CONFIG_CONTENT), str(path))
    # Chat models name the token that ends a turn there, often only there.
    generation_config = path.with_name("generation_config.json")
    if not generation_config.is_file():
        return config
    eos_token_ids = read_field(
        "eos_token_id", read_json_object(generation_config, _CONFIG_CONTENT), str(generation_config)
    )
    if eos_token_ids is None:
        return config
    return dataclasses.replace(
        config,
        eos_token_ids=tuple(eos_token_ids if type(eos_token_ids) is list else [eos_token_ids]),
    )


def load_tokenizer(folder: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Reads `tokenizer.json` as a tokenizer that neither truncates nor pads.

    Args:
      folder: a Hugging Face folder.

    Raises:
      ValueError: if the file is missing or unreadable.
    """
    path = _find_member(folder, "tokenizer.json")
    data = read_small_file(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"{path} cannot be read as a tokenizer ({error}).") from None
    # The file may hold lengths of the training, which would cut prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def resolve_dtype(dtype: DTypeLike | None, folder_dtype: str) -> str:
    """Returns the name of the dtype to load: `dtype`, else float32 on a CPU, else the folder's.

    Args:
      dtype: bfloat16, float16 or float32 in any form that `jnp.dtype` takes, or None.
      folder_dtype: in `config.json`.

    Raises:
      ValueError: if `dtype` is another dtype or none.
    """
    if dtype is None:
        return "float32" if jax.default_backend() == "cpu" else folder_dtype
    try:
        name = jnp.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it needs to be one of {DTYPES}.")
    return name


def load(
    folder: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[Model, TransformerConfig]:
    """Loads a model: Llama, Mistral, Ministral, Qwen 2, Qwen 3, Gemma 2 or Gemma 3.

    The files are mapped into memory and arrays are assembled on the device, so that the host holds
    no copy of the weights. On a terminal, a load of more than a second shows a progress bar.

    Args:
      folder: a Hugging Face folder with config.json and model.safetensors, or with
        model.safetensors.index.json and the files that it names.
      dtype: of parameters, activations and cache, such as "bfloat16" or jnp.bfloat16. None is
        float32 on a CPU, where bfloat16 products are slow, and the folder's dtype elsewhere.

    Returns:
      The model, and its configuration with that dtype.

    Raises:
      ValueError: if a file or a tensor is missing, unreadable or unsupported; the sentence names
        it.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> model, config = load(pretrained_folder("draft"))
      >>> config.vocab_size
      4096
    """
    config = load_config(folder)
    config = dataclasses.replace(config, dtype=resolve_dtype(dtype, config.dtype))
    path = _find_member(folder, _WEIGHTS)
    if path.with_name(_ADAPTER).is_file():
        raise ValueError(
            f"{path.parent} has {_ADAPTER}; adapters are not supported. Merge the adapter into the "
            "weights, or remove the file if they already contain it."
        )
    tensors, entries, total = MappedTensors(folder), [], 0
    for entry in weight_entries(config):
        views = list(map(tensors.view, entry.names, entry.shapes))
        entries.append((entry, views))
        total += sum(view.nbytes for view in views)
    head = "lm_head.weight" if config.tie_word_embeddings else None
    if head is not None:
        tensors.check_tied(head, "model.embed_tokens.weight")
    tensors.check_all_read((name for entry, _ in entries for name in entry.names), head)
    params: dict[str, Any] = {}
    with loading_bar(f"loading {pathlib.Path(folder).name}", total) as advance:
        for entry, views in entries:
            # One array at a time, so that the tensors of only one are on the device as well.
            array = jax.block_until_ready(_concatenate(views, entry.transposed, config.dtype))
            set_path(params, entry.path, array)
            advance(sum(view.nbytes for view in views))
    return build(config, params), config


def save(
    folder: str | os.PathLike[str],
    params: Any,
    config: TransformerConfig,
    tokenizer: tokenizers.Tokenizer,
    dtype: str = "bfloat16",
) -> None:
    """Saves a Hugging Face folder that `load` reads back, up to rounding to `dtype`.

    Args:
      folder: created if absent. Its config.json, model.safetensors and tokenizer.json are
        replaced, each after the new one is complete.
      params: as in `Model.params`.
      config: of the model; its dtype is replaced by `dtype`.
      tokenizer: saved as tokenizer.json.
      dtype: of the tensors on disk.

    Raises:
      ValueError: if no supported family has this configuration.
    """
    path = pathlib.Path(folder)
    fields = write_fields(dataclasses.replace(config, dtype=dtype))
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: jnp.asarray(np.ascontiguousarray(array), dtype)
        for entry in weight_entries(config)
        for name, array in zip(
            entry.names, split_tensors(get_path(params, entry.path), entry), strict=True
        )
    }
    with replace_file(path / _WEIGHTS) as temporary:
        temporary.write_bytes(serialize(tensors, metadata={"format": "pt"}))
    with replace_file(path / "config.json") as temporary:
        temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    with replace_file(path / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))
