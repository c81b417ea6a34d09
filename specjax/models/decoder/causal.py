"""Whole sequences through a decoder without a cache, for training and measurements.

Axes: `B` requests, `T` tokens, `E` hidden, `A` taps.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.decoder.attention import AttentionBackend
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.transformer import merge_model


def causal_hidden(
    config: TransformerConfig,
    params: Any,
    token_ids: jax.Array,
    implementation: AttentionBackend = None,
) -> jax.Array:
    """Returns hidden states [B, T, E] of whole sequences at positions 0 to T - 1, for training.

    Args:
      config: sizes and constants.
      params: as in `Model.params`, of any floating dtype.
      token_ids: i32[B, T].
      implementation: of `jax.nn.dot_product_attention`; None is its own choice.

    Returns:
      The hidden states of `apply` for these tokens on an empty cache.

    Example:
      >>> from specjax.models import build
      >>> config = TransformerConfig(64, 16, 32, 2, 4, 2, 4)
      >>> causal_hidden(config, build(config).params, jnp.array([[5, 6, 7]])).shape
      (1, 3, 16)
    """
    return merge_model(config, params).causal(token_ids, implementation)[0]


def causal_taps(
    config: TransformerConfig,
    params: Any,
    token_ids: jax.Array,
    taps: tuple[int, ...],
    implementation: AttentionBackend = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the states of `causal_hidden`, and features [B, T, A * E] of taps, for training.

    Args:
      config: sizes and constants.
      params: as in `causal_hidden`.
      token_ids: i32[B, T].
      taps: numbers of layers after which the residual stream is read.
      implementation: as in `causal_hidden`.

    Example:
      >>> from specjax.models import build
      >>> config = TransformerConfig(64, 16, 32, 2, 4, 2, 4)
      >>> causal_taps(config, build(config).params, jnp.array([[5, 6, 7]]), (0, 1))[1].shape
      (1, 3, 32)
    """
    hidden, states = merge_model(config, params).causal(token_ids, implementation, taps)
    return hidden, jnp.concatenate(states, axis=-1)
