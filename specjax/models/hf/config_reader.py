"""Hugging Face's `config.json`, family by family, and the configuration it means."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.models.config import TransformerConfig
from specjax.models.hf.config_fields import SIZES, read_field
from specjax.models.hf.rope_fields import read_local_rope, read_rope
from specjax.models.hf.unread_fields import refuse_unread

__all__ = ["read_fields"]

_Fields = dict[str, Any]
_MOST_LAYERS = 2**16  # Enough, and short of a list that fills the memory.
_AS_THEY_ARE = ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "bos_token_id")


class _Family(NamedTuple):
    """What a `model_type` is beyond the fields of its `config.json`.

    Attributes:
      absent: the values that transformers gives to fields left out, where they differ from
        the Llama family's.
      made_of: fields of the configuration that the architecture fixes.
      has_window: whether layer n has the window, where `layer_types` does not say; None is a
        family without windows.
      reads: fields read for this family and refused for others.
      fixed: values of such fields that the architecture has without reading them.
      is_gemma: names the activation otherwise, and scales embeddings and queries.
      local_rope: whether layers with a window have rotary frequencies of their own.
    """

    absent: _Fields
    made_of: _Fields
    has_window: Callable[[int, _Fields], bool] | None = None
    reads: tuple[str, ...] = ()
    fixed: _Fields | None = None
    is_gemma: bool = False
    local_rope: bool = False


def _behind_the_first(layer: int, read: _Fields) -> bool:
    return read["sliding_window"] is not None and layer >= read["max_window_layers"]


def _but_every_nth(layer: int, read: _Fields) -> bool:
    return bool((layer + 1) % read["sliding_window_pattern"])


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
_SANDWICH = {"sandwich_norms": True, "norm_offset": 1.0}
_WINDOW = ("sliding_window", "layer_types")
_SWITCH = "use_sliding_window"
_SCALES = ("query_pre_attn_scalar", "final_logit_softcapping")
_MISTRAL = _Family(
    {
        "use_sliding_window": True,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
    },
    {},
    has_window=lambda layer, read: read["sliding_window"] is not None,
    reads=_WINDOW,
)
_FAMILIES = {
    "llama": _Family({}, {}),
    # To transformers a Mistral with `layer_types` is a Ministral, and without them both are one.
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "qwen2": _Family(
        _QWEN, {"qkv_bias": True, "out_bias": False}, _behind_the_first, (*_WINDOW, _SWITCH)
    ),
    "qwen3": _Family(
        _QWEN | {"head_dim": 128}, {"qk_norm": True}, _behind_the_first, (*_WINDOW, _SWITCH)
    ),
    "gemma2": _Family(
        _GEMMA_2,
        _SANDWICH,
        _but_every_nth,
        reads=(*_WINDOW, *_SCALES, "attn_logit_softcapping"),
        fixed={"sliding_window_pattern": 2},
        is_gemma=True,
    ),
    "gemma3_text": _Family(
        _GEMMA_3,
        _SANDWICH | {"qk_norm": True},
        _but_every_nth,
        reads=(*_WINDOW, *_SCALES, "sliding_window_pattern", "rope_local_base_freq"),
        is_gemma=True,
        local_rope=True,
    ),
}
# What a model that sees may say of its text model beside that model's own fields.
_OUTSIDE = (
    "architectures",
    "bos_token_id",
    "eos_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
)


def _text_of(fields: _Fields, source: str) -> _Fields:
    """The fields of the text model, where they lie inside those of a model that sees too."""
    if fields.get("model_type") != "gemma3":
        return fields
    text = read_field("text_config", fields, source)
    given = {name: fields[name] for name in _OUTSIDE if fields.get(name) is not None}
    return {"model_type": "gemma3_text"} | text | given


def read_fields(fields: dict[str, Any], source: str = "config.json") -> TransformerConfig:
    """Reads the fields of a Hugging Face `config.json`, as transformers 4 or 5 writes them.

    Args:
      fields: the parsed JSON.
      source: how a refusal names it.

    Raises:
      ValueError: on a field that is missing, of another type than it needs, or that asks
        for what is not built here.

    Example:
      >>> config = read_fields({
      ...     "model_type": "mistral", "vocab_size": 64, "hidden_size": 16,
      ...     "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
      ...     "num_key_value_heads": 2, "sliding_window": 8})
      >>> config.head_dim, config.layer_windows
      (4, (8, 8))
    """
    sees = fields.get("model_type") == "gemma3"
    fields = _text_of(fields, source)
    kind = fields.get("model_type")
    family = _FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        names = ", ".join(map(repr, _FAMILIES))
        raise ValueError(
            f"{source} has model_type {kind!r}; it needs to be one of those built here: {names}, "
            "or 'gemma3', of which the text model is read."
        )
    # A model that sees does not cap its logits, its text model alone would.
    reads = [n for n in family.reads if not (sees and n == "final_logit_softcapping")]
    refuse_unread(fields, source, reads, family.fixed or {})
    given = family.absent | fields
    theta, scaling = read_rope(given, source, family.local_rope)
    heads = read_field("num_attention_heads", given, source)
    eos, dtype = (read_field(name, given, source) for name in ("eos_token_id", "dtype"))
    dtype = dtype or read_field("torch_dtype", given, source) or "float32"
    read = {name: read_field(name, given, source) for name in (*SIZES, *_AS_THEY_ARE)}
    size = read_field("head_dim", given, source)
    bias = read_field("attention_bias", given, source)
    made = {"qkv_bias": bias, "out_bias": bias} | family.made_of
    made |= _gemma(given, source) if family.is_gemma else {}
    act = "hidden_activation" if family.is_gemma else "hidden_act"
    try:
        return TransformerConfig(
            **read,
            **made,
            num_key_value_heads=read_field("num_key_value_heads", given, source) or heads,
            head_dim=size or max(1, read["hidden_size"] // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            local_rope_theta=read_local_rope(given, source) if family.local_rope else None,
            layer_windows=_windows(given, family, source),
            hidden_act=read_field(act, given, source),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            dtype=dtype,
        )
    except ValueError as error:
        if str(error).startswith(source):
            raise
        raise ValueError(f"{source} does not fit together: {error}") from None


def _gemma(given: _Fields, source: str) -> _Fields:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    attention, logits = (read_field(name, given, source) for name in caps)
    return {
        "embedding_scale": read_field("hidden_size", given, source) ** 0.5,
        "query_scale": read_field("query_pre_attn_scalar", given, source) ** -0.5,
        "attention_softcap": attention,
        "logit_softcap": logits,
    }


def _windows(given: _Fields, family: _Family, source: str) -> tuple[int | None, ...]:
    if family.has_window is None:
        return ()
    read = {
        name: read_field(name, given, source)
        for name in ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    }
    read["sliding_window_pattern"] = given.get("sliding_window_pattern")
    layers = read_field("num_hidden_layers", given, source)
    if layers > _MOST_LAYERS:
        raise ValueError(f"{source} has num_hidden_layers {layers}; nothing here is that deep.")
    if read["sliding_window"] is not None and not read[_SWITCH] and _SWITCH not in family.reads:
        raise ValueError(
            f"{source} has use_sliding_window False and sliding_window {read['sliding_window']}; "
            f"model_type {given['model_type']!r} has no such switch, a null sliding_window is none."
        )
    window = read["sliding_window"] = read["sliding_window"] if read[_SWITCH] else None
    types = read["layer_types"]
    if types is None:
        if family.has_window is _but_every_nth:
            read_field("sliding_window_pattern", given, source)
        local = [family.has_window(layer, read) for layer in range(layers)]
    elif len(types) != layers:
        raise ValueError(
            f"{source} has {len(types)} layer_types; it needs one for each of its {layers} layers."
        )
    else:
        local = [kind == "sliding_attention" for kind in types]
    if any(local) and window is None:
        raise ValueError(
            f"{source} has layers with sliding attention and no sliding_window; it needs its size."
        )
    return tuple(window if one else None for one in local) if any(local) else ()
