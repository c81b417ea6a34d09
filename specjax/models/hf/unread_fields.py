"""Refuses fields of `config.json` that change the logits and are not read."""

from collections.abc import Collection, Mapping
from typing import Any

from specjax.file_io import JsonObject, quote

__all__ = ["CHECKED_FIELDS", "refuse_unread"]

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


def refuse_unread(
    fields: JsonObject,
    source: str,
    extra_fields: Collection[str],
    fixed_values: Mapping[str, Any],
) -> None:
    """Refuses fields that change the logits and that the family does not read.

    Args:
      fields: the parsed JSON.
      source: names the file in an error.
      extra_fields: names of the fields that the family reads.
      fixed_values: values that the architecture fixes; they pass as well.

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
    _refuse_quantised(fields, source)
    _check_lm_head(fields.get("architectures"), source)
    window_is_off = fields.get("use_sliding_window") is False
    for name, harmless in _HARMLESS_VALUES.items():
        if (
            name not in fields
            or name in extra_fields
            or (name == "sliding_window" and window_is_off)
        ):
            continue
        allowed = (*harmless, fixed_values[name]) if name in fixed_values else harmless
        if _is_allowed(fields[name], allowed):
            continue
        raise ValueError(
            f"{source} has {name} {quote(fields[name])}, which changes the logits and is "
            f"not read for model_type {fields['model_type']!r}; it needs to be "
            f"{'null' if allowed[-1] is None else repr(allowed[-1])} or absent."
        )


def _is_allowed(value: Any, allowed: tuple[Any, ...]) -> bool:
    return value in allowed or (isinstance(value, list) and all(v in allowed for v in value))


def _refuse_quantised(fields: JsonObject, source: str) -> None:
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ValueError(
            f"{source} has a quantization_config with quant_method {quote(method)}; "
            "quantised weights are not supported; use a folder with weights in a float dtype."
        )


def _predicts_next(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(_LM_HEAD_SUFFIXES)


def _check_lm_head(architectures: Any, source: str) -> None:
    # One architecture that predicts the next token is enough.
    names = architectures if isinstance(architectures, list) else [architectures]
    if architectures in (None, []) or any(map(_predicts_next, names)):
        return
    raise ValueError(
        f"{source} has architectures {quote(architectures)}; a model needs a head for "
        f"the next token, such as 'LlamaForCausalLM' has it: embeddings, classifiers "
        "and reward models have none."
    )
