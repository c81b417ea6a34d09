"""Reads the folder of a DFlash head, in any of its formats."""

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.typing import DTypeLike

from specjax.models.heads.dflash import DFlashConfig
from specjax.models.heads.folder_kind import draft_kind, read_head_config
from specjax.models.heads.head_fields import HeadFields, read_head_fields
from specjax.models.heads.head_tensors import HeadTensors
from specjax.models.hf.checkpoint import resolve_dtype
from specjax.models.hf.weight_map import WeightEntry, weight_entries

__all__ = ["dflash_entries", "load_dflash", "load_dflash_config"]

_EMBEDDING, _LM_HEAD = "embed_tokens.weight", "lm_head.weight"
# Fields that would change what is drafted, and the values that change nothing.
_NEUTRAL = {
    "is_causal": False,
    "enable_confidence_head": False,
    "markov_rank": 0,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
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
    inner = fields.get("dflash_config")
    places = [fields, inner] if isinstance(inner, dict) else [fields]
    _refuse_variants(places, source)
    head = read_head_fields({n: x for n, x in fields.items() if n not in _NEUTRAL}, source)
    trained_layers = fields.get("num_target_layers")
    if trained_layers not in (None, num_target_layers):
        raise ValueError(
            f"{source} has num_target_layers {trained_layers} and the target has "
            f"{num_target_layers} layers; use a head that was trained for this target."
        )
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
            layer=_layer(head, source),
            draft_vocab_size=head.draft_vocab_size,
            taps=head.taps,
            block_size=_integer("block_size", places, source),
            mask_token_id=_integer("mask_token_id", places, source),
            sample_from_anchor=_samples_from_anchor(fields, source),
            num_speculative_tokens=head.num_speculative_tokens,
            has_embedding=_EMBEDDING in tensors,
            has_lm_head=_LM_HEAD in tensors,
        )
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source} contradicts itself: {error}") from None
    return config, head, tensors


def _refuse_variants(places: list[dict[str, Any]], source: str) -> None:
    """Refuses a folder of another kind, such as DSpark, that has what a DFlash head has not."""
    for place in places:
        for name, neutral in _NEUTRAL.items():
            value = place.get(name)
            if value is None or (value == neutral and type(value) is not bool) or value is neutral:
                continue
            raise ValueError(
                f"{source} has {name} {value!r}, which a DFlash head has not; it needs to be "
                f"{'null' if neutral is None else repr(neutral)} or absent."
            )


def _layer(head: HeadFields, source: str) -> Any:
    """Returns the configuration of the layers: those of Qwen 3, also where they name Llama."""
    inner = head.fields.get("transformer_layer_config") or head.fields
    kind = inner.get("model_type", "qwen3")
    if kind not in ("qwen3", "llama"):
        raise ValueError(
            f"{source} has model_type {kind!r}; the layers of a DFlash head are those of 'qwen3'."
        )
    return dataclasses.replace(head.layer, qk_norm=True)


def _integer(name: str, places: list[dict[str, Any]], source: str) -> int:
    value = next((place[name] for place in places if place.get(name) is not None), None)
    if type(value) is not int:
        raise ValueError(f"{source} has {name} {value!r}; it needs to be an integer.")
    return value


def _samples_from_anchor(fields: dict[str, Any], source: str) -> bool:
    """Returns whether the first row drafts, too: in DeepSpec's folders without their saying so."""
    value = fields.get("sample_from_anchor")
    if value is not None and not isinstance(value, bool):
        raise ValueError(
            f"{source} has sample_from_anchor {value!r}; it needs to be true or false."
        )
    is_deep_spec = "Qwen3DSparkModel" in (fields.get("architectures") or ())
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
