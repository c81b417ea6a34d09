"""Answers without a socket: a client that reads slowly, and one that goes at any moment."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from specjax.contrib.serve.parameters import read_completion

pytestmark = [pytest.mark.lenient, pytest.mark.once]

BODY = {"prompt": "def f(", "seed": 4, "max_tokens": 100, "stream": True}


async def answer(service, executor, receive, send, **fields):
    from specjax.contrib.serve.answers import TextAnswer
    from specjax.contrib.serve.responses import CompletionReply

    def read():
        return read_completion(BODY | fields, service.limits)

    await TextAnswer(service, read, CompletionReply, executor, executor)(
        {"type": "http"}, receive, send
    )


def texts_of(messages):
    events = b"".join(message.get("body", b"") for message in messages).split(b"\n\n")
    chunks = [json.loads(x.removeprefix(b"data: ")) for x in events if x and b"[DONE]" not in x]
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


def test_chunks_of_a_slow_client_merge_and_lose_nothing(served):
    async def read(seconds):
        messages = []

        async def send(message):
            messages.append(message)
            await asyncio.sleep(seconds)

        with ThreadPoolExecutor(1) as executor:
            await answer(served.service, executor, asyncio.Event().wait, send)
        return texts_of(messages)

    served.service.limits = served.service.limits._replace(chunk_seconds=0)
    fast, slow = asyncio.run(read(0)), asyncio.run(read(0.2))
    assert "".join(fast) == "".join(slow)
    assert len(slow) <= len(fast) // 2


@pytest.mark.parametrize("delay", [0, 1e-4, 1e-3, 0.01, 0.05])
def test_a_client_that_goes_at_any_moment_leaves_no_request(served, delay):
    engine = served.service.engine.engine

    async def go():
        async def receive():
            await asyncio.sleep(delay)
            return {"type": "http.disconnect"}

        async def send(message):
            await asyncio.sleep(0)

        with ThreadPoolExecutor(1) as executor:
            await answer(served.service, executor, receive, send, n=3, stream=delay > 1e-3)
            # A thread may still submit.
        await asyncio.sleep(0)

    asyncio.run(go())
    end = time.monotonic() + 10
    while engine.num_running + engine.num_waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert engine.num_running + engine.num_waiting == 0


def test_sigterm_ends_the_command_when_what_runs_has_ended(served, folder):
    import httpx

    program = "import sys; from specjax.cli import main; sys.exit(main())"
    options = ["--target", str(folder), "--port", "0", "--max-length", "128", "--num-slots", "2"]
    options += ["--draft", "none", "--no-penalties", "--no-schemas"]
    server = subprocess.Popen(
        [sys.executable, "-c", program, "serve", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        line = server.stderr.readline()
        assert line.startswith("tiny at http://127.0.0.1:"), line
        body = BODY | {"n": 4, "logprobs": 0}
        with httpx.stream("POST", line.split()[2] + "/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            rest = list(lines)
        chunks = [json.loads(x.removeprefix("data: ")) for x in rest if x.startswith("data: {")]
        reasons = [x["choices"][0]["finish_reason"] for x in chunks]
        assert sum(reason is not None for reason in reasons) == 4
        assert rest[-2:] == ["data: [DONE]", ""]
        assert server.wait(30) == 0, server.stderr.read()
    finally:
        server.kill()
        server.communicate()
