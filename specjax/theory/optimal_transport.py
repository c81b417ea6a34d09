r"""The most that any exact rule accepts of several candidates at one position.

A rule sees the M drafted tokens and emits y ~ p. How often y may be among them is a transport
problem between p and the distribution of the M. By max-flow and min-cut its optimum is

    1 + min_H [p(H) - P(all M drafts in H)]                         over all 2^V sets H of tokens

with P(all in H) = q(H)^M for independent drafts. Drafts without replacement have no such product:
P is summed over the sets that may be drawn, each from those with one token less.
"""

import operator
from typing import Any

import numpy as np

from specjax.theory.arrays import check_probabilities

_MAX_TOKENS = 16


def optimal_acceptance_rate(p: Any, q: Any, num_drafts: int, *, replacement: bool) -> float:
    r"""Returns the largest probability that an emitted token y ~ p is one of M drafted tokens.

    :math:`1 + \min_{H} \big[ p(H) - P(x_1 \in H, \dots, x_M \in H) \big]` over all sets H of tokens

    with :math:`P = q(H)^M` for drafts with replacement. Without replacement, :math:`x_m` follows q
    without :math:`x_1, \dots, x_{m-1}`, divided by its sum, as siblings of a tree are drawn. No
    rule whose output follows p accepts more often, and some rule reaches it, perhaps at the cost of
    a linear program. One draft gives `acceptance_rate`.

    Args:
      p: f64[V], the target's probabilities, V <= 16; divided by their sum.
      q: f64[V], the draft's; divided by their sum.
      num_drafts: M >= 1; without replacement at most the number of tokens with q > 0.
      replacement: whether drafts are drawn with replacement, independently.

    Returns:
      In [0, 1].

    Raises:
      ValueError: if p or q is no distribution, V exceeds 16, or `num_drafts` is out of range.

    Example:
      >>> p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
      >>> [round(optimal_acceptance_rate(p, q, M, replacement=True), 4) for M in (1, 2, 3)]
      [0.7, 0.86, 0.988]
      >>> [round(optimal_acceptance_rate(p, q, M, replacement=False), 4) for M in (1, 2, 3)]
      [0.7, 0.9857, 1.0]

    References:
      Sun et al., 2023, arXiv:2310.15141: the transport problem.
      Hu et al., 2025, arXiv:2502.18779: its optimum as a choice of a set.
    """
    p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
    if p.ndim != 1 or p.size > _MAX_TOKENS:
        raise ValueError(
            f"p has shape {p.shape}; it needs to be [V] with V <= {_MAX_TOKENS}, because all 2^V "
            "sets of tokens are tried. Of a larger vocabulary, take rows cut to so few tokens."
        )
    check_probabilities(p=p, q=q)
    p, q = p / p.sum(), q / q.sum()
    num_possible = np.count_nonzero(q)
    max_drafts = np.inf if replacement else num_possible
    if not 1 <= operator.index(num_drafts) <= max_drafts:
        raise ValueError(
            f"num_drafts is {num_drafts}; it needs to be at least 1, and without replacement at "
            f"most the {num_possible} tokens that q can draw."
        )
    inside = _sums(q) ** num_drafts if replacement else _all_inside(q, num_drafts)
    return float(1 + (_sums(p) - inside).min())


def _sums(weights: np.ndarray) -> np.ndarray:
    """Returns the sum of weights over every set, f64[2^V]; bit v of an index is token v."""
    sums = np.zeros(1)
    for weight in weights:
        sums = np.concatenate([sums, sums + weight])
    return sums


def _all_inside(q: np.ndarray, num_drafts: int) -> np.ndarray:
    """Returns P(all drafts in H) of every set H, f64[2^V], for drafts without replacement."""
    # The mass after a set is drawn: that of its complement, which is the index from the end.
    remainders = _sums(q)[::-1]
    sizes = np.bitwise_count(np.arange(remainders.size))
    drawn = np.zeros(remainders.size)
    drawn[0] = 1
    for size in range(num_drafts):
        sets = np.flatnonzero((sizes == size) & (drawn > 0))
        for v, weight in enumerate(q):
            without = sets[sets >> v & 1 == 0]
            drawn[without | 1 << v] += drawn[without] * weight / remainders[without]
    inside = np.where(sizes == num_drafts, drawn, 0)
    # From sets of exactly M tokens to all subsets of H, one token at a time.
    for v in range(q.size):
        pairs = inside.reshape(-1, 2, 1 << v)
        pairs[:, 1] += pairs[:, 0]
    return inside
