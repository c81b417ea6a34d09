"""Counts the texts that are others in other company, with `row_invariant` and without it.

python -m benchmarks.invariant_texts --out benchmarks/results/cpu_invariant_texts.json
python -m benchmarks.invariant_texts --target SmolLM2-135M-Instruct --texts 8 --new-tokens 32

The target, embedded or of a folder, decodes each text alone, without drafts, at temperatures 0, 0.7
and 1. Each case decodes the same texts otherwise: in batches, by drafts with the rule "coupled" (of
prompt lookup, and of the embedded target's own drafters), from prompts in other chunks, by an
engine that preempts. Equal are texts of the same tokens, and of the same bits of log-probabilities.
Runs on a CPU and on a GPU.
"""

import argparse
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax
from benchmarks.gpu.verify import environment, save
from specjax.models import load, load_drafter, load_tokenizer, pretrained_folder

TEXTS = ("import numpy as np", "The model reads", "def main(", "In the year", "class Stack:\n")
TEMPERATURES = (0.0, 0.7, 1.0)


class Load(NamedTuple):
    """How many texts, of how many new tokens, and the tokens that a row of the cache holds."""

    num_texts: int
    new_tokens: int
    max_length: int


QUICK = Load(6, 8, 48)
# Tokens and log-probabilities of each text.
Texts = list[tuple[np.ndarray, np.ndarray]]


class Bench:
    """The target, its drafters, and the texts' prompts, keys and temperatures."""

    def __init__(self, folder: pathlib.Path, dtype: str, size: Load, row_invariant: bool) -> None:
        self.size = size
        self.target, _ = load(folder, dtype, row_invariant=row_invariant)
        # Name: K, and the drafter.
        self.drafters = {"prompt lookup": (3, specjax.ngram_drafter())}
        if folder == pretrained_folder("target"):
            for name, k, part in (("draft model", 1, "draft"), ("EAGLE-3", 5, "eagle3")):
                self.drafters[name] = k, load_drafter(pretrained_folder(part), self.target)
        tokenizer = load_tokenizer(folder)
        room = size.max_length - size.new_tokens
        prompts = [tokenizer.encode(text).ids for text in TEXTS]
        self.prompts = [
            (prompts[i % len(TEXTS)] * (1 + i % 12))[:room] for i in range(size.num_texts)
        ]
        self.keys = jax.vmap(jax.random.key)(np.arange(size.num_texts))
        self.temperature = np.resize(np.float32(TEMPERATURES), size.num_texts)

    def decode(
        self, together: int, drafter: Any = None, k: int = 1, chunk: int | None = None
    ) -> Texts:
        """The texts, so many at a time, the last ones first."""
        options = specjax.LoopOptions(max_length=self.size.max_length, prefill_chunk_size=chunk)
        config = specjax.SpeculativeConfig(k, rejection_sample_method="coupled")
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for start in range(0, self.size.num_texts, together):
            group = np.arange(self.size.num_texts)[::-1][start : start + together]
            output = specjax.generate(
                self.target,
                drafter,
                [self.prompts[b] for b in group],
                keys=self.keys[group],
                max_new_tokens=self.size.new_tokens,
                temperature=self.temperature[group],
                options=options,
                config=config,
            )
            for row, b in enumerate(group):
                begin, end = len(self.prompts[b]), int(output.lengths[row])
                values = (output.token_ids, output.logprobs)
                found[int(b)] = tuple(np.asarray(x[row, begin:end]) for x in values)
        return [found[b] for b in range(self.size.num_texts)]

    def serve(self, num_slots: int, drafter: Any, k: int) -> Texts:
        """The texts by an engine in which each request loses its slot and its cache once."""
        options = specjax.LoopOptions(max_length=self.size.max_length)
        config = specjax.SpeculativeConfig(k, rejection_sample_method="coupled")
        engine = specjax.Engine(
            self.target, drafter, num_slots=num_slots, options=options, config=config
        )
        requests = [
            engine.submit(
                prompt, key=key, max_new_tokens=self.size.new_tokens, temperature=float(temperature)
            )
            for prompt, key, temperature in zip(
                self.prompts, self.keys, self.temperature, strict=True
            )
        ]
        untouched = list(requests)
        while engine.step():
            for request in [each for each in untouched if len(each.token_ids) > 2]:
                engine.preempt(request, drops_cache=True)
                untouched.remove(request)
        return [(np.array(each.token_ids), np.float32(each.logprobs)) for each in requests]


def cases(bench: Bench) -> Iterator[tuple[str, Callable[[], Texts]]]:
    """Names of the cases, and functions that decode the texts so."""
    size = bench.size.num_texts
    yield "all at once", lambda: bench.decode(size)
    yield "seven at once, chunks of 16", lambda: bench.decode(7, chunk=16)
    yield "all at once, chunks of 1024", lambda: bench.decode(size, chunk=1024)
    for name, (k, drafter) in bench.drafters.items():
        yield f"{name}, K = {k}", lambda k=k, drafter=drafter: bench.decode(size, drafter, k)
    _, lookup = bench.drafters["prompt lookup"]
    yield "alone, prompt lookup, K = 7", lambda: bench.decode(1, lookup, 7)
    yield "engine of 5 slots, preempted", lambda: bench.serve(5, lookup, 3)


def count(found: Texts, wanted: Texts) -> dict[str, int]:
    """How many texts have another token, and how many another bit."""
    pairs = list(zip(found, wanted, strict=True))
    tokens = sum(not np.array_equal(x[0], y[0]) for x, y in pairs)
    bits = sum(not all(np.array_equal(*z) for z in zip(x, y, strict=True)) for x, y in pairs)
    return {"other_tokens": tokens, "other_bits": bits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON")
    embedded = pretrained_folder("target")
    parser.add_argument("--target", type=pathlib.Path, default=embedded, help="its folder")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=128, help="of each text")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--quick", action="store_true", help="few and short texts, no file")
    args = parser.parse_args()
    command = shlex.join(["python", "-m", "benchmarks.invariant_texts", *sys.argv[1:]])
    size = QUICK if args.quick else Load(args.texts, args.new_tokens, 192 + args.new_tokens)
    for dtype in args.dtypes:
        section: dict[str, Any] = {"environment": environment() | {"command": command}, "cases": []}
        for row_invariant in (True, False):
            start = time.perf_counter()
            bench = Bench(args.target, dtype, size, row_invariant)
            wanted = bench.decode(1)
            seconds_alone = time.perf_counter() - start
            for name, decode in cases(bench):
                record = {"case": name, "dtype": dtype, "row_invariant": row_invariant}
                record |= {"texts": size.num_texts, "new_tokens": size.new_tokens}
                record |= count(decode(), wanted) | {"seconds_alone": seconds_alone}
                section["cases"].append(record)
                save(None if args.quick else args.out, dtype, section)
                print(
                    f"{dtype:9} {'on ' if row_invariant else 'off'} {name:30} of {size.num_texts} "
                    f"texts {record['other_tokens']} have other tokens, {record['other_bits']} "
                    "other bits",
                    flush=True,
                )


if __name__ == "__main__":
    main()
