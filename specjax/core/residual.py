r"""The residual of a rejected token, unnormalised: :math:`\max(p - q, 0)`."""

import jax
import jax.numpy as jnp

from specjax.core.logsumexp import Exp2, exp_scaled, split_blocks

# Rounding may leave a residual of this mass where p == q: float32's relative step of 2^-23 on both
# log-probabilities. Such a residual counts as empty. A rejection that is not synthetic is as
# improbable as its residual is small.
MIN_RESIDUAL_MASS = 2.0**-18


def residual_probs(
    target_logprobs: jax.Array, draft_logprobs: jax.Array, exp2: Exp2 = jnp.exp2
) -> jax.Array:
    """Returns the unnormalised residual `max(p - q, 0)`, elementwise.

    Args:
      target_logprobs: f32, log p.
      draft_logprobs: f32, log q; -inf where the draft puts no mass. +inf leaves no residual, which
        removes the token of a one-hot draft.
      exp2: of f32; kernels have a faster one.

    Returns:
      f32 >= 0.
    """
    p, q = [exp_scaled(x, 1.0, exp2) for x in (target_logprobs, draft_logprobs)]
    # p and q are compared, not their logs: the difference is never negative.
    return jnp.where(q < p, p - q, jnp.float32(0))


def residual_logprobs(target_logprobs: jax.Array, draft_logprobs: jax.Array) -> jax.Array:
    """Returns the log of `residual_probs`: -inf where the residual is 0, log p where q = 0.

    The masses of blocks are sums of the numbers whose log this is, so that a block chosen for its
    mass always holds a token.
    """
    logprobs = jnp.log(residual_probs(target_logprobs, draft_logprobs))
    return jnp.where(draft_logprobs == -jnp.inf, target_logprobs, logprobs)


def residual_log_masses(target_logprobs: jax.Array, draft_logprobs: jax.Array) -> jax.Array:
    """Returns the log-mass of the residual in every block, -inf where it is 0.

    Args:
      target_logprobs: f32[V].
      draft_logprobs: f32[V].

    Returns:
      f32[ceil(V / SAMPLING_BLOCK)].
    """
    residual = residual_probs(target_logprobs, draft_logprobs)
    body, tail = split_blocks(residual)
    masses = jnp.sum(body, axis=-1)
    if tail is not None:
        masses = jnp.concatenate([masses, jnp.sum(tail, axis=-1)], axis=-1)
    return jnp.log(masses)
