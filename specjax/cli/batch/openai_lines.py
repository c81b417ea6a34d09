"""A line of OpenAI's batch format, as a line of this command.

{"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

from collections.abc import Mapping

from specjax.cli.option_table import suggest
from specjax.file_io import JsonObject, quote, shorten

_ENVELOPE = ("custom_id", "method", "url", "body")
_PROMPT_OF_URL = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}
_LENGTHS = ("max_tokens", "max_completion_tokens")
# Names in the body that are those of a line here. The last four are vLLM's.
_EQUAL = (
    *("messages", "prompt", "temperature", "top_p", "frequency_penalty", "presence_penalty"),
    *("seed", "stop", "top_k", "min_p", "repetition_penalty", "min_tokens"),
)
# Names that change no text.
_UNREAD = (
    *("model", "user", "metadata", "store", "service_tier", "stream_options"),
    *("safety_identifier", "prompt_cache_key"),
)
# Names that may only say that something is not asked for.
_OFF: JsonObject = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "echo": False,
    "logprobs": False,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "logit_bias": {},
    "tools": [],
}
_KNOWN = (*_EQUAL, *_LENGTHS, *_UNREAD, *_OFF)


def is_openai_line(fields: Mapping[str, object]) -> bool:
    """Returns whether a line is of OpenAI's batch format."""
    return "body" in fields or "custom_id" in fields


def translate_line(fields: Mapping[str, object]) -> JsonObject:
    """Returns the fields of a line of this command; null is absent.

    Raises:
      ValueError: for a field that is not known, and for one that asks for what a file cannot give.

    Example:
      >>> body = {"model": "m", "prompt": "ab", "max_tokens": 3, "stop": None}
      >>> translate_line({"custom_id": "a", "url": "/v1/completions", "body": body})
      {'id': 'a', 'prompt': 'ab', 'max_new_tokens': 3}
    """
    unknown = set(fields) - set(_ENVELOPE)
    if unknown:
        raise ValueError(f"{shorten(min(unknown))} is no field of OpenAI's batch format.")
    body, url = fields.get("body"), fields.get("url")
    if not isinstance(body, dict):
        raise ValueError("body is no object.")
    if fields.get("method", "POST") != "POST":
        raise ValueError(f"method is {quote(fields['method'])}; it needs to be POST.")
    if url is not None and url not in _PROMPT_OF_URL:
        raise ValueError(f"url is {quote(url)}; it needs to be {' or '.join(_PROMPT_OF_URL)}.")
    body = {name: value for name, value in body.items() if value is not None}
    unknown = set(body) - set(_KNOWN)
    if unknown:
        name = shorten(min(unknown))
        raise ValueError(
            f"body.{name} is no field that is known.{suggest(name, _KNOWN)} Known are "
            f"{', '.join(_KNOWN)}."
        )
    for name, off in _OFF.items():
        # `logprobs` 0 asks for log-probabilities, and equals False in Python.
        if name in body and (body[name] != off or type(body[name]) is not type(off)):
            raise ValueError(f"body.{name} is {quote(body[name])}; a file takes {off!r} alone.")
    if isinstance(url, str) and _PROMPT_OF_URL[url] not in body:
        raise ValueError(f"body has no {_PROMPT_OF_URL[url]}, which {url} needs.")
    line = {name: body[name] for name in _EQUAL if name in body}
    if isinstance(ids := line.get("prompt"), list):
        if not all(type(token) is int for token in ids):
            raise ValueError("body.prompt is a list; it needs ids of one prompt, or to be a text.")
        line["prompt_token_ids"] = line.pop("prompt")
    if isinstance(messages := line.get("messages"), list):
        line["messages"] = [_translate_message(message) for message in messages]
    lengths = [body[name] for name in _LENGTHS if name in body]
    if lengths and lengths[0] != lengths[-1]:
        raise ValueError(f"body has {_LENGTHS[0]} {lengths[0]} and {_LENGTHS[1]} {lengths[1]}.")
    line |= {"max_new_tokens": lengths[0]} if lengths else {}
    return ({"id": fields["custom_id"]} if "custom_id" in fields else {}) | line


def _translate_message(message: object) -> object:
    """Returns a message as chat templates take it: "system" for "developer", parts as one text."""
    if not isinstance(message, dict):
        return message
    if message.get("role") == "developer":
        message = message | {"role": "system"}
    if isinstance(parts := message.get("content"), list):
        if not all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in parts):
            raise ValueError("body.messages has a content with a part that is no text.")
        message = message | {"content": "".join(x["text"] for x in parts)}
    return message
