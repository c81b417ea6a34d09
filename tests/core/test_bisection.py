"""The search that kernels and reference share: keys, brackets and bounds."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.core import bisection, truncation
from specjax.core.logsumexp import block_partials, merge_partials

# No subnormal numbers: where they count as zeros they have no order.
SPECIAL = [-np.inf, -3.4e38, -1.0, -2e-38, -0.0, 0.0, 2e-38, 1.0, 1.0000001, 3.4e38, np.inf]


def rows(seed, v=640):
    rng = np.random.default_rng(seed)
    x = (3 * rng.normal(size=(8, v))).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] = 0.25
    x[3] *= np.float32(1e37)
    x[4] = np.where(rng.random(v) < 0.5, -np.inf, x[4])
    x[5] = np.where(rng.random(v) < 0.5, np.float32(0.0), np.float32(-0.0))
    x[6] = x[6] * np.exp(60 * rng.normal(size=v)).clip(1e-30, 1e30).astype(np.float32)
    x[7] -= np.float32(30)
    return x


def nth_largest(x, k):
    return np.sort(x, axis=-1)[np.arange(len(x)), x.shape[1] - k]


def start(x):
    size = (len(x),)
    return bisection.initial_bracket(
        jnp.full(size, -jnp.inf, jnp.float32), jnp.max(x, axis=-1), jnp.ones(size, bool)
    )


@pytest.mark.once
def test_keys_are_in_the_order_of_the_numbers_and_lead_back():
    x = np.array(SPECIAL, np.float32)
    keys = np.asarray(bisection.ordered_key(jnp.asarray(x)))
    np.testing.assert_array_equal(np.diff(keys) > 0, np.diff(x) > 0)
    np.testing.assert_array_equal(bisection.key_value(jnp.asarray(keys)), x)


@pytest.mark.once
def test_a_pivot_is_above_low_and_cuts_in_half():
    low = np.array([-(2**31) + 1, -5, 3, 3, 7, -(2**31) + 1, 2**31 - 10], np.int64)
    high = np.array([2**31 - 1, 7, 4, 5, 7 + 2**20, -(2**31) + 9, 2**31 - 1], np.int64)
    ends = bisection.Bracket(*(jnp.asarray(key.astype(np.int32)) for key in (low, high)))
    pivot = np.array(bisection.key_midpoint(ends)).astype(np.int64)
    np.testing.assert_array_equal(pivot, np.clip((low + high) // 2, low + 1, high))


@pytest.mark.once
def test_the_middle_of_the_values_is_inside():
    values = np.array([[-8.0, 0.0], [-3.4e38, 3.4e38], [1.0, 1.0000001], [0.0, 1e-38]], np.float32)
    low, high = (bisection.ordered_key(jnp.asarray(end)) for end in values.T)
    middle = bisection.value_midpoint(bisection.Bracket(low, high + 1))
    assert np.all((middle > low) & (middle <= high + 1))
    np.testing.assert_allclose(bisection.key_value(middle)[:2], [-4.0, 0.0], atol=1e-30)


@pytest.mark.once
@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("k", [1, 7, 200])
def test_a_search_finds_the_kth_largest_in_tiles(k, looks):
    x = jnp.asarray(rows(0))
    tiles = x.reshape(8, -1, 128)

    def weigh(pivot):
        return jnp.sum(truncation.mass_above(tiles, None, pivot[:, None]), axis=-1)

    def look(ends):
        columns = bisection.Bracket(ends.low[:, None], ends.high[:, None])
        inside = truncation.extremes_blocks(tiles, columns)
        return bisection.Extremes(jnp.min(inside.least, axis=-1), jnp.max(inside.most, axis=-1))

    target = jnp.full((8,), k, jnp.float32)
    ends = bisection.search(start(x), target, weigh, look if looks else None)
    assert np.all(bisection.is_closed(ends))
    # `low` need not be a logit, but none lies between it and the threshold.
    least = truncation.min_kept(tiles, bisection.key_value(ends.low)[:, None])
    np.testing.assert_array_equal(jnp.min(least, axis=-1), nth_largest(np.asarray(x), k))


@pytest.mark.once
def test_extremes_close_a_bracket_on_what_is_inside():
    x = jnp.asarray(rows(1))
    ends = start(x)
    inside = truncation.extremes_blocks(x, ends)
    finite = np.where(np.isfinite(x), x, np.inf)
    np.testing.assert_array_equal(inside.least, finite.min(-1))
    np.testing.assert_array_equal(inside.most, np.max(x, axis=-1))
    ends = bisection.clamp_to_logits(ends, inside)
    np.testing.assert_array_equal(bisection.key_value(ends.low), finite.min(-1))
    assert bisection.is_closed(ends)[2]
    nothing = truncation.Extremes(inside.least * 0 + jnp.inf, inside.most * 0 - jnp.inf)
    closed = bisection.clamp_to_logits(ends, nothing)
    assert np.all(bisection.is_closed(closed))
    np.testing.assert_array_equal(closed.low, ends.low)


@pytest.mark.once
def test_a_bound_from_blocks_is_never_above_what_is_there():
    x = jnp.asarray(rows(2))
    for temperature in (0.3, 1.0, 20.0):
        scale = jnp.full((8,), 1 / temperature, jnp.float32)
        partials = block_partials(x, scale)
        anchor = merge_partials(partials, scale).max
        weights = truncation.mass_weights(x, anchor[:, None], scale[:, None])
        below = np.float32([0, 0.1, 1, 3, 10, 40])
        bounds, masses = [], []
        for distance in below:
            pivot = anchor - jnp.float32(distance)
            bounds.append(truncation.mass_bound(partials, pivot, anchor, scale))
            masses.append(truncation.mass_above(x, weights, pivot))
        bounds, masses = np.array(bounds), np.array(masses)
        assert np.all(bounds <= masses * (1 + 1e-5))
        assert np.all(np.diff(bounds, axis=0) >= -1e-5 * bounds[1:])
        assert np.all(bounds[0] >= 1)
        # Far below the largest logit the bound is the mass.
        np.testing.assert_allclose(
            bounds[-1, 0], masses[-1, 0], rtol=1e-4 if temperature < 3 else 1
        )
