"""Patterns of the decimal integers that are not less, or not more, than a number."""

from specjax.grammars import byte_pattern as bp
from specjax.grammars.byte_pattern import Pattern, byte_range, literal

__all__ = ["at_least", "at_most"]

_DIGIT = byte_range((0x30, 0x39))
_FIRST = byte_range((0x31, 0x39))
_NATURAL = bp.Choice((literal(b"0"), bp.Sequence((_FIRST, bp.Repeat(_DIGIT)))))


def at_least(number: int) -> Pattern:
    """Returns a pattern of the integers >= a number."""
    if number <= 0:
        below = () if number == 0 else (_negative(_to(-number)),)
        return bp.Choice((_NATURAL, *below))
    longer = bp.Sequence((_FIRST, bp.Repeat(_DIGIT, len(str(number)))))
    return bp.Choice((longer, _compared(str(number), above=True)))


def at_most(number: int) -> Pattern:
    """Returns a pattern of the integers <= a number."""
    negative = _negative(bp.Sequence((_FIRST, bp.Repeat(_DIGIT))))
    if number < 0:
        return _negative(at_least(-number))
    zero = literal(b"0")
    return bp.Choice((negative, zero, *(() if number == 0 else (_to(number),))))


def _negative(pattern: Pattern) -> Pattern:
    return bp.Sequence((literal(b"-"), pattern))


def _to(number: int) -> Pattern:
    """Returns a pattern of 1, ..., number."""
    digits = str(number)
    same = _compared(digits, above=False)
    if len(digits) == 1:
        return same
    return bp.Choice((bp.Sequence((_FIRST, bp.Repeat(_DIGIT, 0, len(digits) - 2))), same))


def _compared(digits: str, *, above: bool) -> Pattern:
    """Returns a pattern of the numbers of as many digits that are not less, or not more."""
    options: list[Pattern] = [literal(digits.encode())]
    for i, digit in enumerate(digits.encode()):
        least = 0x31 if i == 0 else 0x30
        ends = (digit + 1, 0x39) if above else (least, digit - 1)
        if ends[0] <= ends[1]:
            rest = bp.Repeat(_DIGIT, len(digits) - i - 1, len(digits) - i - 1)
            options.append(bp.Sequence((literal(digits[:i].encode()), byte_range(ends), rest)))
    return bp.Choice(tuple(options))
