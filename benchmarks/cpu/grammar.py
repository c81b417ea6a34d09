"""Times `json_schema_grammar` with maxLength at a real vocabulary's size, and its peak of memory.

python -m benchmarks.cpu.grammar --tiktoken qwen.tiktoken --out benchmarks/results/cpu_grammar.json

Each grammar is made in a process of its own, whose memory is counted whole: Python, jax and the
vocabulary among it. Bounds are of the seconds of a processor, as others may share it. One
vocabulary has numbered words. One has pieces that are harder than a language's: 1 to 128 bytes,
runs of one letter, and bytes of cut characters. `--tiktoken` names a file of a real vocabulary, a
base64 token and its id in each line.
"""

import argparse
import base64
import json
import multiprocessing
import pathlib
import random
import resource
import sys
import time
from typing import Any

from benchmarks.record import environment, save

V = 151936
LENGTHS = (50, 255, 1000, 10**9)
MAX_SECONDS, MAX_MEGABYTES = 10.0, 1000


def words(vocab_size: int) -> list[bytes]:
    """Single bytes, then numbered words."""
    single = [b"", *(bytes([value]) for value in range(256))]
    return single + [f"w{i}".encode() for i in range(vocab_size - len(single))]


def pieces(vocab_size: int) -> list[bytes]:
    """Single bytes, then distinct pieces of texts in many letters, some of them cut."""
    rng = random.Random(0)
    letters = "etaoinsrhldcumfpgwybvkxjqz" * 4 + 'ABCDEF0123456789     .,-_/\\\\""{}[]:\u00e9\u0434'
    others = "\u20ac\u4e2d\u65e5\ud55c\U0001f600\U00010348"
    found = dict.fromkeys([b"", *(bytes([value]) for value in range(256))])
    while len(found) < vocab_size:
        length = min(1 + int(rng.expovariate(1 / 6)), 64)
        text = "".join(rng.choices(letters + others, k=length)).encode()
        kind = rng.random()
        if kind < 0.02:
            text = rng.choice(letters).encode() * rng.randrange(2, 129)
        elif kind < 0.1:
            text = text[rng.randrange(3) : len(text) - rng.randrange(3)]
        found[text] = None
    return list(found)


def tiktoken(path: pathlib.Path, vocab_size: int) -> list[bytes]:
    """The vocabulary of a file of lines `base64 id`, and ids without a token."""
    vocabulary = [b""] * vocab_size
    for line in path.read_text(encoding="ascii").split("\n"):
        if line:
            text, token = line.split()
            vocabulary[int(token)] = base64.b64decode(text)
    return vocabulary


def measure(name: str, path: pathlib.Path | None, vocab_size: int, length: int) -> dict[str, Any]:
    """Makes one grammar: its size, seconds, and the process' megabytes."""
    from specjax.contrib.grammars import json_schema_grammar

    vocabulary = {"words": words, "pieces": pieces}.get(name, lambda size: tiktoken(path, size))
    tokens = vocabulary(vocab_size)
    begin = time.perf_counter(), time.process_time()
    try:
        schema = {"type": "string", "maxLength": length}
        made = json_schema_grammar(schema, tokens, vocab_size - 1)
        outcome = {"states": made.next_states.shape[0], "classes": made.next_states.shape[1]}
    except ValueError as error:
        outcome = {"refused": str(error)}
    seconds = {
        "seconds": time.perf_counter() - begin[0],
        "processor_seconds": time.process_time() - begin[1],
    }
    # Kibibytes on Linux.
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    case = {"vocabulary": name, "max_length": length} | outcome | seconds
    return case | {"peak_megabytes": megabytes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiktoken", type=pathlib.Path, help="a file of a real vocabulary")
    parser.add_argument("--vocab-size", type=int, default=V)
    parser.add_argument("--out", type=pathlib.Path, help="write the JSON there")
    parser.add_argument("--check", action="store_true", help="fail if a bound is missed")
    args = parser.parse_args()

    names = ["words", "pieces", *([args.tiktoken.name] if args.tiktoken else [])]
    cases = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in names:
            for length in LENGTHS:
                case = pool.apply(measure, (name, args.tiktoken, args.vocab_size, length))
                most = 1.0 if "refused" in case else MAX_SECONDS
                case["holds"] = (
                    case["processor_seconds"] < most and case["peak_megabytes"] < MAX_MEGABYTES
                )
                cases.append(case)
                print(json.dumps(case), flush=True)
    result = {
        "environment": environment(),
        "inputs": {"V": args.vocab_size, "schema": '{"type": "string", "maxLength": max_length}'},
        "bounds": {
            "processor_seconds": MAX_SECONDS,
            "peak_megabytes": MAX_MEGABYTES,
            "refused": 1.0,
        },
        "cases": cases,
    }
    save(args.out, result)
    if args.check and not all(case["holds"] for case in cases):
        sys.exit("A bound is missed.")


if __name__ == "__main__":
    main()
