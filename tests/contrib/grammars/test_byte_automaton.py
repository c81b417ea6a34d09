"""Automata of bytes: what is too large for one is refused at once."""

import time

import pytest
from byte_texts import accepts, automaton_of

import specjax

pytestmark = pytest.mark.once


def nested(levels):
    """A schema in a schema in a schema."""
    schema = {"type": "null"}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


def doubled(levels):
    """A schema that names another twice, which names another twice."""
    twice = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(levels)
    }
    return {"$defs": twice | {f"d{levels}": {"type": "null"}}, "$ref": "#/$defs/d0"}


# Each of the arrays has no 1, no 2, ... or no 18: what an automaton has to know is a set of these.
SUBSETS = {
    "anyOf": [
        {"type": "array", "items": {"enum": [chr(97 + j) for j in range(18) if j != i]}}
        for i in range(18)
    ]
}


BOUNDED = {"type": "integer", "minimum": 7, "maximum": 10**30 + 7}


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"type": "string", "maxLength": 10**12},
            "more than 28268 states; it needs smaller bounds",
        ),
        ({"type": "string", "minLength": 10**12}, "more than 28268 states"),
        ({"type": "string", "maxLength": 2100}, "more than 28268 states"),
        (
            {"type": "array", "items": {"type": "string", "maxLength": 99}, "maxItems": 10**6},
            "more than 28268 states",
        ),
        (SUBSETS, "more than 28268 states"),
        (nested(3000), "more than 64 levels"),
        (doubled(60), "the schema is too large"),
        ({"anyOf": [BOUNDED] * 2000}, "the schema is too large"),
        ({"enum": ["a" * 10**7]}, "the schema is too large"),
        ({"type": "string", "maxLength": "a" * 10**7}, "has maxLength 'aaa"),
    ],
)
def test_a_schema_without_bounds_that_a_machine_holds_is_refused_at_once(schema, words):
    begin = time.process_time()
    with pytest.raises(ValueError, match=words) as caught:
        specjax.contrib.grammars.json_schema_grammar(schema, [b"a"] * 151936, 0)
    assert len(str(caught.value)) < 300
    assert time.process_time() - begin < 2


def test_the_states_of_a_string_grow_as_its_bound():
    sizes = [len(automaton_of({"type": "string", "maxLength": n}).accepts) for n in (10, 100, 1000)]
    assert sizes == [143, 1403, 14003]


def test_four_hundred_properties_are_no_deeper_than_one():
    properties = {f"p{i}": {"type": "null"} for i in range(400)}
    automaton = automaton_of({"type": "object", "properties": properties})
    assert accepts(automaton, b'{"p7":null,"p398":null}')
    assert not accepts(automaton, b'{"p398":null,"p7":null}')
