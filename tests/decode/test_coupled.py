"""Coupled decoding: a seeded text is that of plain decoding, whatever drafts it, and how much."""

import functools

import bigrams
import jax
import numpy as np
import pytest

import specjax
from specjax import SamplingParams, SpeculativeConfig
from specjax.core.coupling import match_probability
from specjax.markov_chain import markov_chain
from specjax.models import load, load_tokenizer, pretrained_folder

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


def decode(drafter, rows=PROMPTS, *, keys=None, target=TARGET, config=None, **options):
    ids, lengths = bigrams.prompts(rows, max(map(len, rows)))
    keys = bigrams.keys(len(rows)) if keys is None else keys
    options = dict(max_new_tokens=NEW, max_length=64, temperature=0.9) | options
    return specjax.generate(target, drafter, ids, lengths, keys=keys, config=config, **options)


def texts(output):
    ids, lengths = np.asarray(output.token_ids), np.asarray(output.lengths)
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


@functools.cache
def plain(implementation="xla"):
    return texts(decode(None, implementation=implementation))


@pytest.mark.parametrize(("drafter", "k"), [("model", 4), ("ngram", 3), ("model", "auto")])
def test_a_seeded_text_is_that_of_plain_decoding(drafter, k, implementation):
    output = decode(DRAFTERS[drafter], config=coupled(k), implementation=implementation)
    assert texts(output) == plain(implementation)
    if k != "auto":
        assert output.metrics.num_accepted.sum() > 0


@pytest.mark.parametrize(("k", "copies"), [(1, 3), (7, 2)])
def test_neither_k_nor_the_batch_changes_a_text(k, copies):
    keys = bigrams.keys(len(PROMPTS))[np.tile(np.arange(len(PROMPTS)), copies)]
    output = decode(DRAFTERS["model"], PROMPTS * copies, keys=keys, config=coupled(k))
    assert texts(output) == plain() * copies


def test_a_request_alone_has_its_text_of_the_batch():
    alone = decode(DRAFTERS["model"], PROMPTS[3:], keys=bigrams.keys(4)[3:], config=coupled(4))
    assert texts(alone) == plain()[3:]


def test_a_greedy_text_is_that_of_plain_decoding():
    cold = dict(temperature=np.array([0.0, 0.9, 0.0, 0.9], np.float32))
    output = decode(DRAFTERS["model"], config=coupled(4), **cold)
    assert texts(output) == texts(decode(None, **cold))


def test_sampling_parameters_leave_it_that_of_plain_decoding():
    few = SamplingParams(top_k=20)
    output = decode(DRAFTERS["model"], config=coupled(4), sampling=few)
    assert texts(output) == texts(decode(None, sampling=few))


@pytest.mark.parametrize("order", [("model", "ngram"), ("ngram", "model"), ("model", None)])
def test_the_drafter_may_change_in_mid_sequence(order):
    """The text so far is the prompt of the rest, under its own keys."""
    before, after = (DRAFTERS.get(name) for name in order)
    first = texts(decode(before, config=coupled(4), max_new_tokens=11))
    rest = decode(after, first, config=coupled(4), max_new_tokens=NEW - 11)
    assert texts(rest) == plain()


def test_the_embedded_pair_says_in_float32_what_it_says_without_drafts():
    target, draft = (load(pretrained_folder(name), "float32")[0] for name in ("target", "draft"))
    tokenizer = load_tokenizer(pretrained_folder("target"))
    prompts = ["Once upon a time", "The little dog was very"]
    rows = [tokenizer.encode(text).ids for text in prompts]
    options = dict(target=target, max_new_tokens=40, temperature=1.0)
    output = decode(specjax.model_drafter(draft), rows, config=coupled(3), **options)
    assert texts(output) == texts(decode(None, rows, **options))
    assert output.metrics.num_accepted.sum() > 10


P, Q = (x[0] for x in (0.98 * probs(2, V) + 0.02 / V, 0.7 * probs(2, V) + 0.3 * probs(3, V)))


def test_drafts_match_as_often_as_the_formula_says():
    """A draft drawn on a draft stream gives the right text, too, and matches with sum p q."""
    target, draft = (markov_chain(np.tile(row, (V, 1))) for row in (P, Q))
    output = decode(
        specjax.model_drafter(draft),
        [[0]] * 16,
        target=target,
        config=coupled(1),
        max_new_tokens=200,
        max_length=256,
        temperature=1.0,
    )
    drafted = np.sum(output.metrics.num_drafted)
    rate, expected = np.sum(output.metrics.num_accepted) / drafted, match_probability(P, Q)
    margin = 5 * np.sqrt(expected * (1 - expected) / drafted)
    assert abs(rate - expected) < margin
    assert abs(P @ Q - expected) > 3 * margin


def begin(config):
    """The state after a first token, with drafts for the second."""
    ids, lengths = bigrams.prompts(PROMPTS)
    options = dict(keys=bigrams.keys(len(PROMPTS)), temperature=0.9, implementation="xla")
    room = dict(max_new_tokens=NEW, max_length=64)
    drafter = DRAFTERS["model"]
    return specjax.init(TARGET, drafter, ids, lengths, config=config, **room, **options)


def step_by(config, state):
    return specjax.step(TARGET, DRAFTERS["model"], state, config=config, implementation="xla")


def test_a_change_of_the_method_drops_drafts_of_the_target_s_noise():
    """Greedy drafts have no logits either. What is emitted is the target's own next draw."""
    state = begin(coupled(4))
    assert state.draft.logits is None
    np.testing.assert_array_equal(state.draft.num_tokens, 4)
    greedy = SpeculativeConfig(4, draft_sample_method="greedy")
    state, info = step_by(greedy, state)
    np.testing.assert_array_equal(info.num_drafted, 0)
    firsts = [text[: len(row) + 2] for text, row in zip(plain(), PROMPTS, strict=True)]
    assert texts(state) == firsts
    np.testing.assert_array_equal(step_by(greedy, state)[1].num_drafted, 4)


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
    with pytest.raises(ValueError, match=f"was begun {'with' if begun else 'without'} acceptance"):
        step_by(then, begin(first))


def test_propose_refuses_another_method():
    with pytest.raises(ValueError, match="rejection_sample_method is 'block'; it is"):
        specjax.propose(
            lambda carry, token_ids, positions: (None, carry),
            (),
            np.zeros(2, np.int32),
            num_tokens=1,
            keys=jax.random.key(0),
            positions=0,
            rejection_sample_method="block",
        )
