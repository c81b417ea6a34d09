"""Patterns of the decimal integers with a lower bound, an upper bound, or both."""

import math

from specjax.contrib.grammars import byte_pattern as bp
from specjax.contrib.grammars.byte_pattern import Pattern, byte_range, literal

__all__ = ["integers"]

_DIGIT = byte_range((0x30, 0x39))
_FIRST = byte_range((0x31, 0x39))


def integers(low: int | None, high: int | None) -> Pattern:
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
    rest = len(digits) - num_same - 1
    before = literal(digits[:num_same].encode())
    return bp.Sequence((before, byte_range(ends), bp.Repeat(_DIGIT, rest, rest)))
