"""Acceptance rates of each position from mean tokens per step, and these means from rates."""

import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

# With a smaller decay, a geometric schedule falls off faster than measured drafts do. If no base
# reaches the mean at this decay, the decay rises.
_SMALLEST_DECAY = 0.85


def geometric_rates(mean_rate: float, K: int) -> jax.Array:
    r"""Returns conditional rates that fall off geometrically, with a given mean acceptance rate.

    :math:`c_i = \mathrm{base} \cdot \mathrm{decay}^i`, so that position i and all before it are
    accepted with :math:`a_i = \mathrm{base}^{i+1}\, \mathrm{decay}^{i(i+1)/2}`, and
    :math:`\frac1K \sum_i a_i` is `mean_rate`. The decay is the smallest value of at least 0.85 that
    reaches that mean with a base of at most 1. It is found by bisection in float64.

    Args:
      mean_rate: a Python number in [0, 1], the mean over the K positions of the
        unconditional rates. 0 gives zeros, 1 gives ones.
      K: number of draft tokens per step, at least 1.

    Returns:
      f32[K] in [0, 1], non-increasing, ready for `conditional_rates=`.

    Raises:
      ValueError: if `mean_rate` is outside [0, 1] or `K` is not a positive integer.

    Example:
      >>> rates = geometric_rates(0.672, 2)
      >>> rates
      Array([0.8 , 0.68], dtype=float32)
      >>> f"{jnp.cumprod(rates).mean():.3f}"
      '0.672'
    """
    rate = check_number("mean_rate", mean_rate, 0, 1)
    size = _size(K)
    if rate in (0, 1):
        return jnp.full(size, rate, jnp.float32)
    index = np.arange(size)

    def excess(base: float, decay: float) -> float:
        unconditional = base ** (index + 1) * decay ** (index * (index + 1) / 2)
        return float(unconditional.mean()) - rate

    if excess(1.0, _SMALLEST_DECAY) >= 0:
        decay = _SMALLEST_DECAY
        base = _increasing_root(lambda base: excess(base, decay), 0.0, 1.0)
    else:
        base = 1.0
        decay = _increasing_root(lambda decay: excess(base, decay), _SMALLEST_DECAY, 1.0)
    return jnp.asarray(base * decay**index, jnp.float32)


def rates_for_length(length: float, K: int) -> jax.Array:
    r"""Returns conditional rates of a given mean acceptance length, with the least variance.

    Ones, one fraction, zeros: :math:`c_i = \min(\max(\mathrm{length} - 1 - i, 0), 1)`. Every
    step emits `floor(length)` or `ceil(length)` tokens, and no schedule of that mean varies
    less.

    Args:
      length: a Python number in [1, K + 1], the mean number of tokens emitted per step, the
        recovered or bonus token counted.
      K: number of draft tokens per step, at least 1.

    Returns:
      f32[K] in [0, 1], non-increasing, ready for `conditional_rates=`.

    Raises:
      ValueError: if `length` is outside [1, K + 1] or `K` is not a positive integer.

    Example:
      >>> rates_for_length(2.5, 4)
      Array([1. , 0.5, 0. , 0. ], dtype=float32)
    """
    size = _size(K)
    num_accepted = check_number("length", length, 1, size + 1) - 1
    return jnp.asarray(np.clip(num_accepted - np.arange(size), 0, 1), jnp.float32)


def conditional_rates(unconditional: ArrayLike) -> jax.Array:
    r"""Returns the conditional rates of given unconditional rates.

    With :math:`a_i` the unconditional rate of position i, its conditional rate is
    :math:`c_i = a_i / a_{i-1}` with :math:`a_{-1} = 1`, so that ``cumprod(c) == a``.

    Args:
      unconditional: f32[..., K] in [0, 1], non-increasing along the last axis. Checked where
        its values are known, that is not under a trace.

    Returns:
      f32[..., K] in [0, 1]; zero from the first zero of `unconditional` on.

    Raises:
      ValueError: if `unconditional` has no axis, leaves [0, 1] or increases.

    Example:
      >>> conditional_rates(jnp.array([0.8, 0.4, 0.0, 0.0]))
      Array([0.8, 0.5, 0. , 0. ], dtype=float32)

    References:
      Leviathan et al., 2023, arXiv:2211.17192: their acceptance rate is c held constant.
    """
    rates = _rates("unconditional", unconditional)
    if not isinstance(unconditional, jax.core.Tracer):
        _check_non_increasing("unconditional", np.asarray(unconditional, np.float32))
    before = jnp.concatenate([jnp.ones_like(rates[..., :1]), rates[..., :-1]], axis=-1)
    return jnp.where(before > 0, rates / jnp.where(before > 0, before, 1), 0)


