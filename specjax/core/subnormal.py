"""Subnormal numbers count as zero where logits are compared.

XLA flushes float32 numbers of magnitude below 2^-126 to zero on a CPU, and not on a GPU. One rule
for both costs one operation per row or block: a cutoff of zero becomes the smallest number that
counts as zero.
"""

import jax
import jax.numpy as jnp

_TINY = float(jnp.finfo(jnp.float32).tiny)
_LARGEST_SUBNORMAL = 2.0**-126 - 2.0**-149


def flush_subnormals(x: jax.Array) -> jax.Array:
    """Returns f32 with 0 for every zero, -0 included, and every subnormal number."""
    return jnp.where(jnp.abs(x) < jnp.float32(_TINY), jnp.float32(0), x)


def smallest_equal(x: jax.Array) -> jax.Array:
    """Returns the smallest number that counts as equal to x: what is not below it reaches x.

    Args:
      x: f32, a cutoff or a bound of one.

    Returns:
      f32, the most negative subnormal number where x counts as zero, else x.
    """
    return jnp.where(jnp.abs(x) < jnp.float32(_TINY), jnp.float32(-_LARGEST_SUBNORMAL), x)


def largest_equal(x: jax.Array) -> jax.Array:
    """Returns the largest f32 that counts as equal to f32 x: only numbers above it exceed x."""
    return jnp.where(jnp.abs(x) < jnp.float32(_TINY), jnp.float32(_LARGEST_SUBNORMAL), x)
