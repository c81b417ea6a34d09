"""Reads the folder of a DFlash head, in any of its formats."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.typing import DTypeLike

from specjax.file_io import quote
from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.folder_kind import draft_kind, read_head_config
from specjax.models.heads.head_fields import (
    ANY,
    HeadFields,
    Known,
    check_num_target_layers,
    read_head_fields,
    refuse_unknown,
)
from specjax.models.heads.head_tensors import HeadTensors
from specjax.models.hf.checkpoint import resolve_dtype
from specjax.models.hf.weight_map import WeightEntry, weight_entries

__all__ = ["dflash_entries", "load_dflash", "load_dflash_config"]

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
_LAYER_KINDS = ("qwen3", "llama")
# At the top level or in `dflash_config`.
_DFLASH_CONFIG: Known = {
    **dict.fromkeys(("block_size", "mask_token_id", "sample_from_anchor"), ANY),
    **dict.fromkeys(("num_target_layers", "target_layer_ids"), ANY),
    # Of a head for more than blocks, where `markov_rank` and `enable_confidence_head` are refused.
    **dict.fromkeys(("confidence_head_alpha", "confidence_head_with_markov"), ANY),
    "markov_head_type": ANY,
    **dict.fromkeys(("causal", "causal_head", "is_causal"), (False,)),
    "input_embedding_scale": (1.0,),
    "output_multiplier": (1.0,),
    "projector_type": ("dflash",),
}
_FIELDS: Known = {
    **_DFLASH_CONFIG,
    **dict.fromkeys(("aux_hidden_state_layer_ids", "dflash_config", "draft_vocab_size"), ANY),
    "target_hidden_size": ANY,
    "sliding_window_non_causal": ANY,  # Layers with a window are refused.
}


def load_dflash_config(
    folder: str | os.PathLike[str], *, num_target_layers: int
) -> tuple[DFlashConfig, HeadFields]:
    """Reads config.json, and of the tensors which ones there are.

    Args:
      folder: of the head.
      num_target_layers: of the target. A folder may name another number, and is refused then.

    Returns:
      The configuration with the dtype that the file names, and what else the file says.

    Raises:
      ValueError: if the folder is not that of a DFlash head, or asks for something unsupported.
    """
    return _read(folder, num_target_layers)[:2]


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
      num_target_layers: as in `load_dflash_config`.

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
    params = tensors.load(dflash_entries(config), layer.dtype)
    if token_map is not None:
        params["token_map"] = jax.device_put(token_map)
    return params, config


def _read(
    folder: str | os.PathLike[str], num_target_layers: int
) -> tuple[DFlashConfig, HeadFields, HeadTensors]:
    kind = draft_kind(folder)
    if kind != "dflash":
        raise ValueError(f"{folder} holds a {kind}; load_dflash reads the folder of a DFlash head.")
    fields, source = read_head_config(folder)
    # A target's layers are causal.
    head = read_head_fields({n: x for n, x in fields.items() if n != "is_causal"}, source)
    inner = {"target_hidden_size": (head.layer.hidden_size,), **_DFLASH_CONFIG}
    refuse_unknown(fields, source, "a DFlash head", _FIELDS, {"dflash_config": inner})
    if head.layer_kind not in _LAYER_KINDS:
        raise ValueError(
            f"{source} has model_type {head.layer_kind!r}; the layers of a DFlash head are those "
            "of 'qwen3'."
        )
    places = [fields, fields.get("dflash_config") or {}]
    told_layers = _value("num_target_layers", places, source)
    check_num_target_layers(told_layers, source, num_target_layers)
    if head.taps is None:
        raise ValueError(
            f"{source} names no target_layer_ids and no aux_hidden_state_layer_ids; add those that "
            "the head was trained with."
        )
    if head.target_hidden_size != head.layer.hidden_size:
        raise ValueError(
            f"{source} has target_hidden_size {head.target_hidden_size} and hidden_size "
            f"{head.layer.hidden_size}; a DFlash head needs its target's size."
        )
    tensors = HeadTensors(folder)
    try:
        config = DFlashConfig(
            # A DFlash head's layers are Qwen 3's, even if config.json names `llama`.
            layer=dataclasses.replace(head.layer, qk_norm=True),
            draft_vocab_size=head.draft_vocab_size,
            taps=head.taps,
            block_size=_integer("block_size", places, source),
            mask_token_id=_integer("mask_token_id", places, source),
            sample_from_anchor=_samples_from_anchor(places, source),
            num_speculative_tokens=head.num_speculative_tokens,
            has_embedding=_EMBEDDING in tensors,
            has_lm_head=_LM_HEAD in tensors,
        )
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source} contradicts itself: {error}") from None
    return config, head, tensors


def _value(name: str, places: list[dict[str, Any]], source: str) -> Any:
    """Returns a field that stands in one of two places, or alike in both; None if in neither."""
    values = [place[name] for place in places if place.get(name) is not None]
    if len(values) == 2 and values[0] != values[1]:
        both = " and in dflash_config ".join(map(quote, values))
        raise ValueError(f"{source} has {name} {both}; loaders differ in which counts: remove one.")
    return values[0] if values else None


def _integer(name: str, places: list[dict[str, Any]], source: str) -> int:
    value = _value(name, places, source)
    if type(value) is not int:
        raise ValueError(f"{source} has {name} {quote(value)}; it needs to be an integer.")
    return value


def _samples_from_anchor(places: list[dict[str, Any]], source: str) -> bool:
    """Returns whether the first row drafts, too: in DeepSpec's folders without their saying so."""
    value = _value("sample_from_anchor", places, source)
    if value is not None and not isinstance(value, bool):
        raise ValueError(
            f"{source} has sample_from_anchor {quote(value)}; it needs to be true or false."
        )
    is_deep_spec = "Qwen3DSparkModel" in str(places[0].get("architectures"))
    return is_deep_spec if value is None else value


def dflash_entries(config: DFlashConfig) -> Iterator[WeightEntry]:
    """Yields the arrays of a head's parameters and their tensors.

    Args:
      config: of the head.
    """
    layer, size = config.layer, config.layer.hidden_size
    yield WeightEntry(("fc",), ("fc.weight",), ((size, len(config.taps) * size),), True)
    yield WeightEntry(("hidden_norm", "weight"), ("hidden_norm.weight",), ((size,),), False)
    decoder = dataclasses.replace(layer, tie_word_embeddings=True)
    for entry in weight_entries(decoder):
        if entry.path == ("embedding",) and not config.has_embedding:
            continue
        names = tuple(name.removeprefix("model.") for name in entry.names)
        yield entry._replace(path=("decoder", *entry.path), names=names)
    if config.has_lm_head:
        yield WeightEntry(("head",), (_LM_HEAD,), ((config.draft_vocab_size, size),), False)
