"""Counts the texts that are others in other company, with `row_invariant` and without it.

python -m benchmarks.invariant_texts --out benchmarks/results/cpu_invariant_texts.json
python -m benchmarks.invariant_texts --target SmolLM2-135M-Instruct --texts 8 --new-tokens 32
python -m benchmarks.invariant_texts --layers 8 --dtypes bfloat16 --texts 64 --new-tokens 128

The target decodes each text alone, without drafts, at temperatures 0, 0.7 and 1. It is embedded, of
a folder, or of random layers of Llama 3.1 8B. Each case decodes the same texts otherwise: in
batches, by drafts with the rule "coupled" (of prompt lookup, a draft model and an EAGLE-3 head, K =
1, 3, 5 and 7), from prompts in other chunks, by an engine that preempts. The last case scores the
whole texts.
Equal are texts of the same tokens, and of the same bits of log-probabilities: of the distribution
that was sampled, and of the model's at temperature 1. Runs on a CPU and on a GPU.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax
from benchmarks.gpu.decode import SMALL, TARGET
from benchmarks.record import environment, save
from specjax.models import (
    Eagle3Config,
    build,
    build_eagle3,
    eagle3_drafter,
    load,
    load_drafter,
    load_tokenizer,
    pretrained_folder,
)

TEXTS = ("import numpy as np", "The model reads", "def main(", "In the year", "class Stack:\n")
TEMPERATURES = (0.0, 0.7, 1.0)


class Load(NamedTuple):
    """How many texts, of how many new tokens, the tokens of a row of the cache, and each K."""

    num_texts: int
    new_tokens: int
    max_length: int
    ks: tuple[int, ...] = (1, 3, 5, 7)


QUICK = Load(6, 8, 48, (1, 3))
# Tokens of each text, and both log-probabilities of each.
Texts = list[tuple[np.ndarray, ...]]


class Source(NamedTuple):
    """A target, the drafters that are tried with it, and tokens to begin with."""

    target: specjax.Model
    drafters: dict[str, specjax.Drafter]
    prompts: list[list[int]]


def of_folder(folder: pathlib.Path, dtype: str, row_invariant: bool) -> Source:
    """A trained target; the embedded one has a draft model and a head, too."""
    target, _ = load(folder, dtype, row_invariant=row_invariant)
    drafters = {}
    if folder == pretrained_folder("target"):
        for name, part in (("draft model", "draft"), ("EAGLE-3", "eagle3")):
            drafters[name] = load_drafter(pretrained_folder(part), target)
    tokenizer = load_tokenizer(folder)
    return Source(target, drafters, [tokenizer.encode(text).ids for text in TEXTS])


def of_shapes(num_layers: int, dtype: str, row_invariant: bool, quick: bool) -> Source:
    """Layers of Llama 3.1 8B, and a draft model and a head of one layer, with random weights."""
    config = dataclasses.replace(TARGET, **(SMALL if quick else {}), dtype=dtype)
    layer = dataclasses.replace(config, num_hidden_layers=1)
    config = dataclasses.replace(config, num_hidden_layers=num_layers)
    target = build(config, row_invariant=row_invariant)
    draft = build(layer, seed=1, row_invariant=row_invariant)
    taps = (0, num_layers // 2, num_layers)
    head = Eagle3Config(layer, config.hidden_size, config.vocab_size, taps)
    drafters = {
        "draft model": specjax.model_drafter(draft),
        "EAGLE-3": eagle3_drafter(target, head, build_eagle3(head, seed=2)),
    }
    draw = np.random.default_rng(3)
    return Source(target, drafters, [draw.integers(0, 500, 5).tolist() for _ in TEXTS])


class Bench:
    """A source, and the texts' prompts, keys and temperatures."""

    def __init__(self, source: Source, size: Load) -> None:
        self.size, self.target = size, source.target
        self.drafters = {"prompt lookup": specjax.ngram_drafter()} | source.drafters
        room, prompts = size.max_length - size.new_tokens, source.prompts
        self.prompts = [
            (prompts[i % len(prompts)] * (1 + i % 12))[:room] for i in range(size.num_texts)
        ]
        self.keys = jax.vmap(jax.random.key)(np.arange(size.num_texts))
        self.temperature = np.resize(np.float32(TEMPERATURES), size.num_texts)

    def decode(
        self, together: int, drafter: Any = None, k: int = 1, chunk: int | None = None
    ) -> Texts:
        """The texts, so many at a time, the last ones first."""
        options = specjax.LoopOptions(
            max_length=self.size.max_length, prefill_chunk_size=chunk, num_logprobs=0
        )
        config = specjax.SpeculativeConfig(k, rejection_sample_method="coupled")
        found: dict[int, tuple[np.ndarray, ...]] = {}
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
                values = (output.token_ids, output.logprobs, output.top_logprobs.logprob)
                found[int(b)] = tuple(np.asarray(x[row, begin:end]) for x in values)
        return [found[b] for b in range(self.size.num_texts)]

    def serve(self, num_slots: int, drafter: Any, k: int) -> Texts:
        """The texts by an engine in which each request loses its slot and its cache once."""
        options = specjax.LoopOptions(max_length=self.size.max_length, num_logprobs=0)
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
        return [
            (
                np.array(each.token_ids),
                np.float32(each.logprobs),
                np.float32([top.logprob for top in each.top_logprobs]),
            )
            for each in requests
        ]

    def score(self, texts: Texts) -> Texts:
        """The texts with the model's log-probabilities as a score of each whole text has them."""
        whole = [[*prompt, *text[0]] for prompt, text in zip(self.prompts, texts, strict=True)]
        scores = specjax.score(self.target, whole)
        return [
            (*text[:2], score.logprobs[len(prompt) :])
            for prompt, text, score in zip(self.prompts, texts, scores, strict=True)
        ]


