"""`Parameters`: what a completion or a chat asks for, read of the body of its request.

    bytes -> `parse_json` -> `read_completion` or `read_chat` -> `Parameters`

Names and ranges are OpenAI's. `top_k`, `min_p` and `repetition_penalty` are additions, which its
client sends by `extra_body`.
"""

import json
from typing import Any, NamedTuple

from specjax.contrib.serve import fields
from specjax.contrib.serve.errors import ApiError
from specjax.contrib.serve.fields import Reader
from specjax.contrib.serve.limits import Limits
from specjax.file_io import quote

# A text, or the ids of its tokens.
Prompt = str | list[int]
Message = dict[str, str]
_SAMPLING: dict[str, Reader] = {
    "top_p": fields.number(0, 1),
    "frequency_penalty": fields.number(-2, 2),
    "presence_penalty": fields.number(-2, 2),
    "top_k": fields.number(-1, 2**31 - 1, int),
    "min_p": fields.number(0, 1),
    "repetition_penalty": fields.number(1e-6, 1e6),
}
_COUNT = fields.number(1, 2**31 - 1, int)
# Fields that change no token: who asks, and values that say what happens anyhow.
_NO_MATTER: dict[str, Reader] = {
    "user": fields.text,
    "safety_identifier": fields.text,
    "prompt_cache_key": fields.text,
    "metadata": lambda _, value: value,
    "store": fields.constant(False),
    "logit_bias": fields.constant({}),
    "service_tier": fields.constant("auto", "default"),
}
_ROLES = ("system", "developer", "user", "assistant")


class Parameters(NamedTuple):
    """What a request asks for.

    Attributes:
      model: its name, or None.
      prompts: texts or ids; those of a chat are one conversation, in `messages`.
      messages: each with a "role" and a "content"; empty for a completion.
      num_samples: n, of each prompt.
      max_new_tokens: most tokens of each, or None for as many as there is room for; 0 for an echo
        alone.
      temperature: >= 0.
      sampling: fields of `SamplingParams`, by name.
      seed: or None for one that the server chooses.
      stop: strings that end a text.
      num_logprobs: likeliest tokens listed for each token; None for no log-probabilities at all.
      echo: whether the text begins with the prompt.
      stream: whether the answer comes in chunks.
      include_usage: whether a stream ends with counts.
      schema: JSON schema of the text, or None.
    """

    model: str | None
    prompts: list[Prompt]
    messages: list[Message]
    num_samples: int
    max_new_tokens: int | None
    temperature: float
    sampling: dict[str, float]
    seed: int | None
    stop: tuple[str, ...]
    num_logprobs: int | None
    echo: bool
    stream: bool
    include_usage: bool
    schema: object | None


def read_completion(value: object, limits: Limits) -> Parameters:
    """Returns the parameters of a body of /v1/completions.

    Raises:
      ApiError: for a field that is wrong or not supported, and more than the limits allow.

    Example:
      >>> read_completion({"prompt": [[1, 2], [3]], "n": 2}, Limits(8, 4)).num_samples
      2
    """
    readers = _common_readers(limits) | {
        "prompt": lambda name, value: _prompts(name, value, limits),
        "logprobs": _listed(limits),
        "echo": fields.flag,
        "max_tokens": fields.number(0, 2**31 - 1, int),
        "best_of": _COUNT,
    }
    given = fields.read_fields(value, readers)
    if "prompt" not in given:
        raise ApiError("there is no prompt.", "prompt")
    if given.get("max_tokens") == 0 and not given.get("echo"):
        raise ApiError("max_tokens is 0; without echo it needs to be at least 1.", "max_tokens")
    if given.get("best_of", 1) > given.get("n", 1):
        raise ApiError(
            "best_of is more than n; this server returns every text that it makes.",
            "best_of",
            code="unsupported_parameter",
        )
    return _parameters(given, limits, given.get("logprobs"), given.get("max_tokens", 16))


