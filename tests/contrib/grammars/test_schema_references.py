"""References and notes of a JSON schema, and what an error says of a long one."""

import pytest
from byte_texts import accepts, automaton_of

from specjax.contrib.grammars.json_schema import schema_pattern
from specjax.contrib.grammars.schema_references import inline_references

pytestmark = pytest.mark.once

NOTES = ("title", "description", "default", "examples", "$schema", "$comment", "id", "$id")
NOTES += ("readonly", "readOnly", "writeOnly", "deprecated", "x-order", "x-")


def test_a_note_says_nothing_about_a_text_and_a_property_may_have_its_name():
    notes = dict.fromkeys(NOTES, True)
    properties = {"id": {"type": "null"} | notes, "title": {"$ref": "#/$defs/one"} | notes}
    schema = {"type": "object", "properties": properties, "required": ["id", "title"]} | notes
    definitions = {"one": {"const": {"id": 1, "x-y": 2}} | notes}
    automaton = automaton_of(schema | {"$defs": definitions})
    assert accepts(automaton, b'{"id":null,"title":{"id":1,"x-y":2}}')
    assert not accepts(automaton, b"{}")
    for key in ("format", "xml"):
        with pytest.raises(ValueError, match=rf"has \['{key}'\], which is not read"):
            automaton_of({"type": "string", key: "date"} | notes)


def test_an_error_shows_the_beginning_of_a_long_value():
    for schema in (
        {"enum": ["a" * 10**5, float("nan")]},
        {"type": "a" * 10**5},
        {"type": "object", "properties": {"a" * 10**5: {"enum": []}}},
        {"$ref": "a" * 10**5},
    ):
        with pytest.raises(ValueError, match="aaa") as caught:
            schema_pattern(inline_references(schema), "the schema")
        assert len(str(caught.value)) < 300
