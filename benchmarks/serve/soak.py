"""Sends thousands of requests to `specjax serve`, lets some clients leave, and checks for leaks.

python -m benchmarks.serve.soak --out benchmarks/results/cpu_serve_soak.json

The server is a process of its own, of a small model. A seed draws the fields of each request. Two
in five clients close the socket after a drawn time: while the request waits in the queue, while its
prompt is read, or in the middle of a stream. Meanwhile one client asks for /health again and again.
At the end no request may run or wait, and memory and threads are those after the first tenth.
Memory is noted after each tenth.
"""

import argparse
import asyncio
import collections
import json
import pathlib
import random
import re
import sys
import tempfile
import time
from typing import Any

import jax
import numpy as np

from benchmarks.record import environment, save
from benchmarks.serve.clients import request_of
from benchmarks.serve.process import server
from specjax import models

MODEL = models.TransformerConfig(
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    eos_token_ids=(0,),
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
OPTIONS = ["--num-slots", "8", "--max-length", "128", "--max-waiting", "256", "--max-logprobs", "5"]
LEAVES, MOST_SECONDS = 0.4, 0.15
# What may be left more than after the first tenth, of the allocators of Python and of C.
MOST_KILOBYTES = 8 * 1024


def draw_request(draw: random.Random) -> bytes:
    """A request of HTTP: a completion or a chat, streamed or not, of up to three texts."""
    body: dict[str, Any] = {
        "stream": draw.random() < 0.7,
        "max_tokens": draw.randint(1, 40),
        "n": draw.choice((1, 1, 1, 2, 3)),
        "temperature": draw.choice((0, 0.7, 1)),
        "stop": ["\n\n"] * draw.randint(0, 1),
    }
    if draw.random() < 0.2:
        body |= {"top_p": 0.9, "frequency_penalty": 0.5}
    if draw.random() < 0.5:
        body["prompt"] = [draw.randrange(1, 4096) for _ in range(draw.randint(1, 80))]
        if draw.random() < 0.3:
            body |= {"echo": True, "logprobs": draw.randint(0, 5)}
        return request_of(json.dumps(body).encode())
    body["messages"] = [{"role": "user", "content": "def f(x): " * draw.randint(1, 5)}]
    if draw.random() < 0.05:
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        schema = {"name": "a", "schema": schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return request_of(json.dumps(body).encode(), "/v1/chat/completions")


async def send(port: int, request: bytes, leaves_after: float | None) -> str:
    """The status of a request, or that its client left."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        async with asyncio.timeout(leaves_after):
            answer = await reader.read(-1)
    except TimeoutError:
        return "left"
    finally:
        writer.close()
    status = answer[9:12].decode()
    is_stream = b"text/event-stream" in answer
    return "cut off" if is_stream and not answer.endswith(b"[DONE]\n\n\r\n0\r\n\r\n") else status


async def ask(port: int, path: str) -> str:
    """The body of an answer."""
    head = f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head.encode())
    answer = await reader.read(-1)
    writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


async def soak(port: int, numbers: range, clients: int, seed: int) -> collections.Counter[str]:
    """Sends the requests of these numbers, `clients` at once; counts what came of them."""
    counts, waiting = collections.Counter[str](), iter(numbers)

    async def run() -> None:
        for number in waiting:
            draw = random.Random(f"{seed} {number}")
            request, leaves = draw_request(draw), draw.random() < LEAVES
            after = draw.random() * MOST_SECONDS if leaves else None
            counts[await send(port, request, after)] += 1

    await asyncio.gather(*(run() for _ in range(clients)))
    return counts


async def state(port: int, pid: int) -> dict[str, Any]:
    """Returns the requests, memory, threads and files of a server without work."""
    deadline = time.monotonic() + 30
    while True:
        lines = [line.split() for line in (await ask(port, "/metrics")).splitlines()]
        values = {line[0]: float(line[1]) for line in lines if line[0] != "#"}
        busy = values["specjax_running"], values["specjax_waiting"]
        if busy == (0, 0) or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.1)
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    files = len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir()))
    return {
        "running": int(busy[0]),
        "waiting": int(busy[1]),
        "rss_kilobytes": int(found["VmRSS"]),
        "threads": int(found["Threads"]),
        "files": files,
    }


async def watch(port: int, seconds: list[float]) -> None:
    """Asks for /health again and again, and notes how long each answer took."""
    while True:
        start = time.perf_counter()
        await ask(port, "/health")
        seconds.append(time.perf_counter() - start)
        await asyncio.sleep(0.02)


async def measure(port: int, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """The record of a soak: a tenth of the requests warms the server up."""
    first = args.requests // 10
    counts = await soak(port, range(first), args.clients, args.seed)
    before, health, start = await state(port, pid), list[float](), time.perf_counter()
    watching = asyncio.ensure_future(watch(port, health))
    memory = []
    for begin in range(first, args.requests, first):
        counts += await soak(port, range(begin, begin + first), args.clients, args.seed)
        memory.append((await state(port, pid))["rss_kilobytes"])
    seconds = time.perf_counter() - start
    watching.cancel()
    after = await state(port, pid)
    return {
        "requests": args.requests,
        "clients": args.clients,
        "seconds": round(seconds, 1),
        "outcomes": dict(sorted(counts.items())),
        "health_ms": {
            name: round(1e3 * float(np.quantile(health, share)), 2)
            for name, share in (("median", 0.5), ("99 %", 0.99), ("longest", 1))
        },
        "before": before,
        "after": after,
        "rss_kilobytes": memory,
        "health": json.loads(await ask(port, "/health")),
    }


def write_model(folder: pathlib.Path) -> pathlib.Path:
    """Writes a small model; returns its folder."""
    params = jax.device_get(models.build(MODEL).params)
    models.save(folder, params, MODEL, models.load_tokenizer(models.pretrained_folder("target")))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def faults(record: dict[str, Any]) -> list[str]:
    """Returns the names of what the soak left taken, and of unexpected outcomes."""
    before, after = record["before"], record["after"]
    found = [name for name in ("running", "waiting") if after[name]]
    found += [name for name in ("threads", "files") if after[name] > before[name]]
    if after["rss_kilobytes"] > before["rss_kilobytes"] + MOST_KILOBYTES:
        found.append("rss_kilobytes")
    return found + [name for name in record["outcomes"] if name not in ("200", "429", "left")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(pathlib.Path(name, "small"))
        with server(folder, *OPTIONS) as (port, pid):
            record = asyncio.run(measure(port, pid, args))
    record = {"environment": environment()} | record
    print(json.dumps(record, indent=1))
    save(args.out, record)
    if found := faults(record):
        sys.exit(f"wrong: {', '.join(found)}")


if __name__ == "__main__":
    main()
