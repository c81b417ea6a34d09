"""A server on loopback, asked by OpenAI's own client: what it answers, and what it refuses."""

import asyncio
import concurrent.futures
import json
import pathlib
import socket
import threading
import time

import numpy as np
import pytest
from checkpoints import write_shallow

import specjax
from specjax import models
from specjax.contrib.serve.parameters import read_completion

pytestmark = [pytest.mark.lenient, pytest.mark.once]

ROOT = pathlib.Path(__file__).parents[3]
PROMPT = "def f(x):"


def complete(served, **arguments):
    return served.client.completions.create(model="tiny", **arguments)


def chat(served, content="hi", **arguments):
    messages = [{"role": "user", "content": content}]
    return served.client.chat.completions.create(model="tiny", messages=messages, **arguments)


def encode(served, text):
    return served.http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def test_a_seed_gives_the_text_that_the_engine_gives(served):
    stream = served.service.engine.submit(
        encode(served, PROMPT), seed=5, max_new_tokens=12, eos_token_ids=[0]
    )
    text = stream.result().text
    answer = complete(served, prompt=PROMPT, seed=5, max_tokens=12)
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)
    assert answer.usage.total_tokens == 17


def test_every_form_of_a_prompt_gives_the_same_texts_with_an_index_over_prompts_times_n(served):
    ids = [encode(served, text) for text in (PROMPT, "import")]
    arguments = {"n": 2, "seed": 3, "max_tokens": 6}
    answers = [complete(served, prompt=x, **arguments) for x in ([PROMPT, "import"], ids)]
    texts = [[choice.text for choice in answer.choices] for answer in answers]
    assert [choice.index for choice in answers[0].choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4
    alone = [complete(served, prompt=x, **arguments) for x in (PROMPT, ids[1])]
    assert [choice.text for answer in alone for choice in answer.choices] == texts[0]
    assert answers[0].usage.prompt_tokens == sum(map(len, ids))


def test_a_row_invariant_target_gives_equal_bits_alone_and_next_to_five(make_service, tmp_path):
    """A request is alone in a server of one slot: its steps have other shapes than with six."""
    import httpx

    from specjax.contrib.serve.app import make_app

    write_shallow(tmp_path, "target", 1)
    options = ("--target", str(tmp_path), "--row-invariant", "--dtype", "bfloat16")
    options += ("--max-length", "128", "--max-logprobs", "3", "--num-speculative-tokens", "3")
    bodies = [
        {"prompt": PROMPT * (i + 1), "seed": i, "max_tokens": 6 + i, "logprobs": 3}
        for i in range(6)
    ]

    async def complete(service):
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://a", timeout=60) as http:
            posts = [http.post("/v1/completions", json=body) for body in bodies]
            return [answer.json()["choices"] for answer in await asyncio.gather(*posts)]

    choices, num_steps = [], []
    for num_slots in ("1", "6"):
        service = make_service(*options, "--num-slots", num_slots)
        with service.engine as server:
            choices.append(asyncio.run(complete(service)))
            num_steps.append(server.engine.num_steps)
    assert num_steps[1] < num_steps[0] / 2
    assert choices[0] == choices[1]


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_the_whole_answer_in_parts_and_ends_with_counts(served, n):
    arguments = {"n": n, "seed": 11, "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    whole = chat(served, **arguments)
    chunks = list(chat(served, stream=True, stream_options={"include_usage": True}, **arguments))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        parts = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        tokens = [x for part in parts if part.logprobs for x in part.logprobs.content]
        assert tokens == choice.logprobs.content
        assert [part.finish_reason for part in parts if part.finish_reason] == ["length"]
    raw = served.http.post(
        "/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 2, "n": n}
    )
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.text.endswith("data: [DONE]\n\n")


def test_both_forms_of_logprobs_list_the_same_tokens(served):
    arguments = {"max_tokens": 16, "seed": 1, "temperature": 0.8, "top_p": 0.9}
    form = complete(served, prompt="user: hi\nassistant:", logprobs=3, **arguments).choices[0]
    content = chat(served, logprobs=True, top_logprobs=3, **arguments).choices[0]
    tokens = content.logprobs.content
    data = b"".join(bytes(token.bytes) for token in tokens)
    assert data.decode(errors="replace") == content.message.content == form.text
    assert form.logprobs.token_logprobs == [token.logprob for token in tokens]
    for token, value, top, offset in zip(
        form.logprobs.tokens,
        form.logprobs.token_logprobs,
        form.logprobs.top_logprobs,
        form.logprobs.text_offset,
        strict=True,
    ):
        assert "\ufffd" in token or form.text.startswith(token, offset)
        assert top[token] >= value
    for token in tokens:
        own = [top.logprob for top in token.top_logprobs if top.bytes == token.bytes]
        assert own in ([], [token.logprob])


def test_echo_lists_the_prompt_as_a_forward_scores_it(served, folder):
    ids, other = encode(served, PROMPT + " # é\n"), encode(served, "import os")
    answer = complete(
        served, prompt=[ids, other], echo=True, logprobs=2, max_tokens=1, temperature=0
    )
    target, _ = models.load(folder)
    for choice, prompt in zip(answer.choices, (ids, other), strict=True):
        form = choice.logprobs
        assert len(form.tokens) == len(form.token_logprobs) == len(prompt) + 1
        assert form.token_logprobs[0] is form.top_logprobs[0] is None
        (scores,) = specjax.score(target, [prompt])
        np.testing.assert_allclose(form.token_logprobs[1:-1], scores.logprobs[1:], atol=1e-4)
        likeliest = [max(top.values()) for top in form.top_logprobs[1:-1]]
        is_top = [x == y for x, y in zip(form.token_logprobs[1:-1], likeliest, strict=True)]
        assert is_top == scores.is_argmax[1:].tolist()
        for value, top in zip(form.token_logprobs[1:], form.top_logprobs[1:], strict=True):
            assert value in top.values()
            assert value <= max(top.values())
        # The generated token is the likeliest, by the same float.
        assert form.token_logprobs[-1] == max(form.top_logprobs[-1].values())
        text = choice.text
        assert text.startswith(PROMPT if prompt is ids else "import os")
        assert form.text_offset[0] == 0


def test_a_stream_echoes_what_a_whole_answer_does(served):
    arguments = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": 9, "seed": 1}
    whole = complete(served, **arguments).choices[0]
    parts = [chunk.choices[0] for chunk in complete(served, stream=True, **arguments)]
    assert "".join(part.text for part in parts) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        values = [x for part in parts if part.logprobs for x in getattr(part.logprobs, name)]
        assert values == getattr(whole.logprobs, name)


def test_an_echo_without_new_tokens_is_the_prompt_alone(served):
    arguments = {"prompt": PROMPT, "echo": True, "logprobs": 2, "seed": 1}
    longer = complete(served, max_tokens=1, **arguments).choices[0].logprobs
    answer = complete(served, max_tokens=0, n=2, **arguments)
    for choice in answer.choices:
        assert (choice.text, choice.finish_reason) == (PROMPT, "length")
        assert choice.logprobs.tokens == longer.tokens[:-1]
        assert choice.logprobs.token_logprobs == longer.token_logprobs[:-1]
        assert choice.logprobs.text_offset == longer.text_offset[:-1]
    assert answer.usage.completion_tokens == 0
    assert answer.usage.total_tokens == answer.usage.prompt_tokens == len(longer.tokens) - 1
    del arguments["logprobs"]
    parts = [x.choices[0] for x in complete(served, max_tokens=0, stream=True, **arguments)]
    assert "".join(part.text for part in parts) == PROMPT
    assert parts[-1].finish_reason == "length"


def test_a_token_that_ends_the_text_is_listed_and_not_written(served, monkeypatch):
    ids = encode(served, PROMPT)
    first = complete(served, prompt=ids, max_tokens=1, temperature=0, logprobs=1).choices[0]
    end = served.service.texts.bytes.index(first.text.encode())
    codec = served.service.codec._replace(eos_token_ids=(end,))
    monkeypatch.setattr(served.service, "codec", codec)
    answer = complete(
        served, prompt=ids, max_tokens=1, temperature=0, logprobs=1, echo=True
    ).choices[0]
    assert answer.finish_reason in ("stop", "length")
    assert len(answer.logprobs.tokens) == len(ids) + 1
    assert answer.logprobs.token_logprobs[-1] == first.logprobs.token_logprobs[0]
    longer = complete(served, prompt=ids, max_tokens=9, temperature=0).choices[0]
    assert longer.finish_reason == "stop"
    assert served.service.engine.state == "running"


def test_any_number_of_stop_strings_end_a_text(served):
    whole = complete(served, prompt=PROMPT, seed=2, max_tokens=30).choices[0].text
    stop = [f"<{i}>" for i in range(50)] + [whole[10:13]]
    cut = complete(served, prompt=PROMPT, seed=2, max_tokens=30, stop=stop).choices[0]
    assert cut.finish_reason == "stop"
    assert whole.startswith(cut.text)
    assert whole[10:13] not in cut.text
    assert complete(served, prompt=PROMPT, seed=2, max_tokens=30, stop=[]).choices[0].text == whole


def test_texts_follow_a_json_schema_that_is_read_once(served, monkeypatch):
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "boolean"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "ab", "schema": schema, "strict": True}}
    read, schemas = served.service.matchers_of, []
    monkeypatch.setattr(served.service, "matchers_of", lambda x: schemas.append(x) or read(x))
    answer = chat(served, n=2, seed=1, max_tokens=100, response_format=form)
    assert schemas == [schema]
    for choice in answer.choices:
        value = json.loads(choice.message.content)
        assert value.keys() == {"a", "b"}
    for schema, words in (({"type": "x"}, "grammar"), ({"$ref": "#"}, "may refer to itself")):
        wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(Exception, match=words) as error:
            chat(served, response_format=wrong)
        assert error.value.status_code == 400
        assert error.value.param == "response_format"