def read_chat(value: object, limits: Limits) -> Parameters:
    """Returns the parameters of a body of /v1/chat/completions.

    Raises:
      ApiError: as `read_completion` does.

    Example:
      >>> body = {"messages": [{"role": "user", "content": "Hello."}], "logprobs": True}
      >>> read_chat(body, Limits(8, 4)).num_logprobs
      0
    """
    readers = _common_readers(limits) | {
        "messages": lambda name, value: read_messages(name, value, limits),
        "logprobs": fields.flag,
        "top_logprobs": _listed(limits),
        "max_completion_tokens": _COUNT,
        "response_format": lambda name, value: _schema(name, value, limits),
        "modalities": fields.constant(["text"]),
    }
    given = fields.read_fields(value, readers)
    if "messages" not in given:
        raise ApiError("there are no messages.", "messages")
    num_logprobs = given.get("top_logprobs", 0) if given.get("logprobs") else None
    if num_logprobs is None and "top_logprobs" in given:
        raise ApiError("top_logprobs is given; it needs logprobs to be true.", "top_logprobs")
    limit = given.get("max_completion_tokens", given.get("max_tokens"))
    return _parameters(given, limits, num_logprobs, limit)


def _parameters(
    given: dict[str, Any], limits: Limits, num_logprobs: int | None, max_new_tokens: int | None
) -> Parameters:
    options = given.get("stream_options", {})
    if options and not given.get("stream"):
        raise ApiError("stream_options is given; it needs stream to be true.", "stream_options")
    prompts, num_samples = given.get("prompt", []), given.get("n", 1)
    num_choices = max(1, len(prompts)) * num_samples
    if num_choices > limits.max_choices:
        raise ApiError(
            f"the request asks for {num_choices} texts; at most {limits.max_choices} are made of "
            "one request.",
            "n",
        )
    return Parameters(
        model=given.get("model"),
        prompts=prompts,
        messages=given.get("messages", []),
        num_samples=num_samples,
        max_new_tokens=max_new_tokens,
        temperature=given.get("temperature", 1.0),
        sampling={name: given[name] for name in _SAMPLING if name in given},
        seed=given.get("seed"),
        stop=given.get("stop", ()),
        num_logprobs=num_logprobs,
        echo=given.get("echo", False),
        stream=given.get("stream", False),
        include_usage=options.get("include_usage", False),
        schema=given.get("response_format"),
    )


def _common_readers(limits: Limits) -> dict[str, Reader]:
    return {
        **_SAMPLING,
        **_NO_MATTER,
        "model": fields.text,
        "max_tokens": _COUNT,
        "temperature": fields.number(0, 2),
        "n": fields.number(1, limits.max_choices, int),
        "seed": fields.number(-(2**63), 2**63 - 1, int),
        "stop": lambda name, value: _stop(name, value, limits),
        "stream": fields.flag,
        "stream_options": fields.object_of(
            {"include_usage": fields.flag, "include_obfuscation": fields.constant(False)}
        ),
    }


def _listed(limits: Limits) -> Reader:
    """Returns a reader of a number of listed tokens."""
    most = limits.max_logprobs or 0
    read = fields.number(0, 2**31 - 1, int)

    def read_listed(name: str, value: object) -> int:
        count: int = read(name, value)
        if count > most:
            raise ApiError(
                f"{name} is {count}; this server lists at most {most} tokens, as its option "
                "--max-logprobs says.",
                name,
            )
        return count

    return read_listed


def _stop(name: str, value: object, limits: Limits) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    strings = [fields.text(name, item) for item in values]
    if not all(strings):
        raise ApiError(f"{name} holds an empty string.", name)
    size = sum(map(len, strings))
    if size > limits.max_stop_characters:
        raise ApiError(
            f"{name} has {size} characters; it takes at most {limits.max_stop_characters} in all.",
            name,
        )
    return tuple(strings)


