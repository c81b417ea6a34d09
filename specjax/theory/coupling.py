r"""How often a draft and the target draw one token from one noise.

Two Gumbel-max draws with equal noise both take token i with probability

    M_i = 1 / sum_j max(p_j / p_i, q_j / q_i)

Draws in two levels first have to take one block b, by the blocks' masses:

    P(match) = sum_b M_b sum_{i in b} M_{i | b}
"""

from typing import Any

import numpy as np

from specjax.core.noise import SAMPLING_BLOCK


def match_probability(p: Any, q: Any, block_size: int = SAMPLING_BLOCK) -> float:
    r"""Returns the probability that coupled draws from p and q agree, in float64 on the host.

    .. math:: \sum_b M_b \sum_{i \in b} M_{i | b}, \qquad
      M_i = 1 / \sum_j \max(p_j / p_i, q_j / q_i) \le \min(p_i, q_i)

    over blocks b by their masses, and over each block's tokens by their shares of it. No shared
    noise makes draws agree more often than :math:`\sum \min(p, q)`, `theory.acceptance_rate`, at
    which rejection sampling accepts. Draws on one level may agree more often than these, or less.

    Args:
      p: [V], the target's probabilities.
      q: [V], the draft's.
      block_size: tokens per block of the two-level draw; V or more is one level.

    Returns:
      In [0, 1].

    Raises:
      ValueError: if p and q are not [V] of one vocabulary.

    Example:
      >>> p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
      >>> [round(match_probability(p, q, block_size), 4) for block_size in (2, 128)]
      [0.5875, 0.6308]
      >>> round(float(specjax.theory.acceptance_rate(p, q)), 4)  # The optimum.
      0.7

    References:
      Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
    """
    p, q = (np.asarray(x, np.float64) for x in (p, q))
    if p.ndim != 1 or p.shape != q.shape or not p.size:
        raise ValueError(
            f"p has shape {p.shape} and q {q.shape}; both need to be [V], of one vocabulary."
        )
    starts = np.arange(0, p.size, block_size)
    blocks = _match_probabilities(np.add.reduceat(p, starts), np.add.reduceat(q, starts))
    pairs = zip(np.split(p, starts[1:]), np.split(q, starts[1:]), strict=True)
    inside = [_match_probabilities(*pair).sum() for pair in pairs]
    return float(blocks @ np.array(inside))


def _match_probabilities(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns M_i of every i; weights need not sum to 1, and M_i = 0 where either is 0."""
    result = np.zeros(p.size)
    for i in np.flatnonzero((p > 0) & (q > 0)):
        result[i] = 1 / np.sum(np.maximum(p / p[i], q / q[i]))
    return result
