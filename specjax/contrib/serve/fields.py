"""Fields of a JSON object: a reader for each, null as absent, and no field that is not known."""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from specjax.contrib.serve.errors import ApiError
from specjax.file_io import quote, shorten

# (name, value) -> the value, checked; it raises `ApiError`.
Reader: TypeAlias = Callable[[str, object], Any]


def parse_json(body: bytes) -> object:
    """Returns the value of a body in JSON.

    Example:
      >>> parse_json(b'{"n": 2}')
      {'n': 2}
    """
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError("the body is nested too deeply.") from None
    except ValueError as error:  # Of an integer with too many digits, and of bytes, too.
        raise ApiError(f"the body is no JSON: {shorten(error)}.") from None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"it holds {name}")


def read_fields(value: object, readers: Mapping[str, Reader], where: str = "") -> dict[str, Any]:
    """Returns the fields of an object that are not null, each as its reader returns it.

    Args:
      value: of `parse_json`.
      readers: of the fields that may occur.
      where: names the object in a sentence, such as "messages[0]."; empty for the body.

    Example:
      >>> read_fields({"n": 2, "stop": None}, {"n": number(1, 4, int), "stop": text})
      {'n': 2}
    """
    if not isinstance(value, dict):
        name = where.rstrip(".") or "the body"
        raise ApiError(f"{name} is {quote(value)}; it needs an object.", where.rstrip(".") or None)
    given = {name: item for name, item in value.items() if item is not None}
    for name in given:
        if name not in readers:
            name = where + shorten(name)
            raise ApiError(
                f"{name} is given, which this server does not support; leave it out.",
                name,
                code="unsupported_parameter",
            )
    return {name: readers[name](where + name, item) for name, item in given.items()}


def number(low: float, high: float, kind: type[int] | type[float] = float) -> Reader:
    """Returns a reader of a number in [low, high], of an integer if `kind` is int."""
    noun = "an integer" if kind is int else "a number"

    def read(name: str, value: object) -> Any:
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not (is_number and isinstance(value, int | float) and low <= value <= high):
            raise _wrong(name, value, f"{noun} in [{low}, {high}]")
        return value

    return read


def flag(name: str, value: object) -> bool:
    """Returns a truth value."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def text(name: str, value: object) -> str:
    """Returns a string of whole characters."""
    if not isinstance(value, str):
        raise _wrong(name, value, "a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ApiError(
            f"{name} holds half a surrogate pair, which is no character.", name
        ) from None
    return value


def object_of(readers: Mapping[str, Reader]) -> Reader:
    """Returns a reader of an object of such fields."""
    return lambda name, value: read_fields(value, readers, name + ".")


def constant(*values: object) -> Reader:
    """Returns a reader of one of some values, which say what this server does anyhow."""

    def read(name: str, value: object) -> object:
        if not any(value == known and type(value) is type(known) for known in values):
            names = " or ".join(json.dumps(known) for known in values)
            raise ApiError(
                f"{name} is {quote(value)}, which this server does not support; it needs to be "
                f"{names}, or left out.",
                name,
                code="unsupported_parameter",
            )
        return value

    return read


def _wrong(name: str, value: object, needs: str) -> ApiError:
    return ApiError(f"{name} is {quote(value)}; it needs {needs}.", name, code="invalid_value")