def test_schemas_that_are_slow_to_read_hold_up_nothing_else(served, monkeypatch):
    read, has_begun, may_end = served.service.matchers_of, threading.Event(), threading.Event()

    def read_slowly(schema):
        has_begun.set()
        assert may_end.wait(60)
        return read(schema)

    monkeypatch.setattr(served.service, "matchers_of", read_slowly)
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        form = {"type": "json_object"}
        answers = [pool.submit(chat, served, max_tokens=2, response_format=form) for _ in range(6)]
        try:
            assert has_begun.wait(60)
            time.sleep(0.1)  # For the others to come.
            assert encode(served, "hi")
            assert complete(served, prompt="a", max_tokens=1).usage.completion_tokens == 1
            assert not any(answer.done() for answer in answers)
        finally:
            may_end.set()
        assert all(answer.result().usage.completion_tokens == 2 for answer in answers)


def test_refusals_are_errors_of_the_client_with_the_name_of_the_field(served):
    import openai

    with pytest.raises(openai.BadRequestError) as error:
        chat(served, tools=[{"type": "function", "function": {"name": "f"}}])
    assert error.value.param == "tools"
    assert error.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        served.client.responses.create(model="tiny", input="hi")
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        served.client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="at most 128") as error:
        complete(served, prompt=[1] * 120, max_tokens=20)
    assert error.value.code == "context_length_exceeded"
    for prompt in ("", [""], [[]], [[1], []]):
        with pytest.raises(openai.BadRequestError, match="no tokens") as error:
            complete(served, prompt=prompt)
        assert error.value.param == "prompt"
    with pytest.raises(openai.BadRequestError, match="at most 32"):  # --max-waiting
        complete(served, prompt=["a"] * 33)
    with pytest.raises(openai.BadRequestError, match=r"the model/chat_template\.jinja cannot"):
        chat(served, "raise")
    assert [model.id for model in served.client.models.list()] == ["tiny"]
    assert served.client.models.retrieve("tiny").owned_by == "specjax"


