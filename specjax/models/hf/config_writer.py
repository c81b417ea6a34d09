"""Writes a `TransformerConfig` as the `config.json` of a family that has it."""

from typing import Any

from specjax.models.decoder.config import TransformerConfig
from specjax.models.hf.config_reader import COPIED_FIELDS, read_fields

__all__ = ["write_fields"]

# In order of preference: the first family that supports a configuration writes it.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
_COPIED_FIELDS = (*COPIED_FIELDS, "num_key_value_heads", "head_dim", "rope_theta")


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
    for kind, architecture in _ARCHITECTURES.items():
        fields = _llama_fields(config) | {"architectures": [architecture], "model_type": kind}
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
        f"{' or '.join(_ARCHITECTURES)} has."
    )


def _llama_fields(config: TransformerConfig) -> dict[str, Any]:
    eos = list(config.eos_token_ids)
    return {name: getattr(config, name) for name in _COPIED_FIELDS} | {
        "architectures": [],
        "model_type": "",
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
