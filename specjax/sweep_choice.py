"""Which number of drafts is best: tokens per step over seconds per step, for every K."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Best", "choose", "predicted_lengths", "synthetic_lengths"]

# Acceptance lengths at which a K is measured, at most.
_LENGTHS = 4


class Best(NamedTuple):
    """The K of the most tokens per second at the pair's own acceptance.

    Attributes:
      K: it.
      tokens_per_second: for each K from 0, at the median step.
      quartiles: for each K, the rates at the slower and the faster quartile of its steps.
      gains: for each K, its rate over that of K = 0.
      ties: other Ks that the quartiles do not tell from it.
    """

    K: int
    tokens_per_second: list[float]
    quartiles: list[tuple[float, float]]
    gains: list[float]
    ties: list[int]


def predicted_lengths(rates: Sequence[float]) -> list[float]:
    r"""Mean tokens per step of every K up to `len(rates)`, from the rates of the largest.

    :math:`L_K = 1 + \sum_{i < K} a_i`, which is :math:`1 + \sum_i \prod_{j \le i} c_j` of the
    conditional rates: position i of a model's draft is judged alike however many follow it.
    Assumed is that steps begin in places of the same kind whatever K is. A prompt lookup
    may, in addition, find other drafts when fewer are asked for.

    Args:
      rates: unconditional, in [0, 1], non-increasing.

    Returns:
      Of K = 0, 1, ..., `len(rates)`.

    Example:
      >>> predicted_lengths([0.75, 0.5])
      [1.0, 1.75, 2.25]
    """
    return [1.0 + sum(rates[:K]) for K in range(len(rates) + 1)]


def choose(
    lengths: Sequence[float], step_seconds: Sequence[Sequence[float]], batch_size: int
) -> Best:
    """Says which K is best.

    Args:
      lengths: tokens per step of K = 0, 1, ...
      step_seconds: of each K, seconds per step of several runs.
      batch_size: requests per step.

    Returns:
      `Best`; of equal rates the smallest K.

    Example:
      >>> choose([1.0, 1.75, 2.0], [[0.5], [0.625], [1.0]], batch_size=1)[:2]
      (1, [2.0, 2.8, 2.0])
    """
    rates, quartiles = [], []
    for length, seconds in zip(lengths, step_seconds, strict=True):
        low, middle, high = np.percentile(np.asarray(seconds, np.float64), [25, 50, 75])
        rates.append(float(batch_size * length / middle))
        quartiles.append((float(batch_size * length / high), float(batch_size * length / low)))
    best = int(np.argmax(rates))
    ties = [
        K for K, (_, upper) in enumerate(quartiles) if best != K and upper >= quartiles[best][0]
    ]
    return Best(best, rates, quartiles, [rate / rates[0] for rate in rates], ties)


def synthetic_lengths(K: int) -> list[float]:
    """Tokens per step at which a K is measured, from 1 to K + 1.

    Example:
      >>> synthetic_lengths(0), synthetic_lengths(2), synthetic_lengths(6)
      ([1.0], [1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    """
    return [float(length) for length in np.linspace(1, K + 1, min(K + 1, _LENGTHS))]
