"""A request lists the log-probabilities of its prompt, however the prompt was read."""

import dataclasses

import jax
import numpy as np
import pytest
from compilations import compilations

import specjax
from specjax.decode.drafters import Models
from specjax.engine import slots
from specjax.engine.prefill_batch import PrefillBatch
from specjax.engine.programs import BatchShape, warm_up
from specjax.engine.submission import Submission, check_request
from specjax.models import TransformerConfig, build

pytestmark = pytest.mark.lenient

V, S, PIECE, NUM_PIECES = 64, 96, 8, 6
CONFIG = TransformerConfig(V, 32, 64, 2, 4, 2, 8)
TARGET = build(CONFIG, seed=3)
DRAFTER = specjax.model_drafter(build(TransformerConfig(V, 16, 32, 1, 2, 1, 8), seed=4))
PROMPTS = [np.random.default_rng(n).integers(0, V, n).tolist() for n in (37, 1, 70, 2, 25, 9)]
OPTIONS = specjax.LoopOptions(
    max_length=S, prefill_chunk_size=NUM_PIECES * PIECE, num_logprobs=3, prompt_logprobs=True
)


def make_engine(batch=None, num_slots=8, options=OPTIONS, shapes=None):
    """An engine whose prompts are read alone, or in a batch of some shape.

    The set `shapes` gets the shapes of chunks that are listed.
    """
    # An array of no axes is an integer, too, and has no hash.
    options = dataclasses.replace(options, num_logprobs=np.array(options.num_logprobs))
    engine = specjax.Engine(TARGET, DRAFTER, num_slots=num_slots, options=options)
    scheduler = engine._scheduler
    programs = scheduler._programs._replace(batch=batch)
    list_chunk = programs.list_chunk

    def note(caches, token_ids, *operands):
        shapes.add(token_ids.shape)
        return list_chunk(caches, token_ids, *operands)

    if shapes is not None:
        programs = programs._replace(list_chunk=note)
    any_request = check_request(Submission([0, 0], jax.random.key(0)), engine._limits)
    scheduler._slots = warm_up(programs, TARGET, any_request.settings, None)
    scheduler._programs, scheduler._batch = programs, PrefillBatch(programs)
    return engine


def check(request, expected):
    """The rows of a request are those of `score`."""
    rows = request.prompt_logprobs
    assert len(rows) == len(request.prompt_token_ids)
    assert rows[0] is None
    for i, row in enumerate(rows[1:], 1):
        wanted = [leaf[i] for leaf in expected.top_logprobs]
        np.testing.assert_array_equal(row.token_ids, wanted[0])
        np.testing.assert_allclose(row.logprobs, wanted[1], atol=1e-5, rtol=1e-5)
        assert row.rank == wanted[2]
        np.testing.assert_allclose(row.logprob, expected.logprobs[i], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("batch", "listed"),
    [
        (None, {(1, 48)}),
        (BatchShape(2, PIECE), {(1, 48), (2, 8)}),
        (BatchShape(3, PIECE, NUM_PIECES), {(6, 8)}),
    ],
    ids=["alone", "a piece of each", "packed pieces"],
)
def test_prompts_have_the_log_probabilities_of_a_forward_pass(batch, listed):
    shapes, expected = set(), specjax.score(TARGET, PROMPTS, options=OPTIONS)
    engine = make_engine(batch, shapes=shapes)
    shapes.clear()
    plain = make_engine(batch, options=dataclasses.replace(OPTIONS, prompt_logprobs=False))
    values = {"max_new_tokens": 6, "temperature": 0}
    requests, others = [], []
    with compilations() as found:
        # Two of three are listed. Listed and other prompts are read by one program.
        for i in range(18):
            prompt, key = PROMPTS[i % 6], jax.random.key(i)
            lists = i % 3 < 2
            requests.append(engine.submit(prompt, key=key, prompt_logprobs=lists, **values))
            others.append(plain.submit(prompt, key=key, **values))
        engine.run()
    assert not found
    assert shapes == listed
    plain.run()
    for i, (request, other) in enumerate(zip(requests, others, strict=True)):
        assert request.token_ids == other.token_ids
        if i % 3 < 2:
            check(request, expected[i % 6])
        else:
            assert request.prompt_logprobs is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_listing_changes_no_bit_of_the_caches(dtype):
    target = build(dataclasses.replace(CONFIG, dtype=dtype), seed=3)
    models = Models(target, DRAFTER)
    random = np.random.default_rng(0)
    token_ids = random.integers(0, V, (3, 40)).astype(np.int32)
    positions = np.where(np.arange(40) < [[40], [7], [23]], np.arange(40), -1).astype(np.int32)
    plain = slots.new_caches(models, max_length=S, size=3)
    listed = slots.new_caches(models, max_length=S, size=3)
    for _ in range(2):  # The second chunk reads what the first wrote.
        plain = slots.prefill_chunk(models, plain, token_ids, positions)
        operands = (models, listed, token_ids, positions, positions)
        listed, _ = slots.list_chunk(*operands, num_listed=2)
        positions = np.where(positions < 0, -1, positions + 40)
    for one, other in zip(*map(jax.tree.leaves, (plain, listed)), strict=True):
        np.testing.assert_array_equal(*(x.astype(np.float32) for x in (one, other)))


def test_samples_share_the_rows_of_their_prompt_and_a_preempted_request_keeps_them():
    engine = make_engine()
    (expected,) = specjax.score(TARGET, PROMPTS[2:3], options=OPTIONS)
    samples = engine.submit_samples(
        3, PROMPTS[2], key=jax.random.key(0), max_new_tokens=9, prompt_logprobs=True
    )
    assert samples[0].prompt_logprobs is None
    while not engine.num_running:
        engine.step()
    engine.preempt(samples[0], drops_cache=True)
    engine.run()
    for sample in samples:
        check(sample, expected)


def test_an_aborted_request_has_no_rows_and_holds_no_array():
    engine = make_engine(num_slots=1)
    running = engine.submit([1, 2], key=jax.random.key(0), prompt_logprobs=True)
    waiting = engine.submit(PROMPTS[0], key=jax.random.key(0), prompt_logprobs=True)
    for _ in range(3):
        engine.step()
    engine.abort(waiting)
    engine.abort(running)
    assert running.prompt_logprobs is not None
    assert waiting.prompt_logprobs is None
    assert waiting._listing is None


def test_rows_are_asked_for_when_the_engine_is_made():
    engine = make_engine(options=dataclasses.replace(OPTIONS, prompt_logprobs=False))
    with pytest.raises(ValueError, match="prompt_logprobs is True, and the engine was made witho"):
        engine.submit([1], key=jax.random.key(0), prompt_logprobs=True)
    with pytest.raises(ValueError, match="prompt_logprobs is 1; it needs"):
        engine.submit([1], key=jax.random.key(0), prompt_logprobs=1)
    with pytest.raises(ValueError, match="prompt_logprobs is True, and num_logprobs is None"):
        specjax.Engine(
            TARGET, None, num_slots=1, options=specjax.LoopOptions(9, prompt_logprobs=True)
        )
    with pytest.raises(ValueError, match="num_logprobs is 9999 for a vocabulary of"):
        make_engine(options=dataclasses.replace(OPTIONS, num_logprobs=9999))
