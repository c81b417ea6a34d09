"""A Markov chain as a `Model`: the smallest model there is, for examples."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.types import Model

__all__ = ["markov_chain"]


def markov_chain(probs: Any) -> Model:
    """Returns a model whose next token has the distribution ``probs[last token]``.

    Args:
      probs: f32[V, V], >= 0; each row sums to 1.

    Returns:
      `Model` with the log-probabilities as parameters and an empty cache.

    Example:
      >>> from specjax.markov_chain import markov_chain
      >>> model = markov_chain([[0.0, 1.0], [1.0, 0.0]])
      >>> output = specjax.generate(
      ...     model, None, [[0]], keys=jax.random.key(0), max_new_tokens=3)
      >>> specjax.unpad(output.token_ids)
      [[0, 1, 0, 1]]
    """
    return Model(jnp.log(jnp.asarray(probs, jnp.float32)), _init_cache, _apply, _logits)


def _init_cache(batch_size: int, max_length: int) -> Any:
    return ()


def _apply(params: Any, token_ids: jax.Array, positions: jax.Array, cache: Any) -> Any:
    """Returns the token ids as hidden states [B, L, 1]."""
    return token_ids[..., None], cache


def _logits(params: jax.Array, hidden: jax.Array) -> jax.Array:
    return params[hidden[..., 0]]
