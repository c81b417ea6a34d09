"""Metrics against a recount in plain Python, in every loop they may be carried by."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.decode.commit import Finish
from specjax.decode.metrics import Metrics, init_metrics, update_metrics
from specjax.types import Verification

B, K, STEPS = 3, 4, 6


@st.composite
def histories(draw):
    """Drafted, accepted and emitted tokens of every request in every step."""
    steps = []
    for _ in range(STEPS * B):
        drafted = draw(st.integers(-1, K))
        accepted = draw(st.integers(0, max(drafted, 0)))
        steps.append((drafted, accepted, accepted + draw(st.integers(0, 1))))
    return np.moveaxis(np.int32(steps).reshape(STEPS, B, 3), -1, 0)


def outcome(num_accepted, num_emitted):
    shape = (*num_accepted.shape, K + 1)
    return Verification(jnp.zeros(shape, jnp.int32), num_accepted, num_emitted, jnp.zeros(shape))


def step(metrics, numbers):
    drafted, accepted, emitted = numbers
    return update_metrics(metrics, drafted, outcome(accepted, emitted)), None


def recount(history):
    counts = Metrics(*(np.zeros(s, int).tolist() for s in (B, B, (B, K), (B, K))))
    for t in range(STEPS):
        for b in range(B):
            drafted, accepted, emitted = (int(numbers[t, b]) for numbers in history)
            if drafted < 0:
                continue
            counts.num_steps[b] += 1
            counts.num_emitted[b] += emitted
            for i in range(drafted):
                counts.num_drafted[b][i] += 1
            for i in range(accepted):
                counts.num_accepted[b][i] += 1
    return counts


def assert_same(metrics, counts):
    chex.assert_trees_all_equal(Metrics(*metrics), Metrics(*(np.int32(c) for c in counts)))


scanned = jax.jit(lambda history: jax.lax.scan(step, init_metrics(B, K), history)[0])


@pytest.mark.once
@settings(deadline=None, max_examples=40)
@given(histories())
def test_the_counts_are_those_of_a_recount(history):
    assert_same(scanned(tuple(history)), recount(history))


@pytest.mark.once
@settings(deadline=None, max_examples=40)
@given(histories())
def test_the_rates_are_quotients_over_all_requests_and_no_number_where_nothing_was_counted(history):
    counts = recount(history)
    metrics = Metrics(*(jnp.int32(c) for c in counts))

    def quotient(numerator, denominator):
        return np.float32(numerator / denominator if denominator else np.nan)

    drafted, accepted = np.sum(counts.num_drafted, 0), np.sum(counts.num_accepted, 0)
    for rate, wanted in [
        (metrics.mean_acceptance_length, quotient(sum(counts.num_emitted), sum(counts.num_steps))),
        (metrics.draft_acceptance_rate, quotient(accepted.sum(), drafted.sum())),
        (metrics.acceptance_rates, list(map(quotient, accepted, drafted))),
    ]:
        np.testing.assert_array_equal(rate, wanted)


def test_an_inactive_request_adds_nothing_for_any_verification():
    metrics = init_metrics(B, K)
    rubbish = outcome(jnp.full(B, 3, jnp.int32), jnp.full(B, -7, jnp.int32))
    chex.assert_trees_all_equal(
        update_metrics(metrics, jnp.full(B, -1, jnp.int32), rubbish), metrics
    )


def test_a_position_that_no_step_drafted_has_no_rate():
    """A rate of 0 would say that its drafts were rejected."""
    metrics = init_metrics(B, K)
    assert np.all(np.isnan(metrics.acceptance_rates))
    assert np.isnan(metrics.mean_acceptance_length)
    assert np.isnan(metrics.draft_acceptance_rate)
    tested = metrics._replace(num_drafted=metrics.num_drafted.at[1, 0].set(2))
    np.testing.assert_array_equal(tested.acceptance_rates, [0.0] + [np.nan] * (K - 1))
    assert tested.draft_acceptance_rate == 0


def test_plain_decoding_is_counted_with_no_draft_positions_at_all():
    ones = jnp.ones(B, jnp.int32)
    plain = Verification(jnp.zeros((B, 1), jnp.int32), 0 * ones, ones, jnp.zeros((B, 1)))
    metrics = update_metrics(init_metrics(B, 0), 0 * ones, plain)
    assert metrics.mean_acceptance_length == 1
    assert np.isnan(metrics.draft_acceptance_rate)
    assert metrics.acceptance_rates.shape == (0,)


@settings(deadline=None, max_examples=5)
@given(histories())
def test_while_loops_and_vmap_count_what_a_scan_counts(history):
    history = tuple(map(jnp.asarray, history))

    def body(state):
        t, metrics = state
        return t + 1, step(metrics, [numbers[t] for numbers in history])[0]

    looped = jax.lax.while_loop(lambda s: s[0] < STEPS, body, (jnp.int32(0), init_metrics(B, K)))[1]
    assert_same(looped, recount(history))
    twice = jax.vmap(scanned)(tuple(jnp.stack([numbers, numbers]) for numbers in history))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[1], twice), looped)
    # Metrics of several runs together are one set of metrics.
    chex.assert_trees_all_close(twice.acceptance_rates, looped.acceptance_rates)
    chex.assert_trees_all_close(twice.mean_acceptance_length, looped.mean_acceptance_length)


def test_a_batch_sharded_over_devices_is_counted_on_its_devices():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    numbers = jax.device_put(jnp.int32([2, 4, -1, 0]), rows)
    with jax.set_mesh(mesh):
        metrics = jax.device_put(init_metrics(4, K), rows)
        metrics = jax.jit(update_metrics)(
            metrics, numbers, outcome(jnp.maximum(numbers - 1, 0), jnp.maximum(numbers, 0))
        )
    assert all(leaf.sharding.is_equivalent_to(rows, leaf.ndim) for leaf in metrics)
    np.testing.assert_array_equal(metrics.num_accepted.sum(-1), [1, 3, 0, 0])


END, FULL, GOES_ON, INVALID = Finish.END_OF_SEQUENCE, Finish.LENGTH, 0, Finish.INVALID


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "committed", "finish", "counted", "kept"),
    [
        # All accepted, the first of them the end: it counts, and no position after it.
        (4, 4, 5, 1, END, 1, 1),
        (4, 4, 5, 4, END, 4, 4),
        (4, 4, 5, 5, END, 4, 4),
        # The end replaced a rejected token.
        (4, 1, 2, 2, END, 2, 1),
        # The row after the end was invalid: nothing was emitted past the end.
        (4, 2, 2, 2, END, 2, 2),
        (4, 2, 2, 2, INVALID, 4, 2),
        (4, 4, 5, 3, FULL, 3, 3),
        (2, 2, 3, 3, FULL, 2, 2),
        # Full after a rejection: the positions after it were never in the text.
        (4, 1, 2, 2, FULL, 2, 1),
        (4, 1, 2, 2, GOES_ON, 4, 1),
        # Without a reason, what is committed alone tells of the cut.
        (4, 4, 5, 2, None, 2, 2),
        (4, 1, 2, 2, None, 4, 1),
        (-1, 4, 5, 3, END, 0, 0),
    ],
)
def test_only_the_positions_before_the_end_of_a_text_are_counted(
    drafted, accepted, emitted, committed, finish, counted, kept
):
    one = functools.partial(jnp.full, 1)
    metrics = update_metrics(
        init_metrics(1, K),
        one(drafted),
        outcome(one(accepted), one(emitted)),
        num_committed=one(committed),
        finish=None if finish is None else one(finish, jnp.int8),
    )
    place = np.arange(K)[None]
    active = drafted >= 0
    assert_same(metrics, ([active], [committed * active], place < counted, place < kept))


def test_a_batch_of_another_size_is_refused():
    ones = jnp.ones(B, jnp.int32)
    with pytest.raises(ValueError, match=r"draft_num_tokens has shape \(3,\); .*\(4,\)"):
        update_metrics(init_metrics(4, K), ones, outcome(ones, ones))
