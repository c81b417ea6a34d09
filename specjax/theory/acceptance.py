"""How often one drafted token is accepted."""

from typing import Any

from specjax.theory.arrays import as_floats, check_probabilities


def acceptance_rate(p: Any, q: Any) -> Any:
    r"""Returns the probability that token-level rejection sampling accepts a sampled draft.

    :math:`\sum_x q(x) \min(1, p(x) / q(x)) = \sum_x \min(p(x), q(x))`

    It is one minus the total variation of p and q. No rule whose output follows p accepts more
    often, coupled draws included (`match_probability`). A one-hot q gives p of its token.

    Args:
      p: f32[..., V] or f64, the target's probabilities at the request's temperature and cutoff.
      q: as p, the draft's. Values are checked outside a trace.

    Returns:
      [...] in [0, 1]; f64, or an array of JAX from one.

    Raises:
      ValueError: if shapes differ, or a row is no distribution.

    Example:
      >>> float(acceptance_rate([0.5, 0.3, 0.2], [0.2, 0.3, 0.5]))
      0.7
      >>> jax.jit(acceptance_rate)(jnp.array([[0.75, 0.25]]), jnp.array([[0.5, 0.5]]))
      Array([0.75], dtype=float32)

    References:
      Leviathan et al., 2023, arXiv:2211.17192, corollary 3.6: their beta.
    """
    check_probabilities(p=p, q=q)
    xp, p, q = as_floats(p, q)
    return xp.minimum(p, q).sum(axis=-1)
