"""Fields of `config.json`: allowed values, their description for errors, defaults."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.file_io import JsonObject, quote
from specjax.models.decoder.config import ACTIVATIONS, DTYPES

__all__ = ["FIELD_NAMES", "SIZES", "read_field", "read_scale"]

# Required fields.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_LAYER_TYPES = ("full_attention", "sliding_attention")


class _Field(NamedTuple):
    is_valid: Callable[[Any], bool]
    requirement: str
    default: Any = None


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_ids(value: Any) -> bool:
    return all(map(_is_id, value)) if isinstance(value, list) else value is None or _is_id(value)


def _is_scale(value: Any) -> bool:
    # Inside float32; this also refuses the NaN and Infinity that Python's JSON allows.
    return type(value) in (int, float) and 0 < value < 2.0**127


def _are_layer_types(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(v in _LAYER_TYPES for v in value))


def _one_of(names: tuple[str, ...], default: Any = None) -> _Field:
    return _Field(lambda v: v in names, " or ".join(map(repr, names)), default)


def _integer(most: int, null: bool = False) -> _Field:
    requirement = f"an integer from 1 to {most}{', or null' * null}"
    return _Field(
        lambda v: (v is None and null) or (type(v) is int and 1 <= v <= most), requirement
    )


_LENGTH = 2**31 - 1  # Positions are 32-bit.
_SCALE = _Field(_is_scale, "a positive number below 2**127")
_SCALE_OR_NULL = _Field(
    lambda v: v is None or _is_scale(v), "a positive number below 2**127, or null"
)
_BOOL = _Field(lambda v: isinstance(v, bool), "true or false", False)
_OBJECT = _Field(lambda v: v is None or isinstance(v, dict), "an object or null")
_DTYPE = _Field(lambda v: v in (None, *DTYPES), "'bfloat16', 'float16', 'float32' or null")
_FIELDS = {
    # Far above published sizes. The products stay below 2**63, which the compiler relies on.
    "vocab_size": _integer(2**24),
    "hidden_size": _integer(2**18),
    "intermediate_size": _integer(2**20),
    "num_hidden_layers": _integer(2**10),
    "num_attention_heads": _integer(2**12),
    "num_key_value_heads": _integer(2**12, null=True),
    "head_dim": _integer(2**12, null=True),
    "rope_parameters": _OBJECT,
    "rope_scaling": _OBJECT,
    "max_position_embeddings": _integer(_LENGTH)._replace(default=2048),
    "rms_norm_eps": _SCALE._replace(default=1e-6),
    "rope_theta": _SCALE._replace(default=10000.0),
    "rope_local_base_freq": _SCALE._replace(default=10000.0),
    "tie_word_embeddings": _BOOL,
    "attention_bias": _BOOL,
    "hidden_act": _one_of(ACTIVATIONS, "silu"),
    "hidden_activation": _one_of(ACTIVATIONS, "gelu_pytorch_tanh"),
    "bos_token_id": _Field(lambda v: v is None or _is_id(v), "a token id or null"),
    "eos_token_id": _Field(_is_ids, "a token id, a list of them or null"),
    "sliding_window": _integer(_LENGTH, null=True),
    "use_sliding_window": _BOOL,
    "max_window_layers": _Field(_is_id, "an integer in [0, 2**31)", 28),
    "sliding_window_pattern": _integer(_LENGTH),
    "layer_types": _Field(
        _are_layer_types,
        "null or a list of 'full_attention' and 'sliding_attention', one per layer",
    ),
    "query_pre_attn_scalar": _SCALE,
    "attn_logit_softcapping": _SCALE_OR_NULL,
    "final_logit_softcapping": _SCALE_OR_NULL,
    "text_config": _Field(lambda v: isinstance(v, dict), "an object"),
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
}
FIELD_NAMES = tuple(_FIELDS)


def read_field(name: str, fields: JsonObject, source: str) -> Any:
    """Returns the checked value of a field, or its default.

    Args:
      name: of the field.
      fields: the parsed JSON.
      source: names the file in an error.

    Raises:
      ValueError: if the value is not allowed.
    """
    field = _FIELDS[name]
    value = fields.get(name, field.default)
    if not field.is_valid(value):
        raise ValueError(f"{source} has {name} {quote(value)}; it needs to be {field.requirement}.")
    return value


def read_scale(name: str, group: str, fields: JsonObject, source: str) -> float:
    """Returns a positive number inside an object of `config.json`, such as `factor`.

    Args:
      name: of the number.
      group: of the object, for an error.
      fields: of the object.
      source: names the file in an error.

    Raises:
      ValueError: if the number is absent or not positive.
    """
    if not _is_scale(fields.get(name)):
        raise ValueError(
            f"{source} has {group} with {name} {quote(fields.get(name))}; it needs to be a "
            "positive number."
        )
    return float(fields[name])
