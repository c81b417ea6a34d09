"""Fields of `config.json`: allowed values, their description for errors, defaults."""

from collections.abc import Callable
from typing import Any, NamedTuple

from specjax.file_io import JsonObject, quote
from specjax.models.decoder.config import ACTIVATIONS, DTYPES

# Required fields.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_LAYER_TYPES = ("full_attention", "sliding_attention")


class Field(NamedTuple):
    """The allowed values of a field, their description, and the value of an absent field."""

    is_valid: Callable[[Any], bool]
    requirement: str
    default: Any = None

    def check(self, name: str, value: Any, source: str) -> Any:
        """Returns the value of a field, or refuses it.

        Args:
          name: of the field.
          value: in the parsed JSON.
          source: names the file in an error.

        Raises:
          ValueError: if the value is not allowed.
        """
        if not self.is_valid(value):
            raise ValueError(
                f"{source} has {name} {quote(value)}; it needs to be {self.requirement}."
            )
        return value


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_ids(value: Any) -> bool:
    return all(map(_is_id, value)) if isinstance(value, list) else value is None or _is_id(value)


def _is_scale(value: Any) -> bool:
    # Inside float32; this also refuses the NaN and Infinity that Python's JSON allows.
    return type(value) in (int, float) and 0 < value < 2.0**127


def _are_layer_types(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(v in _LAYER_TYPES for v in value))


def _one_of(names: tuple[str, ...], default: Any = None) -> Field:
    return Field(lambda v: v in names, " or ".join(map(repr, names)), default)


def _integer(most: int) -> Field:
    return Field(lambda v: type(v) is int and 1 <= v <= most, f"an integer from 1 to {most}")


def _or_null(field: Field) -> Field:
    return Field(lambda v: v is None or field.is_valid(v), f"{field.requirement}, or null")


_LENGTH = 2**31 - 1  # Positions are 32-bit.
POSITIVE = Field(_is_scale, "a positive number")
"""A number in an object of a field, such as `factor` of `rope_scaling`."""
_SCALE = Field(_is_scale, "a positive number below 2**127")
_BOOL = Field(lambda v: isinstance(v, bool), "true or false", False)
OBJECT = Field(lambda v: v is None or isinstance(v, dict), "an object")
"""An object inside another, or null."""
_OBJECT_OR_NULL = OBJECT._replace(requirement="an object or null")
_DTYPE = Field(lambda v: v in (None, *DTYPES), "'bfloat16', 'float16', 'float32' or null")
_FIELDS = {
    # Far above published sizes. The products stay below 2**63, which the compiler relies on.
    "vocab_size": _integer(2**24),
    "hidden_size": _integer(2**18),
    "intermediate_size": _integer(2**20),
    "num_hidden_layers": _integer(2**10),
    "num_attention_heads": _integer(2**12),
    "num_key_value_heads": _or_null(_integer(2**12)),
    "head_dim": _or_null(_integer(2**12)),
    "rope_parameters": _OBJECT_OR_NULL,
    "rope_scaling": _OBJECT_OR_NULL,
    "max_position_embeddings": _integer(_LENGTH)._replace(default=2048),
    "rms_norm_eps": _SCALE._replace(default=1e-6),
    "rope_theta": _SCALE._replace(default=10000.0),
    "rope_local_base_freq": _SCALE._replace(default=10000.0),
    "tie_word_embeddings": _BOOL,
    "attention_bias": _BOOL,
    "hidden_act": _one_of(ACTIVATIONS, "silu"),
    "hidden_activation": _one_of(ACTIVATIONS, "gelu_pytorch_tanh"),
    "bos_token_id": Field(lambda v: v is None or _is_id(v), "a token id or null"),
    "eos_token_id": Field(_is_ids, "a token id, a list of them or null"),
    "sliding_window": _or_null(_integer(_LENGTH)),
    "use_sliding_window": _BOOL,
    "max_window_layers": Field(_is_id, "an integer in [0, 2**31)", 28),
    "sliding_window_pattern": _integer(_LENGTH),
    "layer_types": Field(
        _are_layer_types,
        "null or a list of 'full_attention' and 'sliding_attention', one per layer",
    ),
    "query_pre_attn_scalar": _SCALE,
    "attn_logit_softcapping": _or_null(_SCALE),
    "final_logit_softcapping": _or_null(_SCALE),
    "text_config": Field(lambda v: isinstance(v, dict), "an object"),
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
    return field.check(name, fields.get(name, field.default), source)
