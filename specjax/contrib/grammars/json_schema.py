"""`json_schema_grammar`: the grammar of compact JSON texts of a schema."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specjax.contrib.grammars import byte_pattern as bp
from specjax.contrib.grammars.byte_automaton import byte_automaton
from specjax.contrib.grammars.byte_pattern import Pattern, byte_range, literal, optional
from specjax.contrib.grammars.integer_bounds import at_least, at_most, between
from specjax.contrib.grammars.schema_references import inline_references
from specjax.contrib.grammars.token_automaton import max_states, token_automaton
from specjax.file_io import quote
from specjax.processing.grammar import Grammar

__all__ = ["json_schema_grammar", "schema_pattern"]

_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "integer": ("minimum", "maximum"),
    "number": (),
    "boolean": (),
    "null": (),
}
_CLASSES: dict[str, Any] = {"object": Mapping, "array": list, "string": str, "number": (int, float)}
_MAX_DIGITS = 40
_DIGIT = byte_range((0x30, 0x39))
_HEX = byte_range((0x30, 0x39), (0x41, 0x46), (0x61, 0x66))
_TAIL = byte_range((0x80, 0xBF))


def json_schema_grammar(
    schema: Mapping[str, Any], vocabulary: Sequence[bytes], eos_token_ids: int | Iterable[int]
) -> Grammar:
    r"""Returns a grammar of JSON texts that a schema accepts, then an end-of-sequence token.

    Texts are compact: no white space between values, properties in the schema's order, and no other
    properties. Every such text can be cut into tokens in any way. The arrays take
    ``4 Q C + 4 V + 4 Q ceil(V / 32)`` bytes for Q states and C classes of tokens. A character of a
    ``maxLength`` takes 14 states.

    Args:
      schema: with ``type``, ``enum`` and ``const`` (of that type, if there is one) or ``anyOf``.
        A ``type`` is object, array, string, integer, number, boolean, null, or a list of these.
        Also ``properties`` and ``required``; ``items``, ``minItems``, ``maxItems``; ``minLength``
        and ``maxLength``; ``minimum`` and ``maximum`` of an integer. Also ``$ref`` to ``$defs``,
        none of which contains itself. A property that is not required may be absent.
      vocabulary: the bytes of each of the V tokens, as `token_bytes` returns them; empty for a
        token without text. V is the target's, padding included.
      eos_token_ids: the token or tokens that end a text. Pass equal ones to `generate`.

    Returns:
      `Grammar` of NumPy arrays; `jax.device_put` places it once.

    Raises:
      ValueError: for another keyword of JSON schema, for a schema without texts or with too deep
        nesting, or for tokens that complete no text. Or if Q is more than 65536, or ``4 Q C``
        or ``4 Q ceil(V / 32)`` more than 512 MiB.

    Example:
      >>> vocabulary = [b"", b'{"a":', b"}", b"true", b"fal", b"se", b"null"]
      >>> schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
      >>> grammar = specjax.contrib.grammars.json_schema_grammar(schema, vocabulary, [0])
      >>> state = grammar.next_states[0, grammar.token_classes[1]]  # after {"a":
      >>> bin(grammar.allowed[state, 0])  # tokens 3 and 4 may follow
      '0b11000'

    References:
      Willard and Louf, 2023, arXiv:2307.09702.
    """
    try:
        pattern = schema_pattern(inline_references(schema), "the schema")
        automaton = byte_automaton(pattern, max_states(len(vocabulary)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply; it needs fewer levels.") from None
    return token_automaton(automaton, vocabulary, eos_token_ids)


def schema_pattern(schema: Any, name: str) -> Pattern:
    """Returns the pattern of the compact JSON texts that a schema accepts.

    Args:
      schema: a mapping, as `inline_references` returns it.
      name: of the schema, for errors.

    Raises:
      ValueError: for an unsupported keyword or value.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(
            f"{name} is {quote(schema)}; it needs an object of JSON schema's keywords."
        )
    kinds = _kinds(schema, name)
    for key in ("const", "enum", "anyOf"):
        if key in schema:
            _refuse_others(schema, (key, "type") if key != "anyOf" else (key,), name)
            return _one_of(key, schema[key], kinds, name)
    if not kinds:
        raise ValueError(
            f"{name} has {quote(sorted(schema))} and no type, const, enum or anyOf; it needs one "
            "of them."
        )
    known = [key for kind in kinds for key in _KEYWORDS[kind]]
    if "number" in kinds:  # a bound would apply to the number, too
        known = [key for key in known if key not in _KEYWORDS["integer"]]
    _refuse_others(schema, ("type", *known), name)
    return bp.Choice(tuple(_PATTERNS[kind](schema, name) for kind in kinds))


