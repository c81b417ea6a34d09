"""Buffers of a capacity: other prompts and texts run through the programs that are compiled."""

import dataclasses
import functools
import itertools

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilations import compilations

import specjax
from specjax import SamplingParams, SpeculativeConfig
from specjax.decode.drafters import Models
from specjax.decode.generate import loop_in_place
from specjax.decode.prefill import begin_compilation
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.markov_chain import markov_chain

V, B = 4, 3
TARGET, DRAFT = bigrams.pair(V, seed=1)
MODEL = bigrams.model(TARGET)
BY_MODEL = specjax.model_drafter(bigrams.model(DRAFT))
CONFIG = SpeculativeConfig(num_speculative_tokens=3)
ROWS = [[1, 2, 3, 0, 1, 2, 2], [3], [0, 1, 0, 2, 1]]


def options_of(max_length=None, prefill_chunk_size=None):
    """A listing as where one is compared: the tests share programs."""
    return specjax.LoopOptions(max_length, prefill_chunk_size, num_logprobs=1)


def generate(rows, options=None, *, drafter=BY_MODEL, target=MODEL, **values):
    options = options_of() if options is None else options
    values = {"keys": bigrams.keys(len(rows)), "max_new_tokens": 9} | values
    return specjax.generate(target, drafter, rows, config=CONFIG, options=options, **values)


def texts(output):
    return specjax.unpad(output.token_ids)


def random_requests(rng):
    """Prompts and every kind of parameter that is a value."""
    rows = [rng.integers(0, V, rng.integers(1, 90)).tolist() for _ in range(B)]
    sampling = SamplingParams(
        top_k=rng.integers(1, V + 1, B),
        top_p=rng.uniform(0.5, 1, B),
        repetition_penalty=rng.uniform(0.8, 1.3, B),
    )
    most = rng.integers(1, 30, B) if rng.random() < 0.5 else int(rng.integers(1, 30))
    temperature = rng.uniform(0, 2, B) if rng.random() < 0.5 else float(rng.uniform(0, 2))
    return rows, dict(
        sampling=sampling,
        max_new_tokens=most,
        temperature=temperature,
        eos_token_ids=rng.integers(0, V, rng.integers(0, 5)).tolist(),
    )


@pytest.mark.once
def test_fifty_requests_of_any_length_and_any_values_compile_nothing():
    rng, keys = np.random.default_rng(0), bigrams.keys(B)
    options = {"keys": keys, "config": CONFIG, "options": options_of()}

    def stream(rows, **values):
        ids, lengths = np.zeros((B, 90), np.int32), [len(row) for row in rows]
        state = specjax.init(MODEL, BY_MODEL, (ids, lengths), **values, **options)
        specjax.step(MODEL, BY_MODEL, state, config=CONFIG)

    def both(seed):
        rows, values = random_requests(rng)
        generate(rows, keys=keys, **values)
        if seed % 10 == 0:
            stream(rows, **values)

    with compilations() as found:
        both(0)
    names = [x.removeprefix("jit_").removeprefix("jit(").removesuffix(")") for x in found]
    # `init` reads the last tokens of the prompts, too.
    programs = ("run_prefill", "run_loop", "run_first_step", "run_step")
    assert [names.count(x) for x in programs] == [2, 1, 1, 1]
    with compilations() as found:
        for seed in range(1, 51):
            both(seed)
    assert found == []


def test_steps_of_generate_write_into_the_caches_of_the_prefill():
    models = Models(MODEL, BY_MODEL)
    arguments = RequestArguments(ROWS, bigrams.keys(B), max_new_tokens=5)
    requests, static = check_arguments(*models, arguments, CONFIG, options_of(4096))
    _, compilations = begin_compilation(loop_in_place, models, requests, static)
    memory = compilations[1].result().memory_analysis()
    caches = sum(leaf.nbytes for leaf in jax.tree.leaves(models.init_caches(B, 4096)))
    assert memory.alias_size_in_bytes >= caches
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes


@pytest.mark.once
def test_tokens_do_not_depend_on_the_capacity_or_on_the_chunks_of_a_prompt():
    temperature = np.array([0.0, 1.0, 0.7], np.float32)
    wanted = generate(ROWS, options_of(16), temperature=temperature)
    for max_length, chunk in ((16, 1), (16, 6), (None, 3)):
        found = generate(ROWS, options_of(max_length, chunk), temperature=temperature)
        assert found.token_ids.shape == (B, 128 if max_length is None else max_length)
        for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_array_equal(x[:, :16] if x.ndim > 1 else x, y)


