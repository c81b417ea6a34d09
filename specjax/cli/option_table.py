"""Options of the command as tables: how each is parsed, its limits and its help text."""

import argparse
import contextlib
import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from specjax.file_io import quote


class Option(NamedTuple):
    """An option of the command.

    Attributes:
      parse: makes a value of its text; None for an option without a text.
      letter: names the value in the help.
      text: of the help, without the default.
      limits: the minimum and the maximum of a number.
      default: if the option is absent.
      needs: names the limits in a sentence, or None for the numbers themselves.
      aliases: other names, such as those of other programs.
      is_list: whether the option may be given several times; its value is a list then.
      off: the value that changes nothing, as the help says; None without one.
    """

    parse: Callable[[str], Any] | None
    letter: str
    text: str
    limits: tuple[float, float] | None = None
    default: Any = None
    needs: str | None = None
    aliases: tuple[str, ...] = ()
    is_list: bool = False
    off: float | None = None


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


class Command(NamedTuple):
    """A command, such as `specjax generate`.

    Attributes:
      help: a line in the list of commands.
      description: of its own help.
      groups: tables of options, by their headings.
      prompt: help of prompts as arguments, which stand in the first group; None without.
      file_group: heading of the options that need --input, or None. Their limits are checked after
        that.
    """

    help: str
    description: str
    groups: Mapping[str, Mapping[str, Option]]
    prompt: str | None = None
    file_group: str | None = None


def add_command(parser: argparse.ArgumentParser, command: Command) -> None:
    """Adds a command's arguments to its parser."""
    for i, (heading, table) in enumerate(command.groups.items()):
        group = parser.add_argument_group(heading)
        if i == 0 and command.prompt is not None:
            group.add_argument("prompt", nargs="*", help=command.prompt)
            how: Any = {"nargs": "+", "action": "extend", "metavar": "FILE"}
            text = "read a prompt from each FILE, of at most 16 MiB"
            group.add_argument("--prompt-file", help=text, **how)
        _add_options(group, table)


def _add_options(group: Any, table: Mapping[str, Option]) -> None:
    for name, option in table.items():
        text = option.text
        how: dict[str, Any] = {"action": "store_true"}
        if option.off is not None:
            text += f"; {option.off:g} disables"
        if option.default is not None:
            text += f"; default: {option.default}"
        if option.parse is not None:
            how = {"type": option.parse, "default": option.default, "metavar": option.letter}
        if option.is_list:
            how |= {"action": "append", "default": []}
        group.add_argument(option_name(name), *option.aliases, help=text, **how)


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


def parse_fields(text: str) -> dict[str, str]:
    """Returns the places of NAME=PLACE,NAME=PLACE."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and place for name, _, place in pairs):
        raise argparse.ArgumentTypeError(
            f"{quote(text)} is no NAME=PLACE,NAME=PLACE; id=task_id,prompt=prompt is one"
        )
    return {name.strip(): place.strip() for name, _, place in pairs}


def parse_template_arg(text: str) -> tuple[str, Any]:
    """Returns the name and the value of NAME=VALUE; a value that is no JSON is text."""
    name, sign, value = text.partition("=")
    if not (sign and name.isidentifier()):
        raise argparse.ArgumentTypeError(
            f"{quote(text)} is no NAME=VALUE; enable_thinking=false is one"
        )
    with contextlib.suppress(ValueError):
        return name, json.loads(value)
    return name, value


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns a question with the known word that is closest to a word; "" if none is close.

    Example:
      >>> suggest("--temprature", ["--temperature", "--top-k"]), suggest("x", ["--top-k"])
      (' Did you mean --temperature?', '')
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]}?" if close else ""
