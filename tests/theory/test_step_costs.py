"""`StepCosts`: times between measured batch sizes, what is refused, and the file."""

import dataclasses
import json
import math
from fractions import Fraction

import pytest

import specjax
from specjax import SpeculativeConfig, StepCosts

SIZES = (1, 8, 32, 33)
TIMES = ((5.5, 6.0, 6.25), (6.0, 6.5, 7.5), (7.0, 8.25, 11.0), (9.0, 8.0, 12.0))
COSTS = StepCosts(SIZES, TIMES)


def by_hand(batch_size, k):
    """The line through the two measured times next to a batch size, in fractions."""
    if batch_size <= SIZES[0] or batch_size >= SIZES[-1]:
        return Fraction(TIMES[0 if batch_size <= SIZES[0] else -1][k])
    after = next(i for i, size in enumerate(SIZES) if size > batch_size)
    (low, high), (first, last) = SIZES[after - 1 : after + 1], TIMES[after - 1 : after + 1]
    share = Fraction(batch_size - low, high - low)
    return (1 - share) * Fraction(first[k]) + share * Fraction(last[k])


def test_times_between_measured_batch_sizes_lie_on_the_line_through_them():
    for batch_size in range(1, 40):
        wanted = [float(by_hand(batch_size, k)) for k in range(3)]
        assert COSTS.interpolate(batch_size) == pytest.approx(wanted, rel=1e-14)
    for size, times in zip(SIZES, TIMES, strict=True):
        assert COSTS.interpolate(size) == times
    # Beyond the largest size its own times hold, and no line that may fall below 0.
    assert COSTS.interpolate(10**6) == TIMES[-1]
    assert StepCosts((4,), ((1.0, 2.0),)).interpolate(1) == (1.0, 2.0)


def test_a_config_of_a_table_has_the_costs_of_a_batch_size_when_it_is_asked():
    config = SpeculativeConfig("auto", step_costs=COSTS)
    assert (config.num_speculative_tokens, config.step_costs) == (2, COSTS)
    of_20 = config.for_batch_size(20)
    assert of_20 == SpeculativeConfig("auto", step_costs=(6.5, 7.375, 9.25))
    assert of_20.for_batch_size(8) is of_20
    # Tables of as many costs share their programs.
    assert config.compile_key() == of_20.compile_key()
    assert hash(config) == hash(SpeculativeConfig("auto", step_costs=dataclasses.replace(COSTS)))


def test_a_file_gives_the_table_back_and_is_one_of_the_command(tmp_path):
    costs, path = dataclasses.replace(COSTS, measured_on="a card"), tmp_path / "step_costs.json"
    costs.save(path)
    assert StepCosts.load(path) == costs
    fields = json.loads(path.read_text())["step_costs"]
    assert SpeculativeConfig("auto", step_costs=fields).step_costs == costs
    path.write_text('{"step_costs": [1, 2]}')
    with pytest.raises(ValueError, match=r"step_costs\.json has step_costs of one batch size"):
        StepCosts.load(path)
    for text in ("[1]", "{}", "no JSON", '{"step_costs": {"batch_sizes": [1]}}', "[" * 200_000):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"step_costs\.json is no file of step costs"):
            StepCosts.load(path)


@pytest.mark.parametrize(
    ("sizes", "times", "words"),
    [
        ((), (), r"batch_sizes is \(\); it needs one int >= 1 or several in rising order"),
        ((0, 4), TIMES[:2], r"batch_sizes is \(0, 4\)"),
        ((4, 4), TIMES[:2], r"batch_sizes is \(4, 4\)"),
        ((8, 4), TIMES[:2], r"batch_sizes is \(8, 4\)"),
        ((1.5,), TIMES[:1], r"batch_sizes is \(1\.5,\)"),
        (8, TIMES[:1], "batch_sizes is 8"),
        ((1, 8), TIMES[:1], "it needs a row of times for each of the 2 batch_sizes"),
        ((1,), 5.0, r"milliseconds is 5\.0"),
        ((1, 8), ((1, 2), (1, 2, 3)), r"milliseconds\[1\] has 3 times and milliseconds\[0\] 2"),
        ((1,), ((1.0,),), r"milliseconds\[0\] needs 2 to 33 numbers, .*; it has 1 of them"),
        ((1,), ((1.0, 0.0),), r"milliseconds\[0\]\[1\] is 0\.0; a step's time needs to be a"),
        ((1,), ((1.0, math.inf),), r"milliseconds\[0\]\[1\] is inf"),
    ],
)
def test_a_table_that_is_none_is_refused(sizes, times, words):
    with pytest.raises(ValueError, match=words):
        StepCosts(sizes, times)


def test_a_table_needs_auto_and_its_own_fields():
    with pytest.raises(ValueError, match=r'step_costs is given, but .*; it needs to be "auto"'):
        specjax.SpeculativeConfig(3, step_costs=COSTS)
    with pytest.raises(ValueError, match=r"measured_on is \['a'\]; it needs to be a str"):
        StepCosts((8,), TIMES[:1], ["a"])  # A config with a list would have no hash.
    with pytest.raises(ValueError, match=r"step_costs has the fields \['sizes'\]; it needs"):
        SpeculativeConfig("auto", step_costs={"sizes": [1]})
