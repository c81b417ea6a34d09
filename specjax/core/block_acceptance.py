r"""The rule of block verification: which prefix of a request's drafted tokens is accepted.

With p_i the target's row after i drafted tokens, q_i the draft's and u_i the uniform of token i:

    rho_0 = 1        rho_i = min(1, rho_{i-1} p_{i-1}(x_i) / q_{i-1}(x_i))
    Z_i = sum_x max(rho_i p_i(x) - q_i(x), 0)
    h_i = Z_i / (Z_i + 1 - rho_i)        h_K = rho_K
    tau = the largest i with u_i < rho_i and u_i < h_i, else 0

The next token is drawn from p_K if tau = K, else from `norm(max(rho_tau p_tau - q_tau, 0))`. Since
h_i <= rho_i, a row is summed only where u_i < rho_i, and none before tau.

References:
  Sun et al., 2024, arXiv:2403.10444.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

# What is known of a prefix: whether it is accepted, or nothing before its residual is summed.
REJECTED = 0
OPEN = 1
ACCEPTED = 2

# Bounds are widened by more than the sums that they stand for can round.
_RELATIVE, _ABSOLUTE = 2.0**-10, 2.0**-16


def cap_ratios(log_ratios: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns log rho_0 to log rho_K from the K log-ratios log p(x_i) - log q(x_i).

    Args:
      log_ratios: f32[] each, -inf where p(x_i) or q(x_i) is 0: then no later prefix is accepted.

    Returns:
      K + 1 f32[] <= 0.
    """
    log_rhos = [jnp.float32(0)]
    for log_ratio in log_ratios:
        log_rhos.append(jnp.minimum(log_rhos[-1] + log_ratio, jnp.float32(0)))
    return log_rhos


def accept_block(u: jax.Array, log_rho: jax.Array, mass: jax.Array) -> jax.Array:
    """Returns whether a prefix shorter than all drafts is accepted, u < h: it has u < rho, too.

    Args:
      u: f32 or f64, a uniform in (0, 1), smaller than rho.
      log_rho: f32 <= 0.
      mass: f32 >= 0, Z.

    Returns:
      bool.
    """
    total = mass - jnp.expm1(log_rho)
    return (u * total.astype(u.dtype) < mass.astype(u.dtype)) | (total <= 0)


def accept_by_bounds(
    u: jax.Array, log_rho: jax.Array, least: jax.Array, most: jax.Array
) -> jax.Array:
    """Returns the status i32 of a prefix by bounds of Z: `ACCEPTED`, `REJECTED` or `OPEN`.

    h grows with Z. So u < h(least) accepts and u >= h(most) rejects, whatever Z is between them.

    Args:
      u: f32 or f64, a uniform in (0, 1), smaller than rho.
      log_rho: f32 <= 0.
      least: f32, a lower bound of Z.
      most: f32, an upper bound of Z.

    Returns:
      i32.
    """
    least = jnp.maximum(least * (1 - _RELATIVE) - _ABSOLUTE, 0)
    most = most * (1 + _RELATIVE) + _ABSOLUTE
    may_accept = accept_block(u, log_rho, most)
    known = jnp.where(may_accept, jnp.int32(OPEN), jnp.int32(REJECTED))
    return jnp.where(accept_block(u, log_rho, least), jnp.int32(ACCEPTED), known)
