"""Arguments of `Engine.submit`: their ranges, and the key that a seed makes."""

import re

import automata
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax import Grammar, SamplingParams
from specjax.engine.submission import EngineLimits, Submission, check_request, drop_batch_axis

pytestmark = pytest.mark.once

V = 4
DEFAULTS = SamplingParams(
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    bias=np.zeros(V, np.float32),
    grammar=Grammar(*automata.tables(V)),
    grammar_state=-1,
)
LIMITS = EngineLimits(16, V, drop_batch_axis(DEFAULTS), None, False)
NUM_STATES = len(DEFAULTS.grammar.next_states)
LEAST = np.nextafter(np.float32(0), np.float32(1))


def check(**values):
    return check_request(Submission([0, 1], **{"key": jax.random.key(0)} | values), LIMITS)


@pytest.mark.parametrize(
    ("name", "inside", "outside", "needed"),
    [
        ("top_k", [-1, 0, 2**31 - 1], [-2, -(2**31)], "an integer >= -1"),
        ("top_p", [0, LEAST, 1], [-LEAST, 1.0001, np.nan, np.inf], "a finite number in [0, 1]"),
        ("min_p", [0, LEAST, 1], [-LEAST, 1.0001, np.nan, np.inf], "a finite number in [0, 1]"),
        ("repetition_penalty", [LEAST, 3e38], [0, -1, np.nan, np.inf], "a finite number > 0"),
        ("frequency_penalty", [-3e38, 3e38], [np.nan, np.inf, -np.inf], "a finite number"),
        ("presence_penalty", [-3e38, 3e38], [np.nan, np.inf, -np.inf], "a finite number"),
        ("grammar_state", [-1, 0, NUM_STATES - 1], [-2], "an integer >= -1"),
    ],
)
def test_a_number_out_of_its_range_is_refused_in_a_sentence_and_the_ends_are_taken(
    name, inside, outside, needed
):
    for value in inside:
        settings = check(sampling=SamplingParams(**{name: value})).settings
        taken = getattr(settings.sampling, name)
        assert taken == np.asarray(value, taken.dtype)
    for value in outside:
        said = rf"^sampling\.{name} is \S+; it needs {re.escape(needed)}\.$"
        with pytest.raises(ValueError, match=said):
            check(sampling=SamplingParams(**{name: value}))


def test_a_bias_that_is_no_number_and_a_state_beyond_the_grammar_are_refused():
    bias = np.array([0, -np.inf, np.nan, np.nan], np.float32)
    with pytest.raises(ValueError, match=r"^sampling.bias is nan at token 2; it needs numbers.$"):
        check(sampling=SamplingParams(bias=bias))
    with pytest.raises(ValueError, match=f"^sampling.grammar_state is {NUM_STATES}; the engine"):
        check(sampling=SamplingParams(grammar_state=NUM_STATES))


def test_no_stop_strings_may_be_none():
    assert check(stop=None).stop == check(stop=()).stop == ()


def bits(seed):
    return jax.random.key_data(check(key=None, seed=seed).settings.keys).tolist()


@given(st.integers(-(2**63), 2**63 - 1))
def test_all_64_bits_of_a_seed_are_in_its_key(seed):
    high, low = bits(seed)
    assert (high << 32 | low) == seed % 2**64


@given(st.integers(0, 2**32 - 1))
def test_a_seed_of_32_bits_makes_the_key_of_jax(seed):
    assert bits(seed) == jax.random.key_data(jax.random.key(seed, impl="threefry2x32")).tolist()


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 0.5, "1", True])
def test_a_seed_that_is_no_integer_of_64_bits_is_refused(seed):
    with pytest.raises(ValueError, match=r"^seed is .*; it needs a Python int in"):
        check(key=None, seed=seed)


@pytest.mark.parametrize(
    ("seed", "said"), [(1, "key and seed are both given"), (None, "neither key nor seed is given")]
)
def test_a_request_has_a_key_or_a_seed(seed, said):
    with pytest.raises(ValueError, match=f"^{said}; a request needs one of them"):
        check(key=jax.random.key(0) if seed else None, seed=seed)
