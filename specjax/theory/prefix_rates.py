r"""How often a step accepts its first i drafted tokens: token by token, or as a block.

Let x^i be the first i drafted tokens, p(x^i) and q(x^i) their probabilities, and p_i, q_i the rows
after them. A step has drafted x^i and accepts all of it with probability

    standard  m(x^{i+1}) = m(x^i) min(p_i(x), q_i(x))
    block     m(x^{i+1}) = min(m(x^i) p_i(x), q(x^{i+1}))          m of no tokens is 1

so that a_i = sum m(x^{i+1}) over all x^{i+1} is the unconditional rate of position i. In the rule
of block verification, m(x^i) = q(x^i) rho_i. A text that the target writes begins with x^i with
probability p(x^i): given it, the step accepts its first i tokens with probability m(x^i) / p(x^i).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.theory.arrays import check_probabilities

_METHODS = ("standard", "block")


def unconditional_rates(target: Sequence[Any], draft: Sequence[Any], method: str) -> np.ndarray:
    r"""Returns how often a step accepts each drafted token and all before it, summed over drafts.

    :math:`a_i = \sum_{x^{i+1}} \prod_{j \le i} \min(p_j(x_j), q_j(x_j))` token by token, and as a
    block, with :math:`m` of the empty prefix 1,

    .. math:: a_i = \sum_{x^{i+1}} m(x^{i+1}), \qquad
      m(x^{i+1}) = \min(m(x^i)\, p_i(x_i), q(x^{i+1}))

    No exact rule for one drafted sequence has a larger :math:`\sum_i a_i` than the block's. A rate
    does not depend on how many tokens are drafted after its position.

    Args:
      target: K arrays, of which the i-th holds p_i, f64[V, ..., V] of i + 1 axes: the row of
        probabilities after each prefix of i tokens. K >= 0; V^K numbers are summed.
      draft: as `target`, the draft's.
      method: "standard", token by token, or "block".

    Returns:
      f64[K] in [0, 1], non-increasing, ready for `acceptance_lengths`.

    Raises:
      ValueError: if shapes are others, a row is no distribution, or `method` is another.

    Example:
      >>> p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
      >>> target, draft = [p, np.tile(p, (2, 1))], [q, np.tile(q, (2, 1))]
      >>> for method in ("standard", "block"):
      ...     rates = unconditional_rates(target, draft, method)
      ...     print(f"{9 * rates.sum():.0f} / 9")
      10 / 9
      11 / 9

    References:
      Sun et al., 2024, arXiv:2403.10444: section 3 has this example.
    """
    _check_method(method)
    if len(target) != len(draft):
        raise ValueError(
            f"target has {len(target)} arrays and draft {len(draft)}; both need K, one for each "
            "drafted token."
        )
    rates = []
    accepted, drafted = np.ones(()), np.ones(())
    for i, (p, q) in enumerate(zip(target, draft, strict=True)):
        p, q = np.asarray(p, np.float64), np.asarray(q, np.float64)
        if p.shape != np.shape(target[0])[:1] * (i + 1):
            raise ValueError(
                f"target[{i}] has shape {p.shape}; it needs {i + 1} axes of V, a row of "
                f"probabilities after each prefix of {i} tokens."
            )
        check_probabilities(**{f"target[{i}]": p, f"draft[{i}]": q})
        if method == "block":
            drafted = drafted[..., None] * q
            accepted = np.minimum(accepted[..., None] * p, drafted)
        else:
            accepted = accepted[..., None] * np.minimum(p, q)
        rates.append(accepted.sum())
    # Where p is q, rounding may raise a rate above the one before it.
    return np.minimum.accumulate(np.minimum(rates, 1.0))


def rates_given_text(log_ratios: Any, method: str) -> np.ndarray:
    r"""Returns conditional rates of a step, given the text that the target writes.

    The step accepts token i of the text, having accepted those before it, with probability

        standard  min(1, q_i(x_i) / p_i(x_i))
        block     min(1, q_i(x_i) / (rho_i p_i(x_i)))
                  rho_0 = 1        rho_{i+1} = min(1, rho_i p_i(x_i) / q_i(x_i))

    so one text serves every K and both rules. The mean of `cumprod` of the rates, over texts that
    the target wrote, is `unconditional_rates`: a way to them where drafts cannot be enumerated.

    Args:
      log_ratios: f64[..., K], log p - log q of each token of a text after the tokens before it; inf
        where q is 0.
      method: "standard" or "block".

    Returns:
      f64[..., K] in [0, 1].

    Raises:
      ValueError: if `log_ratios` has no axis, a NaN or -inf, which no text has, or `method` is
        another.

    Example:
      >>> log_ratios = np.log([0.5, 2.0, 2.0])
      >>> rates_given_text(log_ratios, "standard")
      array([1. , 0.5, 0.5])
      >>> rates_given_text(log_ratios, "block")
      array([1. , 1. , 0.5])

    References:
      Sun et al., 2024, arXiv:2403.10444.
    """
    _check_method(method)
    log_ratios = np.asarray(log_ratios, np.float64)
    if log_ratios.ndim == 0 or not (log_ratios > -np.inf).all():
        raise ValueError(
            "log_ratios needs a last axis of K numbers, log p - log q of tokens that the target "
            "wrote: none is NaN or -inf."
        )
    log_rates, log_rho = np.zeros_like(log_ratios), np.zeros(log_ratios.shape[:-1])
    for i in range(log_ratios.shape[-1]):
        log_ratio = log_rho + log_ratios[..., i]
        log_rates[..., i] = np.minimum(-log_ratio, 0)
        if method == "block":
            log_rho = np.minimum(log_ratio, 0)
    return np.exp(log_rates)


def _check_method(method: str) -> None:
    if method not in _METHODS:
        raise ValueError(f"method is {method!r}; it needs to be one of {', '.join(_METHODS)}.")