def cases(bench: Bench, wanted: Texts) -> Iterator[tuple[str, Callable[[], Texts]]]:
    """Names of the cases, and functions that decode the texts so, or score those decoded alone."""
    size, lookup = bench.size.num_texts, bench.drafters["prompt lookup"]
    yield "all at once", lambda: bench.decode(size)
    yield "seven at once, chunks of 16", lambda: bench.decode(7, chunk=16)
    yield "all at once, chunks of 1024", lambda: bench.decode(size, chunk=1024)
    for (name, drafter), k in itertools.product(bench.drafters.items(), bench.size.ks):
        yield f"{name}, K = {k}", functools.partial(bench.decode, size, drafter, k)
    yield "alone, prompt lookup, K = 7", lambda: bench.decode(1, lookup, 7)
    yield "engine of 5 slots, preempted", lambda: bench.serve(5, lookup, 3)
    yield "scores of the whole texts", lambda: bench.score(wanted)


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
    parser.add_argument("--layers", type=int, help="of an 8B model, instead of a folder")
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=128, help="of each text")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--quick", action="store_true", help="few and short texts, no file")
    args = parser.parse_args()
    size = QUICK if args.quick else Load(args.texts, args.new_tokens, 192 + args.new_tokens)
    for dtype in args.dtypes:
        section: dict[str, Any] = {"environment": environment(), "cases": []}
        for row_invariant in (True, False):
            start = time.perf_counter()
            if args.layers:
                source = of_shapes(args.layers, dtype, row_invariant, args.quick)
            else:
                source = of_folder(args.target, dtype, row_invariant)
            bench = Bench(source, size)
            wanted = bench.decode(1)
            seconds_alone = time.perf_counter() - start
            for name, decode in cases(bench, wanted):
                record = {"case": name, "dtype": dtype, "row_invariant": row_invariant}
                record |= {"texts": size.num_texts, "new_tokens": size.new_tokens}
                record |= count(decode(), wanted) | {"seconds_alone": seconds_alone}
                section["cases"].append(record)
                save(None if args.quick else args.out, {dtype: section})
                print(
                    f"{dtype:9} {'on ' if row_invariant else 'off'} {name:30} of {size.num_texts} "
                    f"texts {record['other_tokens']} have other tokens, {record['other_bits']} "
                    "other bits",
                    flush=True,
                )


if __name__ == "__main__":
    main()
