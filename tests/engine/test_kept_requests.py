"""An engine gives the kept sets of `generate`, and masks of those that are too large for ids."""

import asyncio

import bigrams
import jax
import numpy as np
import pytest

import specjax
from specjax import SamplingParams, SpeculativeConfig
from specjax.engine import scheduler, slots

V, MAX_KEPT, NEW = 70, 8, 7
TARGET, DRAFT = bigrams.pair(V, seed=2)
MODELS = bigrams.model(TARGET), specjax.model_drafter(bigrams.model(DRAFT))
CONFIG = SpeculativeConfig(num_speculative_tokens=2)
KEYS = bigrams.keys(5)
TOP_K = [3, 40, 0, 8, 5]
TEMPERATURE = [1.0, 0.7, 1.2, 0.0, 1.0]
PROMPTS = [[1], [2, 3], [4], [60, 2], [9]]


@pytest.fixture(scope="module")
def engine():
    return specjax.Engine(
        *MODELS,
        num_slots=2,
        config=CONFIG,
        options=specjax.LoopOptions(max_length=16, max_kept_tokens=MAX_KEPT),
        sampling=SamplingParams(top_k=0, frequency_penalty=0.0),
    )


@pytest.fixture(scope="module")
def whole():
    """Texts of `generate`, in which the sets of every request fit."""
    return specjax.generate(
        *MODELS,
        PROMPTS,
        keys=KEYS,
        config=CONFIG,
        max_new_tokens=NEW,
        temperature=np.float32(TEMPERATURE),
        sampling=SamplingParams(top_k=np.array(TOP_K), frequency_penalty=np.full(5, 0.2)),
        options=specjax.LoopOptions(max_length=16, max_kept_tokens=40),
    )


def submit(engine, b):
    return engine.submit(
        PROMPTS[b],
        key=KEYS[b],
        max_new_tokens=NEW,
        temperature=TEMPERATURE[b],
        sampling=SamplingParams(top_k=TOP_K[b], frequency_penalty=0.2),
    )


def check(request, b, whole):
    new = slice(len(PROMPTS[b]), len(PROMPTS[b]) + NEW)
    assert request.token_ids == whole.token_ids[b, new].tolist()
    assert len(request.kept_tokens) == NEW
    expected = jax.tree.map(lambda x: np.asarray(x)[b, new], whole.kept_tokens)
    for i, kept in enumerate(request.kept_tokens):
        assert kept.num_kept == expected.num_kept[i]
        one = jax.tree.map(lambda x, i=i: x[i : i + 1], expected)
        np.testing.assert_array_equal(kept.to_csr()[1], one.to_csr()[1])
        assert (kept.mask is not None) == (MAX_KEPT < kept.num_kept < V)


def test_sets_are_those_of_generate_and_those_above_m_have_masks(engine, whole):
    requests = [submit(engine, b) for b in range(5)]
    engine.step()
    engine.step()
    assert engine.preempt(requests[1])
    engine.run()
    for b, request in enumerate(requests):
        check(request, b, whole)
    assert {int(request.kept_tokens[0].num_kept) for request in requests} == {3, 40, V, 1, 5}


def test_masks_stay_on_the_device_where_every_set_fits(engine, whole, monkeypatch):
    outputs = []

    def read(output):
        outputs.append(slots.read_output(output))
        return outputs[-1]

    monkeypatch.setattr(scheduler, "read_output", read)

    async def run(b):
        request = submit(engine, b)
        async for _ in request:
            pass
        check(request, b, whole)

    async def run_both():
        await asyncio.gather(run(0), run(4))

    asyncio.run(run_both())
    assert outputs
    assert all(output.masks is None for output in outputs)
    request = submit(engine, 1).result()
    check(request, 1, whole)
    assert outputs[-1].masks.shape == (2, 3, 3)


def test_a_slot_has_no_buffers_of_kept_sets(engine):
    """A set is read with its step: more ids take no memory for a whole text."""
    needs = specjax.memory_needs(
        *MODELS,
        batch_size=2,
        options=specjax.LoopOptions(max_length=16),
        sampling=SamplingParams(top_k=0, frequency_penalty=0.0),
        config=CONFIG,
    )
    # Each request of an engine has 16 end-of-sequence ids of its own.
    assert engine.slot_bytes - needs.slot_bytes <= 4 * 16