def _prompts(name: str, value: object, limits: Limits) -> list[Prompt]:
    """Returns the prompts of a text, of ids, or of a list of these."""
    is_one = isinstance(value, str) or (
        isinstance(value, list) and bool(value) and type(value[0]) is int
    )
    prompts = [value] if is_one else value
    if not isinstance(prompts, list) or not prompts:
        raise ApiError(
            f"{name} is {quote(value)}; it needs a text, token ids, or a list of these.", name
        )
    if len(prompts) > limits.max_choices:
        raise ApiError(
            f"{name} has {len(prompts)} prompts; it takes at most {limits.max_choices}.", name
        )
    return [_prompt(name, prompt, limits) for prompt in prompts]


def _prompt(name: str, value: object, limits: Limits) -> Prompt:
    if isinstance(value, str):
        return fields.text(name, value)
    if not isinstance(value, list):
        raise ApiError(f"{name} holds {quote(value)}; it needs texts or lists of ids.", name)
    if len(value) >= limits.max_length:
        raise ApiError(
            f"{name} has {len(value)} tokens; this server takes at most {limits.max_length} of a "
            "prompt and its text together.",
            name,
            code="context_length_exceeded",
        )
    if not all(type(token) is int and 0 <= token < limits.vocab_size for token in value):
        raise ApiError(
            f"{name} holds a value that is no token; ids are integers in [0, {limits.vocab_size}).",
            name,
        )
    return value


def read_messages(name: str, value: object, limits: Limits) -> list[Message]:
    """Returns the messages of a conversation, with contents that are texts."""
    if not isinstance(value, list) or not value:
        raise ApiError(f"{name} is {quote(value)}; it needs a list of messages.", name)
    if len(value) > limits.max_messages:
        raise ApiError(
            f"{name} has {len(value)} messages; it takes at most {limits.max_messages}.", name
        )
    readers = {"role": fields.text, "name": fields.text, "content": _content}
    messages = []
    for i, item in enumerate(value):
        message = fields.read_fields(item, readers, f"{name}[{i}].")
        role = message.get("role")
        if role not in _ROLES:
            raise ApiError(
                f"{name}[{i}].role is {quote(role)}; it needs to be one of {', '.join(_ROLES)}.",
                f"{name}[{i}].role",
            )
        if "content" not in message:
            raise ApiError(f"{name}[{i}] has no content.", f"{name}[{i}].content")
        # Templates of open models know it as "system".
        message["role"] = "system" if role == "developer" else role
        messages.append(message)
    return messages


def _content(name: str, value: object) -> str:
    """Returns a message's content: a text, or the texts of its parts."""
    if not isinstance(value, list):
        return fields.text(name, value)
    readers = {"type": fields.constant("text"), "text": fields.text}
    parts = (fields.read_fields(x, readers, f"{name}[{i}].") for i, x in enumerate(value))
    return "".join(part.get("text", "") for part in parts)


def _schema(name: str, value: object, limits: Limits) -> object | None:
    """Returns the JSON schema of a response format; None for plain text."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        fields.read_fields(value, {"type": fields.text}, name + ".")
        return None
    if kind == "json_object":
        fields.read_fields(value, {"type": fields.text}, name + ".")
        return {"type": "object"}
    readers = {
        "name": fields.text,
        "description": fields.text,
        "strict": fields.flag,
        "schema": lambda _, schema: schema,
    }
    outer = {"type": fields.constant("json_schema", "json_object", "text")}
    given = fields.read_fields(
        value, outer | {"json_schema": fields.object_of(readers)}, name + "."
    )
    schema = given.get("json_schema", {}).get("schema")
    if not isinstance(schema, dict):
        name += ".json_schema.schema"
        raise ApiError(f"{name} is {quote(schema)}; it needs a JSON schema.", name)
    size = len(json.dumps(schema, separators=(",", ":")))
    if size > limits.max_schema_bytes:
        raise ApiError(
            f"the JSON schema has {size} bytes; it takes at most {limits.max_schema_bytes}.", name
        )
    return schema
