"""`SpeculativeConfig`: how a decode loop speculates, checked when it is made."""

import dataclasses
import operator
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import rules
from specjax.core.rule import (
    BLOCK,
    COUPLED,
    STANDARD,
    BuiltInRule,
    Rule,
    StaticRule,
    SyntheticRule,
    VerificationRule,
)
from specjax.theory import acceptance_rates
from specjax.theory.acceptance_rates import check_number
from specjax.theory.step_costs import MAX_SPECULATIVE_TOKENS, StepCosts, read_step_costs

RejectionSampleMethod = Literal["standard", "block", "coupled", "synthetic"]
DraftSampleMethod = Literal["probabilistic", "greedy"]
REJECTION_SAMPLE_METHODS = get_args(RejectionSampleMethod)

# What steps cost that draft with a model, rounded up: on a CPU the embedded pair takes 1.64, 1.78
# and 1.98 at K = 1, 2 and 4, on an H200 an 8B target with a 1B draft 2.1 at K = 5.
DEFAULT_STEP_COSTS = (1.0, 1.65, 1.8, 1.9, 2.0)
# Ways to ask for synthetic acceptance: `(value, K) -> conditional rates` of each.
_SYNTHETIC_FORMS = {
    "synthetic_acceptance_rate": acceptance_rates.geometric_rates,
    "synthetic_acceptance_rates": lambda rates, _: acceptance_rates.conditional_rates(
        np.float32(rates)
    ),
    "synthetic_acceptance_length": acceptance_rates.rates_for_length,
}


