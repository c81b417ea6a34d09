"""Reads a file of prompts: JSON lines, all checked before decoding.

A line is one of this command, of OpenAI's batch format, or of a data set whose fields are named.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from specjax.cli.arguments import END_OPTIONS, MAX_TEMPERATURE, SAMPLING_OPTIONS
from specjax.cli.batch.openai_lines import is_openai_line, translate_line
from specjax.cli.option_table import suggest
from specjax.engine.stop_strings import check_stop
from specjax.file_io import JsonObject, quote, shorten

_MAX_WORD = 40
_PROMPTS = ("prompt", "prompt_token_ids", "messages", "turns")
# Returns the tokens of a text, or of a conversation as a list of messages.
Encode: TypeAlias = Callable[[str | list[Any]], list[int]]
_OPTIONS = SAMPLING_OPTIONS | {"min_tokens": END_OPTIONS["min_tokens"]}
# Type, minimum, maximum.
_NUMBERS: dict[str, tuple[Any, float, float]] = {
    "max_new_tokens": (int, 1, 2**31 - 1),
    "temperature": (float, 0, MAX_TEMPERATURE),
    "seed": (int, -(2**63), 2**63 - 1),
    **{name: (x.parse, *x.limits) for name, x in _OPTIONS.items() if x.limits},
}


FIELDS = (*_PROMPTS, "id", "stop", *_NUMBERS)


class PromptLine(NamedTuple):
    """A line of the input.

    Attributes:
      number: of the line, from 1.
      id: the line's own id, a string, a number or None.
      token_ids: the prompt.
      stop: stop strings, or None for those of the options.
      values: the options that the line sets, by name.
      later_turns: the user's messages after this one, each of which follows an answer.
      messages: of the conversation so far, if there are several turns.
      answers: to the turns before: text, token_ids and finish_reason.
    """

    number: int
    id: Any
    token_ids: list[int]
    stop: tuple[str, ...] | None
    values: JsonObject
    later_turns: tuple[str, ...] = ()
    messages: tuple[JsonObject, ...] = ()
    answers: tuple[Mapping[str, object], ...] = ()

    def next_turn(self, answer: Mapping[str, object], encode: Encode) -> "PromptLine":
        """Returns the line after an answer: its prompt is the conversation up to the next one."""
        messages = [*self.messages, {"role": "assistant", "content": answer["text"]}]
        messages.append({"role": "user", "content": self.later_turns[0]})
        return self._replace(
            token_ids=encode(messages),
            later_turns=self.later_turns[1:],
            messages=tuple(messages),
            answers=(*self.answers, answer),
        )


def read_lines(
    data: bytes,
    encode: Encode,
    places: Mapping[str, str] | None = None,
) -> tuple[list[PromptLine], list[str]]:
    r"""Returns the lines of a file, and a sentence for each that is malformed.

    Args:
      data: the file; empty lines are skipped.
      encode: returns the tokens of a text, or of a conversation as a list of messages. It raises
        `ValueError` for other values.
      places: field -> its place in a line, such as {"prompt": "turns.0"}; the rest of the line is
        not read. None reads lines of this command and of OpenAI's batch format.

    Example:
      >>> lines, problems = read_lines(b'{"prompt": "ab", "top_k": 3}\n\n{"prompt": 7}', list)
      >>> lines[0].number, lines[0].token_ids, lines[0].values
      (1, ['a', 'b'], {'top_k': 3})
      >>> problems
      ['line 3: prompt is 7; it needs a string that is not empty.']
    """
    lines, problems = [], []
    for number, text in enumerate(data.split(b"\n"), start=1):
        if not text.strip():
            continue
        try:
            lines.append(_read_line(number, text, encode, places))
        except ValueError as error:
            problems.append(f"line {number}: {error}")
        except RecursionError:  # By the reader, by a value in a sentence, or by a chat template.
            problems.append(f"line {number}: it is nested too deeply.")
    return lines, problems


def _read_line(
    number: int,
    text: bytes,
    encode: Encode,
    places: Mapping[str, str] | None,
) -> PromptLine:
    try:
        fields = json.loads(text)
    except ValueError:
        raise ValueError("it is no JSON.") from None
    if not isinstance(fields, dict):
        raise ValueError("it is no JSON object.")
    if places:
        fields = {name: _find_value(fields, place) for name, place in places.items()}
    fields = {name: value for name, value in fields.items() if value is not None}
    if is_openai_line(fields):
        fields = translate_line(fields)
    unknown = set(fields) - set(FIELDS)
    if unknown:
        word = shorten(min(unknown), _MAX_WORD)
        raise ValueError(
            f"{word} is no field that is known.{suggest(word, FIELDS)} Known are "
            f"{', '.join(FIELDS)}; --fields names those of another file."
        )
    name = fields.get("id")
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        raise ValueError(f"id is {quote(name)}; it needs a string or an integer.")
    values = {key: _check_number(key, fields[key]) for key in _NUMBERS if key in fields}
    stop = check_stop(fields["stop"]) if "stop" in fields else None
    line = PromptLine(number, name, [], stop, values)
    if "turns" in fields and not isinstance(fields["turns"], list):
        raise ValueError("turns is no list.")
    if "turns" in fields:
        first, *later = map(_check_text, fields["turns"] or [None])
        messages = ({"role": "user", "content": first},)
        line = line._replace(later_turns=tuple(later), messages=messages)
        fields = {**fields, "messages": list(messages)}
        del fields["turns"]
    return line._replace(token_ids=_read_prompt(fields, encode))


def _find_value(fields: object, place: str) -> Any:
    """Returns the value at a place such as `turns.0`: names, and numbers of a list's members."""
    value: Any = fields
    for part in place.split("."):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, ValueError, TypeError):
            raise ValueError(f"it has no {place}, which --fields names.") from None
    return value


def _read_prompt(fields: JsonObject, encode: Encode) -> list[int]:
    names = [name for name in _PROMPTS if name in fields]
    if len(names) != 1:
        has = " and ".join(names) or "no prompt"
        raise ValueError(f"it has {has}; it needs one of {', '.join(_PROMPTS)}.")
    value = fields[names[0]]
    if names[0] == "prompt_token_ids":
        if not isinstance(value, list) or not all(type(token) is int for token in value):
            raise ValueError("prompt_token_ids is no list of integers.")
        if any(abs(token) >= 2**31 for token in value):
            raise ValueError("prompt_token_ids holds an integer beyond 32 bits.")
        return value
    if names[0] == "prompt" and not (isinstance(value, str) and value):
        raise ValueError(f"prompt is {quote(value)}; it needs a string that is not empty.")
    if names[0] == "messages" and not isinstance(value, list):
        raise ValueError("messages is no list.")
    return encode(value)


def _check_text(value: Any) -> str:
    if not (isinstance(value, str) and value):
        raise ValueError(f"turns has {quote(value)}; it needs texts that are not empty.")
    return value


def _check_number(name: str, value: Any) -> Any:
    kind, low, high = _NUMBERS[name]
    allowed = (int,) if kind is int else (int, float)
    is_number = isinstance(value, allowed) and not isinstance(value, bool)
    # Finite limits leave out NaN and infinities; math.isfinite fails on an integer beyond float64.
    if not is_number or not low <= value <= high:
        noun = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} is {quote(value)}; it needs {noun} in [{low}, {high}].")
    return np.dtype(np.int64 if kind is int else np.float64).type(value).item()
