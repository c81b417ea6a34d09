"""Chooses how many tokens a request drafts next, from its own past steps and a table of costs.

    rate[b]  = (num_accepted[b] + prior) / (num_tested[b] + prior)      decayed counts of past steps
    speed[k] = (1 + rate + rate^2 + ... + rate^k) / step_costs[k]        expected tokens per cost

A token is tested if all drafted before it in its step were accepted. The K of a step is decided
before any of its tokens is drafted, so that the output follows the target whatever is chosen. The
rates are counted in integers and looked up: no rounding depends on the batch.

An engine's step takes as long as its longest draft makes it, also for slots that draft less, and a
request cannot know what the others draft: its K follows from its own past alone. The rule assumes
that each of the other B - 1 slots has a usual rate and drafts the k' that is best for it:

    tokens[k] = 1 + rate + ... + rate^k
    speed[k]  = (tokens[k] + (B - 1) * usual_tokens[k']) / step_costs[k]         k >= k'

No request drafts fewer than k', which would shorten no step, and it drafts more only where its own
gain makes up for longer steps of all. Where k' is 0, hardly one ever drafts. The usual rate is the
config's. Where it has none it is 0.55, less than most drafts have: costs leave out prompts that a
drafter reads and drafts that ends of texts cut off.

    shared k = argmax_k sum_b speed_b[k]                 or one number for all requests

With a shared one, past steps of others decide, too. Each output follows the target all the same.
"""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from specjax import theory
from specjax.config import SpeculativeConfig

__all__ = [
    "DraftHistory",
    "add_step",
    "choose_k",
    "choose_shared_k",
    "init_history",
    "k_by_rate",
    "settled_k",
    "speeds_by_rate",
]

# Rates are looked up in 64ths, and tokens are counted in 1024ths.
_NUM_RATES = 64
_TOKEN = 1024
# Counts lose a 128th in every step: what was seen 89 steps ago counts half.
_DECAY_SHIFT = 7
# As if 2.48 of 4 tokens had been accepted before the first step. Of these constants the traces of
# the embedded pair gained most among those that lose 2 % where no draft is ever accepted.
_PRIOR_TESTED = 4 * _TOKEN
_PRIOR_ACCEPTED = 2540
# Of each drafted token in the other slots of an engine, where the config has no usual rate.
_USUAL_RATE = 0.55


class DraftHistory(NamedTuple):
    """What `num_speculative_tokens="auto"` knows of each request.

    Attributes:
      num_tested: i32[B], decayed count of drafted tokens that were tested, in 1024ths.
      num_accepted: i32[B], decayed count of those accepted, in 1024ths.
      num_read: i32[B], committed tokens that the drafter has read.
    """

    num_tested: jax.Array
    num_accepted: jax.Array
    num_read: jax.Array


def init_history(lengths: jax.Array) -> DraftHistory:
    """Returns the history of requests of which all but the last token was read."""
    zeros = jnp.zeros_like(lengths)
    return DraftHistory(zeros, zeros, lengths - 1)


def k_by_rate(config: SpeculativeConfig, num_slots: int = 1) -> Any:
    """Returns the best k of each acceptance rate 0, 1/64, ..., 1, i32[65]; None without "auto".

    Made on the host in float64; the smallest k of equal speed, from k' on.

    Args:
      config: with the costs of steps and the usual rate.
      num_slots: B, of an engine.

    Example:
      >>> config = SpeculativeConfig("auto", step_costs=(1.0, 1.25, 1.75))
      >>> k_by_rate(config)[[0, 16, 24, 32, 64]].tolist()
      [0, 0, 1, 1, 2]
      >>> k_by_rate(config, num_slots=16)[[0, 16, 24, 32, 64]].tolist()
      [1, 1, 1, 1, 1]
    """
    if config.step_costs is None:
        return None
    costs, tokens = np.asarray(config.step_costs), _tokens_by_rate(config)
    usual = _USUAL_RATE if config.usual_acceptance_rate is None else config.usual_acceptance_rate
    usual_tokens = theory.acceptance_lengths(usual ** np.arange(1, len(costs)))
    others = int(theory.best_k(usual_tokens, costs).k) if num_slots > 1 else 0
    total = tokens + (num_slots - 1) * usual_tokens[others]
    best = others + theory.best_k(total[:, others:], costs[others:]).k
    return best.astype(np.int32)


