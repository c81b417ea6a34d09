"""Constants of a layer, and functions of arrays that plain JAX and the kernels share.

The reference and the kernels that it judges import this file; neither imports the other.
Axes: `N` tokens, `D` head dimension; others broadcast.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """Constants of one layer's attention.

    Attributes:
      scale: multiplies the scores.
      window: number of tokens that a token attends to, itself included; None is all.
      softcap: c, where scores s become c tanh(s / c), or None.
      is_causal: whether a token attends to slots up to its own; else to those up to the last new
        token of its request.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    is_causal: bool = True


@dataclasses.dataclass(frozen=True)
class NormSpec:
    """An RMSNorm without its weight: y = x / sqrt(mean(x^2) + eps) * (weight + offset).

    Attributes:
      size: number of elements of x.
      eps: added to the mean square.
      offset: added to the weight.
    """

    size: int
    eps: float
    offset: float = 0.0


def is_visible(position: Any, slot: Any, window: int | None) -> jax.Array:
    """Returns whether tokens at positions attend to slots; -1 is no token and no slot.

    Args:
      position: i32, of the tokens; broadcasts with `slot`.
      slot: i32, of the cache.
      window: as in `AttentionSpec`.
    """
    visible = (slot >= 0) & (slot <= position)
    return visible if window is None else visible & (slot > position - window)


def last_visible(positions: list[jax.Array], spec: AttentionSpec) -> list[jax.Array]:
    """Returns the last slot that each new token of a request attends to, -1 for no token.

    Args:
      positions: i32 each, of the tokens.
      spec: whether it is the token's own.
    """
    if spec.is_causal:
        return positions
    last = functools.reduce(jnp.maximum, positions)
    return [jnp.where(position < 0, position, last) for position in positions]


def cache_entries(keys: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values as a cache holds them: non-finite values are 0, their keys NaN.

    A masked slot has weight 0, and 0 * NaN is NaN. So values must be finite, or rows would depend
    on masked slots. The NaN in the key makes every row NaN that attends to the slot, so an overflow
    is not hidden.

    Args:
      keys: of the cache's dtype, rotated.
      values: of the cache's dtype and the keys' shape.
    """
    # x - x is NaN where x is not finite, and 0 elsewhere: one instruction for kernels, where
    # `isfinite` takes two comparisons.
    keys = keys - (keys - keys) - (values - values)
    return keys, jnp.where(jnp.abs(values) < jnp.inf, values, jnp.zeros((), values.dtype))


def rotate_halves(
    low: jax.Array, high: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns both halves of rotated heads (RoPE): coordinate i is paired with i + D / 2.

    Args:
      low: coordinates below D / 2.
      high: coordinates from D / 2 on.
      cos: cosines of the angles.
      sin: sines of the angles.

    References:
      Su et al., 2021, arXiv:2104.09864.
    """
    return low * cos - high * sin, high * cos + low * sin