def _kinds(given: Mapping[str, Any], name: str) -> list[str]:
    """Returns the types of a schema, none if it names none."""
    if "type" not in given:
        return []
    kinds = given["type"] if isinstance(given["type"], list) else [given["type"]]
    unknown = [kind for kind in kinds if kind not in list(_KEYWORDS)]
    if unknown or not kinds:
        raise ValueError(
            f"{name} has type {quote(unknown or kinds)}; it needs some of {list(_KEYWORDS)}."
        )
    return kinds


def _refuse_others(given: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"{name} has {quote(unknown)}, which is not read here; these keywords are: "
            f"{sorted(known)}."
        )


def _one_of(key: str, value: Any, kinds: list[str], name: str) -> Pattern:
    """Returns the pattern of `const`, `enum` or `anyOf`."""
    values = [value] if key == "const" else value
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} has {key} {quote(value)}; it needs a list that is not empty.")
    if key == "anyOf":
        options = (schema_pattern(x, f"{name}.anyOf[{i}]") for i, x in enumerate(values))
        return bp.Choice(tuple(options))
    for x in values:
        if kinds and not any(_is_kind(x, kind) for kind in kinds):
            raise ValueError(
                f"{name} has {quote(x)} in {key}; with its type it needs some of {kinds}."
            )
    try:
        return bp.Choice(tuple(map(_value, values)))
    except ValueError:
        raise ValueError(
            f"{name} has {key} {quote(value)}; NaN, infinity and half a surrogate pair are no JSON."
        ) from None


def _is_kind(value: Any, kind: str) -> bool:
    """Returns whether a value is of one of JSON schema's types; 1.0 is an integer, too."""
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if kind == "integer":
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return isinstance(value, _CLASSES.get(kind, ()))


def _value(value: Any) -> Pattern:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return literal(text.encode())


def _bounds(given: Mapping[str, Any], least: str, most: str, name: str) -> tuple[int, int | None]:
    """Returns the bounds of a length; 0 and None without them."""
    low, high = given.get(least, 0), given.get(most)
    for key, bound in ((least, low), (most, high)):
        if bound is not None and (type(bound) is not int or bound < 0):
            raise ValueError(f"{name} has {key} {quote(bound)}; it needs an integer >= 0.")
    if high is not None and high < low:
        raise ValueError(
            f"{name} has {least} {quote(low)} and {most} {quote(high)}; no text follows it."
        )
    return low, high


def _object(given: Mapping[str, Any], name: str) -> Pattern:
    properties, required = given.get("properties", {}), given.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise ValueError(f"{name} has required {quote(required)}; it needs a list of names.")
    if given.get("additionalProperties", False) is not False:
        raise ValueError(f"{name} has additionalProperties; only the listed ones are generated.")
    if not isinstance(properties, Mapping) or set(required) - set(properties):
        raise ValueError(
            f"{name} requires {quote(required)} and has the properties {quote(list(properties))}; "
            "it needs each that it requires among them."
        )
    members = tuple(
        bp.Sequence(
            (_value(key), literal(b":"), schema_pattern(x, f"{name}.properties.{key[:80]}"))
        )
        for key, x in properties.items()
    )
    listed = bp.Members(members, tuple(key in required for key in properties), literal(b","))
    return bp.Sequence((literal(b"{"), listed, literal(b"}")))


