"""Strictness for the core's tests, fake devices, and the implementations this machine has."""

import pathlib

import jax
import pytest

# Before the first use of a backend. They share the cores: one device is no slower for it.
jax.config.update("jax_num_cpu_devices", 4)

_MODELS = pathlib.Path(__file__).parent / "models"


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """Mixed dtypes and ranks are errors, but for what is marked `lenient` or stands in models/."""
    if request.node.get_closest_marker("lenient") or _MODELS in request.path.parents:
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="session", params=["xla"])
def implementation(request):
    """Each implementation of the samplers that this machine can run."""
    return request.param