def speeds_by_rate(config: SpeculativeConfig) -> Any:
    """Returns the expected tokens per cost of each k at each rate, f32[65, K + 1]; None as above.

    Example:
      >>> config = SpeculativeConfig("auto", step_costs=(1.0, 1.25, 1.75))
      >>> speeds_by_rate(config)[32].tolist()  # 1 / 1, 1.5 / 1.25, 1.75 / 1.75
      [1.0, 1.2000000476837158, 1.0]
    """
    if config.step_costs is None:
        return None
    best = theory.best_k(_tokens_by_rate(config), config.step_costs)
    return best.tokens_per_second.astype(np.float32)


def _tokens_by_rate(config: SpeculativeConfig) -> Any:
    """Returns the expected tokens of a step at each rate and k, f64[65, K + 1]."""
    assert config.step_costs is not None
    rates = np.arange(_NUM_RATES + 1)[:, None] / _NUM_RATES
    return theory.acceptance_lengths(rates ** np.arange(1, len(config.step_costs)))


def settled_k(table: Any) -> int | None:
    """Returns the k of every request at any rate that it comes to, or None if rates decide.

    A request that drafts nothing keeps the rate that it had at first.

    Args:
      table: from `k_by_rate`, or from `speeds_by_rate` if all requests share a k.

    Example:
      >>> dear = SpeculativeConfig("auto", step_costs=(1.0, 2.0, 3.0))
      >>> settled_k(k_by_rate(dear)), settled_k(k_by_rate(SpeculativeConfig("auto")))
      (0, None)
      >>> cheap = SpeculativeConfig("auto", step_costs=(1.0, 1.1, 1.2))
      >>> settled_k(k_by_rate(cheap, num_slots=16))
      2
    """
    best = table if table.ndim == 1 else np.argmax(table, axis=1)
    first = int(best[_PRIOR_ACCEPTED * _NUM_RATES // _PRIOR_TESTED])
    return first if first == 0 or np.all(best == first) else None


def add_step(
    history: DraftHistory, num_drafted: jax.Array, num_accepted: jax.Array, lengths: jax.Array
) -> DraftHistory:
    """Returns the history with one step added.

    Args:
      history: before the step.
      num_drafted: i32[B], -1 for an inactive request.
      num_accepted: i32[B].
      lengths: i32[B], committed tokens after the step. The last of them is never a drafted one
        that the drafter has read.
    """
    num_tested = num_accepted + (num_accepted < num_drafted).astype(jnp.int32)
    return DraftHistory(
        _decay(history.num_tested) + _TOKEN * num_tested,
        _decay(history.num_accepted) + _TOKEN * num_accepted,
        jnp.minimum(history.num_read, lengths - 1),
    )


def _decay(count: jax.Array) -> jax.Array:
    return count - (count >> _DECAY_SHIFT)


def choose_k(history: DraftHistory, k_by_rate: jax.Array) -> jax.Array:
    """Returns how many tokens each request drafts next, i32[B]."""
    return jnp.take(k_by_rate, _rate_index(history))


def choose_shared_k(history: DraftHistory, speeds: jax.Array, is_active: jax.Array) -> jax.Array:
    """Returns how many tokens all requests draft next, i32[]; the smallest of equals.

    Args:
      history: of the requests.
      speeds: from `speeds_by_rate`.
      is_active: bool[B], which requests go on.
    """
    each = jnp.take(speeds, _rate_index(history), axis=0)
    total = jnp.sum(jnp.where(is_active[:, None], each, 0.0), axis=0)
    return jnp.argmax(total).astype(jnp.int32)


def _rate_index(history: DraftHistory) -> jax.Array:
    accepted = history.num_accepted + _PRIOR_ACCEPTED
    return accepted * _NUM_RATES // (history.num_tested + _PRIOR_TESTED)


jax.export.register_namedtuple_serialization(DraftHistory, serialized_name="specjax.DraftHistory")
