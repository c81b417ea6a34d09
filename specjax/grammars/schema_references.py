"""`inline_references`: a JSON schema with each `$ref` replaced by the definition that it names."""

from collections.abc import Mapping
from typing import Any

__all__ = ["inline_references"]

_PLACES = ("$defs", "definitions")


def inline_references(schema: Any) -> Any:
    """Returns a schema without `$ref` and definitions; what is no schema stays as it is.

    Args:
      schema: with ``{"$ref": "#/$defs/NAME"}`` or ``"#/definitions/NAME"`` in place of schemas.

    Raises:
      ValueError: for another reference, one to itself, or other keywords next to one.

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
    return _inline(own, definitions, ())


def _inline(schema: Any, definitions: Mapping[str, Any], inside: tuple[str, ...]) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema:
        name = schema["$ref"]
        if name not in definitions:
            raise ValueError(f"$ref is {name!r}; the schema defines {sorted(definitions)}.")
        if name in inside:
            raise ValueError(f"$ref is {name!r} inside itself; no finite automaton holds that.")
        others = sorted(set(schema) - {"$ref", "title", "description", "default"})
        if others:
            raise ValueError(f"$ref {name!r} has {others} next to it; it needs to stand alone.")
        return _inline(definitions[name], definitions, (*inside, name))
    inlined = dict(schema)
    for key in ("items", "additionalProperties"):
        if key in inlined:
            inlined[key] = _inline(inlined[key], definitions, inside)
    if isinstance(inlined.get("anyOf"), list):
        inlined["anyOf"] = [_inline(option, definitions, inside) for option in inlined["anyOf"]]
    if isinstance(inlined.get("properties"), Mapping):
        properties = inlined["properties"].items()
        inlined["properties"] = {key: _inline(x, definitions, inside) for key, x in properties}
    return inlined
