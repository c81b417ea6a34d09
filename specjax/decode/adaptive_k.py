"""The number of tokens that a step drafts: K, or a k chosen by acceptance in past steps.

A step asks `DecodeState.k_policy`, a `KPolicy`, and need not know how k is chosen:

    without a table       K tokens
    a table i32[65]       each request has its own k
    a table f32[65, K+1]  all requests have one k, in an engine with `k_by_load`

Counts of past steps, `DraftHistory`, give a request's acceptance rate. A table, made once by
`k_by_rate`, gives k at each rate:

    rate[b]  = (num_accepted[b] + 2.48) / (num_tested[b] + 4)        decayed counts, and a prior
    speed[k] = (1 + rate + rate^2 + ... + rate^k) / step_costs[k]    expected tokens per cost
    k[b]     = argmax_k speed[k]                                     at the rate of request b

A token is tested if all drafted before it in its step were accepted. The k of a step is decided
before any of its tokens is drafted, so the output follows the target whatever is chosen. Rates are
counted in integers and looked up: no rounding depends on the batch. Of `StepCosts` the config has
the row of one batch size here: no clock is read.

In an engine of B slots a step takes as long as its longest draft, and a request cannot know what
the others draft. It assumes that each of the others has a usual rate and drafts k', the best k
for that rate:

    tokens[k]       = 1 + rate + ... + rate^k
    usual_tokens[k] = 1 + usual_rate + ... + usual_rate^k
    speed[k]        = (tokens[k] + (B - 1) * usual_tokens[k']) / step_costs[k]        k >= k'

A request that drafts fewer than k' shortens no step. It drafts more only where its own gain makes
up for longer steps of all. The usual rate is the config's, else 0.55. Most drafts have a higher
rate. But costs omit prompts that a drafter reads, and drafts that the ends of texts cut off.

With `k_by_load`, a table made by `throughput_by_rate` gives speed[k] of each rate, and

    k = argmax_k sum_b speed_b[k]        over the active requests b

depends on past steps of the other requests, too. Each output still follows the target.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from specjax import theory
from specjax.config import SpeculativeConfig
from specjax.devices.placement import pvary_like
from specjax.types import Draft

# Rates are looked up in 64ths, and tokens are counted in 1024ths.
_NUM_RATES = 64
_TOKEN = 1024
# Counts lose a 128th in every step: after 89 more, a step counts half.
_DECAY_SHIFT = 7
# The prior counts, as if 2.48 of 4 tokens had been accepted before the first step. Of the priors
# that lose at most 2 % where no draft is accepted, this gained most on traces of the embedded pair.
_PRIOR_TESTED = 4 * _TOKEN
_PRIOR_ACCEPTED = 2540
# Acceptance rate of tokens in the other slots of an engine, where the config has no usual rate.
_USUAL_RATE = 0.55


# The functions that `KPolicy.draft` is given; both take and return the drafter's state.
_Propose = Callable[[Any, jax.Array], tuple[Draft, Any]]
_Read = Callable[[Any, jax.Array], Any]


class DraftHistory(NamedTuple):
    """Counts of each request's past drafts, by which an adaptive policy chooses.

    Attributes:
      num_tested: i32[B], decayed count of drafted tokens that were tested, in 1024ths.
      num_accepted: i32[B], decayed count of those accepted, in 1024ths.
      num_read: i32[B], committed tokens that the drafter has read.
    """

    num_tested: jax.Array
    num_accepted: jax.Array
    num_read: jax.Array


def init_history(table: Any, lengths: jax.Array) -> DraftHistory | None:
    """Returns the history of requests before their first step; None where K is fixed.

    Args:
      table: `Settings.k_by_rate`.
      lengths: i32[B], tokens of each prompt, of which the drafter has read all but the last.
    """
    if table is None:
        return None
    zeros = jnp.zeros_like(lengths)
    return DraftHistory(zeros, zeros, lengths - 1)


class KPolicy(NamedTuple):
    """Says how many tokens each request drafts: K, or as many as are best at its acceptance rate.

    Attributes:
      table: `Settings.k_by_rate`; None if K is fixed.
      history: of past steps; None if K is fixed.
    """

    table: jax.Array | None
    history: DraftHistory | None

    @property
    def is_adaptive(self) -> bool:
        """Whether requests choose among numbers of tokens."""
        return self.history is not None

    def budget(self, num_tokens: jax.Array, is_active: jax.Array) -> jax.Array:
        """Returns how many tokens each request drafts next, i32[B].

        Args:
          num_tokens: i32[B], how many tokens each text has room for.
          is_active: bool[B], requests that go on.
        """
        if self.history is None or self.table is None:
            return num_tokens
        rates = _rate_index(self.history)
        if self.table.ndim == 1:
            return jnp.minimum(num_tokens, jnp.take(self.table, rates))
        each = jnp.take(self.table, rates, axis=0)
        total = jnp.sum(jnp.where(is_active[:, None], each, 0.0), axis=0)
        return jnp.minimum(num_tokens, jnp.argmax(total).astype(jnp.int32))

    def draft_sizes(self, k: int, buckets: tuple[int, ...]) -> list[int]:
        """Returns the numbers of drafted tokens for which a step has a program, in rising order.

        Args:
          k: K, the one number if it is fixed.
          buckets: numbers besides 0 and K. Each is one more copy of the target's layers.
        """
        if self.history is None:
            return [k]
        return sorted({0, k, *(number for number in buckets if 0 < number < k)})

    def run_if_any(
        self, num_tokens: jax.Array, function: Callable[[Any], Any], operand: Any
    ) -> Any:
        """Returns `function(operand)` if a request drafts or K is fixed, else the operand.

        Args:
          num_tokens: i32[B], how many tokens each request drafts.
          function: takes and returns a pytree of one structure.
          operand: this pytree.
        """
        if self.history is None:
            return function(operand)
        return cond_in_place(jnp.any(num_tokens > 0), function, operand)

    def draft(
        self, propose: _Propose, read: _Read, state: Any, num_tokens: jax.Array, lengths: jax.Array
    ) -> tuple[Draft, Any, DraftHistory | None]:
        """Returns the draft of requests that draft; these first read the tokens that they missed.

        If K is fixed, every request drafts in every step and has missed none.

        Args:
          propose: `(state, num_tokens) -> (draft, state)`; `num_tokens` is -1 for a request that
            drafts none.
          read: `(state, num_read) -> state`, which reads the committed tokens after the first
            `num_read` i32[B], but for the last.
          state: the drafter's, before.
          num_tokens: i32[B], how many tokens each request drafts, -1 if it ended.
          lengths: i32[B], committed tokens.

        Returns:
          The draft, the drafter's state and the history.
        """
        if (history := self.history) is None:
            return *propose(state, num_tokens), None
        is_drafting = num_tokens > 0
        # Every proposal reads the last two tokens itself.
        has_missed = is_drafting & (lengths - 1 - history.num_read > 1)
        state = read(state, jnp.where(has_missed, history.num_read, lengths - 1))
        # For the drafter, a request that drafts nothing is inactive, alone or in a batch.
        draft, state = propose(state, jnp.where(is_drafting, num_tokens, -1))
        num_drafted = draft.num_tokens
        assert num_drafted is not None
        draft = draft.replace(num_tokens=jnp.where(is_drafting, num_drafted, num_tokens))
        # The drafter has read all but the last token of its draft.
        num_read = lengths - 1 + jnp.maximum(num_drafted, 1)
        history = history._replace(num_read=jnp.where(is_drafting, num_read, history.num_read))
        return draft, state, history

    def update(
        self, num_drafted: jax.Array, num_accepted: jax.Array, lengths: jax.Array
    ) -> DraftHistory | None:
        """Returns the history with one step added; None if K is fixed.

        Args:
          num_drafted: i32[B], -1 for an inactive request.
          num_accepted: i32[B].
          lengths: i32[B], committed tokens after the step. The drafter has not read the last of
            them, which is no drafted token.
        """
        if (history := self.history) is None:
            return None
        num_tested = num_accepted + (num_accepted < num_drafted).astype(jnp.int32)
        return DraftHistory(
            _decay(history.num_tested) + _TOKEN * num_tested,
            _decay(history.num_accepted) + _TOKEN * num_accepted,
            jnp.minimum(history.num_read, lengths - 1),
        )

    def num_read(self, lengths: jax.Array) -> jax.Array:
        """Returns how many committed tokens a draft model has read, i32[B]; fewer if K is fixed.

        Then it may not have read the last, one that it drafted last, and one of a last step that
        had no room for drafts.
        """
        return jnp.maximum(lengths - 3, 0) if self.history is None else self.history.num_read


def cond_in_place(predicate: jax.Array, function: Callable[[Any], Any], operand: Any) -> Any:
    """Returns `function(operand)` where the predicate holds, else the operand.

    It is a loop of at most one round, because XLA writes into a loop's carry in place. It would
    copy the operands of `lax.cond`, which here hold caches.
    """

    def run(carry: Any) -> Any:
        return pvary_like((jnp.zeros((), bool), function(carry[1])), carry)

    start = (predicate, operand)
    return jax.lax.while_loop(lambda carry: carry[0], run, pvary_like(start, start))[1]


def k_by_rate(config: SpeculativeConfig, num_slots: int = 1) -> Any:
    """Returns the best k of each acceptance rate 0, 1/64, ..., 1, i32[65]; None if K is fixed.

    The table is made on the host in float64. If several k >= k' have the same speed, the smallest
    is best.

    Args:
      config: from `for_batch_size`, with the costs of steps and the usual rate.
      num_slots: B, of an engine.

    Example:
      >>> config = SpeculativeConfig("auto", step_costs=(1.0, 1.25, 1.75))
      >>> k_by_rate(config)[[0, 16, 24, 32, 64]].tolist()
      [0, 0, 1, 1, 2]
      >>> k_by_rate(config, num_slots=16)[[0, 16, 24, 32, 64]].tolist()
      [1, 1, 1, 1, 1]
    """
    if not config.adaptive_k:
        return None
    costs, tokens = np.asarray(config.step_costs), _tokens_by_rate(config)
    usual = _USUAL_RATE if config.usual_acceptance_rate is None else config.usual_acceptance_rate
    usual_tokens = theory.acceptance_lengths(usual ** np.arange(1, len(costs)))
    usual_k = int(theory.best_k(usual_tokens, costs).k) if num_slots > 1 else 0
    total = tokens + (num_slots - 1) * usual_tokens[usual_k]
    best = usual_k + theory.best_k(total[:, usual_k:], costs[usual_k:]).k
    return best.astype(np.int32)


def throughput_by_rate(config: SpeculativeConfig) -> Any:
    """Returns the expected tokens per cost of each k at each rate, f32[65, K + 1].

    Returns None if K is fixed.

    Args:
      config: from `for_batch_size`.

    Example:
      >>> config = SpeculativeConfig("auto", step_costs=(1.0, 1.25, 1.75))
      >>> throughput_by_rate(config)[32].tolist()  # 1 / 1, 1.5 / 1.25, 1.75 / 1.75
      [1.0, 1.2000000476837158, 1.0]
    """
    if not config.adaptive_k:
        return None
    best = theory.best_k(_tokens_by_rate(config), config.step_costs)
    return best.tokens_per_second.astype(np.float32)


def _tokens_by_rate(config: SpeculativeConfig) -> Any:
    """Returns the expected tokens of a step at each rate and k, f64[65, K + 1]."""
    assert config.step_costs
    rates = np.arange(_NUM_RATES + 1)[:, None] / _NUM_RATES
    return theory.acceptance_lengths(rates ** np.arange(1, len(config.step_costs)))


def constant_k(table: Any) -> int | None:
    """Returns k if it stays the same at every rate that a request can reach, else None.

    If k is 0 at the prior's rate, no token is ever tested, and the rate stays.

    Args:
      table: from `k_by_rate` or `throughput_by_rate`.

    Example:
      >>> dear = SpeculativeConfig("auto", step_costs=(1.0, 2.0, 3.0))
      >>> constant_k(k_by_rate(dear)), constant_k(k_by_rate(SpeculativeConfig("auto")))
      (0, None)
      >>> cheap = SpeculativeConfig("auto", step_costs=(1.0, 1.1, 1.2))
      >>> constant_k(k_by_rate(cheap, num_slots=16))
      2
    """
    best = table if table.ndim == 1 else np.argmax(table, axis=1)
    first = int(best[_PRIOR_ACCEPTED * _NUM_RATES // _PRIOR_TESTED])
    return first if first == 0 or np.all(best == first) else None


def _rate_index(history: DraftHistory) -> jax.Array:
    """Returns the acceptance rate of each request in 64ths, i32[B]."""
    accepted = history.num_accepted + _PRIOR_ACCEPTED
    return accepted * _NUM_RATES // (history.num_tested + _PRIOR_TESTED)


def _decay(count: jax.Array) -> jax.Array:
    return count - (count >> _DECAY_SHIFT)


jax.export.register_namedtuple_serialization(DraftHistory, serialized_name="specjax.DraftHistory")
