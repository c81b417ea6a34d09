"""Automata of tokens: each token leads where its bytes do, and no table of all tokens is held."""

import tracemalloc

import numpy as np
import pytest
from byte_texts import automaton_of

from specjax.contrib.grammars import json_schema_grammar, token_automaton
from specjax.contrib.grammars.byte_automaton import ByteAutomaton

pytestmark = pytest.mark.once


def random_automaton(rng):
    """Of ten states that bytes "a" to "e" leave, or do not."""
    table = np.full((10, 256), -1, np.int32)
    table[:, 97:102] = np.where(rng.random((10, 5)) < 0.3, rng.integers(0, 10, (10, 5)), -1)
    return ByteAutomaton(table, rng.random(10) < 0.2)


def random_vocabulary(rng):
    """Tokens of up to four of these bytes, some of them twice, and one without bytes."""
    lengths = rng.integers(0, 5, 40)
    return [bytes(rng.integers(97, 102, length).astype(np.uint8)) for length in lengths] + [b""]


def leads(automaton, vocabulary, eos):
    """Where each token leads from each state, a byte at a time: {state: {token: state}}."""
    end = len(automaton.accepts)
    found = {end: dict.fromkeys(eos, end)}
    for first in range(end):
        found[first] = dict.fromkeys(eos, end) if automaton.accepts[first] else {}
        for token, text in enumerate(vocabulary):
            state = first
            for value in text:
                state = automaton.next_states[state, value] if state >= 0 else -1
            if text and token not in eos and state >= 0:
                found[first][token] = int(state)
    completes = {end}
    for _ in range(end):
        completes |= {state for state, after in found.items() if completes & {*after.values()}}
    return {
        state: {token: after for token, after in tokens.items() if after in completes}
        for state, tokens in found.items()
    }


def test_every_token_leads_where_its_bytes_do_and_only_to_what_tokens_complete():
    rng, num_complete = np.random.default_rng(0), 0
    for _ in range(60):
        automaton, vocabulary = random_automaton(rng), random_vocabulary(rng)
        eos = [0, int(rng.integers(1, 41))]
        expected = leads(automaton, vocabulary, eos)
        if not expected[0]:
            with pytest.raises(ValueError, match="complete no text"):
                token_automaton.token_automaton(automaton, vocabulary, eos)
            continue
        num_complete += 1
        grammar = token_automaton.token_automaton(automaton, vocabulary, eos)
        assert grammar.allowed.shape[1] == 2
        # The states of both that the same tokens reach, and every state is one of them.
        pairs, waiting = {(0, 0)}, [(0, 0)]
        for state, other in waiting:
            words = grammar.allowed[state].tolist()
            allowed = [token for token in range(64) if words[token // 32] >> token % 32 & 1]
            assert allowed == sorted(expected[other])
            after = grammar.next_states[state, grammar.token_classes].tolist()
            reached = {(after[token], expected[other][token]) for token in allowed} - pairs
            assert all(after[token] == state for token in range(41) if token not in allowed)
            pairs |= reached
            waiting += reached
        assert {state for state, _ in pairs} == set(range(len(grammar.next_states)))
    assert num_complete > 20


def test_tokens_that_act_alike_are_one_class_and_no_table_of_all_tokens_is_held():
    pieces = [bytes([value]) for value in range(256)]
    vocabulary = [b"", *pieces, *(x + y for x in pieces for y in pieces if x < b"\x80")]
    tracemalloc.start()
    grammar = json_schema_grammar({"type": "string", "maxLength": 40}, vocabulary, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grammar.next_states.shape[0] == 564
    assert grammar.next_states.shape[1] < 200
    arrays = sum(array.nbytes for array in grammar)
    assert peak < arrays + 2**22 < 4 * len(grammar.next_states) * len(vocabulary) / 4


def test_a_table_of_too_many_states_and_classes_is_refused(monkeypatch):
    automaton = automaton_of({"enum": ["ab", "ba"]})
    vocabulary = [b"", b"a", b"b", b'"']
    grammar = token_automaton.token_automaton(automaton, vocabulary, 0)
    num_states, num_classes = grammar.next_states.shape
    monkeypatch.setattr(token_automaton, "_MAX_BYTES", grammar.next_states.nbytes - 1)
    words = rf"has {num_states} states and {num_classes} classes of tokens"
    with pytest.raises(ValueError, match=words):
        token_automaton.token_automaton(automaton, vocabulary, 0)
