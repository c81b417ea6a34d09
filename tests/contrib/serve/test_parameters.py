"""Bodies of requests: what is read of them, and what is refused by name."""

import json

import pytest

from specjax.contrib.serve.errors import ApiError, error_body, error_headers
from specjax.contrib.serve.fields import parse_json
from specjax.contrib.serve.limits import Limits
from specjax.contrib.serve.parameters import read_chat, read_completion

LIMITS = Limits(max_length=8, vocab_size=10, max_logprobs=5)
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def refusal(read, **body):
    with pytest.raises(ApiError) as error:
        read(body, LIMITS)
    assert error.value.status == 400
    return error.value


def test_null_is_absent_at_every_depth():
    body = {
        "prompt": "a",
        "n": None,
        "stop": None,
        "seed": None,
        "tools": None,
        "best_of": None,
        "logit_bias": None,
        "logprobs": None,
        "suffix": None,
        "stream": True,
        "stream_options": {"include_usage": None},
    }
    assert read_completion(body, LIMITS) == read_completion({"prompt": "a", "stream": True}, LIMITS)
    message = {"role": "assistant", "content": "b", "tool_calls": None, "refusal": None}
    assert read_chat({"messages": [message]}, LIMITS).messages == [
        {"role": "assistant", "content": "b"}
    ]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", ["ab"]),
        ([1, 2], [[1, 2]]),
        (["ab", ""], ["ab", ""]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [3]], ["a", [3]]),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_a_list_of_these(prompt, prompts):
    assert read_completion({"prompt": prompt}, LIMITS).prompts == prompts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("functions", [{}]),
        ("suffix", "a"),
        ("audio", {}),
        ("best_of", 2),
        ("grammar", ""),
        ("logit_bias", {"1": 2}),
        ("store", True),
        ("n", 0),
        ("n", True),
        ("n", 1.0),
        ("n", 129),
        ("seed", 2**63),
        ("temperature", -0.1),
        ("temperature", "1"),
        ("top_p", 1.1),
        ("frequency_penalty", 2.1),
        ("max_tokens", 0),
        ("stop", ["a", 1]),
        ("stop", ["a", ""]),
        ("stop", "a" * 4097),
        ("logprobs", 6),
        ("echo", 1),
        ("stream_options", {"include_usage": True}),
        ("prompt", []),
        ("prompt", [[]] * 129),
        ("prompt", [1, "a"]),
        ("prompt", [10]),
        ("prompt", [True]),
        ("prompt", [0] * 8),
        ("prompt", {"a": 1}),
        ("prompt", "\ud800"),
        ("user", 7),
    ],
)
def test_a_completion_refuses_what_it_does_not_do_by_name(field, value):
    error = refusal(read_completion, **{"prompt": "a", field: value})
    assert error.param == field
    assert field in error.message
    assert "e+" not in error.message  # Limits are written with all their digits.
    assert json.dumps(error_body(error))


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tool_choice", "auto", "tool_choice"),
        ("modalities", ["audio"], "modalities"),
        ("top_logprobs", 2, "top_logprobs"),
        ("response_format", {"type": "grammar"}, "response_format.type"),
        ("response_format", {"type": "json_schema"}, "response_format.json_schema.schema"),
        ("response_format", [], "response_format"),
        ("messages", [], "messages"),
        ("messages", [{"role": "tool", "content": "a"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        (
            "messages",
            [{"role": "user", "content": "a", "tool_calls": []}],
            "messages[0].tool_calls",
        ),
        (
            "messages",
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].image_url",
        ),
    ],
)
def test_a_chat_refuses_what_it_does_not_do_by_name(field, value, param):
    assert refusal(read_chat, **CHAT | {field: value}).param == param


def test_prompts_times_n_are_limited_together():
    refusal(read_completion, prompt=[[1]] * 64, n=3)
    assert read_completion({"prompt": [[1]] * 64, "n": 2}, LIMITS).num_samples == 2


def test_a_chat_reads_both_limits_parts_of_text_and_schemas():
    schema = {"type": "object", "properties": {}}
    body = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}] * 2}],
        "metadata": {"a": "b"},
        "max_tokens": 3,
        "max_completion_tokens": 4,
        "logprobs": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    parameters = read_chat(body, LIMITS)
    assert parameters.messages == [{"role": "system", "content": "aa"}]
    assert (parameters.max_new_tokens, parameters.num_logprobs) == (4, 0)
    assert parameters.schema == schema
    large = {"type": "json_schema", "json_schema": {"schema": {"title": "a" * 2**15}}}
    refusal(read_chat, **CHAT, response_format=large)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"\xff", b'{"a":NaN}', b"[" * 100_000, b'{"n":' + b"1" * 5000 + b"}", b"1 2"],
)
def test_a_body_that_is_no_json_is_refused(body):
    with pytest.raises(ApiError, match="the body"):
        parse_json(body)


def test_only_a_full_queue_asks_a_client_to_come_again():
    assert error_headers(ApiError("full", status=429)) == {"retry-after": "1"}
    for status in (400, 404, 413, 500, 503):
        assert error_headers(ApiError("no", status=status)) == {"x-should-retry": "false"}
