"""The rules by which a drafted token is accepted: greedy, sampled, one-hot, synthetic."""

import jax
import jax.numpy as jnp

from specjax.core.temperature import Temperature


def num_valid_drafts(token_ids: jax.Array, num_tokens: jax.Array | None) -> jax.Array:
    """Returns how many drafted tokens each request has, up to the first -1.

    Args:
      token_ids: i32[..., K].
      num_tokens: i32[...], clipped to [-1, K]; -1 is an inactive request and stays. None is K.

    Returns:
      i32[...] in [-1, K].
    """
    k = token_ids.shape[-1]
    stops = jnp.where(token_ids == -1, jnp.arange(k, dtype=jnp.int32), jnp.int32(k))
    first = jnp.min(stops, axis=-1, initial=k)
    return first if num_tokens is None else jnp.minimum(jnp.clip(num_tokens, -1, k), first)


def accept_random(u: jax.Array, target_logprob: jax.Array, draft_logprob: jax.Array) -> jax.Array:
    r"""Accepts a sampled token with probability :math:`\min(1, p / q)`.

    A one-hot draft has q = 1, that is `draft_logprob` 0. A token with p = 0 is never accepted, nor
    one that its draft could not have sampled (q = 0).

    Args:
      u: f32 or f64, a uniform in (0, 1).
      target_logprob: f32, log p of the token.
      draft_logprob: f32, log q of the token.

    Returns:
      bool.

    References:
      Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    # The difference is 0 when p == q; log u + log q < log p would round and reject.
    return jnp.log(u) < log_ratio(target_logprob, draft_logprob).astype(u.dtype)


def log_ratio(target_logprob: jax.Array, draft_logprob: jax.Array) -> jax.Array:
    """Returns log p - log q of a token; -inf where p or q is 0."""
    possible = (target_logprob > -jnp.inf) & (draft_logprob > -jnp.inf)
    return jnp.where(possible, target_logprob - draft_logprob, -jnp.inf)


def accept_greedy(token_id: jax.Array, argmax: jax.Array) -> jax.Array:
    """Accepts a drafted token that is the target's argmax."""
    return token_id == argmax


def accept_synthetic(u: jax.Array, rate: jax.Array) -> jax.Array:
    """Accepts any token with probability `rate` in [0, 1], whatever p and q are.

    Args:
      u: f32 or f64, a uniform in (0, 1).
      rate: f32, conditional on all tokens before it having been accepted.

    Returns:
      bool.
    """
    return u < rate.astype(u.dtype)


def is_one_hot(temperature: Temperature, logprob: jax.Array, logsumexp: jax.Array) -> jax.Array:
    """Returns whether a token came from a greedy draft, or its statistics are invalid."""
    invalid = ~jnp.isfinite(logsumexp) | ~(logprob < jnp.inf)
    return temperature.greedy | ~temperature.valid | invalid
