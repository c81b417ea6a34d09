"""Objects of OpenAI's answers: whole ones, and chunks of a stream.

    `Part` of a choice -> `Reply.choice` or `Reply.chunk` -> an object -> `event`

`CompletionReply` and `ChatReply` differ in the names of their objects, and in where a choice has
its text.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specjax.contrib.serve.token_scores import TokenScore, chat_logprobs, completion_logprobs
from specjax.contrib.serve.token_texts import TokenTexts

END_OF_STREAM = b"data: [DONE]\n\n"


class Part(NamedTuple):
    """What a choice gained.

    Attributes:
      choice: its index, over prompts x n.
      text: new text.
      scores: of its new tokens, or None without log-probabilities.
      offsets: of these tokens in the choice's whole text.
      finish_reason: in OpenAI's words, with the last part; None before.
    """

    choice: int
    text: str
    scores: list[TokenScore] | None
    offsets: list[int]
    finish_reason: str | None


def to_json(value: Mapping[str, object]) -> bytes:
    """Returns an object as JSON, in ASCII, so that any string can be written."""
    return json.dumps(value, separators=(",", ":")).encode()


def event(value: Mapping[str, object]) -> bytes:
    r"""Returns a server-sent event with an object.

    Example:
      >>> event({"id": 1})
      b'data: {"id":1}\n\n'
    """
    return b"data: " + to_json(value) + b"\n\n"


class Reply:
    """An answer's objects, which share its id, its time and its model.

    Args:
      id: of the answer, without the prefix of its kind.
      created: seconds since 1970.
      model: its name.
      texts: of single tokens.
    """

    prefix, whole_name, chunk_name = "", "", ""

    def __init__(self, id: str, created: int, model: str, texts: TokenTexts) -> None:
        self._head = {"id": self.prefix + id, "created": created, "model": model}
        self._texts = texts

    def choice(self, part: Part) -> bytes:
        """Returns a choice of a whole answer, as JSON."""
        return to_json(self._ending(part) | self._message(part))

    def whole(self, choices: Sequence[bytes], usage: Mapping[str, object]) -> bytes:
        """Returns a whole answer as JSON, of the choices in JSON: they may have megabytes."""
        rest = to_json(self._head | {"object": self.whole_name, "usage": usage})
        return b'{"choices":[' + b",".join(choices) + b"]," + rest[1:]

    def chunk(self, part: Part) -> dict[str, Any]:
        """Returns a chunk with one choice."""
        choices = [self._ending(part) | self._delta(part)]
        return self._head | {"object": self.chunk_name, "choices": choices}

    def usage_chunk(self, usage: Mapping[str, object]) -> dict[str, Any]:
        """Returns the last chunk of a stream, which counts tokens and has no choices."""
        return self._head | {"object": self.chunk_name, "choices": [], "usage": usage}

    def first_event(self, index: int) -> bytes:
        """Returns the event that begins a choice, if there is one."""
        return b""

    def _ending(self, part: Part) -> dict[str, Any]:
        logprobs = None if part.scores is None else self._logprobs(part.scores, part.offsets)
        return {"index": part.choice, "logprobs": logprobs, "finish_reason": part.finish_reason}

    def _logprobs(self, scores: list[TokenScore], offsets: list[int]) -> dict[str, Any]:
        return completion_logprobs(scores, offsets, self._texts)

    def _message(self, part: Part) -> dict[str, Any]:
        return {"text": part.text}

    def _delta(self, part: Part) -> dict[str, Any]:
        return self._message(part)


class CompletionReply(Reply):
    """Answers of /v1/completions."""

    prefix, whole_name, chunk_name = "cmpl-", "text_completion", "text_completion"


class ChatReply(Reply):
    """Answers of /v1/chat/completions."""

    prefix, whole_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def first_event(self, index: int) -> bytes:
        """Returns the event that names who speaks."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return event(self._head | {"object": self.chunk_name, "choices": [choice]})

    def _logprobs(self, scores: list[TokenScore], offsets: list[int]) -> dict[str, Any]:
        return chat_logprobs(scores, self._texts)

    def _message(self, part: Part) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": part.text, "refusal": None}}

    def _delta(self, part: Part) -> dict[str, Any]:
        return {"delta": {"content": part.text} if part.text else {}}
