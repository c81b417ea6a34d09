"""`inline_references`: a JSON schema with each `$ref` replaced by the definition that it names."""

from collections.abc import Mapping
from typing import Any

from specjax.file_io import quote

__all__ = ["inline_references"]

_PLACES = ("$defs", "definitions")
# What says nothing about a text, in any draft of JSON schema; so do keywords that begin with "x-".
_NOTES = {
    *("title", "description", "default", "examples", "example", "$schema", "$id", "id", "$comment"),
    *("deprecated", "readonly", "readOnly", "writeOnly"),
}
_MAX_LEVELS = 64
# A schema counts eight, and each character of its names and values one.
_MAX_PARTS = 8 * 65536


def inline_references(schema: Any) -> Any:
    """Returns a schema without `$ref`, definitions and notes; other values are unchanged.

    Args:
      schema: with ``{"$ref": "#/$defs/NAME"}`` or ``"#/definitions/NAME"`` in place of schemas.

    Raises:
      ValueError: for another reference, one to itself, or other keywords next to one. Or if
        schemas are nested in more than 64 levels, or are too many or too long. Each is counted
        at every reference.

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
    return _inline(own, definitions, (), _Size())


class _Size:
    """Counts levels and parts, before a pattern is made of them."""

    def __init__(self) -> None:
        self.num_levels = self.num_parts = 0

    def add(self, schema: Mapping[str, Any]) -> None:
        """Adds a schema without those inside it."""
        if self.num_levels > _MAX_LEVELS:
            raise ValueError(
                f"the schema is nested in more than {_MAX_LEVELS} levels; it needs fewer levels."
            )
        values = [
            schema.get("const"),
            *_listed(schema.get("enum")),
            *_listed(schema.get("properties")),
        ]
        bounds = [schema.get("minimum"), schema.get("maximum")]
        self.num_parts += 8 + sum(len(str(value)) for value in values)
        # A bound of n digits is compared at each of them.
        self.num_parts += sum((x.bit_length() // 3) ** 2 for x in bounds if isinstance(x, int))
        if self.num_parts > _MAX_PARTS:
            raise ValueError(
                "the schema is too large, each part counted wherever a $ref names it; it needs "
                "fewer schemas, or shorter names and values."
            )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | Mapping) else []


def _inline(
    schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...], size: _Size
) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    levels = 0 if "$ref" in schema else 1
    size.num_levels += levels
    size.add(schema)
    schema = _inlined(schema, definitions, inside, size)
    size.num_levels -= levels
    return schema


def _inlined(
    schema: Mapping[str, Any],
    definitions: Mapping[str, Any],
    inside: tuple[str, ...],
    size: _Size,
) -> Any:
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
        return _inline(definitions[name], definitions, (*inside, name), size)
    inner = (definitions, inside, size)
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
