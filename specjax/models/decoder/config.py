"""`TransformerConfig`: sizes of the decoder and everything that differs between families."""

import dataclasses

from specjax.models.decoder.rope import RopeScaling

DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of a decoder, with Hugging Face's names where there are any.

    The defaults from `rope_scaling` on are the Llama family's.

    Attributes:
      vocab_size: tokens of the vocabulary.
      hidden_size: width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_hidden_layers: decoder layers.
      num_attention_heads: query heads.
      num_key_value_heads: key-value heads, a divisor of the query heads.
      head_dim: size of one head, even.
      rms_norm_eps: added to the mean square in every RMSNorm.
      rope_theta: base of the rotary frequencies.
      tie_word_embeddings: whether the head is the embedding table.
      max_position_embeddings: longest sequence that the model was trained for.
      bos_token_id: starts a sequence, or None.
      eos_token_ids: tokens that end a sequence.
      dtype: of parameters, activations and cache. Norms, rotary embeddings and attention
        weights are always computed in float32.
      rope_scaling: scaling of the frequencies of `rope_theta`, or None.
      local_rope_theta: base of the unscaled frequencies in layers with a window; None if all
        layers share their frequencies.
      layer_windows: for each layer, the number of tokens that a token attends to, itself
        included; None is all. Empty is None for every layer.
      qkv_bias: whether queries, keys and values have a bias.
      out_bias: whether the output projection of attention has a bias.
      qk_norm: whether each head of queries and keys has an RMSNorm.
      sandwich_norms: whether the outputs of attention and MLP have an RMSNorm as well.
      norm_offset: added to the weights of every RMSNorm; 1 in the Gemma family, where the
        weights multiply in float32.
      embedding_scale: multiplies the embeddings, rounded to `dtype`. None is 1.
      query_scale: multiplies the attention scores. None is `head_dim**-0.5`.
      attention_softcap: c, where scores s become c tanh(s / c), or None.
      logit_softcap: c, where logits s become c tanh(s / c), or None.
      hidden_act: activation of the MLP's gate, "silu" or "gelu_pytorch_tanh".
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
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    layer_windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float | None = None
    query_scale: float | None = None
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    hidden_act: str = "silu"

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}; it needs to be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; it needs to be even for rotary embeddings."
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it needs to be one of {DTYPES}.")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act is {self.hidden_act!r}; it needs to be one of {ACTIVATIONS}."
            )
        if len(self.layer_windows) not in (0, self.num_hidden_layers):
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries; it needs one for each of "
                f"the {self.num_hidden_layers} layers, or to be empty."
            )

    def window(self, layer: int) -> int | None:
        """Returns the number of tokens that a token of this layer attends to, or None for all."""
        return self.layer_windows[layer] if self.layer_windows else None

    def rope(self, layer: int) -> tuple[float, RopeScaling | None]:
        """Returns base and scaling of this layer's rotary frequencies."""
        if self.local_rope_theta is not None and self.window(layer) is not None:
            return self.local_rope_theta, None
        return self.rope_theta, self.rope_scaling
