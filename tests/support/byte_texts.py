"""Texts of bytes that an automaton of a JSON schema accepts."""

from specjax.contrib.grammars.byte_automaton import byte_automaton
from specjax.contrib.grammars.json_schema import schema_pattern


def automaton_of(schema):
    """The automaton of a schema's texts."""
    return byte_automaton(schema_pattern(schema))


def accepts(automaton, text):
    """Whether the bytes of a text lead from the first state to one where it may end."""
    state = 0
    for value in text:
        state = automaton.next_states[state, value]
        if state < 0:
            return False
    return bool(automaton.accepts[state])
