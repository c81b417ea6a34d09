"""`measure_step_costs`: the milliseconds of steps are those that they take."""

import collections
import dataclasses
import time

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

import specjax
from specjax import SpeculativeConfig, measure_step_costs

TARGET, DRAFT = bigrams.pair(4, seed=1)
MODEL, BY_MODEL = bigrams.model(TARGET), specjax.model_drafter(bigrams.model(DRAFT))


def sleep(seconds):
    time.sleep(float(seconds))
    return np.int32(0)


def slow(drafter, milliseconds):
    """The drafter, which sleeps so long for each request and drafted token of a step."""

    def propose(params, state, token_ids, hidden, inputs, *, config, implementation):
        number = token_ids.shape[0] * config.num_speculative_tokens
        # The draft needs the result, so that no step goes without it.
        seconds = jnp.float32(1e-3 * milliseconds * number)
        zero = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.int32), seconds)
        return drafter.propose(
            params,
            state,
            token_ids + zero,
            hidden,
            inputs,
            config=config,
            implementation=implementation,
        )

    return dataclasses.replace(drafter, propose=propose)


@pytest.mark.once
def test_the_times_of_steps_are_measured_by_batch_size_and_drafted_tokens():
    costs = measure_step_costs(
        MODEL,
        slow(BY_MODEL, 20),
        batch_sizes=(1, 3),
        max_num_speculative_tokens=2,
        context=5,
        num_steps=4,
        rounds=2,
    )
    assert costs.batch_sizes == (1, 3)
    assert jax.__version__ in costs.measured_on
    for size, times in zip(costs.batch_sizes, costs.milliseconds, strict=True):
        # A plain step has no drafter, and one of k tokens sleeps k times as long as one of 1.
        for k, milliseconds in enumerate(times):
            # Steps on a busy machine take longer than they sleep.
            assert 20 * size * k < milliseconds < 40 * size * k + 60
    # Drafts that take longer than their tokens are worth are not drafted.
    config = SpeculativeConfig("auto", step_costs=costs)
    output = specjax.generate(
        MODEL, BY_MODEL, [[1, 2]], keys=bigrams.keys(1), max_new_tokens=8, config=config
    )
    assert output.metrics.num_drafted.sum() == 0


def test_all_steps_of_a_batch_size_begin_after_one_reading_of_its_prompts():
    last_positions = []

    def extend(params, state, token_ids, positions, hidden):
        jax.debug.callback(lambda x: last_positions.append(int(x.max())), positions)
        return BY_MODEL.extend(params, state, token_ids, positions, hidden)

    sizes = {"context": 7, "num_steps": 3, "rounds": 2, "max_num_speculative_tokens": 2}
    with compilations() as names:
        measure_step_costs(
            MODEL, dataclasses.replace(BY_MODEL, extend=extend), batch_sizes=(2,), **sizes
        )
    counts = collections.Counter(names)
    assert (counts["jit(run_prefill)"], counts["jit(_run_steps)"]) == (1, 3)
    # The drafter reads all but the last token of a prompt, and steps read later ones.
    assert sum(last <= 5 for last in last_positions) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_sizes": (4, 2)}, r"batch_sizes is \(4, 2\); it needs"),
        ({"batch_sizes": ()}, r"batch_sizes is \(\); it needs"),
        ({"max_num_speculative_tokens": "auto"}, "max_num_speculative_tokens is 'auto'; it needs"),
        ({"max_num_speculative_tokens": 33}, "max_num_speculative_tokens is 33; it needs"),
        ({"context": 0}, "context is 0; it needs a Python int >= 1"),
        ({"num_steps": 0}, "num_steps is 0; it needs a Python int >= 1"),
        ({"rounds": 0}, "rounds is 0; it needs a Python int >= 1"),
        ({"drafter": None}, "drafter is NoneType; it needs a specjax.Drafter"),
    ],
)
def test_a_measurement_of_wrong_arguments_is_refused_before_a_step(change, words):
    with pytest.raises(ValueError, match=words):
        measure_step_costs(**({"target": MODEL, "drafter": BY_MODEL, "batch_sizes": (1,)} | change))