def acceptance_lengths(unconditional: Any) -> Any:
    r"""Returns the mean number of tokens that a step emits, for every number of drafted tokens.

    :math:`L_k = 1 + \sum_{i < k} a_i`: the token after the accepted run, and each drafted token as
    often as it and all before it are accepted. Rates of a longer draft serve all shorter ones. By
    the standard rule, block verification and coupled sampling, tokens drafted after the first i do
    not change how often these are accepted.

    Args:
      unconditional: [..., K] in [0, 1], non-increasing along the last axis, K >= 0:
        ``cumprod`` of conditional rates, `theory.unconditional_rates`, or shares that were
        counted. Checked where its values are known.

    Returns:
      [..., K + 1], of k = 0, 1, ..., K drafted tokens; f64, or an array of JAX from one.

    Raises:
      ValueError: if `unconditional` has no axis, leaves [0, 1] or increases.

    Example:
      >>> acceptance_lengths([0.75, 0.5])
      array([1.  , 1.75, 2.25])

    References:
      Leviathan et al., 2023, arXiv:2211.17192, equation 1: independent tokens, a_i = alpha^(i+1).
    """
    _check_rates("unconditional", unconditional)
    xp: Any = jnp
    if not isinstance(unconditional, jax.Array):
        xp, unconditional = np, np.asarray(unconditional, np.float64)
    if not isinstance(unconditional, jax.core.Tracer):
        _check_non_increasing("unconditional", np.asarray(unconditional))
    first = xp.ones((*unconditional.shape[:-1], 1), unconditional.dtype)
    return xp.cumsum(xp.concatenate([first, unconditional], axis=-1), axis=-1)


def expected_acceptance_length(conditional: ArrayLike) -> jax.Array:
    r"""Returns the mean number of tokens that a step emits under conditional rates.

    :math:`1 + \sum_i \prod_{j \le i} c_j`: the accepted run and the token after it.

    Args:
      conditional: f32[..., K] in [0, 1]. Checked where its values are known.

    Returns:
      f32[...] in [1, K + 1].

    Raises:
      ValueError: if `conditional` has no axis or leaves [0, 1].

    Example:
      >>> float(expected_acceptance_length(jnp.array([1.0, 0.5, 0.5])))
      2.75
    """
    rates = _rates("conditional", conditional)
    return acceptance_lengths(jnp.cumprod(rates, axis=-1))[..., -1]


def _increasing_root(function: Callable[[float], float], low: float, high: float) -> float:
    """Returns the root of an increasing function by bisection, to far below 1e-9."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if function(middle) >= 0 else (middle, high)
    return (low + high) / 2


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """Returns a rate or a length as a float; refuses a value that is no number in [low, high]."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} is a traced value; it needs to be a Python number, because the schedule is "
            "solved on the host. Compute the rates outside jit and pass them in as data."
        )
    number = to_float(value)
    if not low <= number <= high:
        raise ValueError(f"{name} is {value!r}; it needs to be a number in [{low}, {high}].")
    return number


def to_float(value: Any) -> float:
    """Returns a number as a float, and NaN for a value that is no number."""
    try:
        return math.nan if isinstance(value, (str, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _size(K: int) -> int:
    try:
        size = operator.index(K)
    except TypeError:
        size = 0
    if size < 1:
        raise ValueError(
            f"K is {K!r}; it needs to be an integer of at least 1, the draft tokens per step."
        )
    return size


def _rates(name: str, values: ArrayLike) -> jax.Array:
    _check_rates(name, values)
    return jnp.asarray(values, jnp.float32)


def _check_rates(name: str, values: Any) -> None:
    if np.ndim(values) == 0:
        raise ValueError(f"{name} is a scalar; it needs a last axis of K rates, one per position.")
    if not isinstance(values, jax.core.Tracer):
        concrete = np.asarray(values, np.float32)
        outside = concrete[~((concrete >= 0) & (concrete <= 1))]
        if outside.size:
            raise ValueError(
                f"{name} holds {outside[0]}; every rate is a probability and needs to be in [0, 1]."
            )


def _check_non_increasing(name: str, rates: np.ndarray) -> None:
    rising = np.argwhere(np.diff(rates, axis=-1) > 0)
    if rising.size:
        *lead, index = rising[0]
        row = rates[tuple(lead)]
        raise ValueError(
            f"{name} rises from {row[index]} at position {index} to {row[index + 1]}; it needs to "
            "be non-increasing, because a position counts only when all before it are accepted."
        )
