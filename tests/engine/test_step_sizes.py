"""Steps over fewer slots: the texts of full steps, whichever slots hold the requests."""

import functools
import re

import automata
import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import processed
import pytest
from compilations import compilations

import specjax
from specjax.decode.drafters import Models
from specjax.engine import slots
from specjax.engine.step_sizes import choose_slots, step_some_slots
from specjax.models import (
    DFlashConfig,
    Eagle3Config,
    TransformerConfig,
    build,
    build_dflash,
    build_eagle3,
    dflash_drafter,
    eagle3_drafter,
)

# Programs are called without a public call, which would silence a warning of JAX.
pytestmark = pytest.mark.lenient

V, S, B, K = 64, 48, 8, 3
SIZES = (2, 4, B)
CONFIG = TransformerConfig(V, 32, 64, 2, 4, 2, 8)


def _drafter(name, target):
    layer = TransformerConfig(V, 32, 64, 1, 4, 2, 8, qk_norm=name == "dflash")
    if name == "eagle3":
        head = Eagle3Config(layer, 32, V, taps=(0, 1, 2))
        return eagle3_drafter(target, head, build_eagle3(head))
    if name == "dflash":
        head = DFlashConfig(layer, V, taps=(0, 2), block_size=K + 1, mask_token_id=V - 1)
        return dflash_drafter(target, head, build_dflash(head))
    if name == "ngram":
        return specjax.ngram_drafter()
    # All drafts of a greedy request are accepted, unless a cache has tokens of another.
    return specjax.model_drafter(target)


@functools.cache
def _models(name, row_invariant=False):
    target = build(CONFIG, seed=0, row_invariant=row_invariant)
    return target, name and _drafter(name, target)


def _engine(name, num_slots, row_invariant=False, **values):
    return specjax.Engine(
        *_models(name, row_invariant),
        num_slots=num_slots,
        options=specjax.LoopOptions(max_length=S, prefill_chunk_size=8, num_logprobs=2),
        **{"config": specjax.SpeculativeConfig(num_speculative_tokens=K)} | values,
    )


def _note_sizes(engine):
    """A list that gets the number of rows of each step."""
    sizes, scheduler = [], engine._scheduler
    step = scheduler._programs.step

    def note(*operands):
        slots, output = step(*operands)
        sizes.append(output.token_ids.shape[0])
        return slots, output

    scheduler._programs = scheduler._programs._replace(step=note)
    return sizes


def _serve(engine, values_of=lambda index: {}):
    """Requests that come while others go, some of them preempted; and the sizes of the steps."""
    sizes, requests = _note_sizes(engine), []

    def submit():
        index = len(requests)
        prompt = np.random.default_rng(index).integers(0, V, 1 + 5 * index % 23)
        values = {"max_new_tokens": 5 + 3 * index % 13, "temperature": 0} | values_of(index)
        return engine.submit(prompt, key=jax.random.key(index), **values)

    for step in range(24):
        for _ in range({0: 2, 3: 2, 6: 8}.get(step, 0)):
            requests.append(submit())
        if step % 3 == 2:
            engine.preempt(requests[step % len(requests)], drops_cache=step % 2 == 0)
        engine.step()
    engine.run()
    assert {request.finish_reason for request in requests} == {"length"}
    return requests, sizes


