"""The configuration of a Llama-family decoder, and its Hugging Face `config.json`."""

import dataclasses
from typing import Any

__all__ = ["TransformerConfig"]

_NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)


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

    @classmethod
    def from_dict(cls, fields: dict[str, Any], source: str = "config.json") -> "TransformerConfig":
        """Reads the fields of a Hugging Face `config.json` of `model_type` "llama".

        Args:
          fields: the parsed JSON.
          source: how a refusal names it.

        Raises:
          ValueError: on a field that is missing, or that asks for what is not built here.
        """
        _refuse_unsupported(fields, source)
        heads = fields["num_attention_heads"]
        rope = fields.get("rope_parameters") or {}
        eos = fields.get("eos_token_id")
        dtype = fields.get("dtype") or fields.get("torch_dtype") or "float32"
        return cls(
            **{name: fields[name] for name in _NEEDED},
            num_key_value_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            rms_norm_eps=fields.get("rms_norm_eps", 1e-6),
            rope_theta=float(fields.get("rope_theta") or rope.get("rope_theta", 10000.0)),
            tie_word_embeddings=fields.get("tie_word_embeddings", False),
            max_position_embeddings=fields.get("max_position_embeddings", 2048),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
            dtype=dtype,
        )

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
    for name in _NEEDED:
        value = fields.get(name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{source} has {name} {value!r}; it needs to be a positive integer.")
    scaling = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    rope = scaling.get("rope_type", scaling.get("type", "default"))
    if rope != "default":
        raise ValueError(
            f"{source} scales its rotary embeddings by {rope!r}; only unscaled ones are built here."
        )
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    for name, value in wanted.items():
        if fields.get(name, value) != value:
            raise ValueError(
                f"{source} has {name} {fields[name]!r}; it needs to be {value!r}, the Llama layer."
            )
