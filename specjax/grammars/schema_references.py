"""`inline_references`: a JSON schema with each `$ref` replaced by the definition that it names."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from specjax.file_io import quote

__all__ = ["inline_references"]

_PLACES = ("$defs", "definitions")
# What says nothing about a text, in any draft of JSON schema; so do keywords that begin with "x-".
_NOTES = {
    *("title", "description", "default", "examples", "example", "$schema", "$id", "id", "$comment"),
    *("deprecated", "readonly", "readOnly", "writeOnly"),
}
_MOST_SCHEMAS = 65536


def inline_references(schema: Any) -> Any:
    """Returns a schema without `$ref`, definitions and notes; what is no schema stays as it is.

    Args:
      schema: with ``{"$ref": "#/$defs/NAME"}`` or ``"#/definitions/NAME"`` in place of schemas.

    Raises:
      ValueError: for another reference, one to itself, or other keywords next to one. Or if there
        are more than 65536 schemas, each counted wherever it is named.

    Example:
      >>> inline_references({"$defs": {"x": {"type": "null"}}, "items": {"$ref": "#/$defs/x"}})
      {'items': {'type': 'null'}}
    """
    if not isinstance(schema, Mapping):
        return schema
    definitions = {
        f"#/{place}/{name}": value
        for place in _PLACES
        if isinstance(schema.get(place), Mapping)
        for name, value in schema[place].items()
    }
    own = {key: value for key, value in schema.items() if key not in _PLACES}
    return _inline(own, definitions, (), itertools.count(1))


def _inline(
    schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...], numbers: Iterator[int]
) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if next(numbers) > _MOST_SCHEMAS:
        raise ValueError(
            f"the schema has more than {_MOST_SCHEMAS} schemas, each counted wherever a $ref names "
            "it; it needs fewer."
        )
    schema = {key: value for key, value in schema.items() if not _is_note(key)}
    if "$ref" in schema:
        name = schema["$ref"]
        if not isinstance(name, str) or name not in definitions:
            raise ValueError(
                f"$ref is {quote(name)}; the schema defines {quote(list(definitions))}."
            )
        if name in inside:
            raise ValueError(
                f"$ref is {quote(name)} inside itself; no finite automaton holds that."
            )
        others = sorted(set(schema) - {"$ref"})
        if others:
            raise ValueError(
                f"$ref {quote(name)} has {quote(others)} next to it; it needs to stand alone."
            )
        return _inline(definitions[name], definitions, (*inside, name), numbers)
    inner = (definitions, inside, numbers)
    for key in ("items", "additionalProperties"):
        if key in schema:
            schema[key] = _inline(schema[key], *inner)
    if isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [_inline(option, *inner) for option in schema["anyOf"]]
    if isinstance(schema.get("properties"), Mapping):
        properties = schema["properties"].items()
        schema["properties"] = {key: _inline(x, *inner) for key, x in properties}
    return schema


def _is_note(key: Any) -> bool:
    return key in _NOTES or (isinstance(key, str) and key.startswith("x-"))
