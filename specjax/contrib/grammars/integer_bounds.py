"""Patterns of the decimal integers with a lower bound, an upper bound, or both."""

from specjax.contrib.grammars import byte_pattern as bp
from specjax.contrib.grammars.byte_pattern import Pattern, byte_range, literal

__all__ = ["at_least", "at_most", "between"]

_DIGIT = byte_range((0x30, 0x39))
_FIRST = byte_range((0x31, 0x39))
_NATURAL = bp.Choice((literal(b"0"), bp.Sequence((_FIRST, bp.Repeat(_DIGIT)))))


def at_least(number: int) -> Pattern:
    """Returns a pattern of the integers >= a number."""
    if number <= 0:
        below = () if number == 0 else (_negative(_positive(1, -number)),)
        return bp.Choice((_NATURAL, *below))
    longer = bp.Sequence((_FIRST, bp.Repeat(_DIGIT, len(str(number)))))
    return bp.Choice((longer, _compared(str(number), above=True)))


def at_most(number: int) -> Pattern:
    """Returns a pattern of the integers <= a number."""
    negative = _negative(bp.Sequence((_FIRST, bp.Repeat(_DIGIT))))
    if number < 0:
        return _negative(at_least(-number))
    zero = literal(b"0")
    return bp.Choice((negative, zero, *(() if number == 0 else (_positive(1, number),))))


def between(low: int, high: int) -> Pattern:
    """Returns a pattern of the integers low, ..., high."""
    options = []
    if low < 0:
        options.append(_negative(_positive(max(1, -high), -low)))
    if low <= 0 <= high:
        options.append(literal(b"0"))
    if high > 0:
        options.append(_positive(max(1, low), high))
    return bp.Choice(tuple(options))


def _negative(pattern: Pattern) -> Pattern:
    return bp.Sequence((literal(b"-"), pattern))


def _positive(low: int, high: int) -> Pattern:
    """Returns a pattern of low, ..., high, the first of which is at least 1."""
    first, last = str(low), str(high)
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
    rest = len(digits) - num_same - 1
    before = literal(digits[:num_same].encode())
    return bp.Sequence((before, byte_range(ends), bp.Repeat(_DIGIT, rest, rest)))
