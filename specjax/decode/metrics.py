"""Metrics of speculation: counts of each request, which steps add to, and rates made of them."""

from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp

from specjax.decode.commit import Finish
from specjax.types import Verification


class Metrics(NamedTuple):
    """Counts of each request. Rates are over all requests, and NaN where nothing was counted.

    Attributes:
      num_steps: i32[B], verification steps in which the request was active.
      num_emitted: i32[B], tokens emitted in these steps and committed.
      num_drafted: i32[B, K], for each position of a draft, the steps that drafted a token there.
        A position after the end of the text does not count.
      num_accepted: i32[B, K], for each position, how many of these steps accepted the token.
    """

    num_steps: jax.Array
    num_emitted: jax.Array
    num_drafted: jax.Array
    num_accepted: jax.Array

    @property
    def mean_acceptance_length(self) -> jax.Array:
        """Tokens emitted and committed per step, f32[]; NaN before the first step."""
        return _ratio(self.num_emitted.sum(), self.num_steps.sum())

    @property
    def draft_acceptance_rate(self) -> jax.Array:
        """Accepted tokens per drafted token, f32[]; NaN if none was drafted."""
        return _ratio(self.num_accepted.sum(), self.num_drafted.sum())

    @property
    def acceptance_rates(self) -> jax.Array:
        """Unconditional acceptance rate of each position, f32[K]; NaN where nothing was drafted.

        A position is accepted only if all before it are. So the rates do not increase with the
        position as long as every step drafts equally many tokens.
        """
        requests = tuple(range(self.num_drafted.ndim - 1))
        return _ratio(self.num_accepted.sum(requests), self.num_drafted.sum(requests))


def init_metrics(batch_size: int, K: int) -> Metrics:
    """Returns metrics before the first step.

    Args:
      batch_size: B, a Python int >= 0.
      K: most drafted tokens per request and step, a Python int >= 0; 0 for plain decoding.

    Returns:
      `Metrics` of zeros, i32[B] and i32[B, K].

    Example:
      >>> init_metrics(batch_size=2, K=3).num_drafted.shape
      (2, 3)
    """
    return Metrics(
        num_steps=jnp.zeros(batch_size, jnp.int32),
        num_emitted=jnp.zeros(batch_size, jnp.int32),
        num_drafted=jnp.zeros((batch_size, K), jnp.int32),
        num_accepted=jnp.zeros((batch_size, K), jnp.int32),
    )


def update_metrics(
    metrics: Metrics,
    draft_num_tokens: jax.Array,
    verification: Verification,
    *,
    num_committed: Any = None,
    finish: Any = None,
) -> Metrics:
    r"""Returns the metrics with one step added.

    A verification goes on past the end of a text. In a step that ends the text after
    :math:`c = \text{num_committed}` tokens, only the drafted positions :math:`i < c` count. The
    position of the token that ends the text is one of them. So position i, once reached, is
    accepted with probability :math:`\sum \min(p, q)` as in any other step.

    Args:
      metrics: the counts so far.
      draft_num_tokens: i32[B] in [-1, K], drafted tokens of each request. 0 is a step without
        drafts, -1 an inactive request, which adds nothing. Pass at most the tokens that a
        request has left.
      verification: `Verification` of the step.
      num_committed: i32[B], how many of the emitted tokens `commit` appended. None is all.
      finish: i8[B], as `commit` returns it. None means that a text ended only where fewer tokens
        were committed than emitted.

    Returns:
      `Metrics` with the step added.

    Raises:
      ValueError: if the batch sizes of the arguments differ.

    Example:
      >>> outcome = specjax.Verification(
      ...     token_ids=jnp.array([[5, 7, -1], [-1, -1, -1]]),
      ...     num_accepted=jnp.array([1, 0]),
      ...     num_emitted=jnp.array([2, 0]),
      ...     logprobs=jnp.zeros((2, 3)),
      ... )
      >>> metrics = update_metrics(init_metrics(2, K=2), jnp.array([2, -1]), outcome)
      >>> float(metrics.mean_acceptance_length), float(metrics.draft_acceptance_rate)
      (2.0, 0.5)
      >>> metrics.acceptance_rates
      Array([1., 0.], dtype=float32)
    """
    for name, counts in [
        ("draft_num_tokens", draft_num_tokens),
        ("verification.num_accepted", verification.num_accepted),
        ("verification.num_emitted", verification.num_emitted),
        ("num_committed", num_committed),
        ("finish", finish),
    ]:
        if counts is not None and counts.shape != metrics.num_steps.shape:
            raise ValueError(
                f"{name} has shape {counts.shape}; it needs shape {metrics.num_steps.shape}, one "
                "count for each request of metrics."
            )
    active = draft_num_tokens >= 0
    committed = verification.num_emitted if num_committed is None else num_committed
    ended = committed < verification.num_emitted
    if finish is not None:
        # Nothing may be emitted after the end of the text, because the next row is invalid.
        ended |= (finish == Finish.END_OF_SEQUENCE) | (finish == Finish.LENGTH)
    num_drafted = jnp.where(ended, jnp.minimum(draft_num_tokens, committed), draft_num_tokens)
    num_accepted = jnp.where(active, jnp.minimum(verification.num_accepted, committed), 0)
    return Metrics(
        num_steps=metrics.num_steps + active.astype(jnp.int32),
        num_emitted=metrics.num_emitted + jnp.where(active, committed, 0),
        num_drafted=metrics.num_drafted + _reached(num_drafted, metrics.num_drafted),
        num_accepted=metrics.num_accepted + _reached(num_accepted, metrics.num_accepted),
    )


def _reached(count: jax.Array, like: jax.Array) -> jax.Array:
    """Returns 1 at the first `count` positions of the last axis of `like`, and 0 after them."""
    positions = jax.lax.broadcasted_iota(jnp.int32, (1,) * count.ndim + like.shape[-1:], count.ndim)
    return (positions < count[..., None]).astype(jnp.int32)


def _ratio(numerator: jax.Array, denominator: jax.Array) -> jax.Array:
    return numerator.astype(jnp.float32) / denominator.astype(jnp.float32)


jax.export.register_namedtuple_serialization(Metrics, serialized_name="specjax.Metrics")
