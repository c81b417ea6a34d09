"""The folders of EAGLE-3 and DFlash heads: read in any format, written in that of `speculators`.

Only that format defines the taps without ambiguity.
"""

import dataclasses
import os
from collections.abc import Container, Iterator
from typing import Any

from jax.typing import DTypeLike

from specjax.file_io import JsonObject
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.eagle3 import Eagle3Config
from specjax.models.heads.head_fields import (
    ANY,
    FLAG,
    SIZE,
    HeadFields,
    Known,
    any_of,
    default_taps,
)
from specjax.models.heads.head_folder import HeadFormat, head_entries, load_head, save_head
from specjax.models.hf.config_fields import POSITIVE, Field
from specjax.models.hf.weight_map import WeightEntry, vector_entry

_OLD_TAP_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_FLAGS = ("fc_norm", "norm_before_fc", "norm_before_residual", "norm_output")
_EAGLE_CONFIG: Known = {
    "eagle_aux_hidden_state_layer_ids": ANY,
    "has_lm_head": ANY,  # The tensors decide.
    # Differences of layers after the first, and further drafts per pass.
    **any_of("next_layer_regular parallel_draft_heads_num_layers"),
    "parallel_draft_step": (1,),
    **dict.fromkeys(("causal", "is_causal"), (True,)),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
}
_EAGLE3_FIELDS: Known = {
    **any_of("aux_hidden_state_layer_ids target_layer_ids eagle_config draft_vocab_size"),
    **any_of("target_hidden_size num_target_layers bias fc_norm use_aux_norm logit_scale"),
    **any_of("norm_before_fc norm_before_residual norm_output"),
    "num_aux_hidden_states": ANY,  # `fc` decides their number.
    **_EAGLE_CONFIG,
}
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
_DFLASH_FIELDS: Known = {
    **_DFLASH_CONFIG,
    **any_of("aux_hidden_state_layer_ids dflash_config draft_vocab_size"),
    "sliding_window_non_causal": ANY,  # Layers with a window are refused.
}


def load_eagle3(
    folder: str | os.PathLike[str], dtype: DTypeLike | None = None, *, num_target_layers: int
) -> tuple[Any, Eagle3Config]:
    """Loads the parameters of an EAGLE-3 head, for `eagle3_drafter`.

    It reads the formats of SpecForge and SGLang, of `speculators` and of DeepSpec.

    Args:
      folder: with config.json and model.safetensors.
      dtype: as in `load`.
      num_target_layers: of the target; decides the taps if config.json names none.

    Returns:
      The parameters, and the configuration with that dtype.

    Raises:
      ValueError: if a file or a tensor is missing, unreadable or unsupported; the sentence names
        it.
    """
    return load_head(EAGLE3, folder, dtype, num_target_layers)


def save_eagle3(
    folder: str | os.PathLike[str],
    params: Any,
    config: Eagle3Config,
    dtype: str = "bfloat16",
    *,
    verifier: str | None = None,
) -> None:
    """Saves a folder that `load_eagle3` reads back, up to rounding to `dtype`.

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
      >>> from specjax.models import TransformerConfig, build_eagle3
      >>> layer = TransformerConfig(64, 16, 32, 1, 4, 2, 4)
      >>> config, folder = Eagle3Config(layer, 16, 64, taps=(1, 2, 4)), tempfile.mkdtemp()
      >>> save_eagle3(folder, build_eagle3(config), config)
      >>> load_eagle3(folder, "float32", num_target_layers=4)[1].taps
      (1, 2, 4)
    """
    save_head(EAGLE3, folder, params, config, dtype, verifier)


