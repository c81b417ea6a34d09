"""The folder of a DFlash head: read in any format, written in that of `speculators`."""

import dataclasses
import os
from collections.abc import Container, Iterator
from typing import Any

from jax.typing import DTypeLike

from specjax.file_io import JsonObject
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.head_fields import ANY, FLAG, SIZE, HeadFields, Known, any_of
from specjax.models.heads.head_folder import HeadFormat, head_entries, load_head, save_head
from specjax.models.hf.config_fields import Field
from specjax.models.hf.weight_map import WeightEntry, vector_entry

__all__ = ["DFLASH", "load_dflash", "save_dflash"]

_INTEGER = Field(lambda v: type(v) is int, "an integer")
# At the top level or in `dflash_config`.
_DFLASH_CONFIG: Known = {
    **any_of("block_size mask_token_id sample_from_anchor num_target_layers target_layer_ids"),
    **any_of("target_hidden_size"),
    # Options of DSpark's additions; `markov_rank` and `enable_confidence_head` are refused below.
    **any_of("confidence_head_alpha confidence_head_with_markov markov_head_type"),
    **dict.fromkeys(("causal", "causal_head", "is_causal"), (False,)),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "projector_type": ("dflash",),
}
_FIELDS: Known = {
    **_DFLASH_CONFIG,
    **any_of("aux_hidden_state_layer_ids dflash_config draft_vocab_size"),
    "sliding_window_non_causal": ANY,  # Layers with a window are refused.
}


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
    return load_head(DFLASH, folder, dtype, num_target_layers)


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
    save_head(DFLASH, folder, params, config, dtype, verifier)


def _read_config(head: HeadFields, num_target_layers: int, **tables: bool) -> DFlashConfig:
    """Returns the configuration of a head from the fields of its config.json."""
    source, layer = head.source, head.layer
    if head.taps is None:
        raise ValueError(
            f"{source} names no target_layer_ids and no aux_hidden_state_layer_ids; add those that "
            "the head was trained with."
        )
    size = head.read("target_hidden_size", SIZE)
    if size not in (None, layer.hidden_size):
        raise ValueError(
            f"{source} has target_hidden_size {size} and hidden_size {layer.hidden_size}; a DFlash "
            "head needs its target's size."
        )
    return DFlashConfig(
        # A DFlash head's layers are Qwen 3's, even if config.json names `llama`.
        dataclasses.replace(layer, qk_norm=True),
        head.draft_vocab_size,
        head.taps,
        head.read("block_size", _INTEGER),
        head.read("mask_token_id", _INTEGER),
        _samples_from_anchor(head),
        head.num_speculative_tokens,
        **tables,
    )


def _samples_from_anchor(head: HeadFields) -> bool:
    """Returns whether the first row drafts, too, as in DeepSpec's folders by default."""
    value = head.read("sample_from_anchor", FLAG)
    is_deep_spec = "Qwen3DSparkModel" in str(head.fields.get("architectures"))
    return is_deep_spec if value is None else value


def _write_config(config: DFlashConfig) -> JsonObject:
    """Returns the fields of config.json that only this kind of head has."""
    return {
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
    }


def _entries(config: DFlashConfig, names: Container[str]) -> Iterator[WeightEntry]:
    """Yields the arrays of a head's parameters and their tensors."""
    size = config.layer.hidden_size
    yield vector_entry(("hidden_norm", "weight"), "hidden_norm.weight", size)
    for entry in head_entries(config):
        is_outer = entry.path[0] in ("fc", "head")
        yield entry if is_outer else entry._replace(path=("decoder", *entry.path))


DFLASH = HeadFormat(
    "dflash",
    "a DFlash head",
    "DFlashSpeculator",
    known=_FIELDS,
    nested="dflash_config",
    known_nested=_DFLASH_CONFIG,
    layer_kinds=("qwen3", "llama"),
    read_config=_read_config,
    write_config=_write_config,
    entries=_entries,
)
"""The folder of a DFlash head."""
