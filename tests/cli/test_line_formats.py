"""Lines of a file of prompts: OpenAI's batch format, question files, null, and misspelt fields."""

import json

import pytest

from specjax.cli.arguments import parse_options
from specjax.cli.batch.read_lines import PromptLine, read_lines


def read_one(line, places=None):
    """The one line of a file, whose tokens are the prompt itself; or the sentence."""
    lines, problems = read_lines(json.dumps(line).encode(), lambda prompt: [prompt], places)
    return problems[0] if problems else lines[0]


def test_lines_of_openais_batch_format_are_those_of_the_command():
    messages = [{"role": "user", "content": "Hi."}]
    body = {"model": "m", "messages": messages, "max_tokens": 9, "stop": None, "top_p": 0.5}
    body |= {"n": 1, "stream": False, "logprobs": None, "seed": 3, "user": "u"}
    chat = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    values = {"max_new_tokens": 9, "top_p": 0.5, "seed": 3}
    assert read_one(chat) == PromptLine(1, "a", [messages], None, values)
    text = {"custom_id": "b", "url": "/v1/completions", "body": {"prompt": "ab", "stop": ["x"]}}
    assert read_one(text) == PromptLine(1, "b", ["ab"], ("x",), {})
    text["body"]["prompt"] = [1, 2]
    assert read_one(text).token_ids == [1, 2]
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i."}]
    body["messages"] = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    assert read_one(chat).token_ids == [[{"role": "system", "content": "s"}, *messages]]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"prompt": "a", "temprature": 1}, "temprature is no field that is known. Did you mean "),
        ({"prompt": "a", "x": 1}, "Known are prompt, prompt_token_ids, messages, turns, id, stop,"),
        (
            {"body": {"prompt": "a", "max_token": 1}},
            "body.max_token is no field that is known.",
        ),
        ({"body": {"prompt": "a", "n": 2}}, "body.n is 2; a file takes 1 alone."),
        ({"body": {"prompt": "a", "logprobs": 0}}, "body.logprobs is 0; a file takes False alone."),
        ({"body": {"prompt": ["a"]}}, "body.prompt is a list; it needs ids of one prompt"),
        (
            {"body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
            "body.messages has a content with a part that is no text.",
        ),
        ({"body": {"prompt": "a", "tools": [{}]}}, "body.tools is [{}]; a file takes [] alone."),
        ({"body": {"prompt": "a"}, "url": "/v1/embeddings"}, "url is '/v1/embeddings'; it needs"),
        ({"body": {"prompt": "a"}, "url": "/v1/chat/completions"}, "body has no messages, which"),
        ({"body": 1}, "body is no object."),
        ({"body": {}, "custom": 1}, "custom is no field of OpenAI's batch format."),
        ({"turns": []}, "turns has None; it needs texts that are not empty."),
        ({"turns": "a"}, "turns is no list."),
    ],
)
def test_a_field_that_is_not_known_is_refused_with_those_that_are(line, sentence):
    assert sentence in read_one(line)


def test_null_is_absent():
    nulls = dict.fromkeys(("stop", "seed", "id", "messages", "max_new_tokens"))
    assert read_one({"prompt": "a"} | nulls) == read_one({"prompt": "a"})


def test_fields_of_question_files_are_named_by_one_option():
    question = {"task_id": "HumanEval/0", "prompt": "def f():", "test": "...", "entry_point": "f"}
    places = parse_options(
        ["generate", "--input", "a", "--output", "b", "--fields", "id=task_id,prompt=prompt"]
    )[0].fields
    assert read_one(question, places) == PromptLine(1, "HumanEval/0", ["def f():"], None, {})
    question = {"question_id": 81, "category": "x", "turns": ["a", "b"], "reference": []}
    line = read_one(question, {"id": "question_id", "turns": "turns"})
    first = {"role": "user", "content": "a"}
    assert line == PromptLine(1, 81, [[first]], None, {}, ("b",), (first,))
    assert read_one(question, {"prompt": "turns.1"}).token_ids == ["b"]
    assert "it has no turns.2, which --fields names" in read_one(question, {"prompt": "turns.2"})
