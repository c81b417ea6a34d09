r"""Rotary embeddings (RoPE): each pair of a head's coordinates is rotated by its position.

Pair i of a token at position p is rotated by the angle :math:`p \cdot \theta^{-2i/D}`, before
scaling.
Axes: `B` requests, `T` tokens, `H` heads, `D` head dimension.

References:
  Su et al., 2021, arXiv:2104.09864.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.decoder.shared_math import rotate_halves


class RopeScaling(NamedTuple):
    """Stretches rotary wavelengths for sequences longer than in pretraining.

    Attributes:
      kind: "linear" multiplies every wavelength by `factor`. "llama3" does so for wavelengths
        above `original_max_position_embeddings / low_freq_factor`, leaves those below
        `original_max_position_embeddings / high_freq_factor`, and interpolates in between.
      factor: usually >= 1.
      low_freq_factor: periods within the pretraining length below which a wavelength is
        stretched fully.
      high_freq_factor: periods above which it is unchanged; larger than `low_freq_factor`.
      original_max_position_embeddings: the pretraining length.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def rope_cos_sin(
    theta: float, scaling: RopeScaling | None, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of the angles by which `rotate` rotates, two f32[B, T, 1, D / 2].

    Args:
      theta: base of the frequencies.
      scaling: of the wavelengths, or None.
      head_dim: D, even.
      positions: i32[B, T].
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies[None, None, None]
    return jnp.cos(angles), jnp.sin(angles)


def _scaled(frequencies: jax.Array, scaling: RopeScaling) -> jax.Array:
    """Returns frequencies scaled for sequences longer than those of pretraining.

    "linear" divides every frequency. "llama3" divides those of long waves and keeps those of short
    waves. Between `low_freq_factor` and `high_freq_factor`, in waves per pretraining length, it
    interpolates.
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    waves = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    unscaled_share = jnp.clip((waves - low) / (high - low), 0.0, 1.0)
    return frequencies * (unscaled_share + (1.0 - unscaled_share) / scaling.factor)


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Returns [B, T, H, D] with coordinate i and i + D / 2 rotated as a pair, in float32.

    Args:
      x: [B, T, H, D].
      cos_sin: from `rope_cos_sin`.
    """
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(rotate_halves(low, high, *cos_sin), axis=-1).astype(x.dtype)
