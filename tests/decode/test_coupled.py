"""Coupled decoding: a seeded text is that of plain decoding, whatever drafts it, and how much."""

import dataclasses
import functools

import bigrams
import jax
import numpy as np
import pytest

import specjax
from specjax import SamplingParams, SpeculativeConfig
from specjax.markov_chain import markov_chain
from specjax.theory.coupling import match_probability

pytestmark = [pytest.mark.once, pytest.mark.lenient]

V, NEW = 300, 24
PROMPTS = [[1, 2, 3], [3], [0, 1], [2, 2, 2, 0, 1]]


def coupled(k):
    return SpeculativeConfig(k, rejection_sample_method="coupled")


def probs(seed, size=V):
    """Rows of a chain of which a few tokens in several blocks are likely."""
    return np.random.default_rng(seed).dirichlet(np.full(size, 0.01), size)


TARGET = markov_chain(0.98 * probs(0) + 0.02 / V)
DRAFT = markov_chain(0.49 * probs(0) + 0.49 * probs(1) + 0.02 / V)
DRAFTERS = {"model": specjax.model_drafter(DRAFT), "ngram": specjax.ngram_drafter()}


def decode(drafter, rows=PROMPTS, *, keys=None, target=TARGET, implementation="xla", **values):
    keys = bigrams.keys(len(rows)) if keys is None else keys
    # A number per request, which shares compilations.
    temperature = np.full(len(rows), 0.9, np.float32)
    values = {"max_new_tokens": NEW, "temperature": temperature} | values
    options = specjax.LoopOptions(max_length=64, implementation=implementation)
    return specjax.generate(target, drafter, rows, keys=keys, options=options, **values)


def texts(output):
    ids, lengths = np.asarray(output.token_ids), np.asarray(output.lengths)
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


@functools.cache
def plain():
    return texts(decode(None))


def test_a_seeded_text_is_that_of_plain_decoding(implementation):
    """By the kernels, too, it is what plain JAX decodes."""
    output = decode(DRAFTERS["model"], config=coupled(4), implementation=implementation)
    assert texts(output) == plain()
    assert output.metrics.num_accepted.sum() > 0


def test_prompt_lookup_leaves_a_seeded_text_that_of_plain_decoding():
    output = decode(DRAFTERS["ngram"], config=coupled(4))
    assert texts(output) == plain()
    assert output.metrics.num_accepted.sum() > 0


@pytest.mark.parametrize(("k", "first", "copies"), [(1, 3, 1), (7, 0, 2)])
def test_neither_k_nor_the_batch_changes_a_text(k, first, copies):
    """A request alone, and two of each, of which every one has its noise."""
    rows = PROMPTS[first:] * copies
    keys = bigrams.keys(len(PROMPTS))[np.tile(np.arange(first, len(PROMPTS)), copies)]
    output = decode(DRAFTERS["model"], rows, keys=keys, config=coupled(k))
    assert texts(output) == plain()[first:] * copies


def test_a_greedy_text_is_that_of_plain_decoding():
    cold = dict(temperature=np.array([0.0, 0.9, 0.0, 0.9], np.float32))
    output = decode(DRAFTERS["model"], config=coupled(4), **cold)
    assert texts(output) == texts(decode(None, **cold))


def test_sampling_parameters_leave_it_that_of_plain_decoding():
    """And steps of any number of drafts, none among them."""
    few = SamplingParams(top_k=20)
    output = decode(DRAFTERS["model"], config=coupled("auto"), sampling=few)
    assert texts(output) == texts(decode(None, sampling=few))


@pytest.mark.parametrize("order", [("model", "ngram"), ("ngram", "model"), ("model", None)])
def test_the_drafter_may_change_in_mid_sequence(order):
    """The text so far is the prompt of the rest, under its own keys."""
    before, after = (DRAFTERS.get(name) for name in order)
    first = texts(decode(before, config=coupled(4), max_new_tokens=11))
    rest = decode(after, first, config=coupled(4), max_new_tokens=NEW - 11)
    assert texts(rest) == plain()


def test_transformers_say_in_float32_what_the_target_says_without_drafts():
    """Rows of several tokens are rounded otherwise than one row, and give the same draws."""
    config = specjax.models.TransformerConfig(V, 32, 48, 2, 2, 1, 16)
    target = specjax.models.build(config, seed=3)
    target = dataclasses.replace(target, params=jax.tree.map(lambda x: x * 8, target.params))
    near = dataclasses.replace(target, params=jax.tree.map(lambda x: x * 0.97, target.params))
    options = dict(target=target, temperature=np.ones(len(PROMPTS), np.float32))
    output = decode(specjax.model_drafter(near), config=coupled(3), **options)
    assert texts(output) == texts(decode(None, **options))
    assert 10 < output.metrics.num_accepted.sum() < output.metrics.num_drafted.sum()


