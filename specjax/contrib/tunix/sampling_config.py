"""The sampling fields of a tunix `RolloutConfig`, as arguments of `specjax.generate`."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.processing.sampling_params import SamplingParams

__all__ = ["read_filters", "read_key", "read_temperature"]


def read_temperature(rollout_config: Any) -> float:
    """Returns the temperature; 0 is greedy, and so is `top_p` None in tunix's sampler."""
    return 0.0 if rollout_config.top_p is None else float(rollout_config.temperature)


def read_filters(rollout_config: Any) -> SamplingParams:
    """Returns top-k and top-p, those that filter anything."""
    top_k, top_p = rollout_config.top_k, rollout_config.top_p
    return SamplingParams(
        top_k=top_k if top_k and top_k > 0 else None,
        top_p=top_p if top_p is not None and top_p < 1 else None,
    )


def read_key(seed: Any) -> jax.Array:
    """Returns the key of a seed: an integer, a key of either kind, or None for 0."""
    if seed is None or not hasattr(seed, "dtype") or not seed.shape:
        if hasattr(seed, "dtype") and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
            key: jax.Array = seed
            return key
        return jax.random.key(int(seed or 0), impl="threefry2x32")
    return jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
