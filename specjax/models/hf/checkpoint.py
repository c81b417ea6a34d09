"""Loads and saves models as Hugging Face folders, and loads their tokenizers."""

import contextlib
import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.tree_util import keystr
from jax.typing import DTypeLike
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.devices.placement import Placement, parse_mesh
from specjax.file_io import replace_file, shorten
from specjax.implementation import Implementation
from specjax.models.decoder.config import DTYPES, TransformerConfig
from specjax.models.decoder.transformer import build, param_shapes
from specjax.models.hf.config_json import load_config, write_fields
from specjax.models.hf.folder import find_member, read_small_file, write_folder
from specjax.models.hf.mapped_tensors import MappedTensors, has_weights
from specjax.models.hf.weight_map import (
    WeightEntry,
    assemble_arrays,
    concatenate,
    concatenate_on_device,
    get_path,
    set_path,
    stored_tensors,
    weight_entries,
)
from specjax.models.sharding import (
    is_stacked,
    shard_config,
    sharded_model,
    share_shapes,
    share_views,
    split_axis,
)
from specjax.types import Model

_WEIGHTS, _ADAPTER = "model.safetensors", "adapter_config.json"
_SECONDS_BEFORE_BAR = 1.0


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
    folder: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    mesh: Any = None,
    replicate: bool = False,
    implementation: str | Implementation | None = None,
    row_invariant: bool = False,
) -> tuple[Model, TransformerConfig]:
    """Loads a model: Llama, Mistral, Ministral, Qwen 2, Qwen 3, Gemma 2 or Gemma 3.

    The files are mapped into memory and arrays are assembled on the device, so the host holds no
    copy of the weights. On a terminal, a load of more than a second shows a progress bar.

    Args:
      folder: a Hugging Face folder with config.json and model.safetensors, or with
        model.safetensors.index.json and the files that it names.
      dtype: of parameters, activations and cache, such as "bfloat16" or jnp.bfloat16. None is
        float32 on a CPU, where bfloat16 products are slow, and the folder's dtype elsewhere.
      mesh: None, or as in `split_model`: requests lie over its axis "data" and weights over
        "model". Each device receives only its share of the tensors.
      replicate: as in `split_model`; ignored without a mesh.
      implementation: of a decode step, as in `build`.
      row_invariant: as in `build`; not with a mesh.

    Returns:
      The model, and its configuration with that dtype.

    Raises:
      ValueError: if a file or a tensor is missing, unreadable or unsupported; the sentence names
        it. For a mesh, also what `split_model` refuses.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> model, config = load(pretrained_folder("draft"))
      >>> config.vocab_size
      4096
    """
    config = load_config(folder)
    config = dataclasses.replace(config, dtype=resolve_dtype(dtype, config.dtype))
    placement = None if mesh is None else parse_mesh(mesh, replicate)
    if row_invariant and mesh is not None:
        raise ValueError("row_invariant is True with a mesh; it needs a model on one device.")
    if placement is not None and placement.model is not None:
        shard_config(config, placement.num_shares)
    path = find_member(folder, _WEIGHTS)
    if path.with_name(_ADAPTER).is_file():
        raise ValueError(
            f"{path.parent} has {_ADAPTER}; adapters are not supported. Merge the adapter into the "
            "weights, or remove the file if they already contain it."
        )
    tensors = MappedTensors(folder)
    entries = tensors.views(weight_entries(config))
    total = sum(view.nbytes for _, views in entries for view in views)
    head = "lm_head.weight" if config.tie_word_embeddings else None
    if head is not None:
        tensors.check_tied(head, "model.embed_tokens.weight")
    tensors.check_all_read((name for entry, _ in entries for name in entry.names), head)
    params: dict[str, Any] = {}
    with _loading_bar(f"loading {pathlib.Path(folder).name}", total) as advance:
        if placement is None:
            arrays = assemble_arrays(entries, config.dtype)
        else:
            arrays = _assemble_shares(entries, config, placement)
        for (entry, views), array in zip(entries, arrays, strict=True):
            set_path(params, entry.path, array)
            advance(sum(view.nbytes for view in views))
    if placement is not None:
        return sharded_model(config, params, placement, implementation=implementation), config
    model = build(config, params, implementation=implementation, row_invariant=row_invariant)
    return model, config


