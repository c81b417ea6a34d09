"""`Codec`: prompts to tokens, tokens to text, by the tokenizer and the chat template of a model."""

import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.contrib.serve.errors import ApiError
from specjax.contrib.serve.parameters import Message
from specjax.file_io import JsonObject, read_file

_MAX_BYTES = 2**24


class GilFreeTokenizer:
    """A tokenizer whose `encode` lets other threads of Python run meanwhile.

    `tokenizers.Tokenizer.encode` holds the interpreter: half a second for a megabyte, in which a
    server would answer nobody. Its `encode_batch` does not.

    Args:
      tokenizer: a `tokenizers.Tokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any:
        """Returns the encoding of a text."""
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Codec(NamedTuple):
    """Prompts to tokens and tokens to text.

    Attributes:
      tokenizer: a `GilFreeTokenizer`.
      encode: (text, whether a chat template made it) -> ids; raises `ValueError`.
      render: messages -> the text that the chat template makes of them; raises `ValueError`.
      eos_token_ids: tokens that end a text.
      info: of `tokenizer_info`.
    """

    tokenizer: Any
    encode: Callable[[str, bool], list[int]]
    render: Callable[[Sequence[Message]], str]
    eos_token_ids: tuple[int, ...]
    info: JsonObject

    def encode_chat(self, messages: Sequence[Message], max_length: int) -> list[int]:
        """Returns the ids of a conversation.

        Raises:
          ApiError: for messages that the template or the tokenizer refuses, or that are too long.
        """
        try:
            text = self.render(messages)
        except ValueError as error:
            raise ApiError(str(error), "messages") from None
        return self.encode_text(text, True, max_length)

    def encode_text(self, text: str, is_rendered: bool, max_length: int) -> list[int]:
        """Returns the ids of a text; its special tokens are in it already if it is rendered.

        Raises:
          ApiError: for a text that the tokenizer cannot read, or that is too long.
        """
        param = "messages" if is_rendered else "prompt"
        # Of more characters no tokenizer here makes so few tokens; encoding them would take long.
        if len(text) > 64 * max_length:
            raise ApiError(
                f"the prompt has {len(text)} characters; this server takes at most {max_length} "
                "tokens of a prompt and its text together.",
                param,
                code="context_length_exceeded",
            )
        try:
            return self.encode(text, is_rendered)
        except ValueError as error:
            raise ApiError(str(error), param) from None


def tokenizer_info(
    folder: str | os.PathLike[str], tokenizer: Any, eos_token_ids: Sequence[int]
) -> JsonObject:
    """Returns what /tokenizer_info says: tokenizer_config.json, the end token, the template.

    Args:
      folder: of the target.
      tokenizer: of that folder.
      eos_token_ids: of the target; the first is the end token if the file names none.
    """
    config, template = (
        pathlib.Path(folder, name) for name in ("tokenizer_config.json", "chat_template.jinja")
    )
    info = json.loads(read_file(config, _MAX_BYTES)) if config.is_file() else {}
    if template.is_file():
        info["chat_template"] = read_file(template, _MAX_BYTES).decode()
    for name, value in info.items():
        if name.endswith("_token") and isinstance(value, dict):
            info[name] = value.get("content")
    end = tokenizer.id_to_token(eos_token_ids[0]) if eos_token_ids else None
    return {"eos_token": end, "bos_token": None, "pad_token": None} | info
