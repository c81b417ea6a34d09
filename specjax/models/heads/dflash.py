"""DFlash: a few decoder layers that draft a block of tokens in one pass.

    c[t]   = hidden_norm(fc(concat(taps[t])))                  of every committed token but the last
    rows   = embed([last token, mask, ..., mask])              at positions n - 1, n, ...
    K, V   = [those of c[0 .. n - 2], those of the rows]       in each layer, by its own projections
    x      = layers(rows), each row attending to all K, V
    logits of the token at position n - 1 + j = lm_head(norm(x[j])),  j = 1, 2, ...

taps[t] are the target's residual streams after some layers, at token t. A row does not see the
tokens drafted at other rows, so q of a block is the product of its rows' softmaxes. With
`sample_from_anchor`, as DeepSpec trains, row j is for the token at position n + j, and row 0 drafts
too. Committed tokens have no queries: their keys and values are those of c alone.
Axes: `B` requests, `T` tokens, `A` taps, `E` hidden, `L` layers, `G` key-value heads of a layer,
`D` head dimension.

References:
  Chen et al., 2026, arXiv:2602.06036: DFlash.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.implementation import Implementation
from specjax.models.decoder.attention import layer_caches, write_entries
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.dispatch import run_product
from specjax.models.decoder.layers import RMSNorm, linear, rms_norm, weight
from specjax.models.decoder.rope import rope_cos_sin, rotate
from specjax.models.decoder.shared_math import NormSpec, cache_entries
from specjax.models.decoder.transformer import Transformer, functions

_MAX_BLOCK = 256  # A cache has room for a block more than the text.


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """Sizes and variants of a DFlash head.

    Attributes:
      layer: of the head's layers. Its `hidden_size` and `vocab_size` are the target's.
      draft_vocab_size: tokens that the head drafts from.
      taps: numbers of layers of the target after which the residual stream is read; 0 is the
        embeddings.
      block_size: rows of a block: the last committed token, and masks.
      mask_token_id: the token whose embedding a mask has.
      sample_from_anchor: whether the row of the last committed token drafts, too.
      num_speculative_tokens: K that the head was trained for; None is as many as a block has.
      has_embedding: whether the head has its own embeddings; else they are the target's.
      has_lm_head: whether the head has its own output layer; else it is the target's.
      kind: the name of the kind in messages.
    """

    kind: ClassVar[str] = "DFlash"
    layer: TransformerConfig
    draft_vocab_size: int
    taps: tuple[int, ...]
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool = False
    num_speculative_tokens: int | None = None
    has_embedding: bool = False
    has_lm_head: bool = False

    def __post_init__(self) -> None:
        vocab_size, k = self.layer.vocab_size, self.num_speculative_tokens
        if not 2 <= self.block_size <= _MAX_BLOCK:
            raise ValueError(f"block_size is {self.block_size}; it needs to be 2 to {_MAX_BLOCK}.")
        if k is not None and k > self.max_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {k}; a block of {self.block_size} drafts at most "
                f"{self.max_speculative_tokens}."
            )
        if not 0 <= self.mask_token_id < vocab_size:
            raise ValueError(
                f"mask_token_id is {self.mask_token_id}; it needs to be one of the {vocab_size} "
                "tokens of the vocabulary."
            )
        if not self.has_lm_head and self.draft_vocab_size != vocab_size:
            raise ValueError(
                f"a head without an lm_head has a draft vocabulary of {self.draft_vocab_size} "
                f"tokens; the target's lm_head has {vocab_size}."
            )
        if not self.layer.qk_norm:
            raise ValueError(
                "qk_norm is False; the layers of a DFlash head have norms of queries and keys."
            )
        if self.layer.layer_windows:
            raise ValueError(
                f"layer_windows is {list(self.layer.layer_windows)}; the layers of a DFlash head "
                "need to attend to all tokens."
            )

    @property
    def target_hidden_size(self) -> int:
        """The target's hidden size E, which is also the head's."""
        return self.layer.hidden_size

    @property
    def max_speculative_tokens(self) -> int:
        """The maximum number of tokens that a block drafts."""
        return self.block_size - 1 + self.sample_from_anchor


class _BlockDecoder(Transformer):
    """A decoder whose new tokens attend to one another.

    Args:
      config: of the layers.
      rngs: source of the initial weights; None gives zeros.
    """

    def __init__(self, config: TransformerConfig, rngs: nnx.Rngs | None) -> None:
        super().__init__(config, rngs)
        for layer in self.layers:
            layer.attention.spec = dataclasses.replace(layer.attention.spec, is_causal=False)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Returns embeddings [B, T, E], of a table that may be the target's, of another dtype."""
        return self.embedding[...][token_ids].astype(self.config.dtype)


class ContextWeights(NamedTuple):
    """The weights of committed tokens' keys and values, for all layers at once.

    Attributes:
      matrix: [E, L * 2 * G * D], the layers' projections next to one another.
      bias: [L * 2 * G * D], or None.
      key_norm: [L, D].
    """

    matrix: jax.Array
    bias: jax.Array | None
    key_norm: jax.Array


