"""Rules for `rule=` of `rejection_sample`, as values.

    standard, block, coupled                         exact; static
    lenience, typical_acceptance, relaxed, ensemble  not exact; static, parameters are compiled in
    synthetic                                        given rates, which are data

One emitted token follows

    q a + (1 - sum q a) norm(residual)        with a(x) the probability that x is accepted

which is p for the standard rule alone of those that judge each token. Each docstring gives the
total variation from p at p = (0.5, 0.3, 0.15, 0.05) and q = (0.3, 0.2, 0.3, 0.2).
`tests/samplers/test_rules.py` measures it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core.rule import (
    BLOCK,
    COUPLED,
    STANDARD,
    BuiltInRule,
    RowValues,
    Rule,
    StaticRule,
    SyntheticRule,
)

__all__ = [
    "block",
    "coupled",
    "ensemble",
    "lenience",
    "relaxed",
    "standard",
    "synthetic",
    "typical_acceptance",
]


def _log_difference(lp: jax.Array, lq: jax.Array) -> jax.Array:
    """Returns log max(p - q, 0)."""
    return jnp.log(jnp.maximum(jnp.exp(lp) - jnp.exp(lq), 0))


# Values, not functions: the command finds the programs that it kept by the text of a rule, and the
# text of a function has an address.
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


def standard() -> BuiltInRule:
    """Returns the standard rule, u < p / q and max(p - q, 0); exact.

    It is the default of `rejection_sample`, whose page has the formulas, and has a faster code path
    than a `Rule`. There a residual of mass below 2^-18 is empty; the weights of a `Rule` may be as
    small.

    Returns:
      The value, static.

    Example:
      >>> specjax.rules.standard()
      rules.standard()

    References:
      Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    return STANDARD


def block() -> BuiltInRule:
    r"""Returns block verification, which accepts at least as many tokens as the standard rule.

    It is exact. The tokens of a draft are accepted together. A token that is likelier under the
    target makes up for an earlier, less likely one.

    .. math:: \rho_i = \min(1, \rho_{i-1} p(x_i) / q(x_i)), \qquad
      Z_i = \sum \max(\rho_i p - q, 0), \qquad
      h_i = \frac{Z_i}{Z_i + 1 - \rho_i}, \quad h_K = \rho_K

    The longest prefix whose uniform lies below :math:`h_i` is accepted. The next token is drawn
    from :math:`\max(\rho_i p - q, 0) / Z_i`. No other rule that is exact for one drafted sequence
    accepts more on average. Greedy requests and those whose drafts are all one-hot follow the
    standard rule, and so does K = 1, token for token.

    Every target row with a draft is read; the standard rule stops at a rejection. Where the
    statistics of a draft row are not finite its token is one-hot. A target row that is not a
    distribution ends the drafts before it: if all of those are accepted, nothing more is emitted.

    Returns:
      The value, static.

    Example:
      >>> target_logits = jnp.log(jnp.array([[[0.1, 0.9], [0.5, 0.5]]]))
      >>> draft = specjax.Draft(jnp.array([[1]]), logits=target_logits[:, :1])
      >>> step = specjax.rejection_sample(
      ...     draft, target_logits, keys=jax.random.key(0), positions=0,
      ...     rule=specjax.rules.block())
      >>> step.num_accepted, step.num_emitted
      (Array([1], dtype=int32), Array([2], dtype=int32))

    References:
      Sun et al., 2024, arXiv:2403.10444.
    """
    return BLOCK


def coupled() -> BuiltInRule:
    r"""Returns coupled sampling, which accepts drafted tokens while the target draws them, too.

    .. math:: y_i = \text{the draw of } \mathrm{softmax}(\text{logits}_i / \text{temperature})
      \text{ at (position} + i, \text{TARGET)}, \qquad x_i \text{ is accepted iff } x_i = y_i

    It is exact. The emitted tokens are :math:`y_0, y_1, \dots` up to the first disagreement: those
    that `gumbel_sample` draws from these rows without a draft. A seeded text does not depend on the
    drafter, so any tokens may be verified. q is not read: only the draft's token ids and their
    numbers count. An id outside [0, V) agrees with nothing. With `bonus_token_ids` the text differs
    from plain decoding's.

    Draft with the noise of the target: draft and target then agree often. `propose` with this rule
    does so, and so does ``gumbel_sample(..., stream=Stream.TARGET)`` with these keys and positions.
    Two-level draws, over blocks b of 128 tokens and within each, agree with probability

    .. math:: \sum_b M_b \sum_{v \in b} M_{v | b}, \qquad
      M_i = 1 / \sum_j \max(p_j / p_i, q_j / q_i)

    No rule accepts more often than :math:`\sum \min(p, q)`, the rate of the standard rule. Tokens
    chosen without that noise, by a greedy draft or prompt lookup, are accepted with probability
    p(x). That is optimal. By another rule, tokens drawn on the target's stream bias the output: a
    draft that says so, `Draft.on_target_stream`, is refused there.

    Returns:
      The value, static.

    Example:
      >>> target_logits = jnp.log(jnp.array([[[0.1, 0.9], [0.5, 0.5]]]))
      >>> keys = jax.vmap(jax.random.key)(jnp.array([7]))
      >>> drawn = specjax.gumbel_sample(
      ...     target_logits[:, 0], keys=keys, positions=3, stream=specjax.Stream.TARGET)
      >>> step = specjax.rejection_sample(
      ...     specjax.Draft(drawn.token_ids[:, None], on_target_stream=True), target_logits,
      ...     keys=keys, positions=3, rule=specjax.rules.coupled())
      >>> step.num_accepted, step.num_emitted
      (Array([1], dtype=int32), Array([2], dtype=int32))

    References:
      Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
    """
    return COUPLED