class _LargestK(int):
    """The `num_speculative_tokens` of "auto"; `dataclasses.replace` by another integer fixes K."""


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    r"""How a decode loop drafts and verifies. Hashable, so that it can be a static argument.

    Synthetic acceptance needs exactly one of `synthetic_acceptance_rate`,
    `synthetic_acceptance_rates` and `synthetic_acceptance_length`. The other verification methods
    refuse all three.

    Attributes:
      num_speculative_tokens: draft tokens K per step, 1 to 32. With "auto" each request drafts as
        many in a step as its own history and `step_costs` make worth it. The field then holds the
        largest number.
      rejection_sample_method: "standard" follows the target's distribution. "block" does, too, and
        accepts at least as many tokens on average. "coupled" does, and emits the target's own
        draws, so that a seeded text does not depend on the drafter. "synthetic" accepts at given
        rates whatever p and q are, to time a step at that acceptance.
      draft_sample_method: "probabilistic" samples drafts at the request's temperature, and carries
        their logits to verification. By "coupled" it draws with the target's noise, and carries
        none. "greedy" takes the likeliest tokens, verified as one-hot.
      synthetic_acceptance_rate: in [0, 1], mean of the unconditional rates, by geometric decay.
      synthetic_acceptance_rates: K unconditional rates in [0, 1], non-increasing.
      synthetic_acceptance_length: in [1, K + 1], mean tokens per step, with the least variance.
      use_fp64_gumbel: noise in float64, which needs `jax_enable_x64`.
      step_costs: K + 1 numbers > 0 for "auto", the time of a step that drafts and verifies 0, 1,
        ..., K tokens, relative to one another; `specjax sweep` measures them. They need not rise.
        `StepCosts` has the times of several batch sizes: `generate` reads the row of its batch
        size, and an engine the row of its number of slots. None is `DEFAULT_STEP_COSTS`. Without
        "auto", None.
      usual_acceptance_rate: in [0, 1] with "auto", how often a drafted token is accepted whose
        predecessors were, as `specjax sweep` measures it. An `Engine` takes the drafts of other
        slots to have it; `generate` and an engine by `k_by_load` do not read it. None is 0.55.
      rule: a `specjax.Rule` by which "standard" accepts, such as `specjax.rules.relaxed(10,
        0.6)`, which is not exact. None is the standard rule. No other method takes one.

    Raises:
      ValueError: if a value is outside the ranges above.

    Example:
      >>> config = SpeculativeConfig(
      ...     num_speculative_tokens=3,
      ...     rejection_sample_method="synthetic",
      ...     synthetic_acceptance_length=2.5,
      ... )
      >>> config.conditional_rates()
      Array([1. , 0.5, 0. ], dtype=float32)
      >>> SpeculativeConfig("auto", step_costs=(1.0, 1.2, 1.4)).num_speculative_tokens
      2
      >>> SpeculativeConfig(draft_sample_method="gumbel")
      Traceback (most recent call last):
      ValueError: draft_sample_method is 'gumbel'; it is named "probabilistic" here.
    """

    num_speculative_tokens: Any = 4
    rejection_sample_method: RejectionSampleMethod = "standard"
    draft_sample_method: DraftSampleMethod = "probabilistic"
    synthetic_acceptance_rate: float | None = None
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    use_fp64_gumbel: bool = False
    step_costs: tuple[float, ...] | StepCosts | None = None
    rule: StaticRule | None = None
    usual_acceptance_rate: float | None = None

    def __post_init__(self) -> None:
        self._resolve_auto()
        _check_rejection_sample_method(self.rejection_sample_method)
        _check_draft_sample_method(self.draft_sample_method)
        if not isinstance(self.use_fp64_gumbel, bool):
            raise ValueError(
                f"use_fp64_gumbel is {self.use_fp64_gumbel!r}; it needs to be True or False."
            )
        self._check_synthetic_form()
        self._check_rule()
        if self.rule is not None and self.rejection_sample_method != "standard":
            raise ValueError(
                f"rule is given, but rejection_sample_method is {self.rejection_sample_method!r}; "
                'it needs to be "standard", because every other method accepts in its own way.'
            )
        if self.rule == STANDARD:
            self._set("rule", None)

    def verification_rule(self, conditional_rates: Any = None) -> VerificationRule:
        """Returns the rule by which drafted tokens are verified, for `rejection_sample`.

        Args:
          conditional_rates: f32[K] in place of the config's own, if the method is "synthetic". A
            compile key holds none. None computes them.
        """
        if self.rejection_sample_method == "synthetic":
            rates = self.conditional_rates() if conditional_rates is None else conditional_rates
            return rules.synthetic(rates)
        return BuiltInRule(self.rejection_sample_method) if self.rule is None else self.rule

    def conditional_rates(self) -> jax.Array | None:
        """Returns the rates of `verification_rule`, f32[K]; None unless "synthetic"."""
        for name, rates_of in _SYNTHETIC_FORMS.items():
            if (value := getattr(self, name)) is not None:
                return rates_of(value, self.num_speculative_tokens)
        return None

    @property
    def adaptive_k(self) -> bool:
        """Whether each request drafts as many tokens as its own history makes worth it: "auto"."""
        return isinstance(self.num_speculative_tokens, _LargestK)

    def for_batch_size(self, batch_size: int) -> "SpeculativeConfig":
        """Returns the config with plain numbers as step costs, for one batch size.

        Here alone a table of `StepCosts` is read.

        Example:
          >>> costs = {"batch_sizes": [1, 3], "milliseconds": [[1, 1.25], [2, 3]]}
          >>> SpeculativeConfig("auto", step_costs=costs).for_batch_size(2).step_costs
          (1.5, 2.125)
        """
        if not isinstance(self.step_costs, StepCosts):
            return self
        return dataclasses.replace(self, step_costs=self.step_costs.interpolate(batch_size))

    @property
    def noise_dtype(self) -> type[jnp.float32] | type[jnp.float64]:
        """Float type of the noise, for `noise_dtype=` of samplers and verification."""
        return jnp.float64 if self.use_fp64_gumbel else jnp.float32

    @property
    def draws_on_target_stream(self) -> bool:
        """Whether drafts are drawn with the target's own noise."""
        return self.rejection_sample_method == "coupled"

    def to_json(self) -> dict[str, Any]:
        """Returns the fields by name; refuses a rule, which is functions."""
        if self.rule is not None:
            raise ValueError(
                "config has a rule, whose functions a file cannot hold; compile programs with a "
                "rule in each process."
            )
        return dataclasses.asdict(self)

    def compile_key(self) -> "SpeculativeConfig":
        """Returns this config without its rates and costs, as a key of compiled functions.

        Synthetic configs of equal K, method and noise have one key. So have configs that differ in
        their step costs alone, and not in their number. With the key as the static argument and
        `conditional_rates()` as data, a change of rates never recompiles.
        """
        forms: dict[str, Any] = dict.fromkeys(_SYNTHETIC_FORMS)
        if self.rejection_sample_method == "synthetic":
            forms["synthetic_acceptance_rate"] = 0.0
        return dataclasses.replace(
            self,
            **forms,
            step_costs=None if self.step_costs is None else (1.0,) * len(self.step_costs),
            usual_acceptance_rate=None,
        )

    def _check_rule(self) -> None:
        """Refuses rules that a method names, and what is no rule."""
        rule: Any = self.rule
        if isinstance(rule, SyntheticRule) or rule is BLOCK or rule is COUPLED:
            name = "synthetic" if isinstance(rule, SyntheticRule) else rule.name
            raise ValueError(
                f"rule is rules.{name}(...); it needs to be None, with rejection_sample_method="
                f"{name!r}, which names that rule."
            )
        if rule is not None and not isinstance(rule, Rule | BuiltInRule):
            raise ValueError(f"rule is {type(rule).__name__}; it needs a specjax.Rule, or None.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _resolve_auto(self) -> None:
        number, costs = self.num_speculative_tokens, self.step_costs
        usual = self.usual_acceptance_rate
        if not self.adaptive_k and not (isinstance(number, str) and number == "auto"):
            self._set("num_speculative_tokens", _num_tokens(number))
            for name, value in [("step_costs", costs), ("usual_acceptance_rate", usual)]:
                if value is not None:
                    raise ValueError(
                        f"{name} is given, but num_speculative_tokens is {number}; it needs to be "
                        f'"auto" for that. Without it, {name} is None.'
                    )
            return
        if self.rejection_sample_method == "synthetic":
            raise ValueError(
                'num_speculative_tokens is "auto", which follows the acceptance of the models; '
                'rejection_sample_method "synthetic" needs an integer.'
            )
        costs = DEFAULT_STEP_COSTS if costs is None else read_step_costs(costs)
        self._set("num_speculative_tokens", _LargestK(len(costs) - 1))
        self._set("step_costs", costs)
        if usual is not None:
            self._set("usual_acceptance_rate", check_number("usual_acceptance_rate", usual, 0, 1))

    def _check_synthetic_form(self) -> None:
        forms = [name for name in _SYNTHETIC_FORMS if getattr(self, name) is not None]
        if self.rejection_sample_method != "synthetic" and forms:
            raise ValueError(
                f"{forms[0]} is given, but rejection_sample_method is "
                f'{self.rejection_sample_method!r}; it needs to be "synthetic" for that, because '
                "every other method accepts by the models' own probabilities."
            )
        if self.rejection_sample_method == "synthetic" and len(forms) != 1:
            came = " and ".join(forms) if forms else "none of them"
            raise ValueError(
                'rejection_sample_method "synthetic" needs exactly one of '
                f"{', '.join(_SYNTHETIC_FORMS)}; it has {came}."
            )
        k = self.num_speculative_tokens
        for name in forms:
            value = getattr(self, name)
            if name == "synthetic_acceptance_rates":
                self._set(name, _check_rates(name, value, k))
            else:
                bounds = (1, k + 1) if name == "synthetic_acceptance_length" else (0, 1)
                self._set(name, check_number(name, value, *bounds))


def _num_tokens(value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if not 1 <= number <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"num_speculative_tokens is {value!r}; it needs to be an integer from 1 to "
            f'{MAX_SPECULATIVE_TOKENS}, or "auto".'
        )
    return number


def _check_rejection_sample_method(method: Any) -> None:
    if method not in REJECTION_SAMPLE_METHODS:
        *first, last = (f'"{name}"' for name in REJECTION_SAMPLE_METHODS)
        raise ValueError(
            f"rejection_sample_method is {method!r}; it needs to be {', '.join(first)} or {last}."
        )


def _check_draft_sample_method(method: Any) -> None:
    if method == "gumbel":
        raise ValueError("draft_sample_method is 'gumbel'; it is named \"probabilistic\" here.")
    if method not in get_args(DraftSampleMethod):
        raise ValueError(
            f'draft_sample_method is {method!r}; it needs to be "greedy" or "probabilistic".'
        )


def _check_rates(name: str, values: Any, size: int) -> tuple[float, ...]:
    try:
        values = tuple(values)
    except TypeError:
        raise ValueError(
            f"{name} is {values!r}; it needs to be {size} rates, one for each draft token."
        ) from None
    if len(values) != size:
        raise ValueError(
            f"{name} has {len(values)} rates for {size} draft tokens; it needs one for each."
        )
    rates = tuple(
        check_number(f"{name}[{index}]", value, 0, 1) for index, value in enumerate(values)
    )
    for index in range(1, size):
        if rates[index] > rates[index - 1]:
            raise ValueError(
                f"{name} rises from {rates[index - 1]} at position {index - 1} to {rates[index]}; "
                "it needs to be non-increasing, because a position counts only when all before "
                "it are accepted."
            )
    return rates