@pytest.mark.once
def test_every_request_has_its_own_number_of_new_tokens():
    counts = np.array([1, 9, 4])
    # Greedy: the drafts that are cut at the end of a text change which noise draws its last tokens.
    whole, cut = (
        generate(ROWS, options_of(16), max_new_tokens=n, temperature=0.0) for n in (9, counts)
    )
    rows = zip(texts(whole), ROWS, counts, strict=True)
    assert texts(cut) == [text[: len(row) + n] for text, row, n in rows]


def test_under_an_outer_jit_the_capacity_is_given_where_the_number_of_tokens_is_traced():
    def call(most, max_length):
        return generate(ROWS, options_of(max_length), max_new_tokens=most).token_ids

    with pytest.raises(ValueError, match=r"give options=LoopOptions\(max_length=...\)"):
        jax.eval_shape(lambda most: call(most, None), jnp.int32(9))
    found = jax.jit(lambda most: call(most, 16))(jnp.int32(9))
    np.testing.assert_array_equal(found, generate(ROWS, options_of(16)).token_ids)


@pytest.mark.once
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"options": options_of(15)},
            "max_length is 15; the longest prompt and its max_new_tokens need 16",
        ),
        ({"options": options_of(33)}, "target takes texts of at most 32 tokens"),
        ({"max_new_tokens": 26}, "a text may need 33 tokens, and the target takes"),
        ({"max_new_tokens": np.array([1, 0, 3])}, "max_new_tokens holds 0"),
        ({"options": options_of(None, 0)}, "prefill_chunk_size is 0"),
    ],
)
def test_what_has_no_room_is_refused(change, words):
    target = specjax.Model(MODEL.params, MODEL.init_cache, MODEL.apply, MODEL.logits, max_length=32)
    assert jax.eval_shape(lambda: generate(ROWS, target=target)).token_ids.shape == (B, 32)
    with pytest.raises(ValueError, match=words):
        generate(ROWS, target=target, **change)


def test_an_id_outside_the_vocabulary_is_refused_where_the_host_reads_prompts():
    """After a prompt's length any id may stand; what is traced is the caller's promise."""
    options = dict(keys=bigrams.keys(2), max_new_tokens=9, config=CONFIG)
    compiled = specjax.compile_generate(
        MODEL, None, batch_size=2, config=options.pop("config"), options=options_of(16)
    )
    calls = [
        functools.partial(specjax.generate, MODEL, BY_MODEL, config=CONFIG),
        functools.partial(specjax.init, MODEL, BY_MODEL, config=CONFIG),
        functools.partial(compiled, MODEL, None),
    ]
    for call, wrong in itertools.product(calls, (V, -1, 2**31 - 1)):
        words = rf"prompts has {wrong} as token 1 of prompt 1; it needs an id in \[0, {V}\)"
        padded = [[1, 2, 0], [3, wrong, wrong]]
        pairs = [(make(padded), [3, 2]) for make in (list, np.array, jnp.array)]
        for prompts in ([[1, 2, 0], [3, wrong]], *pairs):
            with pytest.raises(ValueError, match=words):
                call(prompts, **options)
    # An id after a prompt's length is not read.
    prompts = [[1, V], [3, -1]], [1, 1]
    assert compiled(MODEL, None, prompts, **options).token_ids.shape == (2, 16)
    traced = jax.eval_shape(lambda ids: calls[0]((ids, [1, 1]), **options), np.full((2, 1), V))
    assert traced.token_ids.shape == (2, 128)


def test_the_check_of_prompts_traces_the_target_no_oftener():
    traced = []

    def apply(params, token_ids, *rest):
        traced.append(token_ids.shape)
        return MODEL.apply(params, token_ids, *rest)

    target = dataclasses.replace(MODEL, apply=apply)
    for rows in (ROWS, [[0], [1, 2], [3]]):
        generate(rows, target=target)
    # The rows of a step, whose shapes the check asks for first; a chunk of the prompts; the loop.
    rows = (B, CONFIG.num_speculative_tokens + 1)
    assert traced == [rows, (B, 128), rows]


@pytest.mark.once
def test_a_device_without_room_names_the_bytes_of_the_cache():
    def init_cache(batch_size, max_length):
        return jnp.zeros((batch_size, max_length, 2**20, 2**20), jnp.int8)

    def apply(params, token_ids, positions, cache):
        return jnp.stack([token_ids, token_ids], axis=-1), cache

    huge = specjax.Model(MODEL.params, init_cache, apply, MODEL.logits)
    words = (
        r"The target's cache takes 49152.00 GiB \(52776558133248 bytes\) and the drafter's state "
        r"192 bytes for batch_size 3 and max_length 16; a smaller one"
    )
    with pytest.raises(MemoryError, match=words):
        specjax.init(
            huge,
            BY_MODEL,
            ROWS,
            keys=bigrams.keys(B),
            max_new_tokens=9,
            options=options_of(16),
        )


