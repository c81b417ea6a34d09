"""Synthetic acceptance: each schedule against its definition in float64."""

import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.theory.acceptance_rates import (
    conditional_rates,
    expected_acceptance_length,
    geometric_rates,
    rates_for_length,
)

# Each is compiled for, once.
SIZES = st.sampled_from((1, 2, 3, 7, 32))
RATES = st.floats(0, 1)


def unconditional(conditional):
    return np.cumprod(np.asarray(conditional, np.float64))


def law_of_length(conditional):
    """Probability of emitting 1, ..., K + 1 tokens, by enumeration of every run of coins."""
    conditional = np.asarray(conditional, np.float64)
    law = np.zeros(len(conditional) + 1)
    for coins in itertools.product([True, False], repeat=len(conditional)):
        chance = np.prod(np.where(coins, conditional, 1 - conditional))
        law[[*coins, False].index(False)] += chance
    return law


@pytest.mark.once
def test_rates_for_a_length_have_it_as_their_expected_acceptance_length():
    rates = rates_for_length(2.25, 3)
    np.testing.assert_allclose(rates, [1, 0.25, 0])
    assert expected_acceptance_length(rates) == pytest.approx(2.25)


@pytest.mark.once
@settings(deadline=None, max_examples=60)
@given(rate=RATES, size=SIZES)
def test_a_geometric_schedule_has_the_mean_that_was_asked_for(rate, size):
    rates = geometric_rates(rate, size)
    chex.assert_shape(rates, (size,))
    chex.assert_type(rates, jnp.float32)
    assert abs(unconditional(rates).mean() - rate) < 1e-6


@pytest.mark.once
@settings(deadline=None, max_examples=60)
@given(rate=st.floats(0.01, 1), size=st.integers(2, 32))
def test_a_geometric_schedule_falls_off_by_the_smallest_decay_from_0_85_up(rate, size):
    rates = np.asarray(geometric_rates(rate, size), np.float64)
    assert rates.max() <= 1
    assert (np.diff(rates) <= 0).all()
    ratios = rates[1:] / rates[:-1]
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)
    assert ratios[0] > 0.85 - 1e-6
    index = np.arange(size)
    reachable = (0.85 ** (index * (index + 1) / 2)).mean()
    if rate <= reachable:
        np.testing.assert_allclose(ratios[0], 0.85, rtol=1e-6)
    else:
        # A larger base would exceed 1, so that no smaller decay reaches the mean.
        assert rates[0] == 1


@pytest.mark.parametrize("size", [1, 2, 5, 32])
def test_a_geometric_schedule_at_its_ends_is_all_zeros_or_all_ones(size):
    np.testing.assert_array_equal(geometric_rates(0.0, size), np.zeros(size))
    np.testing.assert_array_equal(geometric_rates(1.0, size), np.ones(size))


@pytest.mark.once
@settings(deadline=None, max_examples=60)
@given(share=RATES, size=st.integers(1, 8))
def test_a_schedule_for_a_length_has_that_mean_and_the_least_variance(share, size):
    length = 1 + share * size
    rates = rates_for_length(length, size)
    law, lengths = law_of_length(rates), np.arange(1, size + 2)
    mean = law @ lengths
    assert abs(mean - length) < 1e-6
    # A law on the integers with a given mean varies least on the two integers around it.
    fraction = length - np.floor(length)
    assert abs(law @ (lengths - mean) ** 2 - fraction * (1 - fraction)) < 1e-5
    assert sorted(set(np.asarray(rates)) - {0, 1}) == [r for r in rates if 0 < r < 1]


@pytest.mark.once
@settings(deadline=None, max_examples=60)
@given(SIZES.flatmap(lambda size: st.lists(RATES, min_size=size, max_size=size)))
def test_conditional_rates_multiply_back_to_the_unconditional_ones(rates):
    rates = np.sort(np.float32(rates))[::-1]
    conditional = conditional_rates(rates)
    assert ((conditional >= 0) & (conditional <= 1)).all()
    # Rates below the smallest normal number are flushed to zero on some devices.
    np.testing.assert_allclose(unconditional(conditional), rates, rtol=1e-5, atol=1e-37)


def test_conditional_rates_are_zero_from_the_first_zero_on():
    np.testing.assert_array_equal(conditional_rates([0.5, 0, 0]), np.float32([0.5, 0, 0]))


def test_every_row_of_rates_is_converted_on_its_own():
    rows = np.float32([[0.8, 0.4, 0.4], [1.0, 0.5, 0.0]])
    np.testing.assert_array_equal(conditional_rates(rows), [conditional_rates(row) for row in rows])
    np.testing.assert_array_equal(
        expected_acceptance_length(rows), [expected_acceptance_length(row) for row in rows]
    )


@pytest.mark.once
@settings(deadline=None, max_examples=30)
@given(st.lists(RATES, min_size=1, max_size=6))
def test_the_expected_acceptance_length_is_the_mean_over_every_run_of_coins(rates):
    enumerated = law_of_length(np.float32(rates)) @ np.arange(1, len(rates) + 2)
    np.testing.assert_allclose(expected_acceptance_length(rates), enumerated, rtol=1e-6)


def test_rates_that_change_do_not_recompile():
    traces = []

    @jax.jit
    def length(rates):
        traces.append(rates)
        return expected_acceptance_length(conditional_rates(rates))

    for rate in (0.2, 0.7):
        rates = jnp.cumprod(geometric_rates(rate, 4))
        np.testing.assert_allclose(length(rates), 1 + 4 * rate, rtol=1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: geometric_rates(1.5, 4), r"mean_rate is 1.5; .*\[0, 1\]"),
        (lambda: geometric_rates(float("nan"), 4), "mean_rate is nan"),
        (lambda: geometric_rates("0.5", 4), "mean_rate is '0.5'"),
        (lambda: geometric_rates(0.5, 0), "K is 0; .*at least 1"),
        (lambda: geometric_rates(0.5, 2.0), "K is 2.0; .*integer"),
        (lambda: jax.jit(lambda r: geometric_rates(r, 4))(0.5), "mean_rate is a traced value"),
        (lambda: rates_for_length(0.5, 4), r"length is 0.5; .*\[1, 5\]"),
        (lambda: rates_for_length(5.5, 4), "length is 5.5"),
        (lambda: conditional_rates(0.5), "unconditional is a scalar"),
        (lambda: conditional_rates([0.5, -0.1]), "unconditional holds -0.1"),
        (lambda: conditional_rates([0.5, np.nan]), "unconditional holds nan"),
        (lambda: conditional_rates([0.5, 0.2, 0.6]), "rises from 0.2.* at position 1 to 0.6"),
        (lambda: expected_acceptance_length([1.1]), "conditional holds 1.1"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence_that_names_the_argument(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