class DFlashHead(nnx.Module):
    """The head as an NNX module; `merge_dflash` gives it parameters.

    Args:
      config: sizes and variants.
      rngs: source of the initial weights; None gives zeros.
    """

    def __init__(self, config: DFlashConfig, rngs: nnx.Rngs | None) -> None:
        self.config, layer = config, config.layer
        # A table that is the target's has no size here: it is an argument of `merge_dflash`.
        vocab_size = layer.vocab_size if config.has_embedding else 1
        decoder = dataclasses.replace(layer, vocab_size=vocab_size, tie_word_embeddings=True)
        self.decoder = _BlockDecoder(decoder, rngs)
        self.fc = weight(rngs, layer, len(config.taps) * layer.hidden_size, layer.hidden_size)
        self.hidden_norm = RMSNorm(layer, layer.hidden_size)
        if config.has_lm_head:
            self.head = weight(rngs, layer, config.draft_vocab_size, layer.hidden_size)

    def context(self) -> ContextWeights:
        """Returns the weights of committed tokens' keys and values."""
        attentions: list[Any] = [layer.attention for layer in self.decoder.layers]
        first = attentions[0].num_heads * attentions[0].head_dim
        bias = [each.qkv_bias[first:] for each in attentions if each.qkv_bias is not None]
        return ContextWeights(
            jnp.concatenate([each.qkv[:, first:] for each in attentions], axis=1),
            jnp.concatenate(bias) if bias else None,
            jnp.stack([each.key_norm.weight[...] for each in attentions]),
        )

    def append(
        self,
        weights: ContextWeights,
        features: jax.Array,
        positions: jax.Array,
        cache: Any,
        implementation: str | Implementation | None = None,
    ) -> Any:
        """Returns the cache with the keys and values of committed tokens.

        Args:
          weights: as `context` returns them.
          features: [B, T, A * E], the target's taps at these tokens.
          positions: i32[B, T], -1 for no token.
          cache: keys and values [B, G, S, D] of each layer, or `Pieces` with such a cache.
          implementation: of the products, as in `build`.
        """
        layer = self.config.layer
        groups, size = layer.num_key_value_heads, layer.head_dim
        rows = run_product(features.astype(layer.dtype), self.fc[...], implementation)
        rows = self.hidden_norm(rows)
        if weights.bias is None:
            y = run_product(rows, weights.matrix, implementation)
        else:
            y = linear(rows, weights.matrix, weights.bias)
        caches = layer_caches(cache)
        heads = y.reshape(*positions.shape, len(caches), 2, groups, size)
        keys, values = heads[:, :, :, 0], heads[:, :, :, 1]
        norm = NormSpec(size, layer.rms_norm_eps, layer.norm_offset)
        keys = rms_norm(keys, weights.key_norm[None, None, :, None], norm)
        keys = keys.reshape(*positions.shape, len(caches) * groups, size)
        keys = rotate(keys, rope_cos_sin(*layer.rope(0), size, positions))
        entries = cache_entries(keys.reshape(values.shape), values)
        return tuple(
            write_entries(old, positions, tuple(entry[:, :, n] for entry in entries))
            for n, old in enumerate(caches)
        )


@functools.cache
def _graph(config: DFlashConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: DFlashHead(config, None)))[0]


def merge_dflash(config: DFlashConfig, params: Any, table: jax.Array | None = None) -> DFlashHead:
    """Returns the head with these parameters; its `decoder` runs a block.

    Args:
      config: sizes and variants.
      params: as `build_dflash` returns them.
      table: [V, E], of the embeddings; None where no token is embedded.
    """
    table = jnp.zeros((1, config.layer.hidden_size), config.layer.dtype) if table is None else table
    params = {**params, "decoder": {**params["decoder"], "embedding": table}}
    head: DFlashHead = nnx.merge(_graph(config), nnx.State(params))
    return head


def init_dflash_cache(config: DFlashConfig, batch_size: int, max_length: int) -> Any:
    """Returns empty keys and values of each layer, with room for a block after the last token."""
    return functions(config.layer)[0](batch_size, max_length + config.block_size)


def build_dflash(config: DFlashConfig, seed: int = 0) -> Any:
    """Returns random parameters of a head as a nested dict.

    Args:
      config: sizes and variants.
      seed: of the weights.

    Returns:
      Parameters as `load_dflash` returns them, without a token map.

    Example:
      >>> layer = TransformerConfig(64, 16, 32, 2, 4, 2, 4, qk_norm=True)
      >>> config = DFlashConfig(layer, 64, taps=(1, 2), block_size=4, mask_token_id=63)
      >>> params = build_dflash(config)
      >>> sorted(params), sorted(params["decoder"])
      (['decoder', 'fc', 'hidden_norm'], ['layers', 'norm'])
    """
    params: Any = nnx.to_pure_dict(nnx.state(DFlashHead(config, nnx.Rngs(seed)), nnx.Param))
    if not config.has_embedding:
        del params["decoder"]["embedding"]
    return params
