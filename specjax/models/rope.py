"""Rotary embeddings: each pair of a head's coordinates is turned by its position.

Axes: `B` requests, `T` tokens, `H` heads, `D` head dimension.
"""

import math

import jax
import jax.numpy as jnp

from specjax.models.config import RopeScaling

__all__ = ["rotate", "rotation", "turn"]


def rotation(
    theta: float, scaling: RopeScaling | None, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    r"""Cosines and sines of the angles by which `rotate` turns.

    Pair i turns by :math:`\mathrm{position} \cdot \theta^{-2i/D}`, before scaling.

    Args:
      theta: base of the frequencies.
      scaling: of the wavelengths, or None.
      head_dim: D, even.
      positions: i32[B, T].

    Returns:
      Two f32[B, T, 1, D / 2].
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def _scaled(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # How often a wave fits the first training's length, against the two bounds of the passage.
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    kept = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotate(x: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns the pairs of [B, T, H, D], coordinate i with i + D / 2, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(turn(a, b, *turns), axis=-1).astype(x.dtype)


def turn(a: jax.Array, b: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both halves of turned heads."""
    return a * cos - b * sin, b * cos + a * sin
