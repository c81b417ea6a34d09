"""Times full batches on an NVIDIA GPU: steps, prompts of 1024 tokens, a queue of mixed requests.

python -m benchmarks.gpu.batches --out benchmarks/results/h100_batches.json
python -m benchmarks.gpu.batches --out benchmarks/results/h100_batches.json --vllm vllm.jsonl
python -m benchmarks.gpu.batches --cases costs --out benchmarks/results/h100_step_costs.json
python -m benchmarks.gpu.batches --cases lengths --batch 1 8 16 64 --out h100_lengths.json
python -m benchmarks.gpu.batches --cases slots --out benchmarks/results/h100_few_slots.json

The second puts lines of JSON of vLLM's whole engine next to the first's records. The third measures
the step costs by which K = "auto" chooses, and the K that they make best at some acceptance rates,
a record for each batch size. The fourth times steps in longer buffers, and steps of requests of
mixed lengths; B = 32 needs a GPU of 141 GB. The fifth times steps of few of an engine's slots.
"""

import dataclasses
import json
import pathlib
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax
from benchmarks.gpu.decode import Effort, Timed, clock, profile, repeat_step, speculate
from benchmarks.gpu.heads import Setup, eagle3
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from specjax.decode.drafters import Models
from specjax.decode.prefill import begin_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments

K, LENGTH = 3, 3.0
CONFIG = specjax.SpeculativeConfig(
    num_speculative_tokens=K,
    rejection_sample_method="synthetic",
    synthetic_acceptance_length=LENGTH,
)
# From here on two caches of the default length, which is a power of two, do not fit next to the
# weights: `init` returns a state that no longer shares its memory with the one before.
LARGE = 128


class Load(NamedTuple):
    """Sizes of an engine's load.

    Attributes:
      num_requests: of the queue, all known at the start.
      prompts: shortest and longest of their prompts.
      texts: fewest and most tokens of their texts.
      num_slots: requests that are decoded at once.
      max_length: tokens that a slot holds.
      chunks: tokens of prompts that are read at once, each an engine of its own.
      late: tokens of a prompt that comes while all slots but one are busy.
      step_sizes: slots of a step of one more engine, whose chunks are twice the largest.
      num_steps: steps of each size that are timed.
    """

    num_requests: int = 500
    prompts: tuple[int, int] = (50, 1500)
    texts: tuple[int, int] = (20, 500)
    num_slots: int = 64
    max_length: int = 2048
    chunks: tuple[int, ...] = (512, 1024)
    late: int = 1000
    step_sizes: tuple[int, ...] = (16, 32, 48, 64)
    num_steps: int = 64

    def engine(self, setup: Setup, num_slots: int | tuple[int, ...], chunk: int) -> specjax.Engine:
        """An engine with the drafter, compiled."""
        options = specjax.LoopOptions(self.max_length, prefill_chunk_size=chunk)
        return specjax.Engine(
            setup.target, setup.drafter, num_slots=num_slots, options=options, config=CONFIG
        )


CASES = ["steps", "mixed", "late", "costs", "lengths", "slots"]
REHEARSAL = Load(9, (5, 20), (3, 12), 8, 64, (16,), 20, (2, 8), 3)
MIXED, LONGEST_FIRST = "mixed load", "mixed load, the longest texts first"


def mixed_load(
    setup: Setup, load: Load, num_slots: int | tuple[int, ...], chunk: int
) -> Iterator[dict[str, Any]]:
    """Seconds from the first submission to the last token, in two orders; a run before warms up."""
    draw = random.Random(7)
    sizes = [
        (draw.randint(*load.prompts), draw.randint(*load.texts)) for _ in range(load.num_requests)
    ]
    prompts = [[draw.randrange(10, 100) for _ in range(size)] for size, _ in sizes]
    keys = jax.block_until_ready([jax.random.key(i) for i in range(load.num_requests)])
    work = list(zip(prompts, keys, [most for _, most in sizes], strict=True))
    engine = load.engine(setup, num_slots, chunk)
    record = {"chunk": chunk, "slots": load.num_slots, "step_sizes": num_slots}
    longest_first = sorted(work, key=lambda each: -each[2])
    for name, order in (("", work), (MIXED, work), (LONGEST_FIRST, longest_first)):
        first, start = engine.num_steps, time.perf_counter()
        for prompt, key, most in order:
            engine.submit(prompt, key=key, max_new_tokens=most, temperature=0.0)
        engine.run()
        seconds, steps = time.perf_counter() - start, engine.num_steps - first
        if name:
            yield {"case": name, **record, "steps": steps, "seconds": seconds}
    engine.close()


