"""Models as Hugging Face folders: config.json, model.safetensors, tokenizer.json."""

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
from safetensors.flax import save as serialized

from specjax.files import replacing
from specjax.models.config import DTYPES, TransformerConfig
from specjax.models.hf.config_fields import read_field
from specjax.models.hf.config_reader import read_fields
from specjax.models.hf.config_writer import write_fields
from specjax.models.hf.folder import read_folder, read_member, read_object
from specjax.models.hf.mapped_tensors import MappedTensors
from specjax.models.hf.progress import loading_bar
from specjax.models.hf.weight_map import join, layout, put, split, take
from specjax.models.transformer import build
from specjax.typing import Model

__all__ = ["dtype_here", "load", "load_config", "load_tokenizer", "save"]

_WEIGHTS, _FIELDS = "model.safetensors", "the fields of a configuration"
_ADAPTER = "adapter_config.json"
# Compiled: on the device, and without a copy between turning, joining and casting.
_join = jax.jit(join, static_argnums=(1, 2))


def _open(folder: str | os.PathLike[str], name: str) -> pathlib.Path:
    path = read_folder(folder)
    if not (path / name).is_file() and not (path / f"{name}.index.json").is_file():
        raise ValueError(f"{path} has no {name}; a Hugging Face folder needs it to be read.")
    return path / name


def load_config(folder: str | os.PathLike[str]) -> TransformerConfig:
    """Reads `config.json`, and what ends a sequence from `generation_config.json` if there is one.

    Args:
      folder: a Hugging Face folder of a family that is built here.

    Raises:
      ValueError: on a missing or unreadable file, or one that asks for what is not built here.
    """
    path = _open(folder, "config.json")
    config = read_fields(read_object(path, _FIELDS), str(path))
    # Models that chat name the end of a turn there, and often there only.
    said = path.with_name("generation_config.json")
    if not said.is_file():
        return config
    ends = read_field("eos_token_id", read_object(said, _FIELDS), str(said))
    if ends is None:
        return config
    return dataclasses.replace(config, eos_token_ids=tuple(ends if type(ends) is list else [ends]))


def load_tokenizer(folder: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Reads `tokenizer.json` with the `tokenizers` library; it neither truncates nor pads.

    Raises:
      ValueError: on a missing or unreadable file.
    """
    path = _open(folder, "tokenizer.json")
    data = read_member(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"{path} cannot be read as a tokenizer ({error}).") from None
    # A training's lengths, left in the file: they would cut prompts in silence.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def dtype_here(asked: DTypeLike | None, own: str) -> str:
    """The dtype asked for; else a file's own, but float32 on a CPU, where others are slow.

    Args:
      asked: whatever `jnp.dtype` takes for a dtype that models have, or None.
      own: of the file.

    Raises:
      ValueError: if it is a dtype that no model has, or none at all.
    """
    if asked is None:
        return "float32" if jax.default_backend() == "cpu" else own
    try:
        name = jnp.dtype(asked).name
    except (TypeError, ValueError):
        name = str(asked)
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; it needs to be one of {DTYPES}.")
    return name


def load(
    folder: str | os.PathLike[str], dtype: DTypeLike | None = None
) -> tuple[Model, TransformerConfig]:
    """Reads a model: Llama, Mistral, Ministral, Qwen 2 and 3, or Gemma 2 and 3.

    The files are mapped, and each array is put together on the device: the host holds no copy
    of the weights. A load that takes long shows a bar, on a terminal.

    Args:
      folder: holds config.json and model.safetensors, or its parts and their index, in
        Hugging Face's layout.
      dtype: of parameters, activations and cache, as "bfloat16" or jnp.bfloat16. None is the
        file's own, but float32 on a CPU, where bfloat16 products are slow.

    Returns:
      The model, and its configuration with that dtype.

    Raises:
      ValueError: in a sentence that names the file, or the tensor, and what is needed.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> model, config = load(pretrained_folder("draft"))
      >>> config.vocab_size
      4096
    """
    config = load_config(folder)
    config = dataclasses.replace(config, dtype=dtype_here(dtype, config.dtype))
    path = _open(folder, _WEIGHTS)
    if path.with_name(_ADAPTER).is_file():
        raise ValueError(
            f"{path.parent} has {_ADAPTER}; adapters are not read here. Merge it into the weights, "
            "or drop the file if they hold it already."
        )
    tensors, entries, total = MappedTensors(folder), [], 0
    for entry in layout(config):
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
            # Finished one by one, so that no more than one array's parts lie beside the arrays.
            array = jax.block_until_ready(_join(views, entry.turned, config.dtype))
            put(params, entry.place, array)
            advance(sum(view.nbytes for view in views))
    return build(config, params), config


def save(
    folder: str | os.PathLike[str],
    params: Any,
    config: TransformerConfig,
    tokenizer: tokenizers.Tokenizer,
    dtype: str = "bfloat16",
) -> None:
    """Writes a Hugging Face folder that `load` reads back, up to rounding to `dtype`.

    Args:
      folder: is made if absent; its config.json, model.safetensors and
        tokenizer.json are replaced, each once it is written whole.
      params: as in `Model.params`.
      config: of the model; its dtype is replaced by `dtype`.
      tokenizer: written beside the weights.
      dtype: of the tensors on disk.

    Raises:
      ValueError: if no family has such a configuration.
    """
    path = pathlib.Path(folder)
    fields = write_fields(dataclasses.replace(config, dtype=dtype))
    path.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: jnp.asarray(np.ascontiguousarray(array), dtype)
        for entry in layout(config)
        for name, array in zip(entry.names, split(take(params, entry.place), entry), strict=True)
    }
    with replacing(path / _WEIGHTS) as spare:
        spare.write_bytes(serialized(tensors, metadata={"format": "pt"}))
    with replacing(path / "config.json") as spare:
        spare.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    with replacing(path / "tokenizer.json") as spare:
        tokenizer.save(str(spare))