@contextlib.contextmanager
def _loading_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts loaded bytes; after a second a bar appears on standard error.

    With several processes only the first one shows it.

    Args:
      description: stands next to the bar.
      total: bytes to load.
    """
    if sys.stderr is None or not sys.stderr.isatty() or jax.process_index():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    console = Console(file=sys.stderr)
    start = time.monotonic()
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task(description, total=total)

    def advance(num_bytes: int) -> None:
        progress.advance(task, num_bytes)
        if time.monotonic() - start > _SECONDS_BEFORE_BAR:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()


def _assemble_shares(
    entries: list[tuple[WeightEntry, list[np.ndarray]]],
    config: TransformerConfig,
    placement: Placement,
) -> Iterator[jax.Array]:
    """Yields the array of each entry over the devices; a device receives only its share.

    Args:
      entries: each with views of its tensors, as for `assemble_arrays`.
      config: of the whole model.
      placement: of the model.
    """
    shapes: Any = share_shapes(config, placement)
    for entry, views in entries:
        like: Any = get_path(shapes, entry.path)
        is_split = placement.model is not None and split_axis(entry.path) is not None
        num_shares = placement.num_shares if is_split else 1
        rows = like.shape[0] // num_shares
        by_share: dict[int, jax.Array] = {}
        arrays = []
        for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
            share = (index[0].start or 0) // rows if is_split else 0
            if share not in by_share:
                sources = views
                if is_split:
                    of_share = (config, num_shares, entry.path, share, entry.transposed)
                    sources = share_views(views, *of_share)
                by_share[share] = _put(sources, entry, like, device)
            arrays.append(jax.device_put(by_share[share], device))
        yield jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)


def _put(views: list[np.ndarray], entry: WeightEntry, like: Any, device: jax.Device) -> jax.Array:
    """Returns a share's array, transposed and concatenated on its device."""
    lead = (1,) if is_stacked(entry.path) and len(like.shape) > views[0].ndim else ()
    if device.platform == "cpu":
        array = concatenate(views, entry.transposed, like.dtype.name)
        return jax.device_put(array.reshape(*lead, *array.shape), device)
    tensors = [jax.device_put(view, device) for view in views]
    on_device = concatenate_on_device(tensors, entry.transposed, like.dtype.name)
    # Waits, so that the device holds the tensors of only one array at a time.
    return jax.block_until_ready(on_device.reshape(*lead, *on_device.shape))


def load_shapes(
    folder: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    implementation: str | Implementation | None = None,
    row_invariant: bool = False,
) -> tuple[Model, TransformerConfig]:
    """Returns the model and configuration of `load`, with shapes for weights; reads no weight.

    `compile_generate` and `jax.eval_shape` take such a model.

    Args:
      folder: as in `load`, or with config.json alone. Existing tensors must have the names and
        shapes of config.json; only their headers are read.
      dtype: as in `load`.
      implementation: as in `load`.
      row_invariant: as in `load`.

    Returns:
      The model, whose parameters are `jax.ShapeDtypeStruct`, and its configuration.

    Raises:
      ValueError: as in `load`, for config.json and for the names and shapes of tensors.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> model, _ = load_shapes(pretrained_folder("draft"))
      >>> model.params["embedding"].shape
      (4096, 160)
    """
    config = load_config(folder)
    config = dataclasses.replace(config, dtype=resolve_dtype(dtype, config.dtype))
    if has_weights(folder):
        # Before tracing: config.json may name more than the folder holds.
        MappedTensors(folder).views(weight_entries(config))
    options: Any = {"implementation": implementation, "row_invariant": row_invariant}
    return build(config, param_shapes(config), **options), config


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
      ValueError: if no supported family has this configuration, and for parameters of
        `split_model`.

    Example:
      >>> import tempfile
      >>> from specjax.models import TransformerConfig, load_tokenizer, pretrained_folder
      >>> config = TransformerConfig(4096, 16, 32, 2, 4, 2, 4, eos_token_ids=(2,))
      >>> folder, tokenizer = tempfile.mkdtemp(), load_tokenizer(pretrained_folder("draft"))
      >>> save(folder, build(config).params, config, tokenizer)
      >>> load(folder, "float32")[1] == config
      True
    """
    _check_whole(params, config)
    fields = write_fields(dataclasses.replace(config, dtype=dtype))
    path = write_folder(folder, fields, stored_tensors(params, weight_entries(config), dtype))
    with replace_file(path / "tokenizer.json") as temporary:
        tokenizer.save(str(temporary))


def _check_whole(params: Any, config: TransformerConfig) -> None:
    """Refuses arrays whose shapes are not those of `build`."""
    for path, like in jax.tree.leaves_with_path(param_shapes(config)):
        keys = tuple(entry.key for entry in path)
        shape = np.shape(get_path(params, keys))
        if shape != like.shape:
            raise ValueError(
                f"params has {keystr(path)} of shape {shape}; by config it needs {like.shape}. "
                "Parameters of split_model have other shapes: save those of build."
            )


def load_tokenizer(folder: str | os.PathLike[str]) -> tokenizers.Tokenizer:
    """Reads `tokenizer.json` as a tokenizer that neither truncates nor pads.

    Args:
      folder: a Hugging Face folder.

    Returns:
      The tokenizer.

    Raises:
      ValueError: if the file is missing or unreadable.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> load_tokenizer(pretrained_folder("draft")).get_vocab_size()
      4096
    """
    path = find_member(folder, "tokenizer.json")
    data = read_small_file(path)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except Exception as error:  # The library raises a bare Exception.
        raise ValueError(f"{path} cannot be read as a tokenizer ({shorten(error)}).") from None
    # The file may hold lengths of the training, which would cut prompts silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