def test_a_full_queue_is_429_with_a_time_and_takes_none_of_the_request(served):
    import openai

    engine = served.service.engine
    with engine.engine._scheduler._step_lock:
        waiting = engine.submit([1], seed=0, max_new_tokens=1)
        with pytest.raises(openai.RateLimitError) as error:
            complete(served, prompt=[[1]] * 2, n=16, max_tokens=50)
    assert waiting.result().finish_reason == "length"
    assert error.value.response.headers["retry-after"] == "1"
    assert "x-should-retry" not in error.value.response.headers
    until(lambda: engine.engine.num_running + engine.engine.num_waiting == 0)


def test_two_bodies_of_many_prompts_let_another_client_in_and_get_the_same_texts(served):
    service, engine = served.service, served.service.engine

    def submit(num_prompts, **body):
        prompts = [[i + 1] for i in range(num_prompts)]
        body |= {"prompt": prompts, "seed": 1, "max_tokens": 3}
        return service.submit(read_completion(body, service.limits))

    with engine.engine._scheduler._step_lock:
        bodies = [submit(10), submit(10)]
        other = submit(1, n=2)
        order = engine.engine._scheduler.queue.waiting()
    # After two prompts of the first body and one of the second.
    assert order.index(other[0].stream.request) == 3
    first, second = ([one.stream.result().token_ids for one in body] for body in bodies)
    assert first == second


