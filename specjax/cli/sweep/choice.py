"""Chooses the number K of drafted tokens with the most tokens per second, and Ks as fast as it.

    num_accepted[s]   accepted tokens of step s, measured at the largest K
    tokens[s, K]      = 1 + min(num_accepted[s], K)
    length[K]         = mean of tokens[s, K] over steps = 1 + the first K unconditional rates
    best K            has the largest length / seconds
    gap[K]            tokens per second of the best K minus those of K
    error[K]          standard error of gap[K]; K differs if the gap clearly exceeds it

A rate does not depend on the number of positions after it. The lengths assume that it does not
depend on K through the text either. Prompt lookup may propose other tokens for another K.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from specjax import theory

# Acceptance of neighbouring steps is correlated, so batches are few and long. With the embedded
# models and 10 to 170 steps, the 95 % interval from 5 batches covered the truth in 90 - 97 % of
# runs. From 20 batches it did in 78 - 95 %.
_MAX_BATCHES = 5
# 97.5 % quantile of Student's t, by number of batches.
_STUDENT_T = {3: 4.303, 4: 3.182, 5: 2.776}


class Acceptance(NamedTuple):
    """Accepted tokens of every step, measured at one K.

    Attributes:
      K: drafted tokens per step.
      num_accepted: for each prompt, the number of accepted tokens in each of its steps.
    """

    K: int
    num_accepted: list[list[int]]

    @property
    def step_counts(self) -> list[int]:
        """Accepted tokens per step, over all prompts in order."""
        return [number for counts in self.num_accepted for number in counts]

    @property
    def rates(self) -> list[float]:
        """Unconditional rates: for each position, the share of steps that accepted up to it."""
        counts = self.step_counts
        return [sum(n > i for n in counts) / max(len(counts), 1) for i in range(self.K)]

    @property
    def usual_rate(self) -> float:
        """Conditional rate: the share of drafted tokens accepted after accepted predecessors."""
        counts = self.step_counts
        num_tested = sum(min(n + 1, self.K) for n in counts)
        return sum(counts) / max(num_tested, 1)

    @property
    def lengths(self) -> list[float]:
        """Predicted mean tokens per step of K = 0, 1, ... drafted tokens."""
        lengths: list[float] = theory.acceptance_lengths(self.rates).tolist()
        return lengths


class Best(NamedTuple):
    """The K with the most tokens per second at the pair's acceptance.

    Attributes:
      K: the best number of drafted tokens per step.
      tokens_per_second: for each K from 0, at the median step.
      quartiles: for each K, the rates at the slower and the faster quartile of its steps.
      gains: for each K, its rate over that of K = 0.
      gaps_to_best: for each K, tokens per second of the best minus those of K.
      gap_errors: standard errors of the gaps, from the acceptance.
      indistinguishable: other Ks that may be as fast, within the errors.
    """

    K: int
    tokens_per_second: list[float]
    quartiles: list[tuple[float, float]]
    gains: list[float]
    gaps_to_best: list[float]
    gap_errors: list[float]
    indistinguishable: list[int]


def standard_errors(acceptance: Acceptance) -> list[float]:
    r"""Returns standard errors of the predicted lengths, from batch means.

    :math:`\sigma^2 = \frac{b}{b - 1} \sum_j \big(\sum_{s \in j} (x_s - \bar x)\big)^2 / N^2`

    for N steps in b batches j of consecutive steps. Batches are assumed to be independent;
    neighbouring steps may be correlated. The errors are those of other texts after these prompts;
    other prompts are covered only as far as these differ. One step without accepted tokens and one
    with K are added, so that a few equal steps do not give an error of 0.

    Args:
      acceptance: at the largest K.

    Returns:
      An error for each K = 0, 1, ..., `acceptance.K`.

    Example:
      >>> [round(error, 2) for error in standard_errors(Acceptance(2, [[0, 2], [2, 0]]))]
      [0.0, 0.26, 0.53]
    """
    return _batch_means_errors(_tokens_per_step(acceptance)).tolist()


def _tokens_per_step(acceptance: Acceptance) -> np.ndarray:
    """Returns f64[N + 2, K + 1]: tokens of each step if it had 0, 1, ..., K drafted tokens."""
    counts = np.array([0, *acceptance.step_counts, acceptance.K], np.float64)
    return 1 + np.minimum(counts[:, None], np.arange(acceptance.K + 1))


def _batch_means_errors(values: np.ndarray) -> np.ndarray:
    """Returns standard errors of column means, from batch means."""
    num, batches = len(values), np.array_split(values - values.mean(0), _num_batches(values))
    sums = np.stack([batch.sum(0) for batch in batches])
    error: np.ndarray = np.sqrt(len(sums) / (len(sums) - 1) * np.square(sums).sum(0)) / num
    return error


def _num_batches(values: np.ndarray) -> int:
    return min(len(values), _MAX_BATCHES)


def choose_best(
    acceptance: Acceptance, step_seconds: Sequence[Sequence[float]], batch_size: int
) -> Best:
    r"""Returns the best K and the Ks that may be as fast.

    :math:`\mathrm{gap}_K = B \cdot \mathrm{mean}_s (x_{s*} / t_* - x_{sK} / t_K)`

    with :math:`x_{sK}` the tokens of step s, :math:`t_K` the median seconds and * the best K. The
    error of the gap is that of the difference, under the assumptions of `standard_errors`. K
    differs from the best if

        rate of K at the faster quartile of its steps + t * error  <  best's rate at its slower one

    where t is the 97.5 % quantile of Student's t.

    Args:
      acceptance: at the largest K, with at least one step.
      step_seconds: for each K from 0, seconds per step of several runs.
      batch_size: requests per step.

    Returns:
      `Best`; the smallest K among equal rates.

    Example:
      >>> choose_best(Acceptance(1, [[1, 1, 0, 1]]), [[0.5], [0.625]], batch_size=1)[:2]
      (1, [2.0, 2.8])
    """
    lengths = batch_size * np.array(acceptance.lengths)
    seconds = np.array([np.percentile(runs, [25, 50, 75]) for runs in step_seconds])
    choices = theory.best_k(lengths, seconds.T)
    fast_rates, rates, slow_rates = choices.tokens_per_second
    best = int(choices.k[1])
    step_rates = batch_size * _tokens_per_step(acceptance) / seconds[:, 1]
    errors = _batch_means_errors(step_rates[:, [best]] - step_rates)
    upper_rates = fast_rates + _STUDENT_T[_num_batches(step_rates)] * errors
    return Best(
        best,
        rates.tolist(),
        list(zip(slow_rates.tolist(), fast_rates.tolist(), strict=True)),
        (rates / rates[0]).tolist(),
        (rates[best] - rates).tolist(),
        errors.tolist(),
        [K for K in range(len(rates)) if best != K and upper_rates[K] >= slow_rates[best]],
    )