def synthetic(conditional_rates: Any) -> SyntheticRule:
    """Returns a rule that accepts at given rates whatever p and q are, to time decoding at them.

    Drafted token i is accepted with probability r_i, if all before it were. The token in place of a
    rejected one is drawn as by the standard rule. The rule is a pytree whose leaf are the rates:
    other rates do not recompile. Rates [K] have no batch axis, so they break `vmap(in_axes=0)`:
    repeat them to [B, K] there.

    Args:
      conditional_rates: f32, [K] or [B, K] in [0, 1]. `geometric_rates`, `rates_for_length` and
        `specjax.conditional_rates` make some.

    Returns:
      `SyntheticRule`, a pytree.

    Example:
      >>> step = specjax.rejection_sample(
      ...     specjax.Draft(jnp.array([[3, 1]])), jnp.zeros((1, 3, 8)), keys=jax.random.key(0),
      ...     positions=0, rule=specjax.rules.synthetic([1.0, 0.0]))
      >>> step.num_accepted
      Array([1], dtype=int32)
    """
    if not hasattr(conditional_rates, "dtype"):
        conditional_rates = np.asarray(conditional_rates, np.float32)
    return SyntheticRule(conditional_rates)


def lenience(factor: float) -> StaticRule:
    """Returns the standard rule with q replaced by l q in the test, not exact.

    The residual stays max(p - q, 0), so that no token is emitted more often than p / l. Total
    variation at l = 0.5: 0.2.

    Args:
      factor: l in (0, 1]; 1 is the standard rule.

    Returns:
      `Rule`, static.

    Example:
      >>> specjax.rules.lenience(0.5) == specjax.rules.lenience(0.5), specjax.rules.lenience(1)
      (True, rules.standard())

    References:
      Leviathan et al., 2023, arXiv:2211.17192, appendix A.5.
    """
    fraction = _fraction("factor", factor)
    return STANDARD if fraction == 1 else Rule(_Ratio(fraction), _Residual())


def typical_acceptance(epsilon: float, delta: float) -> Rule:
    """Returns Medusa's rule, which accepts a token of p > min(epsilon, delta e^-H); not exact.

    H is the entropy of the target row. The token in place of a rejected one follows the target row.
    Total variation at epsilon = 0.3 and delta = 0.6: 0.1.

    Args:
      epsilon: in (0, 1].
      delta: in (0, 1].

    Returns:
      `Rule`, static.

    Example:
      >>> specjax.rules.typical_acceptance(0.09, 0.3).statistics
      ('entropy',)

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

    Returns:
      `Rule`, static.

    Example:
      >>> specjax.rules.relaxed(10, 0.6).statistics
      ('max_logprob', 'rank')

    References:
      TensorRT-LLM, "relaxed acceptance" of its DeepSeek-R1 decoding.
    """
    if isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1:
        raise ValueError(f"top_n is {top_n!r}; it needs a Python int >= 1, the tokens to accept.")
    return Rule(_Relaxed(top_n, _fraction("delta", delta)), _TargetRow(), ("max_logprob", "rank"))


def ensemble(weight: float) -> StaticRule:
    """Returns the rule whose tokens follow a p + (1 - a) q; not exact for p.

    Drafted tokens follow the mixture, and the bonus token follows p. A token with p = 0 is still
    rejected. Total variation at a = 0.5: 0.15.

    Args:
      weight: a in (0, 1]; 1 is the standard rule.

    Returns:
      `Rule`, static.

    Example:
      >>> specjax.rules.ensemble(1)
      rules.standard()
    """
    fraction = _fraction("weight", weight)
    return STANDARD if fraction == 1 else Rule(_Mixture(fraction), _Residual())


def _fraction(name: str, value: float) -> float:
    """Returns a parameter in (0, 1] as a Python float."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number <= 1:
        raise ValueError(f"{name} is {value!r}; it needs to be a number in (0, 1].")
    return number