P, Q = (x[0] for x in (0.98 * probs(2, V) + 0.02 / V, 0.7 * probs(2, V) + 0.3 * probs(3, V)))


def test_drafts_match_as_often_as_the_formula_says():
    """A draft drawn on a draft stream gives the right text, too, and matches with sum p q."""
    target, draft = (markov_chain(np.tile(row, (V, 1))) for row in (P, Q))
    options = dict(target=target, config=coupled(4), max_new_tokens=60)
    options |= {"temperature": np.ones(4, np.float32)}
    accepted, drafted = np.zeros(4), np.zeros(4)
    for seed in range(30):
        keys = bigrams.keys(4, seed)
        output = decode(specjax.model_drafter(draft), [[0]] * 4, keys=keys, **options)
        accepted += np.sum(output.metrics.num_accepted, axis=0)
        drafted += np.sum(output.metrics.num_drafted, axis=0)
    # The first of each step: those after it are judged where it is accepted.
    (rate, *_), drafted, expected = accepted / drafted, drafted[0], match_probability(P, Q)
    margin = 5 * np.sqrt(expected * (1 - expected) / drafted)
    assert abs(rate - expected) < margin
    assert abs(P @ Q - expected) > 3 * margin


def begin(config, drafter=DRAFTERS["model"]):
    """The state after a first token, with drafts for the second."""
    temperature = np.full(len(PROMPTS), 0.9, np.float32)
    values = dict(keys=bigrams.keys(len(PROMPTS)), temperature=temperature, max_new_tokens=NEW)
    options = specjax.LoopOptions(max_length=64, implementation="xla")
    drafter = DRAFTERS["model"]
    return specjax.init(TARGET, drafter, PROMPTS, config=config, options=options, **values)


def step_by(config, state, drafter=DRAFTERS["model"]):
    return specjax.step(TARGET, drafter, state, config=config, implementation="xla")


def without_temperature(*arguments, **options):
    """Drafts of which the stream alone tells whether they are drawn or the likeliest."""
    draft, state = DRAFTERS["model"].propose(*arguments, **options)
    return draft.replace(temperature=None), state


TOKENS_ALONE = dataclasses.replace(DRAFTERS["model"], propose=without_temperature)


@pytest.mark.parametrize("drafter", [DRAFTERS["model"], TOKENS_ALONE], ids=["model", "tokens"])
def test_a_change_of_the_method_drops_drafts_of_the_target_s_noise(drafter):
    """Greedy drafts have no logits either. What is emitted is the target's own next draw."""
    state = begin(coupled(4), drafter)
    assert state.draft.logits is None
    assert state.draft.on_target_stream
    np.testing.assert_array_equal(state.draft.num_tokens, 4)
    greedy = SpeculativeConfig(4, draft_sample_method="greedy")
    state, info = step_by(greedy, state, drafter)
    assert not state.draft.on_target_stream
    np.testing.assert_array_equal(info.num_drafted, 0)
    firsts = [text[: len(row) + 2] for text, row in zip(plain(), PROMPTS, strict=True)]
    assert texts(state) == firsts
    np.testing.assert_array_equal(step_by(greedy, state, drafter)[1].num_drafted, 4)


def test_a_change_to_coupled_goes_on_with_plain_decoding_s_text():
    state = begin(SpeculativeConfig(4))
    assert state.draft.logits is not None
    while not np.all(state.finish):
        state, _ = step_by(coupled(4), state)
    assert texts(state) == plain()


@pytest.mark.parametrize("begun", [False, True])
def test_a_state_with_rates_of_acceptance_keeps_them(begun):
    config = SpeculativeConfig(
        4, rejection_sample_method="synthetic", synthetic_acceptance_length=3.0
    )
    first, then = (config, coupled(4)) if begun else (coupled(4), config)
    state = jax.eval_shape(lambda: begin(first))
    with pytest.raises(ValueError, match=f"was begun {'with' if begun else 'without'} acceptance"):
        step_by(then, state)


def test_propose_refuses_what_is_no_rule():
    with pytest.raises(ValueError, match="rule is str; it needs"):
        specjax.propose(
            lambda carry, token_ids, positions: (None, carry),
            (),
            np.zeros(2, np.int32),
            specjax.DraftInputs(jax.random.key(0), positions=0),
            num_tokens=1,
            rule="coupled",
        )
