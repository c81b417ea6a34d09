"""Grammars on the device: each row is in the state after the drafted tokens before it."""

import automata
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from process_rules import process_rules

import specjax
from specjax import History, SamplingParams
from specjax.processing.grammar import advance, allowed_columns

V, D, K = automata.V, len(automata.FOLLOWS), 3
GRAMMAR = specjax.Grammar(*automata.tables())
_RNG = np.random.default_rng(0)
STARTS = np.array([0, 1, 2, 3, 0, 2, -1, 1], np.int32)
SIZE = len(STARTS)
# Any ids, those outside the vocabulary and no token among them.
DRAFTED = _RNG.integers(-1, V + 2, (SIZE, K)).astype(np.int32)
LOGITS = _RNG.normal(size=(SIZE, K + 1, V)).astype(np.float32)


def test_each_row_allows_what_follows_the_drafted_tokens_before_it():
    found = process_rules(LOGITS, grammar=GRAMMAR, grammar_state=STARTS, drafted_token_ids=DRAFTED)
    for b, start in enumerate(STARTS):
        for row in range(K + 1):
            allowed = automata.allowed_after(int(start), DRAFTED[b, :row].tolist())
            np.testing.assert_array_equal(found[b, row], np.where(allowed, LOGITS[b, row], -np.inf))
    # Of one row at a time, as a draft is drawn: what stands after the row is not there yet.
    for row in range(K + 1):
        given = {"first_row": row, "history": History(grammar_state=STARTS)}
        one = process_rules(
            LOGITS[:, row],
            grammar=GRAMMAR,
            drafted_token_ids=np.pad(DRAFTED, ((0, 0), (0, 1))),
            **given,
        )
        np.testing.assert_array_equal(one, found[:, row])


@pytest.mark.parametrize("num_tokens", range(K + 1))
def test_the_state_after_a_step_is_that_after_its_committed_tokens(num_tokens):
    counts = jnp.full(SIZE, num_tokens, jnp.int32)
    found = advance(GRAMMAR, jnp.asarray(STARTS), jnp.asarray(DRAFTED), counts)
    rows = zip(STARTS.tolist(), DRAFTED[:, :num_tokens].tolist(), strict=True)
    assert found.tolist() == [automata.state_after(*row) for row in rows]


@pytest.mark.once
def test_a_draft_of_another_vocabulary_is_masked_by_the_targets_ids():
    token_map = [4, 0, 2]
    draft, _ = specjax.propose(
        lambda carry, token_ids, positions: (jnp.zeros((SIZE, 3)), carry),
        (),
        jnp.zeros(SIZE, jnp.int32),
        specjax.DraftInputs(
            jnp.stack([jax.random.key(seed) for seed in range(SIZE)]),
            positions=1,
            sampling=SamplingParams(grammar=GRAMMAR, grammar_state=STARTS),
        ),
        num_tokens=K,
        token_map=np.array(token_map),
        vocab_size=V,
    )
    for b, start in enumerate(STARTS.tolist()):
        for row in range(K):
            tokens = draft.token_ids[b, :row].tolist()
            if -1 in tokens:
                break
            allowed = automata.allowed_after(start, tokens)[token_map]
            assert (draft.logits[b, row] > -jnp.inf).tolist() == allowed.tolist()


def test_columns_that_the_grammar_does_not_know_are_not_allowed():
    """Whatever stands in the bits after the last token, also through a map of any ids."""
    rest = ~np.uint32(2**V - 1)
    grammar = GRAMMAR._replace(allowed=GRAMMAR.allowed | rest)
    found = allowed_columns(grammar, jnp.asarray(STARTS), V + 30)
    token_map = jnp.array([V - 1, V, -1, -32, 2**31 - 1, 0], jnp.int32)
    mapped = allowed_columns(grammar, jnp.asarray(STARTS), 6, token_map)
    for row, columns, start in zip(found, mapped, STARTS.tolist(), strict=True):
        allowed, other = automata.allowed_after(start, []).tolist(), start < 0
        assert row.tolist() == allowed + [other] * 30
        assert columns.tolist() == [allowed[-1], other, other, other, other, allowed[0]]


def test_columns_outside_the_vocabulary_are_not_allowed_whatever_the_words_say():
    grammar = GRAMMAR._replace(allowed=np.full_like(GRAMMAR.allowed, 2**32 - 1))
    columns = jnp.array([-40, -1, 0, V - 1, V, 31, 32])
    found = allowed_columns(grammar, jnp.zeros(1, jnp.int32), len(columns), columns)
    assert found.tolist() == [[False, False, True, True, False, False, False]]


def test_a_state_past_the_last_one_does_not_move():
    states = jnp.array([D, D + 1, 2**31 - 1], jnp.int32)
    for token in range(V):
        token_ids = jnp.full((3, 1), token, jnp.int32)
        assert (
            advance(GRAMMAR, states, token_ids, jnp.ones(3, jnp.int32)).tolist() == states.tolist()
        )


def test_a_state_that_the_grammar_does_not_have_allows_nothing():
    sampling = SamplingParams(grammar=GRAMMAR, grammar_state=np.full(SIZE, D, np.int32))
    logits, _ = specjax.apply_sampling(jnp.asarray(LOGITS[:, 0]), sampling)
    assert not np.isfinite(logits).any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grammar": None}, "grammar_state is given without grammar"),
        ({"grammar": tuple(GRAMMAR)}, "it needs a specjax.Grammar"),
        ({"grammar": GRAMMAR._replace(allowed=np.zeros(4, np.uint32))}, r"next_states \[Q, C\]"),
        ({"grammar": GRAMMAR._replace(allowed=np.zeros((4, 1), bool))}, "words of 32 tokens"),
        ({"grammar": GRAMMAR._replace(allowed=np.zeros((4, 2), np.uint32))}, r"\(4, 1\)"),
        ({"grammar": GRAMMAR._replace(allowed=np.zeros((3, 1), np.uint32))}, "allowed has shape"),
        ({"grammar": GRAMMAR._replace(next_states=np.zeros((4, 5)))}, "next_states has dtype"),
        ({"grammar": GRAMMAR._replace(token_classes=np.zeros(6, np.int32))}, "token_classes"),
        ({"grammar_state": np.zeros(3, np.int32)}, "grammar_state has shape"),
        ({"drafted_token_ids": None}, "a grammar read the tokens drafted before a row"),
        ({"history": History(grammar_state=np.zeros(3, np.int32))}, "history.grammar_state"),
    ],
)
def test_a_wrong_grammar_is_refused_in_a_sentence(change, words):
    arguments = {"grammar": GRAMMAR, "grammar_state": STARTS, "drafted_token_ids": DRAFTED}
    with pytest.raises(ValueError, match=words):
        process_rules(LOGITS, **(arguments | change))
