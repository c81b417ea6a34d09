"""What the machine that runs the tests has."""

import functools

import jax


@functools.cache
def has_gpu():
    """Whether JAX sees an NVIDIA GPU."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False