def occupy(engine: specjax.Engine, load: Load, number: int) -> list[specjax.Request]:
    """Has an engine decode a number of requests; returns them."""
    length = min(700, load.max_length // 3)
    most = load.max_length - length - 8
    requests = [
        engine.submit([11 + i] * length, key=jax.random.key(i), max_new_tokens=most, temperature=0)
        for i in range(number)
    ]
    while engine.num_running < number:
        engine.step()
    return requests


def few_slots(setup: Setup, load: Load) -> Iterator[dict[str, Any]]:
    """Milliseconds of a step of each size, and of all slots with as few requests; medians."""
    for sizes in (load.step_sizes, load.num_slots):
        engine = load.engine(setup, sizes, load.chunks[-1])
        for number in load.step_sizes:
            requests = occupy(engine, load, number)
            taken = []
            for _ in range(load.num_steps):
                start = time.perf_counter()
                engine.step()
                taken.append(1e3 * (time.perf_counter() - start))
            record = {"case": "few slots", "slots": load.num_slots, "step_sizes": sizes}
            yield record | {"requests": number, "median_ms": statistics.median(taken)}
            for request in requests:
                engine.abort(request)
            engine.run()
        engine.close()


def late_prompt(setup: Setup, load: Load, chunk: int) -> dict[str, Any]:
    """Milliseconds to a late prompt's first token, and between steps meanwhile; medians of four."""
    num_slots = load.num_slots // 2
    engine = load.engine(setup, num_slots, chunk)
    occupy(engine, load, num_slots - 1)
    waits, gaps = [], []
    for trial in range(4):
        for _ in range(5):
            engine.step()
        start = last = time.perf_counter()
        late = engine.submit(
            [7 + trial] * load.late, key=jax.random.key(99), max_new_tokens=2, temperature=0.0
        )
        longest = 0.0
        while not late.token_ids:
            engine.step()
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        waits.append(1e3 * (last - start))
        gaps.append(1e3 * longest)
        engine.abort(late)
    engine.close()
    medians = {"first_token_ms": statistics.median(waits), "gap_ms": statistics.median(gaps)}
    return {"case": "late prompt", "chunk": chunk, "slots": num_slots, **medians}


def prefill_ms(setup: Setup, drafter: specjax.Drafter | None, batch: int, effort: Effort) -> float:
    """Milliseconds of `init`, which reads lists of `context` tokens; a median of runs."""
    key = jax.block_until_ready(jax.random.key(0))
    prompts = np.random.default_rng(2).integers(0, 100, (batch, effort.context)).tolist()
    taken = []
    for _ in range(effort.runs):
        start = time.perf_counter()
        jax.block_until_ready(
            specjax.init(
                setup.target,
                drafter,
                prompts,
                keys=key,
                max_new_tokens=effort.room,
                options=specjax.LoopOptions(max_length=effort.context + effort.room),
            )
        )
        taken.append(1e3 * (time.perf_counter() - start))
    return statistics.median(taken[1:])


def drafters(setup: Setup) -> dict[str, specjax.Drafter | None]:
    """The drafter, or None, by the name of its records."""
    return {"plain": None, f"EAGLE-3, K = {K}": setup.drafter}


def cases(setup: Setup, batch: int, effort: Effort) -> Iterator[dict[str, Any]]:
    """A record of plain and of speculative decoding of one batch size."""
    for name, drafter in drafters(setup).items():
        max_length = effort.context + effort.room if batch >= LARGE else None
        timed = speculate(setup.target, drafter, batch, effort, K, LENGTH, max_length)
        figures, _ = clock(timed, effort)
        record = {"case": name, "B": batch, "context": effort.context} | figures
        if jax.default_backend() == "gpu" and batch >= 32:
            record["profile"] = profile(timed)
        del timed
        yield record | {"prefill_ms": prefill_ms(setup, drafter, batch, effort)}


class Held(NamedTuple):
    """Tokens that each request of a batch holds, and those that it has room for."""

    lengths: list[int]
    max_length: int

    def steps(self, setup: Setup, drafter: specjax.Drafter | None, effort: Effort) -> Timed:
        """Steps of these requests. Their prompts are not read: the caches hold zeros."""
        models, lengths = Models(setup.target, drafter), np.int32(self.lengths)
        prompts = np.ones((len(lengths), max(lengths)), np.int32), lengths
        most = effort.iterations * (K + 1) + 2
        arguments = RequestArguments(prompts, jax.random.key(0), most)
        options = specjax.LoopOptions(max_length=self.max_length)
        requests, static = check_arguments(*models, arguments, CONFIG, options)
        begin = jax.jit(begin_prefill, static_argnames="options")
        state = begin(models, requests, options=static.step)
        return repeat_step(*models, state, CONFIG, effort.iterations)


def compared_lengths(batch: int, context: int) -> Iterator[tuple[str, Held, Held]]:
    """Names, batches, and the batches that they are compared with.

    Equal lengths in buffers of 16 times the context, or of 4 times in a large batch, against twice
    the context. One request of 16,000 tokens next to others of 1,000, against equal requests of the
    same total.
    """
    equal, times, short = [context] * batch, 16 if batch <= 32 else 4, 1000 * context // 1024
    yield "longer buffers", Held(equal, times * context), Held(equal, 2 * context)
    if 1 < batch <= 32:
        mixed = [short] * (batch - 1) + [16 * short]
        mean = [sum(mixed) // batch] * batch
        yield "mixed lengths", Held(mixed, 16 * context), Held(mean, 16 * context)


def lengths(setup: Setup, batch: int, effort: Effort) -> Iterator[dict[str, Any]]:
    """A record of each comparison, plain and speculative, with the ratio of both medians."""
    for what, one, other in compared_lengths(batch, effort.context):
        for name, drafter in drafters(setup).items():
            base, _ = clock(other.steps(setup, drafter, effort), effort)
            figures, _ = clock(one.steps(setup, drafter, effort), effort)
            sizes = {"B": batch, "max_length": one.max_length, "longest": max(one.lengths)}
            ratio = figures["median_ms"] / base["median_ms"]
            record = {"case": f"{name}, {what}", **sizes, **figures}
            yield record | {"base_ms": base["median_ms"], "ratio": ratio}


def step_costs(setup: Setup, batch: int, effort: Effort) -> dict[str, Any]:
    """Milliseconds of steps of 0 to 5 drafted tokens, and the best of them at some rates."""
    most, num_steps = (2, 4) if effort.context < 1024 else (5, 32)
    room = 1 + (num_steps + 1) * (most + 1)
    costs = specjax.measure_step_costs(
        setup.target,
        setup.drafter,
        batch_sizes=[batch],
        max_num_speculative_tokens=most,
        context=effort.context,
        options=specjax.LoopOptions(max_length=effort.context + room),
        num_steps=num_steps,
        rounds=3,
    )
    record: dict[str, Any] = {"case": "step costs", **dataclasses.asdict(costs)}
    for rate in (0.5, 0.6, 0.7, 0.8):
        tokens = specjax.theory.acceptance_lengths([rate**i for i in range(1, most + 1)])
        record[f"best K at {rate}"] = int(specjax.theory.best_k(tokens, costs.milliseconds[0]).k)
    return record


def records(
    setup: Setup, names: list[str], batches: list[int], effort: Effort, is_smoke: bool
) -> Iterator[dict[str, Any]]:
    """A record of each case of these names."""
    load = REHEARSAL if is_smoke else Load()
    for batch in batches if "steps" in names else []:
        yield from cases(setup, batch, effort)
    for batch in batches if "lengths" in names else []:
        yield from lengths(setup, batch, effort)
    for batch in batches if "costs" in names else []:
        yield step_costs(setup, batch, effort)
    if "slots" in names:
        yield from few_slots(setup, load)
    for chunk in load.chunks:
        if "mixed" in names:
            yield from mixed_load(setup, load, load.num_slots, chunk)
        if "late" in names:
            yield late_prompt(setup, load, chunk)
    if "mixed" in names:
        yield from mixed_load(setup, load, load.step_sizes, 2 * load.chunks[-1])


def vllm_section(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The records of vLLM's whole engine, as lines of JSON of its own program hold them."""
    where = next(line for line in lines if line.get("env"))
    names = {"plain": "plain", "eagle3": "EAGLE-3, K = 3"}
    found = [line for line in lines if "ms_step" in line]
    records: list[dict[str, Any]] = [
        {
            "case": names[line["mode"]],
            "B": line["B"],
            "median_ms": line["ms_step"],
            "prefill_ms": 1e3 * line["prefill_s"],
        }
        for line in found
    ]
    records += [
        {"case": line.get("case", MIXED), "seconds": min(line["seconds"])}
        for line in lines
        if "seconds" in line
    ]
    return {"environment": where, "cases": records}


def main() -> None:
    parser = gpu_parser(__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--cases", nargs="+", default=CASES[:3], choices=CASES)
    parser.add_argument("--vllm", type=pathlib.Path, help="lines of JSON of vLLM's engine, only")
    args = parser.parse_args()
    if args.vllm is not None:
        lines = [json.loads(line) for line in args.vllm.read_text().splitlines() if line[:1] == "{"]
        save(args.out, {"vllm": vllm_section(lines)})
        return
    args = parse_on_gpu(parser)
    effort = Effort(16, 64, 3, 2) if args.smoke else Effort(1024, 256, 48, 5)
    setup = eagle3(args.smoke)
    section: dict[str, Any] = {"environment": environment(), "cases": []}
    for record in records(setup, args.cases, args.batch, effort, args.smoke):
        section["cases"].append(record)
        save(args.out, {"specjax": section})
        numbers = {k: np.array(v) for k, v in record.items() if isinstance(v, int | float | tuple)}
        shown = ", ".join(
            f"{name} {np.array2string(value, precision=3)}" for name, value in numbers.items()
        )
        print(f"{record['case']:16} {shown}", flush=True)


if __name__ == "__main__":
    main()
