"""Bytes of slots, steps and chunks, and refusals of what does not fit, before anything compiles."""

import dataclasses

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

import specjax
from specjax import LoopOptions, MemoryNeeds, SpeculativeConfig, memory_needs
from specjax.decode import memory
from specjax.decode.memory import free_bytes
from specjax.models import TransformerConfig, build

pytestmark = pytest.mark.lenient

V, D, LAYERS, KV_HEADS, HEAD_DIM, S, B, K, C = 64, 32, 3, 2, 8, 256, 5, 4, 32
SIZES = TransformerConfig(V, D, 64, LAYERS, 4, KV_HEADS, HEAD_DIM)
CONFIG = SpeculativeConfig(K)
OPTIONS = LoopOptions(max_length=S, prefill_chunk_size=C)
CACHE = 2 * LAYERS * KV_HEADS * HEAD_DIM * S
TARGET, KEYS = build(SIZES, seed=1), bigrams.keys(B)


def needs(drafter=None, target=TARGET, **change):
    values = {"batch_size": B, "options": OPTIONS, "config": CONFIG} | change
    return memory_needs(target, drafter, **values)


def test_a_slot_a_step_and_a_chunk_take_the_bytes_of_their_arrays():
    plain = needs()
    # Next to the cache: token ids, log-probabilities and origins of S tokens, and a few numbers.
    rest = plain.slot_bytes - 4 * CACHE
    assert 9 * S < rest < 9 * S + 200
    assert plain.step_bytes == B * 1 * (V + D) * 4
    assert plain.chunk_bytes == B * C * D * 4
    # A draft model has a cache, and its draft K rows of logits; the target then K + 1 rows.
    drafted = needs(specjax.model_drafter(build(SIZES)))
    rest = drafted.slot_bytes - plain.slot_bytes - 4 * CACHE
    assert K * V * 4 < rest < K * V * 4 + 200
    assert drafted.step_bytes == B * (K + 1) * (V + D) * 4
    # Half the bytes of the caches by dtype.
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), TARGET.params)
    half = needs(target=build(dataclasses.replace(SIZES, dtype="bfloat16"), params))
    assert half.slot_bytes == plain.slot_bytes - 2 * CACHE
    assert half.chunk_bytes == plain.chunk_bytes // 2
    # Twice the caches and buffers by length, and prompts in chunks of at most the capacity.
    double = needs(options=LoopOptions(max_length=2 * S, prefill_chunk_size=10**6))
    assert double.slot_bytes == plain.slot_bytes + (4 * CACHE + 9 * S)
    assert double.chunk_bytes == B * 2 * S * D * 4
    assert plain.of_slots(2.5) == int(2.5 * plain.slot_bytes) + plain.chunk_bytes
    assert MemoryNeeds(10, 7, 3).of_slots(2) == 27


def test_hidden_states_that_are_the_logits_are_counted_once_and_not_for_prompts():
    target = specjax.Model(
        jnp.eye(V),
        lambda size, length: (),
        lambda rows, ids, positions, cache: (rows[ids], cache),
        lambda rows, hidden: hidden,
    )
    assert needs(target=target)[1:] == (B * V * 4, 0)


