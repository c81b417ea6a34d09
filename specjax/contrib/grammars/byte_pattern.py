"""Patterns of bytes: a set of bytes, a sequence, a choice, a repetition, a list of members."""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class Bytes:
    """One byte of a set."""

    values: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Parts one after another; without parts, the empty text."""

    parts: tuple["Pattern", ...]


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of the options; without options, no text."""

    options: tuple["Pattern", ...]


@dataclasses.dataclass(frozen=True)
class Repeat:
    """A part at least `least` and at most `most` times; None is unlimited."""

    part: "Pattern"
    least: int = 0
    most: int | None = None


@dataclasses.dataclass(frozen=True)
class Members:
    """Members in order, with a separator between two; those not required may be absent."""

    members: tuple["Pattern", ...]
    is_required: tuple[bool, ...]
    separator: "Pattern"


Pattern = Bytes | Sequence | Choice | Repeat | Members


_BYTES = tuple(Bytes(frozenset((value,))) for value in range(256))


def literal(text: bytes) -> Pattern:
    """Returns a pattern that matches only this text."""
    return Sequence(tuple(map(_BYTES.__getitem__, text)))


def byte_range(*ranges: tuple[int, int], without: Iterable[int] = ()) -> Bytes:
    """Returns a pattern of one byte in any of these ranges, both ends included."""
    values = {value for first, last in ranges for value in range(first, last + 1)}
    return Bytes(frozenset(values - set(without)))


def optional(part: Pattern) -> Pattern:
    """Returns a pattern of the part, or of the empty text."""
    return Repeat(part, 0, 1)
