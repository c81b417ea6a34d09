"""Noise by address is `jax.random`'s, finite, and fine enough in the tail."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import Stream
from specjax.core import noise

ENDS = np.array([0, 1, 2, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
u32 = st.integers(0, 2**32 - 1)


def split_words(key):
    data = jnp.asarray(key, jnp.uint32)
    return data[..., 0], data[..., 1]


def jax_bits(key, position, stream, level, n, dtype):
    at = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, position), stream), level)
    return jax.random.bits(at, (n,), dtype)


def check_words(seed, position, stream, level, dtype):
    key = jax.random.key(seed)
    with jax.threefry_partitionable(True):
        expected = np.asarray(jax_bits(key, position, stream, level, 300, dtype))
    at = noise.fold_in(noise.address(noise.key_words(key), position, stream), level)
    index = jnp.arange(300, dtype=jnp.uint32)
    np.testing.assert_array_equal(np.asarray(noise.random_bits(at, index, dtype)), expected)
    key_data = np.asarray(jax.random.key_data(key))
    theirs = oracle.fold_in(oracle.address(key_data, position, stream), level)
    wide = np.float64 if dtype == jnp.uint64 else np.float32
    np.testing.assert_array_equal(oracle.words(theirs, np.arange(300), wide), expected)


@pytest.mark.parametrize("partitionable", [True, False])
@pytest.mark.parametrize("wide", [False, True])
def test_noise_matches_jax_random_bit_for_bit(partitionable, wide):
    x64 = jax.enable_x64(True) if wide else contextlib.nullcontext()
    with jax.threefry_partitionable(partitionable), x64:
        for seed, position, stream, level in [
            (0, 0, 0, 0),
            (7, 3, 5, 1),
            (2**31, 2**31 - 1, 64, 0),
        ]:
            check_words(seed, position, stream, level, jnp.uint64 if wide else jnp.uint32)


@settings(max_examples=25, deadline=None)
@given(u32, u32, u32, u32)
def test_our_threefry_is_the_oracle_s(k0, k1, x0, x1):
    ours = noise.threefry2x32((jnp.uint32(k0), jnp.uint32(k1)), (jnp.uint32(x0), jnp.uint32(x1)))
    assert [int(x) for x in ours] == [int(x) for x in oracle.threefry2x32(k0, k1, x0, x1)]


def test_threefry_meets_its_published_vectors():
    """Known answers of the Random123 distribution for Threefry-2x32 with 20 rounds."""
    ones = 2**32 - 1
    cases = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((ones, ones), (ones, ones), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, count, expected in cases:
        words = noise.threefry2x32(split_words(key), split_words(count))
        assert tuple(int(x) for x in words) == expected


def test_a_traced_stream_and_position_name_the_same_address():
    key = noise.key_words(jax.random.key(5))
    traced = jax.jit(noise.address)(key, jnp.int32(9), jnp.int32(3))
    fixed = noise.address(key, 9, 3)
    assert [int(x) for x in traced] == [int(x) for x in fixed]


def test_streams_of_a_step_are_disjoint():
    streams = [Stream.TARGET, *map(Stream.accept, range(32)), *map(Stream.draft, range(32))]
    assert streams[0] == 0
    assert len(set(streams)) == 65
    assert [Stream.accept(2), Stream.draft(2)] == [5, 6]
    assert int(Stream.draft(jnp.int32(2))) == 6


@pytest.mark.parametrize("wide", [False, True])
def test_uniforms_are_inside_and_gumbels_finite_at_both_ends(wide):
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        bits = ENDS.astype(np.uint64) << np.uint64(32) if wide else ENDS
        bits = np.append(bits, np.array([2**64 - 1 if wide else 2**32 - 129], bits.dtype))
        u = np.asarray(noise.uniform_from_bits(jnp.asarray(bits)))
        g = np.asarray(noise.gumbel_from_uniform(jnp.asarray(u)))
        assert u.dtype == (np.float64 if wide else np.float32)
        assert np.all((u > 0) & (u < 1))
        assert np.all(np.isfinite(g))
        np.testing.assert_array_equal(u.astype(np.float64), oracle.uniform(bits))
        np.testing.assert_allclose(g, -np.log(-np.log1p(-oracle.uniform(bits))), atol=3e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(u32, min_size=64, max_size=64))
def test_uniforms_are_the_stated_function_of_the_word(words):
    bits = np.array(words, np.uint32)
    u = np.asarray(noise.uniform_from_bits(jnp.asarray(bits))).astype(np.float64)
    np.testing.assert_array_equal(u, oracle.uniform(bits))


@pytest.mark.parametrize("wide", [False, True])
def test_gumbels_and_coins_stand_at_their_address(wide):
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        dtype, theirs = (jnp.float64, np.float64) if wide else (jnp.float32, np.float32)
        key = jax.random.key(11)
        key_data = np.asarray(jax.random.key_data(key))
        at = noise.address(noise.key_words(key), 17, 4)
        at_oracle = oracle.address(key_data, 17, 4)
        index = jnp.arange(1000, dtype=jnp.uint32)
        for level in (0, 1):
            ours = np.asarray(noise.gumbel(at, level, index, dtype))
            exact = oracle.gumbel(at_oracle, level, np.arange(1000), theirs)
            np.testing.assert_allclose(ours, exact, atol=1e-12 if wide else 3e-6, rtol=0)
        coin = float(noise.uniform(at, jnp.uint32(0), dtype))
        assert coin == oracle.coin(at_oracle, theirs)


@pytest.mark.once
def test_the_tail_of_the_gumbel_is_fine_enough_for_a_large_vocabulary():
    """P(G > g) = u: each word moves it by 2^-32, and rounding to float32 by no more."""
    words = np.arange(2**16, dtype=np.uint32)
    u = np.asarray(noise.uniform_from_bits(jnp.asarray(words))).astype(np.float64)
    np.testing.assert_allclose(u, (words + 0.5) * 2.0**-32, rtol=2.0**-24)
    g = np.asarray(noise.gumbel_from_uniform(jnp.asarray(u.astype(np.float32)))).astype(float)
    survival = -np.expm1(-np.exp(-g))
    np.testing.assert_allclose(survival, u, rtol=5e-6)
    assert np.all(np.diff(g) < 0)