def test_an_engine_has_the_bytes_that_are_said_before_it_is_made():
    target, drafter = bigrams.pair(4, seed=1)
    target = bigrams.model(target)
    drafter = specjax.model_drafter(bigrams.model(drafter))
    options = LoopOptions(max_length=32, prefill_chunk_size=8)
    said = memory_needs(target, drafter, batch_size=3, options=options, config=CONFIG)
    engine = specjax.Engine(target, drafter, num_slots=3, options=options, config=CONFIG)
    # An engine's slot has ids of its own that end a text.
    assert said.slot_bytes < engine.slot_bytes < said.slot_bytes + 100
    programs = engine._scheduler._programs
    assert programs.needs[1:] == (said.step_bytes, said.chunk_bytes // 3)


class Device:
    """A device with so many bytes free, of this process or another."""

    def __init__(self, num_free, process_index=0):
        self.process_index = process_index
        self._stats = {} if num_free is None else {"bytes_limit": num_free + 7, "bytes_in_use": 7}

    def memory_stats(self):
        assert self.process_index == jax.process_index()  # JAX raises an error.
        return self._stats


def test_free_bytes_are_those_of_all_devices_if_each_tells():
    assert free_bytes([Device(10), Device(5)]) == 15
    assert free_bytes([Device(10), Device(None)]) is None
    assert free_bytes(jax.devices()) is None
    assert free_bytes([Device(10), Device(5, process_index=1)]) is None


def test_a_target_is_on_the_devices_that_its_arrays_were_put_on():
    first, last, uncommitted = jax.devices()[0], jax.devices()[-1], jnp.ones(3)

    def devices(*params):
        return memory.devices_of(dataclasses.replace(TARGET, params=params))

    assert devices(np.ones(3)) == devices(uncommitted) == {first}
    with jax.default_device("cpu"):
        assert devices(np.ones(3)) == {jax.local_devices(backend="cpu")[0]}
    with jax.default_device(last):
        assert devices(np.ones(3), uncommitted) == {last}
        assert devices(uncommitted, jax.device_put(uncommitted, first)) == {first}


def call(function, drafter, **change):
    options = {"max_new_tokens": 3, "config": CONFIG, "options": OPTIONS, "keys": KEYS} | change
    return function(TARGET, drafter, [[1, 2, 3]] * B, **options)


def compile_only(target, drafter, prompts, *, keys, max_new_tokens, config, options):
    return specjax.compile_generate(
        target, drafter, batch_size=len(prompts), options=options, config=config
    )


@pytest.mark.parametrize("function", [specjax.generate, specjax.init, compile_only])
def test_a_batch_that_does_not_fit_is_refused_before_anything_compiles(function, monkeypatch):
    memory._check_once.cache_clear()
    drafter = specjax.model_drafter(build(SIZES))
    each = needs(drafter)
    monkeypatch.setattr(memory, "free_bytes", lambda devices: each.of_slots(B - 1) - 1)
    words = (
        rf"no room for {B} requests: each takes .* \({each.slot_bytes} bytes\) at max_length {S}; "
        rf"a step takes .*\({each.step_bytes} bytes\) for its logits, a chunk .*"
        rf"\({each.chunk_bytes} bytes\); .* together, and .* are free. It needs a smaller "
        rf"max_length, or at most {B - 2} prompts at once\."
    )
    # Keys are made by eager operations, which compile once.
    with pytest.raises(MemoryError, match=words):
        call(function, drafter)
    with compilations() as compiled, pytest.raises(MemoryError, match=words):
        call(function, drafter)
    assert compiled == []


@pytest.mark.once
def test_a_batch_that_just_fits_is_decoded_and_not_looked_at_again(monkeypatch):
    memory._check_once.cache_clear()
    told, size = [], needs().of_slots(B)

    def free(devices):
        told.append(devices)
        return size

    monkeypatch.setattr(memory, "free_bytes", free)
    first = call(specjax.generate, None)
    assert set(told[0]) == {jax.devices()[0]}
    size -= 1
    # Its programs are there: a device that is busy with the last call's arrays refuses nothing.
    assert np.all(call(specjax.generate, None).token_ids == first.token_ids)
    longer = dataclasses.replace(OPTIONS, max_length=S + 1)
    with pytest.raises(MemoryError, match="no room for 5 requests"):
        call(specjax.generate, None, options=longer)
    # An outer program is compiled for devices that its call alone knows.
    size = 0

    @jax.jit
    def within(keys):
        return call(specjax.generate, None, options=longer, keys=keys).lengths

    assert within(KEYS).tolist() == [6] * B


@pytest.mark.once
def test_a_check_traces_nothing_that_the_programs_do_not(monkeypatch):
    target, traced = bigrams.model(bigrams.pair(4, seed=1)[0]), []

    def apply(params, token_ids, *rest):
        traced.append(token_ids.shape)
        return target.apply(params, token_ids, *rest)

    found = []
    for num_free in (None, 10**12):
        # Other functions are traced anew.
        model = dataclasses.replace(target, apply=lambda *operands: apply(*operands))
        monkeypatch.setattr(memory, "free_bytes", lambda devices, n=num_free: n)
        traced.clear()
        specjax.generate(model, None, [[1], [2, 3]], keys=bigrams.keys(2), max_new_tokens=9)
        found.append(sorted(traced))
    assert found[0] == found[1]


def test_the_part_that_takes_most_is_to_be_lowered(monkeypatch):
    memory._check_once.cache_clear()
    monkeypatch.setattr(memory, "free_bytes", lambda devices: 1)
    parts = {
        "max_length": MemoryNeeds(9, 2, 3),
        "num_speculative_tokens": MemoryNeeds(1, 90, 3),
        "prefill_chunk_size": MemoryNeeds(1, 2, 90),
    }
    for name, part in parts.items():
        monkeypatch.setattr(memory, "_needs_of_batch", lambda *_, part=part: part)
        with pytest.raises(MemoryError, match=rf"1 bytes are free\. It needs a smaller {name}\."):
            call(specjax.generate, specjax.ngram_drafter())
    monkeypatch.setattr(memory, "_needs_of_batch", lambda *_: MemoryNeeds(1, 90, 3))
    with pytest.raises(MemoryError, match="It needs a smaller number of prompts"):
        call(specjax.generate, None)


def test_as_many_prompts_are_named_as_fit(monkeypatch):
    # Three of five prompts: their slots and three fifths of the logits.
    memory._check_once.cache_clear()
    monkeypatch.setattr(memory, "_needs_of_batch", lambda *_: MemoryNeeds(10, 500, 3))
    for num_free, most in [(330, 3), (329, 2), (549, 4)]:
        monkeypatch.setattr(memory, "free_bytes", lambda devices, n=num_free: n)
        with pytest.raises(MemoryError, match=rf"or at most {most} prompts at once\."):
            call(specjax.generate, None)