def _read_eagle3(head: HeadFields, num_target_layers: int, **tables: bool) -> Eagle3Config:
    """Returns the configuration of a head from the fields of its config.json."""
    layer = head.layer
    if layer.num_hidden_layers != 1:
        raise ValueError(
            f"{head.source} has num_hidden_layers {layer.num_hidden_layers}; an EAGLE-3 head of 1 "
            "layer is supported."
        )
    flags = {name: head.read(name, FLAG) for name in (*_FLAGS, "use_aux_norm", "bias")}
    is_speculators = head.fields.get("speculators_model_type") is not None
    if flags["norm_before_residual"] is None and is_speculators:
        raise ValueError(
            f"{head.source} has no norm_before_residual, of which `speculators` takes false and "
            "vLLM true; add the one that the head was trained with (its drafts are accepted more)."
        )
    scale = head.fields.get("logit_scale")
    scale = 1.0 if scale is None else scale
    return Eagle3Config(
        layer,
        head.target_hidden_size,
        head.draft_vocab_size,
        default_taps(num_target_layers) if head.taps is None else head.taps,
        head.num_speculative_tokens,
        fc_bias=bool(flags["bias"]),
        fc_norm=bool(flags["fc_norm"] or flags["use_aux_norm"]),
        norm_before_fc=bool(flags["norm_before_fc"]),
        norm_before_residual=bool(flags["norm_before_residual"]),
        norm_output=bool(flags["norm_output"]),
        logit_scale=float(POSITIVE.check("logit_scale", scale, head.source)),
        **tables,
    )


def _write_eagle3(config: Eagle3Config) -> JsonObject:
    """Returns the fields of config.json that only this kind of head has."""
    if config.fc_bias or config.logit_scale != 1.0:
        raise ValueError(
            f"the head has fc_bias {config.fc_bias} and logit_scale {config.logit_scale}; the "
            "format of speculators has neither."
        )
    size = config.target_hidden_size
    return {
        "target_hidden_size": None if size == config.layer.hidden_size else size,
        "eagle_aux_hidden_state_layer_ids": list(config.taps),
        **{name: getattr(config, name) for name in _FLAGS},
    }


def _eagle3_entries(config: Eagle3Config, names: Container[str]) -> Iterator[WeightEntry]:
    """Yields the arrays of a head's parameters and their tensors.

    Args:
      config: of the head.
      names: of the folder's tensors; `fc_norm` may have older names there.
    """
    size, target = config.layer.hidden_size, config.target_hidden_size
    if config.fc_bias:
        yield vector_entry(("fc_bias",), "fc.bias", size)
    if config.norm_before_fc:
        width = len(config.taps) * target
        yield vector_entry(("taps_norm", "weight"), "input_norm.weight", width)
    for n in range(len(config.taps) * config.fc_norm):
        name = f"fc_norm.{n}.weight"
        old = f"{_OLD_TAP_NORMS[n]}.weight" if n < len(_OLD_TAP_NORMS) else name
        stored = old if name not in names and old in names else name
        yield vector_entry(("tap_norms", n, "weight"), stored, target)
    yield vector_entry(("hidden_norm", "weight"), "layers.0.hidden_norm.weight", size)
    for entry in head_entries(config):
        if entry.path[-1] == "qkv":
            # Attention reads the token and the state.
            entry = entry._replace(shapes=tuple((out, 2 * size) for out, _ in entry.shapes))
        is_layer = entry.path[0] == "layers"
        yield entry._replace(path=("layer", *entry.path[2:])) if is_layer else entry


EAGLE3 = HeadFormat(
    "eagle3",
    "an EAGLE-3 head",
    "Eagle3Speculator",
    known=_EAGLE3_FIELDS,
    nested="eagle_config",
    known_nested=_EAGLE_CONFIG,
    layer_kinds=("llama", "mistral", "ministral", "qwen2", "qwen3"),
    read_config=_read_eagle3,
    write_config=_write_eagle3,
    entries=_eagle3_entries,
)
"""The folder of an EAGLE-3 head."""


def load_dflash(
    folder: str | os.PathLike[str], dtype: DTypeLike | None = None, *, num_target_layers: int
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


def _read_dflash(head: HeadFields, num_target_layers: int, **tables: bool) -> DFlashConfig:
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


def _write_dflash(config: DFlashConfig) -> JsonObject:
    """Returns the fields of config.json that only this kind of head has."""
    return {
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
    }


def _dflash_entries(config: DFlashConfig, names: Container[str]) -> Iterator[WeightEntry]:
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
    known=_DFLASH_FIELDS,
    nested="dflash_config",
    known_nested=_DFLASH_CONFIG,
    layer_kinds=("qwen3", "llama"),
    read_config=_read_dflash,
    write_config=_write_dflash,
    entries=_dflash_entries,
)
"""The folder of a DFlash head."""
