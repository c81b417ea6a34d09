"""Reads the folder of an EAGLE-3 head, in any of its formats."""

import dataclasses
import os
from collections.abc import Container, Iterator
from typing import Any

import jax
from jax.typing import DTypeLike

from specjax.file_io import quote
from specjax.models.heads.eagle3 import Eagle3Config
from specjax.models.heads.folder_kind import draft_kind, read_head_config
from specjax.models.heads.head_fields import (
    ANY,
    HeadFields,
    Known,
    check_num_target_layers,
    default_taps,
    read_head_fields,
    refuse_unknown,
)
from specjax.models.heads.head_tensors import HeadTensors
from specjax.models.hf.checkpoint import resolve_dtype
from specjax.models.hf.weight_map import WeightEntry, weight_entries

__all__ = ["eagle3_entries", "load_eagle3", "load_eagle3_config"]

_OLD_TAP_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_LAYER_KINDS = ("llama", "mistral", "ministral", "qwen2", "qwen3")
_EAGLE_CONFIG: Known = {
    "eagle_aux_hidden_state_layer_ids": ANY,
    "has_lm_head": ANY,  # The tensors say it.
    # How layers after the first differ, and how many more drafts one pass makes.
    "next_layer_regular": ANY,
    "parallel_draft_heads_num_layers": ANY,
    "parallel_draft_step": (1,),
    **dict.fromkeys(("causal", "is_causal"), (True,)),
    "use_aux_hidden_state": (True,),
    "use_input_layernorm_in_first_layer": (True,),
    "use_last_layernorm": (True,),
}
_FIELDS: Known = {
    **dict.fromkeys(("aux_hidden_state_layer_ids", "target_layer_ids", "eagle_config"), ANY),
    **dict.fromkeys(("draft_vocab_size", "target_hidden_size", "num_target_layers"), ANY),
    **dict.fromkeys(("bias", "fc_norm", "use_aux_norm", "logit_scale"), ANY),
    **dict.fromkeys(("norm_before_fc", "norm_before_residual", "norm_output"), ANY),
    "num_aux_hidden_states": ANY,  # As many as `fc` reads.
    **_EAGLE_CONFIG,
}


def load_eagle3_config(
    folder: str | os.PathLike[str], *, num_target_layers: int
) -> tuple[Eagle3Config, HeadFields]:
    """Reads config.json, and of the tensors which ones there are.

    Args:
      folder: of the head.
      num_target_layers: of the target: where config.json names no taps, they follow from it.

    Returns:
      The configuration with the dtype that the file names, and what else the file says.

    Raises:
      ValueError: if the folder is not that of an EAGLE-3 head, or asks for something unsupported.
    """
    return _read(folder, num_target_layers)[:2]


def load_eagle3(
    folder: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    num_target_layers: int,
) -> tuple[Any, Eagle3Config]:
    """Loads the parameters of an EAGLE-3 head, for `eagle3_drafter`.

    It reads the formats of SpecForge and SGLang, of `speculators` and of DeepSpec.

    Args:
      folder: with config.json and model.safetensors.
      dtype: as in `load`.
      num_target_layers: as in `load_eagle3_config`.

    Returns:
      The parameters, and the configuration with that dtype.

    Raises:
      ValueError: if a file or a tensor is missing, unreadable or unsupported; the sentence names
        it.
    """
    config, _, tensors = _read(folder, num_target_layers)
    layer = dataclasses.replace(config.layer, dtype=resolve_dtype(dtype, config.layer.dtype))
    config = dataclasses.replace(config, layer=layer)
    token_map = tensors.read_token_map(config.draft_vocab_size, layer.vocab_size)
    params = tensors.load(eagle3_entries(config, tensors), layer.dtype)
    if token_map is not None:
        params["token_map"] = jax.device_put(token_map)
    return params, config


