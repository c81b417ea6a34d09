"""`json_schema_grammar`: the grammar of compact JSON texts of a schema."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specjax.contrib.grammars import byte_pattern as bp
from specjax.contrib.grammars.byte_automaton import byte_automaton
from specjax.contrib.grammars.byte_pattern import Pattern, byte_range, literal, optional
from specjax.contrib.grammars.token_automaton import max_states, token_automaton
from specjax.file_io import quote
from specjax.processing.grammar import Grammar

_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "integer": ("minimum", "maximum"),
    "number": (),
    "boolean": (),
    "null": (),
}
_DEFINITIONS = ("$defs", "definitions")
# What says nothing about a text, in any draft of JSON schema; so do keywords that begin with "x-".
_NOTES = {
    *("title", "description", "default", "examples", "example", "$schema", "$id", "id", "$comment"),
    *("deprecated", "readonly", "readOnly", "writeOnly"),
}
_MAX_LEVELS = 64
# A schema counts eight, and each character of its names and values one.
_MAX_PARTS = 8 * 65536
_CLASSES: dict[str, Any] = {"object": Mapping, "array": list, "string": str, "number": (int, float)}
_MAX_DIGITS = 40
_DIGIT = byte_range((0x30, 0x39))
_FIRST = byte_range((0x31, 0x39))
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
        pattern = schema_pattern(schema)
        automaton = byte_automaton(pattern, max_states(len(vocabulary)))
    except RecursionError:
        raise ValueError("the schema is nested too deeply; it needs fewer levels.") from None
    return token_automaton(automaton, vocabulary, eos_token_ids)


def schema_pattern(schema: Any) -> Pattern:
    """Returns the pattern of the compact JSON texts that a schema accepts.

    Args:
      schema: as in `json_schema_grammar`.

    Raises:
      ValueError: for an unsupported keyword or value, for a reference to nothing or to itself, or
        for other keywords next to one. Or if schemas are nested in more than 64 levels, or are too
        many or too long. Each is counted at every reference.
    """
    definitions: dict[str, Any] = {}
    if isinstance(schema, Mapping):
        for place in _DEFINITIONS:
            named = schema[place].items() if isinstance(schema.get(place), Mapping) else ()
            definitions |= {f"#/{place}/{name}": value for name, value in named}
        schema = {key: value for key, value in schema.items() if key not in _DEFINITIONS}
    return _Schemas(definitions).read(schema, "the schema")


class _Schemas:
    """Reads schemas into patterns; counts levels and parts, before a pattern is made of them.

    Args:
      definitions: by the references that name them.
    """

    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._inside: list[str] = []
        self._num_levels = self._num_parts = 0

    def read(self, schema: Any, name: str) -> Pattern:
        """Returns the pattern of a schema, or of the definition that it refers to.

        Args:
          schema: a mapping.
          name: of the schema, for errors.
        """
        if not isinstance(schema, Mapping):
            raise ValueError(
                f"{name} is {quote(schema)}; it needs an object of JSON schema's keywords."
            )
        self._count(schema)
        schema = {key: value for key, value in schema.items() if not _is_note(key)}
        if "$ref" in schema:
            return self._follow(schema, name)
        self._num_levels += 1
        if self._num_levels > _MAX_LEVELS:
            raise ValueError(
                f"the schema is nested in more than {_MAX_LEVELS} levels; it needs fewer levels."
            )
        pattern = self._read(schema, name)
        self._num_levels -= 1
        return pattern

    def _count(self, schema: Mapping[str, Any]) -> None:
        """Counts a schema without those inside it."""
        values = [
            schema.get("const"),
            *_listed(schema.get("enum")),
            *_listed(schema.get("properties")),
        ]
        bounds = [schema.get("minimum"), schema.get("maximum")]
        self._num_parts += 8 + sum(len(str(value)) for value in values)
        # A bound of n digits is compared at each of them.
        self._num_parts += sum((x.bit_length() // 3) ** 2 for x in bounds if isinstance(x, int))
        if self._num_parts > _MAX_PARTS:
            raise ValueError(
                "the schema is too large, each part counted wherever a $ref names it; it needs "
                "fewer schemas, or shorter names and values."
            )

    def _follow(self, schema: Mapping[str, Any], name: str) -> Pattern:
        """Returns the pattern of the definition that a schema refers to."""
        key = schema["$ref"]
        if not isinstance(key, str) or key not in self._definitions:
            raise ValueError(
                f"$ref is {quote(key)}; the schema defines {quote(list(self._definitions))}."
            )
        if key in self._inside:
            raise ValueError(f"$ref is {quote(key)} inside itself; no finite automaton holds that.")
        siblings = sorted(set(schema) - {"$ref"})
        if siblings:
            raise ValueError(
                f"$ref {quote(key)} has {quote(siblings)} next to it; it needs to stand alone."
            )
        self._inside.append(key)
        pattern = self.read(self._definitions[key], name)
        self._inside.pop()
        return pattern

    def _read(self, schema: Mapping[str, Any], name: str) -> Pattern:
        """Returns the pattern of a schema without notes and without a reference."""
        kinds = _kinds(schema, name)
        for key in ("const", "enum", "anyOf"):
            if key in schema:
                _refuse_unknown_keywords(schema, (key, "type") if key != "anyOf" else (key,), name)
                return self._one_of(key, schema[key], kinds, name)
        if not kinds:
            raise ValueError(
                f"{name} has {quote(sorted(schema))} and no type, const, enum or anyOf; it needs "
                "one of them."
            )
        known = [key for kind in kinds for key in _KEYWORDS[kind]]
        if "number" in kinds:  # a bound would apply to the number, too
            known = [key for key in known if key not in _KEYWORDS["integer"]]
        _refuse_unknown_keywords(schema, ("type", *known), name)
        patterns = _PATTERNS | {"object": self._object, "array": self._array}
        return bp.Choice(tuple(patterns[kind](schema, name) for kind in kinds))

    def _one_of(self, key: str, value: Any, kinds: list[str], name: str) -> Pattern:
        """Returns the pattern of `const`, `enum` or `anyOf`."""
        values = [value] if key == "const" else value
        if not isinstance(values, list) or not values:
            raise ValueError(f"{name} has {key} {quote(value)}; it needs a list that is not empty.")
        if key == "anyOf":
            options = (self.read(x, f"{name}.anyOf[{i}]") for i, x in enumerate(values))
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
                f"{name} has {key} {quote(value)}; NaN, infinity and half a surrogate pair are no "
                "JSON."
            ) from None

    def _object(self, schema: Mapping[str, Any], name: str) -> Pattern:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
            raise ValueError(f"{name} has required {quote(required)}; it needs a list of names.")
        if schema.get("additionalProperties", False) is not False:
            raise ValueError(
                f"{name} has additionalProperties; only the listed ones are generated."
            )
        if not isinstance(properties, Mapping) or set(required) - set(properties):
            raise ValueError(
                f"{name} requires {quote(required)} and has the properties "
                f"{quote(list(properties))}; it needs each that it requires among them."
            )
        members = tuple(
            bp.Sequence((_value(key), literal(b":"), self.read(x, f"{name}.properties.{key[:80]}")))
            for key, x in properties.items()
        )
        listed = bp.Members(members, tuple(key in required for key in properties), literal(b","))
        return bp.Sequence((literal(b"{"), listed, literal(b"}")))

    def _array(self, schema: Mapping[str, Any], name: str) -> Pattern:
        if "items" not in schema:
            raise ValueError(f"{name} is an array without items; it needs the schema of its items.")
        item = self.read(schema["items"], f"{name}.items")
        least, most = _bounds(schema, "minItems", "maxItems", name)
        if most == 0:
            return literal(b"[]")
        more_items = bp.Repeat(
            bp.Sequence((literal(b","), item)),
            max(least - 1, 0),
            None if most is None else most - 1,
        )
        items: Pattern = bp.Sequence((item, more_items))
        return bp.Sequence((literal(b"["), items if least else optional(items), literal(b"]")))


def _is_note(key: Any) -> bool:
    return key in _NOTES or (isinstance(key, str) and key.startswith("x-"))


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | Mapping) else []


def _kinds(schema: Mapping[str, Any], name: str) -> list[str]:
    """Returns the types of a schema, none if it names none."""
    if "type" not in schema:
        return []
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    unknown = [kind for kind in kinds if kind not in list(_KEYWORDS)]
    if unknown or not kinds:
        raise ValueError(
            f"{name} has type {quote(unknown or kinds)}; it needs some of {list(_KEYWORDS)}."
        )
    return kinds


def _refuse_unknown_keywords(schema: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    unknown = sorted(set(schema) - set(known))
    if unknown:
        raise ValueError(
            f"{name} has {quote(unknown)}, which is not read here; these keywords are: "
            f"{sorted(known)}."
        )


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


def _bounds(schema: Mapping[str, Any], least: str, most: str, name: str) -> tuple[int, int | None]:
    """Returns the bounds of a length; 0 and None without them."""
    low, high = schema.get(least, 0), schema.get(most)
    for key, bound in ((least, low), (most, high)):
        if bound is not None and (type(bound) is not int or bound < 0):
            raise ValueError(f"{name} has {key} {quote(bound)}; it needs an integer >= 0.")
    if high is not None and high < low:
        raise ValueError(
            f"{name} has {least} {quote(low)} and {most} {quote(high)}; no text follows it."
        )
    return low, high


def _string(schema: Mapping[str, Any], name: str) -> Pattern:
    least, most = _bounds(schema, "minLength", "maxLength", name)
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


def _integer(schema: Mapping[str, Any], name: str) -> Pattern:
    low, high = schema.get("minimum"), schema.get("maximum")
    for key, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and (type(bound) is not int or abs(bound) >= 10**_MAX_DIGITS):
            raise ValueError(
                f"{name} has {key} {quote(bound)}; it needs an integer of at most {_MAX_DIGITS} "
                "digits."
            )
    if low is None and high is None:
        return _DIGITS
    if low is not None and high is not None and high < low:
        raise ValueError(f"{name} has minimum {low} and maximum {high}; no integer follows it.")
    return _integers(low, high)


def _integers(low: int | None, high: int | None) -> Pattern:
    """Returns a pattern of the integers low, ..., high; None is no bound."""
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    options: list[Pattern] = []
    if least < 0:
        options.append(bp.Sequence((literal(b"-"), _positive(max(1, -most), -least))))
    if least <= 0 <= most:
        options.append(literal(b"0"))
    if most > 0:
        options.append(_positive(max(1, least), most))
    return bp.Choice(tuple(options))


def _positive(low: float, high: float) -> Pattern:
    """Returns a pattern of low, ..., high, the first of which is at least 1."""
    first, last = str(low), str(high)
    if high == math.inf:
        num_more = 0 if low == 1 else len(first)
        longer = bp.Sequence((_FIRST, bp.Repeat(_DIGIT, num_more)))
        return bp.Choice((longer, _compared(first, above=True))) if num_more else longer
    if len(first) < len(last):
        middle = bp.Sequence((_FIRST, bp.Repeat(_DIGIT, len(first), len(last) - 2)))
        between_lengths = (middle,) if len(first) < len(last) - 1 else ()
        above = _compared(first, above=True)
        return bp.Choice((above, *between_lengths, _compared(last, above=False)))
    if low == high:
        return literal(first.encode())
    # The first digit that is not that of both: one of them, or one between.
    i = next(i for i, (x, y) in enumerate(zip(first, last, strict=True)) if x != y)
    inner = _beginning(first, i, (ord(first[i]) + 1, ord(last[i]) - 1))
    above = _compared(first, above=True, num_same=i + 1)
    return bp.Choice((above, inner, _compared(last, above=False, num_same=i + 1)))


def _compared(digits: str, *, above: bool, num_same: int = 0) -> Pattern:
    """Returns a pattern of numbers of equal length: >= `digits` if `above`, else <= `digits`.

    Args:
      digits: of a number.
      above: whether `digits` is the lower bound.
      num_same: number of first digits equal to those of `digits`.
    """
    options: list[Pattern] = [literal(digits.encode())]
    for i, digit in enumerate(digits.encode()):
        if i >= num_same:
            least = 0x31 if i == 0 else 0x30
            ends = (digit + 1, 0x39) if above else (least, digit - 1)
            options.append(_beginning(digits, i, ends))
    return bp.Choice(tuple(options))


def _beginning(digits: str, num_same: int, ends: tuple[int, int]) -> Pattern:
    """Returns a pattern: the first `num_same` of `digits`, a digit in `ends`, then any digits."""
    num_digits = len(digits) - num_same - 1
    before = literal(digits[:num_same].encode())
    return bp.Sequence((before, byte_range(ends), bp.Repeat(_DIGIT, num_digits, num_digits)))


_DIGITS = bp.Sequence(
    (
        optional(literal(b"-")),
        bp.Choice((literal(b"0"), bp.Sequence((_FIRST, bp.Repeat(_DIGIT))))),
    )
)


def _number(schema: Mapping[str, Any], name: str) -> Pattern:
    fraction = bp.Sequence((literal(b"."), bp.Repeat(_DIGIT, 1)))
    sign = optional(byte_range((0x2B, 0x2B), (0x2D, 0x2D)))
    exponent = bp.Sequence((byte_range((0x45, 0x45), (0x65, 0x65)), sign, bp.Repeat(_DIGIT, 1)))
    return bp.Sequence((_DIGITS, optional(fraction), optional(exponent)))


_PATTERNS: dict[str, Callable[[Mapping[str, Any], str], Pattern]] = {
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": lambda schema, name: bp.Choice((literal(b"true"), literal(b"false"))),
    "null": lambda schema, name: literal(b"null"),
}
