"""`config.json` of each supported family: read into a `TransformerConfig`, and written."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from specjax.file_io import JsonObject, quote
from specjax.models.decoder.config import TransformerConfig
from specjax.models.hf.config_fields import SIZES, read_field
from specjax.models.hf.folder import find_member, read_json_object
from specjax.models.hf.rope_fields import read_local_rope, read_rope

_Fields = JsonObject
_CONTENT = "the fields of a configuration"
_COPIED_FIELDS = (
    *SIZES,
    *("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "bos_token_id"),
)

# Suffixes of the names of architectures that predict the next token.
_LM_HEAD_SUFFIXES = ("ForCausalLM", "Gemma3ForConditionalGeneration")
# Fields that change the logits of some family, and the value besides null that changes nothing.
# Fields that a family reads or that are not listed pass. A list passes if each element does.
_ABSENT = """
    attention_chunk_size interleaved_sliding_window sliding_window sliding_window_pattern
    rope_local_base_freq attention_multiplier attn_logit_softcapping clip_qkv query_pre_attn_scalar
    final_logit_softcapping logits_soft_cap
"""
_OFF = """
    is_encoder_decoder add_cross_attention use_bidirectional_attention alibi rope_interleave
    rope_interleaved use_mrope attention_bias attn_temperature_tuning qk_layernorm use_qk_norm
    mlp_bias parallel_attn use_parallel_residual
"""
_ONE = """
    no_rope_layers partial_rotary_factor rotary_pct embedding_multiplier lm_head_multiplier
    logit_scale logits_scaling residual_multiplier
"""
_HARMLESS_VALUES: dict[str, tuple[Any, ...]] = {
    "layer_types": (None, "full_attention"),
    "mlp_layer_types": (None, "dense"),
    "per_layer_config": (None, {}),
    "is_causal": (True,),
    "no_rope_layer_interval": (None, 0),
    **dict.fromkeys(_ABSENT.split(), (None,)),
    **dict.fromkeys(_OFF.split(), (None, False)),
    **dict.fromkeys(_ONE.split(), (None, 1)),
}
CHECKED_FIELDS = tuple(_HARMLESS_VALUES)


class _Family(NamedTuple):
    """Properties of a `model_type` that are not in its `config.json`.

    Attributes:
      architecture: its class in transformers.
      defaults: values of absent fields in transformers, where they differ from Llama's.
      implied: fields of `TransformerConfig` that the architecture fixes.
      extra_fields: fields read for this family and refused for others.
      is_gemma: names the activation `hidden_activation`, scales embeddings and queries, has layers
        without the window by `sliding_window_pattern`.
      local_rope: whether layers with a window have other rotary frequencies.
    """

    architecture: str
    defaults: _Fields
    implied: _Fields
    extra_fields: tuple[str, ...] = ()
    is_gemma: bool = False
    local_rope: bool = False


_QWEN = {"sliding_window": 4096, "max_position_embeddings": 32768, "num_key_value_heads": 32}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_GEMMA_2 = _GEMMA | {
    "max_position_embeddings": 8192,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA_3 = _GEMMA | {
    "max_position_embeddings": 131072,
    "sliding_window_pattern": 6,
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "rope_theta": 1e6,
}
_GEMMA_IMPLIED = {"sandwich_norms": True, "norm_offset": 1.0}
_WINDOW_FIELDS = ("sliding_window", "layer_types")
_WINDOW_SWITCH = "use_sliding_window"
_BIAS = "attention_bias"
_QWEN_FIELDS = (*_WINDOW_FIELDS, _WINDOW_SWITCH, _BIAS)
_SCALE_FIELDS = ("query_pre_attn_scalar", "final_logit_softcapping")
_MISTRAL = _Family(
    "MistralForCausalLM",
    {
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    },
    {},
    extra_fields=_WINDOW_FIELDS,
)
# In order of preference: the first family that supports a configuration writes it.
_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", {}, {}, extra_fields=(_BIAS,)),
    # In transformers, a Ministral is a Mistral with `layer_types`; neither has biases.
    "mistral": _MISTRAL,
    "ministral": _MISTRAL._replace(architecture="MinistralForCausalLM"),
    "qwen2": _Family(
        "Qwen2ForCausalLM", _QWEN, {"qkv_bias": True, "out_bias": False}, _QWEN_FIELDS
    ),
    "qwen3": _Family(
        "Qwen3ForCausalLM", _QWEN | {"head_dim": 128}, {"qk_norm": True}, _QWEN_FIELDS
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        _GEMMA_2,
        _GEMMA_IMPLIED,
        extra_fields=(*_WINDOW_FIELDS, *_SCALE_FIELDS, _BIAS, "attn_logit_softcapping"),
        is_gemma=True,
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        _GEMMA_3,
        _GEMMA_IMPLIED | {"qk_norm": True},
        extra_fields=(
            *_WINDOW_FIELDS,
            *_SCALE_FIELDS,
            _BIAS,
            "sliding_window_pattern",
            "rope_local_base_freq",
        ),
        is_gemma=True,
        local_rope=True,
    ),
}
# Fields of a multimodal config.json that describe its text model.
_OUTER_FIELDS = (
    *("architectures", "bos_token_id", "eos_token_id", "dtype", "torch_dtype"),
    *("tie_word_embeddings", "quantization_config"),
)
_WRITTEN_FIELDS = (*_COPIED_FIELDS, "num_key_value_heads", "head_dim", "rope_theta")


def refuse_unread(
    fields: JsonObject, source: str, extra_fields: Collection[str], defaults: Mapping[str, Any]
) -> None:
    """Refuses fields that change the logits and that the family does not read.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.
      extra_fields: names of the fields that the family reads.
      defaults: values that an absent field has; they pass as well.

    Raises:
      ValueError: if there is such a field, if weights are quantised, or if the architecture does
        not predict the next token.

    Example:
      >>> refuse_unread({"model_type": "llama", "logit_scale": 1.0}, "config.json", (), {})
      >>> refuse_unread({"model_type": "llama", "logit_scale": 0.5}, "config.json", (), {})
      Traceback (most recent call last):
        ...
      ValueError: config.json has logit_scale 0.5, which changes the logits and is not read for \
