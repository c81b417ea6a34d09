"""The configuration of a Llama-family decoder, and its Hugging Face `config.json`."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["TransformerConfig"]

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_DTYPES = ("bfloat16", "float16", "float32")
_AS_THEY_ARE = ("rms_norm_eps", "tie_word_embeddings", "max_position_embeddings", "bos_token_id")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of a decoder, under their Hugging Face names.

    Attributes:
      vocab_size: tokens of the vocabulary.
      hidden_size: width of the residual stream.
      intermediate_size: width of the SwiGLU.
      num_hidden_layers: decoder layers.
      num_attention_heads: query heads.
      num_key_value_heads: key-value heads, a divisor of the query heads.
      head_dim: size of one head, even.
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope_theta: base of the rotary frequencies.
      tie_word_embeddings: whether the head is the embedding table.
      max_position_embeddings: longest sequence the model was trained for.
      bos_token_id: starts a sequence, None if there is none.
      eos_token_ids: tokens that end a sequence.
      dtype: of parameters, activations and cache. Norms, rotations and attention
        weights are computed in float32 whatever it is.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 1024
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it needs to be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads}), which they share."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; rotary embeddings need it even, they turn pairs."
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it needs to be one of {_DTYPES}.")

    @classmethod
    def from_dict(cls, fields: dict[str, Any], source: str = "config.json") -> "TransformerConfig":
        """Reads the fields of a Hugging Face `config.json` of `model_type` "llama".

        Args:
          fields: the parsed JSON.
          source: how a refusal names it.

        Raises:
          ValueError: on a field that is missing, of another type than it needs, or that asks
            for what is not built here.
        """
        _refuse_unsupported(fields, source)
        read = {name: _read(name, fields, source) for name in _FIELDS}
        heads, eos = read["num_attention_heads"], read["eos_token_id"]
        rope = (read["rope_parameters"] or {}) | fields
        try:
            return cls(
                **{name: read[name] for name in (*_NEEDED, *_AS_THEY_ARE)},
                num_key_value_heads=read["num_key_value_heads"] or heads,
                head_dim=read["head_dim"] or max(1, read["hidden_size"] // heads),
                rope_theta=float(_read("rope_theta", rope, source)),
                eos_token_ids=tuple(eos)
                if isinstance(eos, list)
                else ()
                if eos is None
                else (eos,),
                dtype=read["dtype"] or read["torch_dtype"] or "float32",
            )
        except ValueError as error:
            raise ValueError(f"{source} does not fit together: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The fields of the Hugging Face `config.json` that `from_dict` reads back."""
        fields = dataclasses.asdict(self)
        dtype, eos = fields.pop("dtype"), list(fields.pop("eos_token_ids"))
        return fields | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "hidden_act": "silu",
            "mlp_bias": False,
            "rope_scaling": None,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "torch_dtype": dtype,
        }


def _refuse_unsupported(fields: dict[str, Any], source: str) -> None:
    kind = fields.get("model_type")
    if kind != "llama":
        raise ValueError(
            f"{source} has model_type {kind!r}; it needs to be 'llama', the family built here."
        )
    for name in ("rope_scaling", "rope_parameters"):
        scaling = _read(name, fields, source) or {}
        unscaled = "default" if scaling.keys() <= {"rope_theta"} else None
        rope = scaling.get("rope_type", scaling.get("type", unscaled))
        if rope != "default":
            raise ValueError(
                f"{source} has {name} that scales the rotary embeddings by {rope!r}; only unscaled "
                "ones are built here."
            )
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, value in wanted.items():
        if fields.get(name, value) != value:
            raise ValueError(
                f"{source} has {name} {fields[name]!r}; it needs to be {value!r}, the Llama layer."
            )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**31


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


def _is_ids(value: Any) -> bool:
    return all(map(_is_id, value)) if isinstance(value, list) else value is None or _is_id(value)


def _is_scale(value: Any) -> bool:
    # Strictly inside float32, which also turns away the NaN and Infinity of Python's JSON.
    return type(value) in (int, float) and 0 < value < 2.0**127


class _Field(NamedTuple):
    """What a field may hold, in code and in words, and what its absence means."""

    fits: Callable[[Any], bool]
    needed: str
    default: Any = None


_SIZE = _Field(_is_size, "a positive integer below 2**31")
_SIZE_OR_NULL = _Field(
    lambda v: v is None or _is_size(v), "a positive integer below 2**31, or null"
)
_OBJECT = _Field(lambda v: v is None or isinstance(v, dict), "an object or null")
_DTYPE = _Field(
    lambda v: v in (None, *_DTYPES),
    "'bfloat16', 'float16', 'float32' or null",
)
_FIELDS = {
    **dict.fromkeys(_NEEDED, _SIZE),
    "num_key_value_heads": _SIZE_OR_NULL,
    "head_dim": _SIZE_OR_NULL,
    "max_position_embeddings": _SIZE._replace(default=2048),
    "rms_norm_eps": _Field(_is_scale, "a positive number", 1e-6),
    "rope_theta": _Field(_is_scale, "a positive number", 10000.0),
    "rope_scaling": _OBJECT,
    "rope_parameters": _OBJECT,
    "tie_word_embeddings": _Field(lambda v: isinstance(v, bool), "true or false", False),
    "bos_token_id": _Field(lambda v: v is None or _is_id(v), "a token id or null"),
    "eos_token_id": _Field(_is_ids, "a token id, a list of them or null"),
    "dtype": _DTYPE,
    "torch_dtype": _DTYPE,
}


def _read(name: str, fields: dict[str, Any], source: str) -> Any:
    field = _FIELDS[name]
    value = fields.get(name, field.default)
    if not field.fits(value):
        raise ValueError(f"{source} has {name} {value!r}; it needs to be {field.needed}.")
    return value
