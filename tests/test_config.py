"""SpeculativeConfig: every refusal, and that its numbers travel as data."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.config import SpeculativeConfig
from specjax.core import rules
from specjax.theory.acceptance_rates import geometric_rates, rates_for_length


def synthetic(**rates):
    return SpeculativeConfig(3, rejection_sample_method="synthetic", **rates)


def test_what_is_not_said_is_standard_verification_of_four_drawn_drafts():
    config = SpeculativeConfig()
    assert config.num_speculative_tokens == 4
    assert (config.rejection_sample_method, config.draft_sample_method) == (
        "standard",
        "probabilistic",
    )
    assert config.conditional_rates() is None
    assert config.noise_dtype is jnp.float32
    assert SpeculativeConfig(use_fp64_gumbel=True).noise_dtype is jnp.float64


@settings(deadline=None, max_examples=20)
@given(rate=st.floats(0, 1, allow_subnormal=False, width=32))
def test_each_synthetic_form_gives_the_rates_of_its_schedule(rate):
    np.testing.assert_array_equal(
        synthetic(synthetic_acceptance_rate=rate).conditional_rates(), geometric_rates(rate, 3)
    )
    np.testing.assert_array_equal(
        synthetic(synthetic_acceptance_length=1 + 3 * rate).conditional_rates(),
        rates_for_length(1 + 3 * rate, 3),
    )
    np.testing.assert_array_equal(
        synthetic(synthetic_acceptance_rates=(1.0, rate, 0.0)).conditional_rates(),
        np.float32([1, rate, 0]),
    )


def test_equal_configs_are_equal_keys_whatever_their_numbers_were_written_as():
    config = synthetic(synthetic_acceptance_rates=(1.0, 0.5, 0.0))
    written = synthetic(synthetic_acceptance_rates=[np.float32(1), np.float64(0.5), 0])
    assert config == written
    assert hash(config) == hash(written)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.use_fp64_gumbel = True


def test_a_rule_is_part_of_the_key():
    keys = [SpeculativeConfig(rule=rules.lenience(x)).compile_key() for x in (0.5, 0.5, 0.6)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0].rule == rules.lenience(0.5)


def test_the_standard_rule_is_no_rule_of_a_config():
    config = SpeculativeConfig(rule=rules.lenience(1))
    assert (config, config.rule) == (SpeculativeConfig(), None)


def test_a_config_makes_its_method_rates_and_rule_one_rule():
    for method in ("standard", "block", "coupled"):
        config = SpeculativeConfig(rejection_sample_method=method)
        assert config.verification_rule() == getattr(rules, method)()
    own = rules.relaxed(3, 0.5)
    assert SpeculativeConfig(rule=own).verification_rule() == own
    config = synthetic(synthetic_acceptance_length=2.5)
    np.testing.assert_array_equal(
        config.verification_rule().conditional_rates, config.conditional_rates()
    )
    other = np.zeros(3, np.float32)
    assert config.compile_key().verification_rule(other).conditional_rates is other


def test_a_change_of_rates_or_of_their_form_never_recompiles():
    traces = []

    @functools.partial(jax.jit, static_argnames="config")
    def mean(rates, *, config):
        traces.append(config)
        return rates.mean()

    configs = [
        synthetic(synthetic_acceptance_rate=0.0),
        synthetic(synthetic_acceptance_rate=0.9),
        synthetic(synthetic_acceptance_rates=(0.9, 0.3, 0.1)),
        synthetic(synthetic_acceptance_length=2.5),
    ]
    for config in configs:
        rates = config.conditional_rates()
        np.testing.assert_allclose(mean(rates, config=config.compile_key()), rates.mean())
    assert len(traces) == 1


def test_auto_stays_auto_and_an_integer_an_integer():
    auto = SpeculativeConfig("auto")
    for costs in ((1.0, 1.5), (1.0, 0.5)):  # A measured table may fall.
        fewer = dataclasses.replace(auto, step_costs=list(costs))
        assert (fewer.num_speculative_tokens, fewer.step_costs) == (1, costs)
    assert dataclasses.replace(auto, draft_sample_method="greedy").step_costs == auto.step_costs
    three = dataclasses.replace(auto, num_speculative_tokens=3, step_costs=None)
    assert three == SpeculativeConfig(3)
    for change in ({"num_speculative_tokens": 4}, {"num_speculative_tokens": 3}):
        with pytest.raises(ValueError, match=r'step_costs is given, but .*; it needs to be "auto"'):
            dataclasses.replace(auto, **change)
    words = r'usual_acceptance_rate is given, but .*; it needs to be "auto"'
    with pytest.raises(ValueError, match=words):
        SpeculativeConfig(4, usual_acceptance_rate=0.7)
    usual = dataclasses.replace(auto, usual_acceptance_rate=np.float32(0.5))
    assert (type(usual.usual_acceptance_rate), usual.usual_acceptance_rate) == (float, 0.5)
    assert usual.compile_key() == auto.compile_key()


def test_a_compile_key_keeps_all_that_a_compiled_function_depends_on():
    standard = SpeculativeConfig(5, draft_sample_method="greedy", use_fp64_gumbel=True)
    assert standard.compile_key() == standard
    key = synthetic(synthetic_acceptance_length=2.5).compile_key()
    assert key.compile_key() == key
    assert key.num_speculative_tokens == 3
    assert key.rejection_sample_method == "synthetic"
    assert key.conditional_rates().shape == (3,)
    assert key != synthetic(synthetic_acceptance_rate=0.5, draft_sample_method="greedy")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0; .*from 1 to 32"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens is 33"),
        ({"num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0; .*integer"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens is True"),
        *(
            ({"num_speculative_tokens": "auto", "step_costs": costs}, sentence)
            for costs, sentence in [
                ((), r"needs 2 to 33 numbers.*; it is \(\)"),
                ("12", "needs 2 to 33 numbers.*; it is '12'"),
                ((1,), "needs 2 to 33 numbers.*; it has 1 of them"),
                ((1,) * 34, "it has 34 of them"),
                ((1, -1), r"step_costs\[1\] is -1; a step's time needs to be a number > 0"),
                ((0, 1), r"step_costs\[0\] is 0; a step's time"),
                ((1, math.nan), r"step_costs\[1\] is nan; a step's time"),
                ((1, 10**400), r"step_costs\[1\] is 10+[.]{3}0+; .* finite in float32"),
                ((1, "2"), r"step_costs\[1\] is '2'; a step's time"),
            ]
        ),
        ({"rejection_sample_method": "typical"}, "rejection_sample_method is 'typical'; "),
        (
            {"rejection_sample_method": "Coupled"},
            'be "standard", "block", "coupled" or "synthetic"',
        ),
        ({"draft_sample_method": "gumbel"}, "draft_sample_method is 'gumbel'; .*\"probabilistic\""),
        ({"draft_sample_method": "beam"}, 'is \'beam\'; .*"greedy" or "probabilistic"'),
        ({"use_fp64_gumbel": 1}, "use_fp64_gumbel is 1; .*True or False"),
        ({"rule": "lenience"}, "rule is str; it needs a specjax.Rule, or None"),
        (
            {"rule": rules.lenience(0.5), "rejection_sample_method": "block"},
            "is 'block'; .*\"standard\"",
        ),
        (
            {"rule": rules.lenience(0.5), "rejection_sample_method": "coupled"},
            "method is 'coupled'; ",
        ),
        ({"rule": rules.standard(), "rejection_sample_method": "block"}, "rule is given, but"),
        ({"rule": rules.block()}, "needs to be None, with rejection_sample_method='block'"),
        ({"rule": rules.synthetic([0.5])}, "rejection_sample_method='synthetic'"),
        ({"rule": rules.standard}, "rule is function; it needs a specjax.Rule, or None"),
        ({"synthetic_acceptance_rate": 0.5}, 'needs to be "synthetic" for that'),
        ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length is given"),
    ],
)
def test_a_wrong_config_is_refused_in_a_sentence_that_names_the_argument(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        SpeculativeConfig(**arguments)


@pytest.mark.parametrize(
    ("rates", "sentence"),
    [
        ({}, "exactly one of .*; it has none of them"),
        (
            {"synthetic_acceptance_rate": 0.5, "synthetic_acceptance_length": 2.0},
            "it has synthetic_acceptance_rate and synthetic_acceptance_length",
        ),
        ({"synthetic_acceptance_rate": 1.1}, r"synthetic_acceptance_rate is 1.1; .*\[0, 1\]"),
        ({"synthetic_acceptance_rate": float("nan")}, "synthetic_acceptance_rate is nan"),
        ({"synthetic_acceptance_rate": "0.5"}, "synthetic_acceptance_rate is '0.5'"),
        ({"synthetic_acceptance_length": 4.5}, r"length is 4.5; .*\[1, 4\]"),
        ({"synthetic_acceptance_length": 0.5}, "length is 0.5"),
        ({"synthetic_acceptance_rates": (0.5, 0.4)}, "has 2 rates for 3 draft tokens"),
        ({"synthetic_acceptance_rates": (0.5, 0.4, 2)}, r"rates\[2\] is 2; .*\[0, 1\]"),
        ({"synthetic_acceptance_rates": (0.5, 0.6, 0.1)}, "rises from 0.5 at position 0 to 0.6"),
        ({"synthetic_acceptance_rates": 0.5}, "rates is 0.5; it needs to be 3 rates"),
    ],
)
def test_wrong_synthetic_numbers_are_refused_in_a_sentence_that_names_them(rates, sentence):
    with pytest.raises(ValueError, match=sentence):
        synthetic(**rates)