model_type 'llama'; it needs to be 1 or absent.
    """
    refuse_quantised(fields, source)
    _check_lm_head(fields.get("architectures"), source)
    window_is_off = fields.get("use_sliding_window") is False
    for name, harmless in _HARMLESS_VALUES.items():
        is_read = name in extra_fields or (name == "sliding_window" and window_is_off)
        allowed = (*harmless, defaults[name]) if name in defaults else harmless
        if name in fields and not is_read and not _is_allowed(fields[name], allowed):
            raise ValueError(
                f"{source} has {name} {quote(fields[name])}, which changes the logits and is "
                f"not read for model_type {fields['model_type']!r}; it needs to be "
                f"{'null' if allowed[-1] is None else repr(allowed[-1])} or absent."
            )


def _is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    return value in allowed or (isinstance(value, list) and all(v in allowed for v in value))


def refuse_quantised(fields: JsonObject, source: str) -> None:
    """Refuses a folder whose weights are quantised."""
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"{source} has a quantization_config with quant_method {quote(method)}; "
            "quantised weights are not supported; use a folder with weights in a float dtype."
        )


def _check_lm_head(architectures: Any, source: str) -> None:
    # One architecture that predicts the next token is enough.
    names = architectures if isinstance(architectures, list) else [architectures]
    named = (name for name in names if isinstance(name, str))
    if architectures in (None, []) or any(name.endswith(_LM_HEAD_SUFFIXES) for name in named):
        return
    raise ValueError(
        f"{source} has architectures {quote(architectures)}; a model needs a head for "
        f"the next token, such as 'LlamaForCausalLM' has it: embeddings, classifiers "
        "and reward models have none."
    )


def read_fields(fields: JsonObject, source: str = "config.json") -> TransformerConfig:
    """Returns the configuration that a `config.json` of transformers 4 or 5 describes.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.

    Raises:
      ValueError: if a field is missing, has a wrong type, or asks for something unsupported.

    Example:
      >>> config = read_fields({
      ...     "model_type": "mistral", "vocab_size": 64, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
      ...     "num_key_value_heads": 2, "sliding_window": 8})
      >>> config.head_dim, config.layer_windows
      (4, (8, 8))
    """
    is_multimodal = fields.get("model_type") == "gemma3"
    if is_multimodal:
        text = read_field("text_config", fields, source)
        outer = {name: fields[name] for name in _OUTER_FIELDS if fields.get(name) is not None}
        fields = {"model_type": "gemma3_text"} | text | outer
    model_type = fields.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        names = ", ".join(map(repr, _FAMILIES))
        raise ValueError(
            f"{source} has model_type {quote(model_type)}; it needs to be one of "
            f"{names}, or 'gemma3', whose text model is loaded."
        )
    # The multimodal model ignores this field of its text model.
    extra_fields = [
        name
        for name in family.extra_fields
        if not (is_multimodal and name == "final_logit_softcapping")
    ]
    refuse_unread(fields, source, extra_fields, family.defaults)
    merged = family.defaults | fields
    theta, scaling = read_rope(merged, source, family.local_rope)
    heads = read_field("num_attention_heads", merged, source)
    dtypes = (read_field(name, merged, source) for name in ("dtype", "torch_dtype"))
    values = {name: read_field(name, merged, source) for name in _COPIED_FIELDS}
    head_dim = read_field("head_dim", merged, source)
    bias = read_field(_BIAS, merged, source)
    implied = {"qkv_bias": bias, "out_bias": bias} | family.implied
    implied |= _gemma_fields(merged, source) if family.is_gemma else {}
    activation = "hidden_activation" if family.is_gemma else "hidden_act"
    try:
        return TransformerConfig(
            **values,
            **implied,
            num_key_value_heads=read_field("num_key_value_heads", merged, source) or heads,
            head_dim=head_dim or max(1, values["hidden_size"] // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            local_rope_theta=read_local_rope(merged, source) if family.local_rope else None,
            layer_windows=_layer_windows(merged, family, source),
            hidden_act=read_field(activation, merged, source),
            eos_token_ids=_eos_token_ids(merged, source) or (),
            dtype=next(filter(None, dtypes), "float32"),
        )
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source} contradicts itself: {error}") from None


def _eos_token_ids(fields: _Fields, source: str) -> tuple[int, ...] | None:
    eos = read_field("eos_token_id", fields, source)
    return tuple(eos) if isinstance(eos, list) else None if eos is None else (eos,)


def _gemma_fields(fields: _Fields, source: str) -> _Fields:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    attention, logits = (read_field(name, fields, source) for name in names)
    return {
        "embedding_scale": read_field("hidden_size", fields, source) ** 0.5,
        "query_scale": read_field("query_pre_attn_scalar", fields, source) ** -0.5,
        "attention_softcap": attention,
        "logit_softcap": logits,
    }


def _layer_windows(fields: _Fields, family: _Family, source: str) -> tuple[int | None, ...]:
    if "sliding_window" not in family.extra_fields:
        return ()
    window = read_field("sliding_window", fields, source)
    is_on = read_field(_WINDOW_SWITCH, fields, source)
    layers = read_field("num_hidden_layers", fields, source)
    kinds = read_field("layer_types", fields, source)
    has_switch = _WINDOW_SWITCH in family.extra_fields
    if window is not None and not is_on and not has_switch:
        raise ValueError(
            f"{source} has use_sliding_window False and sliding_window {window}; "
            f"model_type {fields['model_type']!r} has no such switch; set sliding_window to "
            "null for none."
        )
    window = window if is_on else None
    first = read_field("max_window_layers", fields, source) if has_switch else 0
    if kinds is None and family.is_gemma:
        pattern = read_field("sliding_window_pattern", fields, source)
        has_window = [bool((layer + 1) % pattern) for layer in range(layers)]
    elif kinds is None:
        has_window = [window is not None and layer >= first for layer in range(layers)]
    elif len(kinds) != layers:
        raise ValueError(
            f"{source} has {len(kinds)} layer_types; it needs one for each of its {layers} layers."
        )
    else:
        has_window = [kind == "sliding_attention" for kind in kinds]
    if any(has_window) and window is None:
        raise ValueError(
            f"{source} has layers with sliding attention; it needs sliding_window, their size."
        )
    return tuple(window if is_local else None for is_local in has_window) if any(has_window) else ()


def load_config(folder: str | os.PathLike[str]) -> TransformerConfig:
    """Reads `config.json`; EOS tokens come from `generation_config.json` if there is one.

    Args:
      folder: a Hugging Face folder of a supported family.

    Returns:
      The configuration, with the dtype that the file names.

    Raises:
      ValueError: if a file is missing or unreadable, or asks for something unsupported.

    Example:
      >>> from specjax.models import pretrained_folder
      >>> load_config(pretrained_folder("draft")).vocab_size
      4096
    """
    path = find_member(folder, "config.json")
    config = read_fields(read_json_object(path, _CONTENT), str(path))
    # Chat models name the token that ends a turn there, often only there.
    generation_config = path.with_name("generation_config.json")
    if not generation_config.is_file():
        return config
    fields = read_json_object(generation_config, _CONTENT)
    eos_token_ids = _eos_token_ids(fields, str(generation_config))
    if eos_token_ids is None:
        return config
    return dataclasses.replace(config, eos_token_ids=eos_token_ids)


def write_fields(config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a `config.json` that `read_fields` reads back to `config`.

    Args:
      config: of the model.

    Raises:
      ValueError: if no supported family has this configuration.

    Example:
      >>> write_fields(TransformerConfig(64, 16, 32, 2, 4, 2, 4, qk_norm=True))["model_type"]
      'qwen3'
    """
    for kind in _FAMILIES:
        fields = _llama_fields(config, kind)
        if kind != "llama":
            fields |= _other_fields(config)
        if kind == "mistral":
            # With `layer_types`, transformers would take it for a Ministral.
            del fields["layer_types"]
        try:
            if read_fields(fields) == config:
                return fields
        except ValueError:
            continue
    raise ValueError(
        "no supported family has this combination of features; it needs to be one that "
        f"{' or '.join(_FAMILIES)} has."
    )


