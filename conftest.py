"""What the examples in docstrings may name without importing it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax


@pytest.fixture(autouse=True)
def _names_in_examples(doctest_namespace):
    doctest_namespace.update(jax=jax, jnp=jnp, np=np, specjax=specjax)