def _array(given: Mapping[str, Any], name: str) -> Pattern:
    if "items" not in given:
        raise ValueError(f"{name} is an array without items; it needs the schema of its items.")
    item = schema_pattern(given["items"], f"{name}.items")
    least, most = _bounds(given, "minItems", "maxItems", name)
    if most == 0:
        return literal(b"[]")
    rest = bp.Repeat(
        bp.Sequence((literal(b","), item)), max(least - 1, 0), None if most is None else most - 1
    )
    items: Pattern = bp.Sequence((item, rest))
    return bp.Sequence((literal(b"["), items if least else optional(items), literal(b"]")))


def _string(given: Mapping[str, Any], name: str) -> Pattern:
    least, most = _bounds(given, "minLength", "maxLength", name)
    return bp.Sequence((literal(b'"'), bp.Repeat(_CHARACTER, least, most), literal(b'"')))


def _character() -> Pattern:
    """Returns one character of a JSON string: a code point in UTF-8, or its escape."""
    short = byte_range(*((x, x) for x in b'"\\/bfnrt'))
    # No surrogates: one escape is one character.
    below = byte_range((0x30, 0x39), (0x41, 0x46), (0x61, 0x66), without=b"dD")
    before_surrogates = bp.Sequence(
        (byte_range(*((x, x) for x in b"dD")), byte_range((0x30, 0x37)))
    )
    pair = bp.Choice((bp.Sequence((below, _HEX)), before_surrogates))
    escape = bp.Choice((short, bp.Sequence((literal(b"u"), pair, _HEX, _HEX))))
    two = (byte_range((0xC2, 0xDF)), _TAIL)
    three = (
        (literal(b"\xe0"), byte_range((0xA0, 0xBF)), _TAIL),
        (byte_range((0xE1, 0xEC), (0xEE, 0xEF)), _TAIL, _TAIL),
        (literal(b"\xed"), byte_range((0x80, 0x9F)), _TAIL),
    )
    four = (
        (literal(b"\xf0"), byte_range((0x90, 0xBF)), _TAIL, _TAIL),
        (byte_range((0xF1, 0xF3)), _TAIL, _TAIL, _TAIL),
        (literal(b"\xf4"), byte_range((0x80, 0x8F)), _TAIL, _TAIL),
    )
    plain = byte_range((0x20, 0x7F), without=b'"\\')
    return bp.Choice(
        (plain, bp.Sequence((literal(b"\\"), escape)), *map(bp.Sequence, (two, *three, *four)))
    )


_CHARACTER = _character()


def _integer(given: Mapping[str, Any], name: str) -> Pattern:
    low, high = given.get("minimum"), given.get("maximum")
    for key, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and (type(bound) is not int or abs(bound) >= 10**_MAX_DIGITS):
            raise ValueError(
                f"{name} has {key} {quote(bound)}; it needs an integer of at most {_MAX_DIGITS} "
                "digits."
            )
    if low is None:
        return _DIGITS if high is None else at_most(high)
    if high is None:
        return at_least(low)
    if high < low:
        raise ValueError(f"{name} has minimum {low} and maximum {high}; no integer follows it.")
    return between(low, high)


_DIGITS = bp.Sequence(
    (
        optional(literal(b"-")),
        bp.Choice((literal(b"0"), bp.Sequence((byte_range((0x31, 0x39)), bp.Repeat(_DIGIT))))),
    )
)


def _number(given: Mapping[str, Any], name: str) -> Pattern:
    fraction = bp.Sequence((literal(b"."), bp.Repeat(_DIGIT, 1)))
    sign = optional(byte_range((0x2B, 0x2B), (0x2D, 0x2D)))
    exponent = bp.Sequence((byte_range((0x45, 0x45), (0x65, 0x65)), sign, bp.Repeat(_DIGIT, 1)))
    return bp.Sequence((_DIGITS, optional(fraction), optional(exponent)))


_PATTERNS = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda given, name: bp.Choice((literal(b"true"), literal(b"false"))),
    "null": lambda given, name: literal(b"null"),
}
