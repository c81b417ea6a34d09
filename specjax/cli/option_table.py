"""Options of the command as tables: how each is parsed, its limits and its help text."""

import argparse
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

__all__ = ["Option", "add_options", "check_limits", "flag", "option_name", "without"]


class Option(NamedTuple):
    """An option of the command.

    Attributes:
      parse: makes a value of its text; None for an option without a text.
      letter: names the value in the help.
      text: of the help, without the default.
      limits: the minimum and the maximum of a number.
      default: if the option is absent.
      needs: names the limits in a sentence, or None for the numbers themselves.
    """

    parse: Callable[[str], Any] | None
    letter: str
    text: str
    limits: tuple[float, float] | None = None
    default: Any = None
    needs: str | None = None


def flag(text: str) -> Option:
    """Returns an option without a value."""
    return Option(None, "", text)


def option_name(name: str) -> str:
    """Returns the option that sets a field.

    Example:
      >>> option_name("top_k")
      '--top-k'
    """
    return "--" + name.replace("_", "-")


def without(table: Mapping[str, Option], *names: str) -> dict[str, Option]:
    """Returns a table without some of its options."""
    return {name: option for name, option in table.items() if name not in names}


def add_options(group: Any, table: Mapping[str, Option]) -> None:
    """Adds a table's options to a group of a parser."""
    for name, (parse, letter, text, _, default, _) in table.items():
        if default is not None:
            text += f"; default: {default}"
        value = {"type": parse, "default": default, "metavar": letter}
        how = {"action": "store_true"} if parse is None else value
        group.add_argument(option_name(name), help=text, **how)


def check_limits(options: argparse.Namespace, table: Mapping[str, Option]) -> None:
    """Refuses a number outside its limits by the name of its option."""
    for name, option in table.items():
        value = getattr(options, name)
        if option.limits is None or value is None:
            continue
        low, high = option.limits
        if not low <= value <= high:
            needs = option.needs or (f">= {low}" if high == math.inf else f"in [{low}, {high}]")
            raise ValueError(f"{option_name(name)} is {value}; it needs to be {needs}.")