@pytest.mark.once
def test_a_drafter_that_reads_whole_prompts_drafts_like_one_that_reads_chunks():
    draft = bigrams.model(DRAFT)

    def init(params, token_ids, lengths, max_length):
        index = jnp.arange(max_length, dtype=jnp.int32)[None]
        positions = jnp.where(index < lengths[:, None], index, -1)
        return draft.apply(params, token_ids, positions, draft.init_cache(B, max_length))[1]

    whole = specjax.whole_prompt_drafter(draft.params, init, BY_MODEL.propose)
    found = generate(ROWS, options_of(16, 3), drafter=whole)
    wanted = generate(ROWS, options_of(16))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_prompt_of_one_token_is_drafted_for_alike_in_any_company():
    def init(params, token_ids, lengths, max_length):
        return jnp.where(lengths > 0, 1, 2)

    def propose(params, state, token_ids, hidden, inputs, **options):
        ids = jnp.repeat(state[:, None], 4, axis=1)
        return specjax.Draft(ids, num_tokens=inputs.num_tokens), state

    drafter = specjax.whole_prompt_drafter((), init, propose)
    alone = generate([[3], [1], [2]], options_of(16), drafter=drafter)
    company = generate([[3], [1, 0, 3, 2], [2]], options_of(16), drafter=drafter)
    for found, wanted in zip(jax.tree.leaves(alone), jax.tree.leaves(company), strict=True):
        np.testing.assert_array_equal(found[::2], wanted[::2])
    assert int(alone.metrics.num_accepted.sum()) > 0


def test_taps_that_nothing_hands_out_or_reads_are_refused_in_a_sentence():
    drafter = dataclasses.replace(BY_MODEL, taps=(1,))
    with pytest.raises(ValueError, match=r"taps \[1\] and reads_features False"):
        generate(ROWS, drafter=drafter)
    chain = markov_chain(np.full((V, V), 1 / V))
    with pytest.raises(ValueError, match="this target has no apply_with_taps"):
        generate(ROWS, drafter=dataclasses.replace(drafter, reads_features=True), target=chain)


@pytest.mark.once
@pytest.mark.parametrize("taps", [(), (2, 0)])
def test_a_drafter_that_reads_features_is_given_those_of_every_committed_token_once(taps):
    """Its state counts what it was given at each position, and keeps the features.

    With K = "auto", some steps draft tokens and some none.
    """
    config = SpeculativeConfig("auto", step_costs=(1.0, 1.2, 1.3, 1.4))

    def init(params, batch_size, max_length):
        shape = (batch_size, max_length)
        features = jnp.full((*shape, 2 * max(len(taps), 1)), -1, jnp.int32)
        return jnp.zeros(shape, jnp.int32), features

    def extend(params, state, token_ids, positions, features):
        count, kept = state
        index = jnp.where(positions < 0, count.shape[1], positions)
        rows = jnp.arange(B, dtype=jnp.int32)[:, None]
        count = count.at[rows, index].add(1, mode="drop")
        return count, kept.at[rows, index].set(features, mode="drop")

    def propose(params, state, *arguments, **options):
        return specjax.ngram_drafter().propose((), (), *arguments, **options)[0], state

    drafter = specjax.Drafter((), init, extend, propose, reads_features=True, taps=taps)
    options = specjax.LoopOptions(max_length=16, prefill_chunk_size=3)
    given = dict(keys=bigrams.keys(B), max_new_tokens=9, config=config, options=options)
    state = specjax.init(MODEL, drafter, ROWS, **given)
    while True:
        text, (count, kept) = jax.device_get((state.token_ids, state.drafter_state))
        for b, length in enumerate(np.asarray(state.lengths)):
            # The last committed token is read by the next step.
            np.testing.assert_array_equal(count[b], np.arange(16) < length - 1)
            # The features of this model are a token and the one before it.
            pairs = np.stack([np.append(0, text[b])[:-1], text[b]], axis=-1)
            given = np.concatenate([pairs + 10 * tap for tap in taps or (0,)], axis=-1)
            np.testing.assert_array_equal(kept[b, : length - 1], given[: length - 1])
        if np.all(state.finish):
            break
        state, _ = specjax.step(MODEL, drafter, state, config=config)