def _llama_fields(config: TransformerConfig, kind: str) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    return {name: getattr(config, name) for name in _WRITTEN_FIELDS} | {
        "architectures": [_FAMILIES[kind].architecture],
        "model_type": kind,
        "attention_bias": config.out_bias,
        "hidden_act": config.hidden_act,
        "mlp_bias": False,
        "rope_scaling": _rope_scaling_fields(config),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": config.dtype,
    }


def _rope_scaling_fields(config: TransformerConfig) -> dict[str, Any] | None:
    if config.rope_scaling is None:
        return None
    scaling = config.rope_scaling._asdict()
    kind = scaling.pop("kind")
    if kind == "linear":
        scaling = {"factor": scaling["factor"]}
    return {"rope_type": kind} | scaling


def _other_fields(config: TransformerConfig) -> dict[str, Any]:
    windows = config.layer_windows or (None,) * config.num_hidden_layers
    window = next((size for size in windows if size is not None), None)
    fields = {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "layer_types": ["full_attention" if w is None else "sliding_attention" for w in windows],
        "hidden_activation": config.hidden_act,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }
    if config.query_scale is not None:
        scalar = config.query_scale**-2
        # An integer, up to the rounding of the square root.
        is_integer = abs(scalar - round(scalar)) < 1e-9 * scalar
        fields["query_pre_attn_scalar"] = round(scalar) if is_integer else scalar
    if config.local_rope_theta is not None:
        fields["rope_local_base_freq"] = config.local_rope_theta
    return fields
