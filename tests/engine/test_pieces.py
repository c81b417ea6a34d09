"""Prompts read in pieces: a chunk of several prompts gives what each gives alone."""

import contextlib
import dataclasses
import functools

import jax
import numpy as np
import pytest
from machine import has_gpu

import specjax
from specjax.decode.drafters import Models
from specjax.engine import slots
from specjax.engine.prefill_batch import PrefillBatch
from specjax.engine.programs import BatchShape, warm_up
from specjax.engine.submission import Submission, check_request
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

# Some tests call programs without a public call, which would silence JAX's warning.
pytestmark = [
    pytest.mark.lenient,
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

TARGET = TransformerConfig(64, 32, 64, 3, 4, 2, 8)
LENGTHS, S, PIECE, NUM_PIECES = (37, 5, 70, 2), 96, 8, 6
PROMPTS = [np.random.default_rng(n).integers(0, 64, n) for n in LENGTHS]


def _eagle3(target, implementation):
    head = Eagle3Config(TransformerConfig(64, 32, 64, 1, 4, 2, 8), 32, 64, taps=(1, 2, 3))
    return eagle3_drafter(target, head, build_eagle3(head), implementation=implementation)


def _dflash(target, implementation):
    layer = TransformerConfig(64, 32, 64, 2, 4, 2, 8, qk_norm=True)
    head = DFlashConfig(layer, 64, taps=(1, 2, 3), block_size=5, mask_token_id=63)
    return dflash_drafter(target, head, build_dflash(head), implementation=implementation)


def _by_model(target, implementation):
    return specjax.model_drafter(build(TARGET, seed=1, implementation=implementation))


DRAFTERS = {
    "eagle3": _eagle3,
    "dflash": _dflash,
    "model": _by_model,
    "ngram": lambda *_: specjax.ngram_drafter(),
}


def _models(name, implementation="xla"):
    target = build(TARGET, seed=3, implementation=implementation)
    return Models(target, DRAFTERS[name](target, implementation))


def _chunk(prompt, start, size):
    """The next tokens of a prompt and their positions, [size] each."""
    token_ids, positions = np.zeros(size, np.int32), np.full(size, -1, np.int32)
    tokens = prompt[start : start + size]
    token_ids[: len(tokens)] = tokens
    positions[: len(tokens)] = start + np.arange(len(tokens))
    return token_ids, positions


def _read_alone(models, prompt):
    row = slots.new_caches(models, max_length=S)
    for start in range(0, len(prompt), PIECE):
        row = slots.prefill_chunk(models, row, *(x[None] for x in _chunk(prompt, start, PIECE)))
    return row


def _read_together(models, prompts, order, size, num_pieces, max_length):
    """The rows of all prompts; pieces in this order of the prompts, several chunks."""
    rows = slots.new_caches(models, max_length=max_length, size=len(prompts))
    pieces = [
        (i, *_chunk(prompts[i], start, size))
        for i in order
        for start in range(0, len(prompts[i]), size)
    ]
    # Unused pieces are of row 0 and have no token.
    pieces += [(0, *_chunk([], 0, size))] * (-len(pieces) % num_pieces)
    for first in range(0, len(pieces), num_pieces):
        row, *chunk = map(np.stack, zip(*pieces[first : first + num_pieces], strict=True))
        rows = slots.prefill_chunk(models, rows, *chunk, row.astype(np.int32))
    return rows


@pytest.mark.parametrize("name", DRAFTERS)
def test_pieces_of_several_prompts_write_the_caches_of_each_alone(name, implementation):
    models = _models(name, implementation)
    # A GPU multiplies float32 in tiles of other sizes, which round otherwise.
    limits = {"atol": 5e-3} if has_gpu() else {"rtol": 2e-4, "atol": 2e-5}
    axes = tuple(jax.tree.leaves(slots.cache_axes(models, S)))
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        rows = _read_together(models, PROMPTS, order, PIECE, NUM_PIECES, S)
        for i, prompt in enumerate(PROMPTS):
            one = slots.take(rows, np.int32(i), axes=axes)
            for leaf, expected in zip(
                jax.tree.leaves(one), jax.tree.leaves(_read_alone(models, prompt)), strict=True
            ):
                np.testing.assert_allclose(leaf, expected, **limits)


@pytest.mark.gpu
def test_company_changes_no_bit_of_a_prompt():
    target = TransformerConfig(512, 1024, 2048, 4, 8, 2, 128, dtype="bfloat16")
    layer = dataclasses.replace(target, num_hidden_layers=1)
    head = Eagle3Config(layer, 1024, 512, taps=(1, 2, 4))
    model = build(target, seed=3)
    models = Models(model, eagle3_drafter(model, head, build_eagle3(head)))
    axes = tuple(jax.tree.leaves(slots.cache_axes(models, 512)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 512, n) for n in (37, 400, 16, 129, 300, 5, 97, 250)]
    read = functools.partial(
        _read_together, models, prompts, size=16, num_pieces=32, max_length=512
    )
    alone = [slots.take(read(order=[i]), np.int32(i), axes=axes) for i in range(len(prompts))]
    for order in ([3, 1, 0, 2, 7, 6, 5, 4], [7, 6, 5, 4, 3, 2, 1, 0]):
        rows = read(order=order)
        for i, expected in enumerate(alone):
            one = slots.take(rows, np.int32(i), axes=axes)
            for leaf, wanted in zip(*map(jax.tree.leaves, (one, expected)), strict=True):
                np.testing.assert_array_equal(*(x.astype(np.float32) for x in (leaf, wanted)))


def _engine(in_pieces, num_rows=3):
    """An engine of eight slots, and a list that gets the share of places with a token per chunk."""
    models = _models("eagle3")
    engine = specjax.Engine(
        *models,
        num_slots=8,
        config=specjax.SpeculativeConfig(num_speculative_tokens=3),
        options=specjax.LoopOptions(max_length=S, prefill_chunk_size=NUM_PIECES * PIECE),
    )
    scheduler, filled = engine._scheduler, []
    read = scheduler._programs.prefill_chunk

    def read_and_note(rows, token_ids, positions, *of_pieces):
        filled.append(float(np.mean(positions >= 0)))
        return read(rows, token_ids, positions, *of_pieces)

    programs = scheduler._programs._replace(
        batch=BatchShape(num_rows, PIECE, NUM_PIECES) if in_pieces else None
    )
    any_request = check_request(Submission([0, 0], jax.random.key(0)), engine._limits)
    scheduler._slots = warm_up(programs, models.target, any_request.settings, None)
    scheduler._programs = programs
    scheduler._batch = PrefillBatch(programs._replace(prefill_chunk=read_and_note))
    return engine, filled


def _submit(engine, index):
    prompt = np.random.default_rng(index).integers(0, 64, 1 + 7 * index % 60)
    return engine.submit(
        prompt, key=jax.random.key(index), max_new_tokens=3 + index % 9, temperature=index % 2
    )


def test_an_engine_that_reads_pieces_gives_the_texts_of_one_that_reads_each_prompt_alone():
    requests = []
    for in_pieces in (False, True):
        engine, _ = _engine(in_pieces)
        submitted = [_submit(engine, index) for index in range(24)]
        # Two requests of one prompt, whose row serves both.
        values = {"key": jax.random.key(9), "max_new_tokens": 7}
        submitted += engine.submit_samples(2, PROMPTS[0], **values)
        while engine.step():
            if engine.num_steps % 3 == 0:
                drops_cache = engine.num_steps % 2 == 0
                engine.preempt(submitted[engine.num_steps % 24], drops_cache=drops_cache)
        requests.append(submitted)
    for alone, together in zip(*requests, strict=True):
        assert together.token_ids == alone.token_ids
        np.testing.assert_allclose(together.logprobs, alone.logprobs, rtol=1e-3, atol=1e-3)


def test_a_chunk_of_pieces_waits_until_it_is_full_unless_a_slot_does():
    engine, filled = _engine(True)
    values = {"key": jax.random.key(0), "max_new_tokens": 20, "temperature": 0}
    # Of 48, 16, 16 and 8 tokens: the first fills a chunk, the others most of one.
    for size in (49, 17, 17, 9):
        engine.submit([1] * size, **values)
    engine.step()
    assert filled == [1.0, 40 / 48]
    for _ in range(4):
        engine.submit([1] * 2, **values)
    while engine.num_running < 8:
        engine.step()
    # While no slot is empty, two prompts are read ahead at once. The third waits for a full chunk.
    filled.clear()
    for size in (9, 9):
        engine.submit([1] * size, **values)
    engine.step()
    assert filled == [16 / 48]
    engine.submit([1] * 9, **values)
    engine.step()
    assert filled == [16 / 48]
    engine.run()
    assert filled == [16 / 48, 8 / 48]


def test_a_chunk_that_failed_is_read_again():
    texts = []
    for failing in (0, 1):
        engine, _ = _engine(True)
        read, calls = engine._scheduler._programs.prefill_chunk, []

        def fail_once(*operands, read=read, calls=calls, failing=failing):
            calls.append(operands)
            if len(calls) == failing:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
            return read(*operands)

        programs = engine._scheduler._programs._replace(prefill_chunk=fail_once)
        engine._scheduler._batch = PrefillBatch(programs)
        prompts = [np.random.default_rng(i).integers(0, 64, 20 + i) for i in range(5)]
        requests = [
            engine.submit(prompt, key=jax.random.key(i), max_new_tokens=6)
            for i, prompt in enumerate(prompts)
        ]
        while engine.num_running or engine.num_waiting:
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                engine.step()
        texts.append([request.token_ids for request in requests])
        assert len(calls) >= 2
    assert texts[0] == texts[1]


def test_full_chunks_are_read_behind_a_prompt_of_one_token():
    engine, filled = _engine(True, num_rows=8)
    values = {"key": jax.random.key(0), "max_new_tokens": 20, "temperature": 0}
    for _ in range(8):
        engine.submit([1] * 2, **values)
    while engine.num_running < 8:
        engine.step()
    for size in (9, 9):
        engine.submit([1] * size, **values)
    engine.step()
    filled.clear()
    for size in (1, 49):
        engine.submit([1] * size, **values)
    engine.step()
    assert filled == [1.0]
