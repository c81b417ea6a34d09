"""Turns messages into a prompt by the chat template of a Hugging Face folder."""

import datetime
import functools
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specjax.file_io import JsonObject, quote, shorten
from specjax.models.hf.folder import find_folder, read_json_object, read_small_file

_TEMPLATE_FILE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"


class _GenerationBlock(Extension):
    """The `generation` block, which marks assistant text for training; renders its content."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's filter escapes HTML, which no model was trained on. The arguments are those of
    # transformers; `default` and `cls` would run a template's functions outside the sandbox.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _read_template(path: pathlib.Path, settings: JsonObject) -> tuple[str, pathlib.Path]:
    """Returns the template and the file that holds it."""
    if (path / _TEMPLATE_FILE).is_file():
        data = read_small_file(path / _TEMPLATE_FILE)
        try:
            return data.decode(), path / _TEMPLATE_FILE
        except ValueError:
            raise ValueError(f"{path / _TEMPLATE_FILE} is not UTF-8 text.") from None
    template, source = settings.get("chat_template"), path / _TOKENIZER_CONFIG
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        defaults = [entry.get("template") for entry in named if entry.get("name") == "default"]
        template = defaults[-1] if defaults else None
        if template is None:
            raise ValueError(f"{source} has several chat templates and none is named 'default'.")
    if template is None:
        raise ValueError(
            f"{path} has no chat template; its model continues text and does not answer messages."
        )
    if not isinstance(template, str):
        raise ValueError(f"{source} has a chat_template that is no text; it needs to be text.")
    return template, source


# A template takes tens of milliseconds to compile, in which a server's other threads would wait.
@functools.lru_cache(maxsize=8)
def _compile(text: str) -> jinja2.Template:
    """Returns a template in a sandbox with the filters and functions that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(text)


def _check_messages(messages: Any) -> None:
    is_sequence = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_sequence or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(
            f"messages is {quote(messages)}; it needs to be a list of mappings with a role "
            "and a content, such as [{'role': 'user', 'content': 'Hello.'}]."
        )


def _format_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def chat_prompt(
    folder: str | os.PathLike[str],
    messages: Sequence[Mapping[str, Any]],
    *,
    strftime_now: Callable[[str], str] = _format_now,
    variables: Mapping[str, object] | None = None,
) -> str:
    """Returns the prompt of a conversation, up to where the answer begins.

    The template is rendered in Jinja's sandbox, which keeps it from files and from the interpreter.
    Its time and memory are not limited: a template is a program, so use only folders that you
    trust. The prompt contains its special tokens: encode it without adding any.

    Args:
      folder: a Hugging Face folder with chat_template.jinja, or with a chat_template in
        tokenizer_config.json. The one named "default" is used if there are several.
      messages: each with a "role" and a "content", oldest first. A field that is None counts as
        absent, as in transformers: clients of OpenAI write `"tool_calls": null`. Fields inside
        another field stay.
      strftime_now: formats a date for templates that write one; by default the local time's.
      variables: of the template besides, such as {"enable_thinking": False}; None is no others.

    Returns:
      The prompt.

    Raises:
      ValueError: if there is no folder or no template, or the template fails on the messages.

    Example:
      >>> import tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
      >>> _ = (folder / "chat_template.jinja").write_text(text)
      >>> chat_prompt(folder, [{"role": "user", "content": "Hello."}])
      '<user>Hello.<assistant>'
    """
    path = find_folder(folder)
    _check_messages(messages)
    reserved = {"messages", "add_generation_prompt"} & set(variables or ())
    if reserved:
        raise ValueError(f"variables has {min(reserved)!r}, which the conversation itself sets.")
    config = path / _TOKENIZER_CONFIG
    settings = read_json_object(config, "a tokenizer's settings") if config.is_file() else {}
    text, source = _read_template(path, settings)
    special_tokens = {}
    for name, value in settings.items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            special_tokens[name] = token
    context = {
        "tools": None,
        "documents": None,
        **(variables or {}),
        "messages": [
            {name: value for name, value in message.items() if value is not None}
            for message in messages
        ],
    }
    try:
        functions = {"strftime_now": strftime_now, "add_generation_prompt": True}
        return _compile(text).render(**functions | special_tokens | context)
    except Exception as error:  # A template is a program and may raise anything.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{source} cannot render this conversation ({shorten(reason)}).") from None
