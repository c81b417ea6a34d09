"""Which number of drafts is best, and which others might be: tokens over seconds, for every K.

kept[s]           drafts that step s kept, of the largest K: all that the prompts say
tokens[s, K]      = 1 + min(kept[s], K), for every K from the one record
length[K]         its mean over the steps; length / seconds says which K is best
lead[s, K]        what step s adds to the best's lead over K, in tokens per second
margin[K]         the lead's error; a K is told apart where the lead exceeds it, and more
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
    "Acceptance",
    "Best",
    "choose_best",
    "predicted_lengths",
    "standard_errors",
    "synthetic_lengths",
]

# Acceptance lengths at which a K is measured, at most.
_MAX_LENGTHS = 4
# Neighbouring steps keep alike for as long as the text stays of a kind: batches are few and long.
# On 10 to 170 steps of the embedded pair the 95 % interval of five held the truth in 90 - 97 % of
# runs, that of twenty in 78 - 95 %.
_MAX_BATCHES = 5
# Student's t of 97.5 %, by number of batches: the errors of so few are themselves uncertain.
_STUDENT_T = {3: 4.303, 4: 3.182, 5: 2.776}


class Acceptance(NamedTuple):
    """What the pair's own drafts achieved.

    Attributes:
      K: drafts per step.
      num_accepted: of each prompt, the number of drafts that each of its steps kept.
    """

    K: int
    num_accepted: list[list[int]]

    @property
    def step_counts(self) -> list[int]:
        """Drafts kept, of the steps of all prompts, one prompt after the other."""
        return [number for counts in self.num_accepted for number in counts]

    @property
    def rates(self) -> list[float]:
        """Of all steps, the part that kept each position and those before it."""
        counts = self.step_counts
        return [sum(n > i for n in counts) / max(len(counts), 1) for i in range(self.K)]


class Best(NamedTuple):
    """The K of the most tokens per second at the pair's own acceptance.

    Attributes:
      K: it.
      tokens_per_second: for each K from 0, at the median step.
      quartiles: for each K, the rates at the slower and the faster quartile of its steps.
      gains: for each K, its rate over that of K = 0.
      gaps_to_best: for each K, how much more tokens per second the best makes.
      gap_errors: standard errors of these, from the acceptance.
      indistinguishable: other Ks that the acceptance and the step times do not tell from it.
    """

    K: int
    tokens_per_second: list[float]
    quartiles: list[tuple[float, float]]
    gains: list[float]
    gaps_to_best: list[float]
    gap_errors: list[float]
    indistinguishable: list[int]


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


def standard_errors(acceptance: Acceptance) -> list[float]:
    r"""Of `predicted_lengths`: how far those of other texts of these prompts may lie.

    From batch means: of N steps in b batches of consecutive ones, the square is
    :math:`\frac{b}{b - 1} \sum_j \big(\sum_{s \in j} (x_s - \bar x)\big)^2 / N^2`. Assumed is
    that batches are independent: neighbouring steps may keep alike, but not for longer than
    a batch. How other prompts would do is in it only as far as these ones differ. A step that
    kept nothing and one that kept all are added to those seen, so that a few steps that
    kept alike are not taken for certainty.

    Args:
      acceptance: of the largest K.

    Returns:
      Of K = 0, 1, ..., `acceptance.K`.

    Example:
      >>> [round(error, 2) for error in standard_errors(Acceptance(2, [[0, 2], [2, 0]]))]
      [0.0, 0.26, 0.53]
    """
    return _batch_means_errors(_tokens_per_step(acceptance)).tolist()


def _tokens_per_step(acceptance: Acceptance) -> np.ndarray:
    """f64[N + 2, K + 1]: tokens of each step, had so many drafts been made in it."""
    counts = np.array([0, *acceptance.step_counts, acceptance.K], np.float64)
    return 1 + np.minimum(counts[:, None], np.arange(acceptance.K + 1))


def _batch_means_errors(values: np.ndarray) -> np.ndarray:
    """Standard errors of the means of columns."""
    num, batches = len(values), np.array_split(values - values.mean(0), _num_batches(values))
    sums = np.stack([batch.sum(0) for batch in batches])
    error: np.ndarray = np.sqrt(len(sums) / (len(sums) - 1) * np.square(sums).sum(0)) / num
    return error


def _num_batches(values: np.ndarray) -> int:
    return min(len(values), _MAX_BATCHES)


def choose_best(
    acceptance: Acceptance, step_seconds: Sequence[Sequence[float]], batch_size: int
) -> Best:
    r"""Says which K is best, and which others it is not told from.

    With :math:`x_{sK}` the tokens of step s and :math:`t_K` the median seconds, the best leads
    K by the mean over s of :math:`x_{s*} / t_* - x_{sK} / t_K`. The same steps are in both
    terms, and the error of the lead is that of their difference, of the assumptions of
    `standard_errors`. K is told from the best if the rate at the faster quartile of its
    steps, and half of the lead's 95 % interval (Student's t) on top, stay below the best's
    rate at its slower quartile.

    Args:
      acceptance: of the largest K, of at least one step.
      step_seconds: of each K from 0, seconds per step of several runs.
      batch_size: requests per step.

    Returns:
      `Best`; of equal rates the smallest K.

    Example:
      >>> choose_best(Acceptance(1, [[1, 1, 0, 1]]), [[0.5], [0.625]], batch_size=1)[:2]
      (1, [2.0, 2.8])
    """
    lengths = np.array(predicted_lengths(acceptance.rates))
    seconds = np.array([np.percentile(runs, [25, 50, 75]) for runs in step_seconds])
    fast_rates, rates, slow_rates = batch_size * lengths / seconds.T
    best = int(np.argmax(rates))
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


def synthetic_lengths(K: int) -> list[float]:
    """Tokens per step at which a K is measured, from 1 to K + 1.

    Example:
      >>> synthetic_lengths(0), synthetic_lengths(2), synthetic_lengths(6)
      ([1.0], [1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    """
    return [float(length) for length in np.linspace(1, K + 1, min(K + 1, _MAX_LENGTHS))]
