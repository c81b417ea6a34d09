"""Times 64 clients that stream from a server, next to the same requests on its engine without HTTP.

python -m benchmarks.serve.throughput --out benchmarks/results/h100_serve.json
python -m benchmarks.serve.throughput --quick

The models have the shapes of Llama 3.1 8B and its EAGLE-3 head, with random weights and synthetic
acceptance, as in `benchmarks.gpu.batches`; --quick has small ones. The clients are another process,
as they would be. Each round has all requests sent at once. It records

    ratio of tokens per second     engine: first submission to last token; server: to last byte
    ratio of first tokens          medians over the requests of a round, until the first event

and the engine with the fields that `specjax serve` compiles by default next to one without.
"""

import argparse
import asyncio
import json
import pathlib
import socket
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import jax
import tokenizers
import uvicorn
from tokenizers import decoders, models

import specjax
from benchmarks.gpu.batches import CONFIG
from benchmarks.gpu.heads import Setup, eagle3
from benchmarks.record import environment, save
from specjax.contrib.serve.app import make_app
from specjax.contrib.serve.codec import Codec
from specjax.contrib.serve.limits import Limits
from specjax.contrib.serve.service import Service

FIELDS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
ENGINES: dict[str, tuple[dict[str, float], bool]] = {
    "no fields": ({}, False),
    "cutoffs": (FIELDS, False),
    "default fields": (FIELDS | PENALTIES, True),
}


class Load(NamedTuple):
    """Sizes of a round.

    Attributes:
      num_clients: of a round, each with one request.
      prompt: tokens of each prompt.
      text: tokens of each text.
      max_length: tokens that a slot holds.
      rounds: on the engine, and on the server; the first of each warms up.
    """

    num_clients: int = 64
    prompt: int = 128
    text: int = 384
    max_length: int = 1024
    rounds: int = 5


QUICK = Load(8, 8, 48, 64, 3)


def word_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """A tokenizer whose every token is a short word, so that each writes text."""
    letters = "abcdefghijklmnop"

    def word(i: int) -> str:
        return "Ġ" + "".join(letters[i >> shift & 15] for shift in (16, 12, 8, 4, 0))

    tokenizer = tokenizers.Tokenizer(models.BPE({word(i): i for i in range(vocab_size)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_engine(setup: Setup, load: Load, name: str, tokenizer: Any) -> specjax.Engine:
    """An engine with these fields, compiled."""
    fields, takes_matchers = ENGINES[name]
    return specjax.Engine(
        setup.target,
        setup.drafter,
        num_slots=load.num_clients,
        options=specjax.LoopOptions(load.max_length),
        sampling=specjax.SamplingParams(**fields) if fields else None,
        config=CONFIG,
        tokenizer=tokenizer,
        takes_matchers=takes_matchers,
    )


def engine_round(engine: specjax.Engine, load: Load) -> dict[str, float]:
    """Tokens per second and the median seconds to a first token, without HTTP."""
    start, first = time.perf_counter(), [0.0] * load.num_clients
    requests = [
        engine.submit([11] * load.prompt, seed=5, max_new_tokens=load.text)
        for _ in range(load.num_clients)
    ]
    is_busy = True
    while is_busy:
        is_busy = engine.step()
        now = time.perf_counter() - start
        first = [
            seconds or (now if request.token_ids else 0.0)
            for seconds, request in zip(first, requests, strict=True)
        ]
    tokens = sum(len(request.token_ids) for request in requests)
    return {"tokens_per_s": tokens / now, "first_token_s": statistics.median(first)}


def server_round(port: int, load: Load) -> dict[str, float]:
    """Returns the rates of one round of clients, which are another process."""
    body = {"prompt": [11] * load.prompt, "seed": 5, "max_tokens": load.text, "stream": True}
    body["stream_options"] = {"include_usage": True}
    arguments = [str(port), str(load.num_clients), json.dumps(body)]
    command = [sys.executable, "-m", "benchmarks.serve.clients", *arguments]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    first, last, tokens, reads = zip(*json.loads(output), strict=True)
    return {
        "tokens_per_s": sum(tokens) / max(last),
        "first_token_s": statistics.median(first),
        "chunks_per_stream": statistics.mean(reads),
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of all rounds but the first, and all values."""
    names = rounds[0]
    middle = {name: statistics.median(one[name] for one in rounds[1:]) for name in names}
    return middle | {"rounds": rounds}


def measure(setup: Setup, load: Load, name: str, chunk_seconds: float) -> dict[str, Any]:
    """A record of an engine, alone and then as a server."""
    tokenizer = word_tokenizer(setup.config.vocab_size)
    engine = make_engine(setup, load, name, tokenizer)
    alone = [engine_round(engine, load) for _ in range(load.rounds)]
    limits = Limits(load.max_length, setup.config.vocab_size, chunk_seconds=chunk_seconds)
    codec = Codec(tokenizer, lambda *_: [], lambda _: "", (), {})
    service = Service(specjax.AsyncEngine(engine), codec, "benchmark", limits)
    server = uvicorn.Server(uvicorn.Config(make_app(service), log_level="error", access_log=False))
    bound = socket.create_server(("127.0.0.1", 0), backlog=2048)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    thread.start()
    try:
        served = [server_round(bound.getsockname()[1], load) for _ in range(load.rounds)]
    finally:
        server.should_exit = True
        thread.join()
    one, other = medians(alone), medians(served)
    return {
        "case": name,
        "chunk_seconds": chunk_seconds,
        "ratio_of_tokens": other["tokens_per_s"] / one["tokens_per_s"],
        "ratio_of_first_tokens": other["first_token_s"] / one["first_token_s"],
        "engine": one,
        "server": other,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--chunk-ms", type=float, nargs="+", default=[0, 30])
    parser.add_argument("--clients", type=int, help="default: 64, with --quick 8")
    parser.add_argument("--quick", action="store_true", help="small models, on any device")
    args = parser.parse_args()
    if not args.quick and jax.default_backend() != "gpu":
        sys.exit("JAX sees no GPU here; --quick runs on a CPU.")
    load = QUICK if args.quick else Load()
    load = load if args.clients is None else load._replace(num_clients=args.clients)
    setup = eagle3(args.quick)
    section: dict[str, Any] = {"environment": environment(), "cases": []}
    for name in args.engines:
        for chunk_ms in args.chunk_ms:
            record = measure(setup, load, name, 1e-3 * chunk_ms)
            section["cases"].append(record)
            save(args.out, {"serve": section})
            rates = [record[part]["tokens_per_s"] for part in ("engine", "server")]
            print(
                f"{name:15} {chunk_ms:3g} ms: {rates[0]:.0f} and {rates[1]:.0f} tokens/s, ratios "
                f"{record['ratio_of_tokens']:.3f} and {record['ratio_of_first_tokens']:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