def test_a_request_that_takes_too_long_is_an_error_within_a_stream_too(served, monkeypatch):
    import openai

    limits = served.service.limits._replace(max_seconds=1e-3)
    monkeypatch.setattr(served.service, "limits", limits)
    with pytest.raises(openai.APIStatusError) as error:
        complete(served, prompt="a", max_tokens=100)
    assert error.value.status_code == 504
    assert error.value.code == "timed_out"
    stream = complete(served, prompt="a", max_tokens=100, stream=True)
    with pytest.raises(openai.APIError, match="timeout"):
        list(stream)
    body = {"prompt": "a", "max_tokens": 100, "stream": True}
    assert served.http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")


def test_the_tokenizer_is_served_as_lm_eval_asks_for_it(served):
    info = served.http.get("/tokenizer_info").json()
    assert info["eos_token"] == served.service.texts.text_of(0)
    assert "messages" in info["chat_template"]
    asked = {"prompt": PROMPT, "add_special_tokens": True, "return_token_strs": True}
    answer = served.http.post("/tokenize", json=asked).json()
    ids, names = answer["tokens"], answer["token_strs"]
    assert [served.service.codec.tokenizer.token_to_id(name) for name in names] == ids
    assert served.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == PROMPT
    messages = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}
    answer = served.http.post("/tokenize", json=messages).json()
    assert (answer["count"], answer["token_strs"]) == (len(answer["tokens"]), None)
    assert answer["count"] == chat(served, max_tokens=1).usage.prompt_tokens
    refused = served.http.post("/tokenize", json=messages | {"add_generation_prompt": False})
    assert refused.json()["error"]["param"] == "add_generation_prompt"


def test_metrics_count_what_prometheus_reads(served):
    def read():
        lines = served.http.get("/metrics").text.splitlines()
        return {x.split()[0]: float(x.split()[1]) for x in lines if not x.startswith("#")}

    before = read()
    complete(served, prompt="a", max_tokens=9)
    until(lambda: read()["specjax_tokens_total"] == before["specjax_tokens_total"] + 9)
    after = read()
    assert after["specjax_slots"] == 4
    assert (
        after['specjax_drafted_total{position="3"}']
        >= after['specjax_accepted_total{position="3"}']
    )
    assert 0 < after["specjax_occupancy"] <= 1
    assert served.http.get("/health").json() == {"status": "running"}


def test_200_kinds_of_hostile_bodies_give_no_500_and_leave_the_server_as_it_was(
    served, monkeypatch
):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.serve.hostile import hostile_bodies

    bodies = hostile_bodies()
    assert len(bodies) >= 200

    def post(body):
        path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
        return served.http.post(path, content=body).status_code

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(post, bodies))
    assert {200, 400, 413} <= set(statuses) <= {200, 400, 404, 413, 429}
    engine = served.service.engine.engine
    until(lambda: engine.num_running + engine.num_waiting == 0)
    assert complete(served, prompt="a", max_tokens=1).usage.completion_tokens == 1


def open_stream(served, **body):
    """Sends a request by a socket, and returns the socket."""
    host, port = served.address.removeprefix("http://").split(":")
    data = json.dumps(body | {"stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(data)}\r\n\r\n"
    client = socket.create_connection((host, int(port)))
    client.sendall(head.encode() + data)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_leaves_no_slot_taken(served, stream):
    server, engine = served.service.engine, served.service.engine.engine
    before = server.totals.num_requests.get("aborted", 0)
    clients = [
        open_stream(served, prompt="a", max_tokens=120, n=2, stream=stream) for _ in range(5)
    ]
    until(lambda: engine.num_running + engine.num_waiting > 3)
    for client in clients:
        client.close()
    until(lambda: engine.num_running + engine.num_waiting == 0)
    until(lambda: server.totals.num_requests.get("aborted", 0) > before)


def test_a_key_is_asked_for(served):
    import httpx

    from specjax.contrib.serve.app import make_app

    transport = httpx.ASGITransport(make_app(served.service, api_key="secret"))

    async def get(path, key=None):
        headers = {} if key is None else {b"authorization": key.encode()}
        async with httpx.AsyncClient(transport=transport, base_url="http://a") as http:
            return await http.get(path, headers=headers)

    assert asyncio.run(get("/health")).status_code == 200
    assert asyncio.run(get("/v1/models", "Bearer secret")).status_code == 200
    for key in (None, "", "Bearer", "Bearer secre", "Bearer secret2", "secret", "Bearer s\u00e9"):
        answer = asyncio.run(get("/v1/models", key))
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
