r"""What is left of the target once the draft is spent: :math:`\max(p - q, 0)`."""

import jax
import jax.numpy as jnp

from specjax.core.logsumexp import Exp2, exp_scaled, split_blocks

__all__ = ["MIN_RESIDUAL_MASS", "block_residual_weights", "residual_logprobs", "residual_probs"]

# A residual of less mass than this is what rounding may leave of p == q: float32's relative step
# of 2^-23 on both log-probabilities. A rejection is as improbable as its residual is small, unless
# it is synthetic.
MIN_RESIDUAL_MASS = 2.0**-18


def residual_probs(
    target_logprobs: jax.Array, draft_logprobs: jax.Array, exp2: Exp2 = jnp.exp2
) -> jax.Array:
    """Unnormalised residual `max(p - q, 0)`, elementwise.

    Args:
      target_logprobs: f32, log p.
      draft_logprobs: f32, log q; -inf where the draft puts no mass. +inf leaves no
        residual: that is how the token of a one-hot draft is removed.
      exp2: of f32; kernels have a faster one.

    Returns:
      f32 >= 0.
    """
    p, q = [exp_scaled(x, 1.0, exp2) for x in (target_logprobs, draft_logprobs)]
    # Of p and q and not of their logs: the difference is never negative.
    return jnp.where(q < p, p - q, jnp.float32(0))


def residual_logprobs(target_logprobs: jax.Array, draft_logprobs: jax.Array) -> jax.Array:
    """Log of `residual_probs`: -inf where nothing is left, log p itself where q = 0.

    The log of the very numbers that are summed into the masses of blocks, so that a
    block chosen for its mass always holds a token.
    """
    left = jnp.log(residual_probs(target_logprobs, draft_logprobs))
    return jnp.where(draft_logprobs == -jnp.inf, target_logprobs, left)


def block_residual_weights(target_logprobs: jax.Array, draft_logprobs: jax.Array) -> jax.Array:
    """Log-mass of the residual in every block, -inf where nothing is left.

    Args:
      target_logprobs: f32[V].
      draft_logprobs: f32[V].

    Returns:
      f32[ceil(V / SAMPLING_BLOCK)].
    """
    body, tail = split_blocks(residual_probs(target_logprobs, draft_logprobs))
    masses = jnp.sum(body, axis=-1)
    if tail is not None:
        masses = jnp.concatenate([masses, jnp.sum(tail, axis=-1)], axis=-1)
    return jnp.log(masses)
