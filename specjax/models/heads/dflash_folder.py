"""The folder of a DFlash head: read in any format, written in that of `speculators`."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from jax.typing import DTypeLike

from specjax.file_io import quote
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.head_fields import ANY, HeadFields, Known, any_of, refuse_unknown
from specjax.models.heads.head_folder import (
    HeadTensors,
    decoder_entries,
    load_params,
    open_head,
    write_head,
)
from specjax.models.hf.weight_map import WeightEntry

__all__ = ["load_dflash", "open_dflash", "save_dflash"]

_TITLE = "a DFlash head"
_LAYER_KINDS = ("qwen3", "llama")
# At the top level or in `dflash_config`.
_DFLASH_CONFIG: Known = {
    **any_of("block_size mask_token_id sample_from_anchor num_target_layers target_layer_ids"),
    # Options of DSpark's additions; `markov_rank` and `enable_confidence_head` are refused below.
    **any_of("confidence_head_alpha confidence_head_with_markov markov_head_type"),
    **dict.fromkeys(("causal", "causal_head", "is_causal"), (False,)),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "projector_type": ("dflash",),
}
_FIELDS: Known = {
    **_DFLASH_CONFIG,
    **any_of("aux_hidden_state_layer_ids dflash_config draft_vocab_size target_hidden_size"),
    "sliding_window_non_causal": ANY,  # Layers with a window are refused.
}


def open_dflash(
    folder: str | os.PathLike[str], *, num_target_layers: int
) -> tuple[DFlashConfig, HeadFields, HeadTensors]:
    """Reads config.json, and the names and shapes of the tensors.

    Args:
      folder: of the head.
      num_target_layers: of the target. A folder that names another number is refused.

    Returns:
      The configuration with the file's dtype, the other fields of the file, and the tensors, which
      are not read yet.

    Raises:
      ValueError: if the folder is not that of a DFlash head, or asks for something unsupported.
    """
    # A target's layers are causal.
    head = open_head(folder, "dflash", _TITLE, nested="dflash_config", not_of_layer=("is_causal",))
    source, layer = head.source, head.layer
    inner = {"target_hidden_size": (layer.hidden_size,), **_DFLASH_CONFIG}
    refuse_unknown(head.fields, source, _TITLE, _FIELDS, {"dflash_config": inner})
    if head.layer_kind not in _LAYER_KINDS:
        raise ValueError(
            f"{source} has model_type {head.layer_kind!r}; the layers of a DFlash head are those "
            "of 'qwen3'."
        )
    head.check_num_target_layers(num_target_layers)
    if head.taps is None:
        raise ValueError(
            f"{source} names no target_layer_ids and no aux_hidden_state_layer_ids; add those that "
            "the head was trained with."
        )
    if head.target_hidden_size != layer.hidden_size:
        raise ValueError(
            f"{source} has target_hidden_size {head.target_hidden_size} and hidden_size "
            f"{layer.hidden_size}; a DFlash head needs its target's size."
        )
    tensors = HeadTensors(folder)
    sizes = {name: _integer(head, name) for name in ("block_size", "mask_token_id")}
    samples_from_anchor = _samples_from_anchor(head)
    try:
        config = DFlashConfig(
            # A DFlash head's layers are Qwen 3's, even if config.json names `llama`.
            dataclasses.replace(layer, qk_norm=True),
            head.draft_vocab_size,
            head.taps,
            **sizes,
            sample_from_anchor=samples_from_anchor,
            num_speculative_tokens=head.num_speculative_tokens,
            has_embedding=tensors.has_embedding,
            has_lm_head=tensors.has_lm_head,
        )
    except ValueError as error:
        raise ValueError(f"{source} contradicts itself: {error}") from None
    return config, head, tensors


def load_dflash(
    folder: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    num_target_layers: int,
) -> tuple[Any, DFlashConfig]:
    """Loads the parameters of a DFlash head, for `dflash_drafter`.

    It reads the formats of z-lab, of `speculators` and of DeepSpec.

    Args:
      folder: with config.json and model.safetensors.
      dtype: as in `load`.
      num_target_layers: of the target. A folder that names another number is refused.

    Returns:
      The parameters, and the configuration with that dtype.

    Raises:
      ValueError: if a file or a tensor is missing, unreadable or unsupported; the sentence names
        it.
    """
    config, _, tensors = open_dflash(folder, num_target_layers=num_target_layers)
    return load_params(config, tensors, _entries(config), dtype)


def save_dflash(
    folder: str | os.PathLike[str],
    params: Any,
    config: DFlashConfig,
    dtype: str = "bfloat16",
    *,
    verifier: str | None = None,
) -> None:
    """Saves a folder that `load_dflash` reads back, up to rounding to `dtype`.

    Args:
      folder: created if absent. Its config.json and model.safetensors are replaced, each after the
        new one is complete.
      params: of the head.
      config: of the head; its dtype is replaced by `dtype`.
      dtype: of the tensors on disk.
      verifier: the name of the target that the head was trained for, or None.

    Raises:
      ValueError: if the format has no room for the configuration.

    Example:
      >>> import tempfile
      >>> from specjax.models import TransformerConfig, build_dflash
      >>> layer = TransformerConfig(64, 16, 32, 2, 4, 2, 4, qk_norm=True)
      >>> config = DFlashConfig(layer, 64, taps=(1, 2), block_size=4, mask_token_id=63)
      >>> folder = tempfile.mkdtemp()
      >>> save_dflash(folder, build_dflash(config), config)
      >>> load_dflash(folder, "float32", num_target_layers=4)[1].taps
      (1, 2)
    """
    fields = {
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
    }
    write_head(
        folder,
        params,
        config,
        _entries(config),
        fields,
        architecture="DFlashSpeculator",
        dtype=dtype,
        verifier=verifier,
    )


def _integer(head: HeadFields, name: str) -> int:
    value = head.value(name)
    if type(value) is not int:
        raise ValueError(f"{head.source} has {name} {quote(value)}; it needs to be an integer.")
    return value


def _samples_from_anchor(head: HeadFields) -> bool:
    """Returns whether the first row drafts, too, as in DeepSpec's folders by default."""
    value = head.flag("sample_from_anchor")
    is_deep_spec = "Qwen3DSparkModel" in str(head.fields.get("architectures"))
    return is_deep_spec if value is None else value


def _entries(config: DFlashConfig) -> Iterator[WeightEntry]:
    """Yields the arrays of a head's parameters and their tensors.

    Args:
      config: of the head.
    """
    size = config.layer.hidden_size
    yield WeightEntry(("fc",), ("fc.weight",), ((size, len(config.taps) * size),), True)
    yield WeightEntry(("hidden_norm", "weight"), ("hidden_norm.weight",), ((size,),), False)
    for entry in decoder_entries(config):
        is_head = entry.path == ("head",)
        yield entry if is_head else entry._replace(path=("decoder", *entry.path))
