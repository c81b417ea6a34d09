"""Rules that others use, as values for `rejection_sample`; all but the standard one are not exact.

One emitted token follows

    q a + (1 - sum q a) norm(residual)        with a(x) the probability that x is accepted

which is p for the standard rule alone. Each docstring gives the total variation from p at
p = (0.5, 0.3, 0.15, 0.05) and q = (0.3, 0.2, 0.3, 0.2). `tests/samplers/test_rules.py` measures it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.rule import RowValues, Rule

__all__ = ["ensemble", "lenience", "relaxed", "standard", "typical_acceptance"]


def _log_difference(lp: jax.Array, lq: jax.Array) -> jax.Array:
    """Returns log max(p - q, 0)."""
    return jnp.log(jnp.maximum(jnp.exp(lp) - jnp.exp(lq), 0))


@dataclasses.dataclass(frozen=True)
class _Residual:
    """log max(p - q, 0)."""

    def __call__(self, lp: Any, lq: Any, row: RowValues) -> Any:
        return _log_difference(lp, lq)


@dataclasses.dataclass(frozen=True)
class _TargetRow:
    """log p: the token in place of a rejected one follows the target row."""

    def __call__(self, lp: Any, lq: Any, row: RowValues) -> Any:
        return lp


@dataclasses.dataclass(frozen=True)
class _Ratio:
    """u < p / (l q)."""

    lenience: float = 1.0

    def __call__(self, lp: Any, lq: Any, u: Any, row: RowValues) -> Any:
        return jnp.log(u * self.lenience) < lp - lq


@dataclasses.dataclass(frozen=True)
class _Typical:
    """p > min(epsilon, delta e^-H)."""

    epsilon: float
    delta: float

    def __call__(self, lp: Any, lq: Any, u: Any, row: RowValues) -> Any:
        return jnp.exp(lp) > jnp.minimum(self.epsilon, self.delta * jnp.exp(-row.entropy))


@dataclasses.dataclass(frozen=True)
class _Relaxed:
    """One of the N likeliest, and p >= max p - delta."""

    top_n: int
    delta: float

    def __call__(self, lp: Any, lq: Any, u: Any, row: RowValues) -> Any:
        near = jnp.exp(lp) >= jnp.exp(row.max_logprob) - self.delta
        return (row.rank < self.top_n) & near


@dataclasses.dataclass(frozen=True)
class _Mixture:
    """u < (a p + (1 - a) q) / q."""

    weight: float

    def __call__(self, lp: Any, lq: Any, u: Any, row: RowValues) -> Any:
        return u < self.weight * jnp.exp(lp - lq) + (1 - self.weight)


def standard() -> Rule:
    """Returns the standard rule, u < p / q and max(p - q, 0); exact.

    `rejection_sample` without `rule` is this one on its own, faster code path. There a residual of
    mass below 2^-18 is empty; the weights of a rule may be as small.

    References:
      Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    return Rule(_Ratio(), _Residual())


def lenience(factor: float) -> Rule:
    """Returns the standard rule with q replaced by l q in the test, not exact.

    The residual stays max(p - q, 0), so that no token is emitted more often than p / l. Total
    variation at l = 0.5: 0.2.

    Args:
      factor: l in (0, 1]; 1 is the standard rule.

    References:
      Leviathan et al., 2023, arXiv:2211.17192, appendix A.5.
    """
    return Rule(_Ratio(_fraction("factor", factor)), _Residual())


def typical_acceptance(epsilon: float, delta: float) -> Rule:
    """Returns Medusa's rule, which accepts a token of p > min(epsilon, delta e^-H); not exact.

    H is the entropy of the target row. The token in place of a rejected one follows the target row.
    Total variation at epsilon = 0.3 and delta = 0.6: 0.1.

    Args:
      epsilon: in (0, 1].
      delta: in (0, 1].

    References:
      Cai et al., 2024, arXiv:2401.10774.
    """
    accept = _Typical(_fraction("epsilon", epsilon), _fraction("delta", delta))
    return Rule(accept, _TargetRow(), ("entropy",))


def relaxed(top_n: int, delta: float) -> Rule:
    """Returns TensorRT-LLM's relaxed acceptance: near the likeliest token, accept; not exact.

    A token is accepted if fewer than N are likelier and p >= max p - delta. The token in place of a
    rejected one follows the target row. Total variation at N = 2 and delta = 0.25: 0.1.

    Args:
      top_n: N, at least 1.
      delta: in (0, 1].

    References:
      TensorRT-LLM, "relaxed acceptance" of its DeepSeek-R1 decoding.
    """
    if isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1:
        raise ValueError(f"top_n is {top_n!r}; it needs a Python int >= 1, the tokens to accept.")
    return Rule(_Relaxed(top_n, _fraction("delta", delta)), _TargetRow(), ("max_logprob", "rank"))


def ensemble(weight: float) -> Rule:
    """Returns the rule whose tokens follow a p + (1 - a) q; not exact for p.

    Drafted tokens follow the mixture, and the bonus token follows p. A token with p = 0 is still
    rejected. Total variation at a = 0.5: 0.15.

    Args:
      weight: a in (0, 1]; 1 is the standard rule.
    """
    fraction = _fraction("weight", weight)
    return standard() if fraction == 1 else Rule(_Mixture(fraction), _Residual())


def _fraction(name: str, value: float) -> float:
    """Returns a parameter in (0, 1] as a Python float."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number <= 1:
        raise ValueError(f"{name} is {value!r}; it needs to be a number in (0, 1].")
    return number
