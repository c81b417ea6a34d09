"""The kernels of `gumbel_sample` in Pallas' interpreter: every token is the reference's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verify_cases import make_keys

import specjax
from specjax.implementation import Implementation
from specjax.pallas.kernel_config import KernelConfig

pytestmark = pytest.mark.interpret

BATCH = 32


@functools.cache
def sampled(implementation, vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = (3 * rng.normal(size=(BATCH, vocab_size))).astype(np.float32)
    logits[0] = -np.inf
    logits[1, vocab_size // 2] = np.nan
    return jax.device_get(
        specjax.gumbel_sample(
            jnp.asarray(logits),
            keys=make_keys(BATCH),
            positions=np.arange(BATCH, dtype=np.int32),
            stream=np.arange(BATCH, dtype=np.int32) % 5,
            temperature=rng.choice([0.0, 0.3, 1.0, 2.0], BATCH).astype(np.float32),
            cutoff=rng.choice([-np.inf, 0.0], BATCH).astype(np.float32),
            options=specjax.Options(implementation=implementation),
        )
    )


@pytest.mark.parametrize("vocab_size", [1025, 5000])
def test_samples_are_the_reference_s(vocab_size):
    """By the default sizes of kernels; test_gumbel_sample has those of rows of all other sizes."""
    ours, theirs = sampled("interpret", vocab_size), sampled("xla", vocab_size)
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=2e-6, rtol=2e-7)
    np.testing.assert_allclose(ours.logsumexp, theirs.logsumexp, atol=2e-6, rtol=2e-7)


@pytest.mark.parametrize("parts", [0, pytest.param(4, marks=pytest.mark.checks)])
def test_noise_in_parts_or_in_none_draws_the_reference_s_samples(parts):
    """As it is made for many rows, and for more blocks than one program makes noise for."""
    kernels = Implementation("interpret", (KernelConfig(num_noise_splits=parts),))
    ours, theirs = (sampled(each, 1025) for each in (kernels, "xla"))
    np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
