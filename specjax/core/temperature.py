"""Temperatures, parsed into a scale and two flags.

A temperature is data. It is applied once, inside the passes that reduce a row. Logits are never
divided by it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Below this a request is greedy, as in vLLM.
MIN_TEMPERATURE = 1e-5


class Temperature(NamedTuple):
    """A parsed temperature.

    Attributes:
      scale: f32, one over the temperature; 1 for greedy and invalid requests.
      greedy: bool, the temperature is below `MIN_TEMPERATURE`.
      valid: bool, the temperature is neither negative nor NaN nor infinite.
    """

    scale: jax.Array
    greedy: jax.Array
    valid: jax.Array


def spread_over_rows(value: Any, leading: tuple[int, ...]) -> jax.Array:
    """Returns a parameter of the first axes of rows, or of none, for each of the rows [leading]."""
    value = value.reshape((*value.shape, *(1,) * (len(leading) - value.ndim)))
    return jnp.broadcast_to(value, leading)


def parse_temperature(temperature: jax.Array) -> Temperature:
    """Parses f32 temperatures of any shape."""
    valid = (temperature >= 0) & jnp.isfinite(temperature)
    greedy = valid & (temperature < jnp.float32(MIN_TEMPERATURE))
    random = valid & ~greedy
    scale = jnp.float32(1) / jnp.where(random, temperature, jnp.float32(1))
    # Above 8.5e37 it is subnormal: a CPU takes that for 0, and a masked logit times 0 is NaN.
    scale = jnp.maximum(scale, jnp.float32(jnp.finfo(jnp.float32).tiny))
    return Temperature(scale, greedy, valid)
