"""Chat templates: messages become the prompt that a folder's model was trained to answer."""

import datetime
import json
import os
import pathlib
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specjax.models.hf.folder import read_folder, read_member, read_object

__all__ = ["chat_prompt"]

_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


class _Generation(Extension):
    """The block that marks, for a training, what the assistant says: here it is its content."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _json(value: Any, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers gives to templates; the sandbox, since they come with the weights."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    made.filters["tojson"] = _json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _template(path: pathlib.Path, settings: dict[str, Any]) -> tuple[str, pathlib.Path]:
    """The template, and the file that it is from."""
    if (path / _FILE).is_file():
        data = read_member(path / _FILE)
        try:
            return data.decode(), path / _FILE
        except ValueError:
            raise ValueError(f"{path / _FILE} is not UTF-8 text.") from None
    found, source = settings.get("chat_template"), path / _CONFIG
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
        if found is None:
            raise ValueError(f"{source} has no chat template of the name 'default'.")
    if found is None:
        raise ValueError(
            f"{path} has no chat template; its model continues text, and answers none."
        )
    if not isinstance(found, str):
        raise ValueError(f"{source} has a chat_template that is no text; it needs to be one.")
    return found, source


def _check_messages(messages: Any) -> None:
    several = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not several or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(
            f"messages is {reprlib.repr(messages)}; it needs to be a list of mappings with a role "
            "and a content, such as [{'role': 'user', 'content': 'Hello.'}]."
        )


def chat_prompt(folder: str | os.PathLike[str], messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of a conversation in the words of a folder's chat template, up to the answer.

    The template is rendered in Jinja's sandbox. The text holds the special tokens that begin
    it: it is to be encoded without adding any.

    Args:
      folder: a Hugging Face folder with chat_template.jinja, or with a chat_template in
        tokenizer_config.json; of several named ones "default" is taken.
      messages: each with a "role" and a "content", the oldest first.

    Returns:
      The prompt.

    Raises:
      ValueError: in a sentence, if there is no folder, no template in it, or it does not take
        these messages.

    Example:
      >>> import tempfile
      >>> folder = pathlib.Path(tempfile.mkdtemp())
      >>> text = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
      >>> _ = (folder / "chat_template.jinja").write_text(text)
      >>> chat_prompt(folder, [{"role": "user", "content": "Hello."}])
      '<user>Hello.<assistant>'
    """
    path = read_folder(folder)
    _check_messages(messages)
    config = path / _CONFIG
    settings = read_object(config, "a tokenizer's settings") if config.is_file() else {}
    text, source = _template(path, settings)
    tokens = {}
    for name, value in settings.items():
        said = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(said, str):
            tokens[name] = said
    given = {"messages": [dict(message) for message in messages], "tools": None, "documents": None}
    try:
        template = _environment().from_string(text)
        return template.render(**tokens | given, add_generation_prompt=True)
    except Exception as error:  # A template may fail in any way that a program can.
        said = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{source} does not take this conversation ({said}).") from None
