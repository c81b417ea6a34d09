"""Rules of acceptance as values: when a drafted token is accepted, and what replaces it if not.

    BuiltInRule      standard, block and coupled, which have code of their own
    SyntheticRule    given rates, data: the one rule with a leaf
    Rule             two functions of your own

    accept(lp, lq, u, row)        bool, elementwise: accepted or not
    log_residual(lp, lq, row)     log-weights, elementwise, of the token in place of a rejected one

A `Rule` is traced into plain JAX and into the kernels. `lp` is log p of a token, `lq` log q, `u` a
uniform in (0, 1) and `row` statistics of the target row. `specjax.rules` makes rules of each kind.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_STATISTICS = ("max_logprob", "entropy", "rank")


class RowValues:
    """Statistics of a target row; one is computed where a rule reads it.

    Attributes:
      max_logprob: log p of the likeliest token.
      entropy: -sum p log p.
      rank: number of tokens strictly likelier than the drafted one.
    """

    def __init__(self, names: tuple[str, ...], **values: Callable[[], jax.Array]) -> None:
        """Takes the statistics that a rule names, and a function that computes each."""
        self._names, self._values = names, values

    def __getattr__(self, name: str) -> jax.Array:
        """Computes a statistic; refuses one that the rule does not name."""
        if name.startswith("_") or name not in self._names:
            raise AttributeError(
                f"row.{name} is read by a rule whose statistics are {self._names}; it needs to be "
                "named there."
            )
        return self._values[name]()


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule of acceptance for `rejection_sample`: hashable, static under `jit`, equal by value.

    The library rejects p(x) = 0, q(x) = 0 and ids outside the vocabulary before a rule is asked. It
    reads a log-weight of NaN or +inf as -inf, and never emits a masked token. After a rejection the
    token follows softmax(log_residual), or the target row where no log-weight is finite. For a
    one-hot draft q is 1 at its token. The bonus token follows p. The functions capture no arrays:
    parameters are Python numbers. A new lambda for each call compiles each call.

    Attributes:
      accept: of (lp, lq, u, row), bool.
      log_residual: of (lp, lq, row), unnormalised: any number may be added to all,
        up to what float32 rounds of the sums.
      statistics: fields of `row` that the functions read: "max_logprob", "entropy", "rank".
      greedy: whether greedy requests ask the rule, too, with lp at temperature 1. Else they accept
        the argmax.

    Raises:
      ValueError: for an unknown statistic, or functions that are not.

    Example:
      >>> rule = specjax.Rule(
      ...     accept=lambda lp, lq, u, row: lp > row.max_logprob - 1.0,
      ...     log_residual=lambda lp, lq, row: lp,
      ...     statistics=("max_logprob",))
      >>> step = specjax.rejection_sample(
      ...     specjax.Draft(jnp.array([[0]])), jnp.zeros((1, 2, 4)), keys=jax.random.key(0),
      ...     positions=0, rule=rule)
      >>> step.num_accepted
      Array([1], dtype=int32)
    """

    accept: Callable[..., Any]
    log_residual: Callable[..., Any]
    statistics: tuple[str, ...] = ()
    greedy: bool = False

    def __post_init__(self) -> None:
        for name in ("accept", "log_residual"):
            if not callable(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it needs to be a function.")
        object.__setattr__(self, "statistics", tuple(self.statistics))
        for name in self.statistics:
            if name not in _STATISTICS:
                raise ValueError(
                    f"statistics holds {name!r}; each is one of {', '.join(_STATISTICS)}."
                )


@dataclasses.dataclass(frozen=True)
class BuiltInRule:
    """A rule with code of its own: hashable, static under `jit`, equal by value.

    Attributes:
      name: "standard", "block" or "coupled", as a function of `specjax.rules`.
    """

    name: str

    def __repr__(self) -> str:
        return f"rules.{self.name}()"


STANDARD = BuiltInRule("standard")
BLOCK = BuiltInRule("block")
COUPLED = BuiltInRule("coupled")


@dataclasses.dataclass(frozen=True, eq=False)
class SyntheticRule:
    """Acceptance at given rates: a pytree of one leaf, so data under `jit`, and not hashable.

    Attributes:
      conditional_rates: f32[K] or f32[B, K], as in `specjax.rules.synthetic`.
    """

    conditional_rates: Any

    def __hash__(self) -> int:
        raise TypeError(
            "a synthetic rule holds an array, so it has no hash; pass it to jit as data, not as a "
            "static argument."
        )


jax.tree_util.register_dataclass(SyntheticRule, data_fields=["conditional_rates"], meta_fields=[])

StaticRule = Rule | BuiltInRule
VerificationRule = StaticRule | SyntheticRule


def accepts(rule: Rule, lp: jax.Array, lq: jax.Array, u: jax.Array, row: RowValues) -> jax.Array:
    """Returns whether tokens are accepted: what the rule says, where p > 0 and q > 0.

    Args:
      rule: the rule.
      lp: f32, log p.
      lq: f32, log q.
      u: f32 or f64, in (0, 1).
      row: of the target row.

    Returns:
      bool.
    """
    possible = (lp > -jnp.inf) & (lq > -jnp.inf)
    # Logs are finite here, so that a rule's difference is no NaN; the token is rejected anyway.
    zero = jnp.zeros_like(lp)
    lp, lq = (jnp.where(possible, x, zero).astype(u.dtype) for x in (lp, lq))
    return possible & rule.accept(lp, lq, u, row)


def log_weights(rule: Rule, lp: jax.Array, lq: jax.Array, row: RowValues) -> jax.Array:
    """Returns the log-weights f32 of the token in place of a rejected one; -inf where masked."""
    weights = rule.log_residual(lp, lq, row)
    return jnp.where((lp > -jnp.inf) & (weights < jnp.inf), weights, -jnp.inf)


def check_rule(rule: VerificationRule) -> None:
    """Raises `ValueError` for what is no rule."""
    if not isinstance(rule, VerificationRule):
        raise ValueError(
            f"rule is {type(rule).__name__}; it needs a specjax.Rule, or what a function of "
            "specjax.rules returns, such as rules.standard()."
        )


def static_rule(rule: VerificationRule) -> StaticRule:
    """Returns the static part of a rule; synthetic rates are data of the standard one."""
    return STANDARD if isinstance(rule, SyntheticRule) else rule