@pytest.mark.parametrize("name", ["model", "eagle3", "dflash"])
def test_a_step_of_some_slots_moves_these_as_a_full_step_does_and_no_other(name):
    engine, models = _engine(name, B), Models(*_models(name))
    for index in range(5):
        prompt = np.random.default_rng(index).integers(0, V, 3 + 4 * index)
        engine.submit(prompt, key=jax.random.key(index), temperature=index % 2)
    while engine.num_waiting or engine.num_steps < 4:
        engine.step()
    scheduler = engine._scheduler
    before, options = scheduler._slots, scheduler._programs.step.keywords["options"]
    axes = slots.slot_axes(before, slots.cache_axes(models, S))
    full, some = (jax.tree.map(jnp.copy, before) for _ in range(2))
    full, full_output = slots.step_slots(models, full, None, options=options)
    chosen = np.array([3, 0, 6, 4], np.int32)  # Slot 6 holds no request.
    some, output = step_some_slots(models, some, None, chosen, options=options)
    states = [_leaves(state) for state in (before, full, some)]
    for axis, old, expected, new in zip(axes, *states, strict=True):
        if axis == slots.NO_BATCH_AXIS:
            np.testing.assert_array_equal(new, old)
            continue
        others, active = np.delete(np.arange(B), chosen), [3, 0, 4]
        np.testing.assert_array_equal(*(np.take(x, others, axis) for x in (new, old)))
        rows = (np.take(x, active, axis) for x in (new, expected))
        np.testing.assert_allclose(*rows, rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(output.token_ids[:2], full_output.token_ids[np.array([3, 0])])


def _leaves(state):
    """NumPy arrays, in the order of `jax.tree.leaves`."""
    keys = jax.random.key_data(state.settings.keys)
    state = state._replace(settings=state.settings._replace(keys=keys))
    return jax.tree.leaves(jax.device_get(state))


@pytest.mark.parametrize("name", [None, "model", "ngram", "eagle3", "dflash"])
def test_greedy_texts_are_those_of_full_steps(name):
    alike, _ = _serve(_engine(name, B))
    engine = _engine(name, SIZES)
    with compilations() as compiled:
        requests, sizes = _serve(engine)
    assert compiled == []
    assert set(sizes) == set(SIZES)
    assert engine.num_slots == B
    for one, expected in zip(requests, alike, strict=True):
        assert one.token_ids == expected.token_ids
        np.testing.assert_allclose(one.logprobs, expected.logprobs, rtol=1e-4, atol=1e-5)
        assert jax.tree.all(jax.tree.map(np.array_equal, one.metrics, expected.metrics))


class Matcher(automata.Matcher):
    """The automaton's, for V tokens."""

    def compute_bitmask(self):
        allowed = automata.allowed_after(self.states[-1], [])
        return processed.pack(np.pad(allowed, (0, V - automata.V))).tobytes()


@pytest.mark.parametrize("k_by_load", [False, True])
def test_adaptive_k_penalties_and_matchers_follow_their_slots(k_by_load):
    def values_of(index):
        if index % 3 == 0:
            # Longer texts: they are alone at last, in other slots than the first.
            return {"matcher": Matcher(index % 4), "max_new_tokens": 22}
        return {"sampling": specjax.SamplingParams(repetition_penalty=1 + index / 10)}

    values = {
        "config": specjax.SpeculativeConfig("auto", step_costs=(1.0, 1.3, 1.45, 1.6)),
        "sampling": specjax.SamplingParams(repetition_penalty=1.0),
        "k_by_load": k_by_load,
        "takes_matchers": True,
    }
    alike, _ = _serve(_engine("model", B, **values), values_of)
    requests, sizes = _serve(_engine("model", (4, B), **values), values_of)
    assert set(sizes) == {4, B}
    assert [one.token_ids for one in requests] == [one.token_ids for one in alike]
    for index in range(0, len(requests), 3):
        tokens = requests[index].token_ids
        assert all(
            automata.allowed_after(index % 4, tokens[:i])[token] for i, token in enumerate(tokens)
        )


def test_rows_that_depend_on_no_other_row_have_the_same_bits_in_every_size():
    def values_of(index):
        return {"temperature": index % 2}

    alike, _ = _serve(_engine("model", B, row_invariant=True), values_of)
    requests, sizes = _serve(_engine("model", SIZES, row_invariant=True), values_of)
    assert set(sizes) == set(SIZES)
    for one, expected in zip(requests, alike, strict=True):
        assert one.token_ids == expected.token_ids
        np.testing.assert_array_equal(one.logprobs, expected.logprobs)


def test_a_step_has_the_smallest_size_that_holds_the_occupied_slots():
    occupants = [None, "a", None, "b", None, "c", None, None]
    assert choose_slots(occupants, SIZES).tolist() == [1, 3, 5, 0]
    occupants[5] = None
    assert choose_slots(occupants, SIZES).tolist() == [1, 3]
    assert choose_slots([None, *"abcdefg"], SIZES).tolist() == list(range(8))


@pytest.mark.parametrize(
    ("num_slots", "sentence"),
    [
        ((4, 2), "num_slots is (4, 2); it needs rising sizes of steps"),
        ((4, 4), "num_slots is (4, 4); it needs rising sizes of steps"),
        ((), "num_slots is (); it needs rising sizes of steps"),
        ((0, 4), "num_slots is 0; it needs a Python int >= 1"),
        ((2, 4.0), "num_slots is 4.0; it needs a Python int >= 1"),
    ],
)
def test_sizes_that_do_not_rise_from_one_are_refused(num_slots, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        _engine(None, num_slots)


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_several_sizes_are_refused_for_models_that_read_no_pieces(name):
    whole = bigrams.model(bigrams.pair(V, seed=1)[0])
    target = whole if name == "target" else _models(None)[0]
    options = specjax.LoopOptions(max_length=S)
    why = f"num_slots is (2, 8), and the {name} has reads_pieces=False;"
    with pytest.raises(ValueError, match=re.escape(why)):
        specjax.Engine(target, specjax.model_drafter(whole), num_slots=(2, 8), options=options)