def _read(
    folder: str | os.PathLike[str], num_target_layers: int
) -> tuple[Eagle3Config, HeadFields, HeadTensors]:
    kind = draft_kind(folder)
    if kind != "eagle3":
        raise ValueError(
            f"{folder} holds a {kind}; load_eagle3 reads the folder of an EAGLE-3 head."
        )
    fields, source = read_head_config(folder)
    head = read_head_fields(fields, source)
    refuse_unknown(fields, source, "an EAGLE-3 head", _FIELDS, {"eagle_config": _EAGLE_CONFIG})
    if head.layer_kind not in _LAYER_KINDS:
        raise ValueError(
            f"{source} has model_type {head.layer_kind!r}; the layer of an EAGLE-3 head is that of "
            f"{', '.join(map(repr, _LAYER_KINDS))}."
        )
    check_num_target_layers(fields.get("num_target_layers"), source, num_target_layers)
    tensors = HeadTensors(folder)
    if head.layer.num_hidden_layers != 1:
        raise ValueError(
            f"{head.source} has num_hidden_layers {head.layer.num_hidden_layers}; an EAGLE-3 head "
            "of 1 layer is supported."
        )
    taps = default_taps(num_target_layers) if head.taps is None else head.taps
    options = {name: _flag(head, name) for name in ("norm_before_fc", "norm_output")}
    try:
        config = Eagle3Config(
            layer=head.layer,
            target_hidden_size=head.target_hidden_size,
            draft_vocab_size=head.draft_vocab_size,
            taps=taps,
            num_speculative_tokens=head.num_speculative_tokens,
            fc_bias=_flag(head, "bias"),
            fc_norm=_flag(head, "fc_norm") or _flag(head, "use_aux_norm"),
            norm_before_residual=_norm_before_residual(head),
            has_embedding=_EMBEDDING in tensors,
            has_lm_head=_LM_HEAD in tensors,
            logit_scale=_logit_scale(head),
            **options,
        )
    except ValueError as error:
        raise ValueError(f"{head.source} contradicts itself: {error}") from None
    return config, head, tensors


def _flag(head: HeadFields, name: str) -> bool:
    value = head.fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{head.source} has {name} {quote(value)}; it needs to be true or false.")
    return bool(value)


def _norm_before_residual(head: HeadFields) -> bool:
    is_absent = head.fields.get("norm_before_residual") is None
    if is_absent and head.fields.get("speculators_model_type") is not None:
        raise ValueError(
            f"{head.source} has no norm_before_residual, of which `speculators` takes false and "
            "vLLM true; add the one that the head was trained with (its drafts are accepted more)."
        )
    return _flag(head, "norm_before_residual")


def _logit_scale(head: HeadFields) -> float:
    scale = head.fields.get("logit_scale")
    scale = 1.0 if scale is None else scale
    if type(scale) not in (int, float) or not 0 < scale < 2.0**127:
        raise ValueError(
            f"{head.source} has logit_scale {quote(scale)}; it needs to be a positive number."
        )
    return float(scale)


def eagle3_entries(config: Eagle3Config, names: Container[str] = ()) -> Iterator[WeightEntry]:
    """Yields the arrays of a head's parameters and their tensors.

    Args:
      config: of the head.
      names: of the tensors that a folder holds, where older names may stand for `fc_norm`.
    """
    layer, size, target = config.layer, config.layer.hidden_size, config.target_hidden_size
    width = len(config.taps) * target

    def vector(path: tuple[str | int, ...], name: str, length: int) -> WeightEntry:
        return WeightEntry(path, (name,), ((length,),), False)

    yield WeightEntry(("fc",), ("fc.weight",), ((size, width),), True)
    if config.fc_bias:
        yield vector(("fc_bias",), "fc.bias", size)
    if config.norm_before_fc:
        yield vector(("taps_norm", "weight"), "input_norm.weight", width)
    for n in range(len(config.taps) * config.fc_norm):
        name = f"fc_norm.{n}.weight"
        old = f"{_OLD_TAP_NORMS[n]}.weight" if n < len(_OLD_TAP_NORMS) else name
        found = old if name not in names and old in names else name
        yield vector(("tap_norms", n, "weight"), found, target)
    for entry in weight_entries(layer):
        if entry.path[0] != "layers":
            continue
        stored = tuple(name.removeprefix("model.") for name in entry.names)
        shapes = entry.shapes
        if entry.path[-1] == "qkv":
            shapes = tuple((out, 2 * size) for out, _ in shapes)
        yield entry._replace(path=("layer", *entry.path[2:]), names=stored, shapes=shapes)
    yield vector(("hidden_norm", "weight"), "layers.0.hidden_norm.weight", size)
    yield vector(("norm", "weight"), "norm.weight", size)
    if config.has_embedding:
        shape = ((layer.vocab_size, size),)
        yield WeightEntry(("embedding",), (_EMBEDDING,), shape, False)
    if config.has_lm_head:
        shape = ((config.draft_vocab_size, size),)
        yield WeightEntry(("head",), (_LM_HEAD,), shape, False)
