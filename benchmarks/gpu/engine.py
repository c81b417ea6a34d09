"""Times an engine at real size on an NVIDIA GPU: full slots, a queue of requests, a late prompt.

python -m benchmarks.gpu.engine --out benchmarks/results/h200_engine.json

Options name a part, such as `--cases full --slots 64 --section engine_64`, which is put next to the
others in the file.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

import specjax
from benchmarks.gpu.decode import DRAFT, LENGTH, SMALL, TARGET, K, read_ms
from benchmarks.gpu.engine_bound import bare_step_ms, bound_seconds, fill, measure_times
from benchmarks.record import environment, gpu_parser, parse_on_gpu, save
from specjax.models import build


class Effort(NamedTuple):
    """Sizes of the measurements.

    Attributes:
      slots: numbers of slots that are kept full, and compared with `generate`.
      prompt: tokens of each of their prompts.
      new: tokens that each of them gets.
      queue: requests of the mixed load.
      queue_slots: its slots.
      prompts: shortest and longest of its prompts.
      texts: fewest and most tokens of its texts.
      late: tokens of the prompt that comes last.
      bare: steps, or chunks of a prompt, that are dispatched without reading them.
      chunk: tokens of a prompt that are read at once.
    """

    slots: tuple[int, ...] = (1, 8, 32, 64)
    prompt: int = 512
    new: int = 384
    queue: int = 500
    queue_slots: int = 32
    prompts: tuple[int, int] = (50, 2000)
    texts: tuple[int, int] = (20, 500)
    late: int = 1000
    bare: int = 48
    chunk: int = 256

    @property
    def max_length(self) -> int:
        """Tokens that a slot of the mixed load holds."""
        return self.prompts[1] + self.texts[1]


CASES = ["queue", "late", "full"]
REHEARSAL = Effort((2,), 12, 20, 9, 2, (5, 20), (3, 12), 20, 3)


class Pair(NamedTuple):
    """A target, its drafter, and how they decode."""

    target: specjax.Model
    drafter: specjax.Drafter
    config: specjax.SpeculativeConfig

    def engine(self, num_slots: int, max_length: int, chunk: int) -> specjax.Engine:
        """An engine of the pair, compiled."""
        options = specjax.LoopOptions(max_length, prefill_chunk_size=chunk)
        return specjax.Engine(
            self.target, self.drafter, num_slots=num_slots, options=options, config=self.config
        )


def prompt_of(length: int, seed: int) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, 100, length).tolist()


def decode_seconds(pair: Pair, num_slots: int, effort: Effort) -> float:
    """Seconds that `generate` takes for all but the first token of equal requests, its best."""
    options = specjax.LoopOptions(max_length=effort.prompt + effort.new)
    compiled = specjax.compile_generate(
        pair.target, pair.drafter, batch_size=num_slots, config=pair.config, options=options
    )
    prompts = [prompt_of(effort.prompt, seed) for seed in range(num_slots)]
    keys = jax.random.split(jax.random.key(0), num_slots)
    seconds: dict[int, list[float]] = {1: [], effort.new: []}
    for new in (1, *[1, effort.new] * 3):
        start = time.perf_counter()
        output = compiled(
            pair.target, pair.drafter, prompts, keys=keys, max_new_tokens=new, temperature=1.0
        )
        jax.block_until_ready(output)
        seconds[new].append(time.perf_counter() - start)
    return min(seconds[effort.new]) - min(seconds[1])


def full_slots(pair: Pair, num_slots: int, effort: Effort) -> dict[str, Any]:
    """Tokens per second with every slot busy, next to `generate`, and what a step's host adds."""
    engine = pair.engine(num_slots, effort.prompt + effort.new, effort.chunk)
    prompts = [prompt_of(effort.prompt, seed) for seed in range(num_slots)]
    fill(engine, prompts, effort.new)
    engine.run()
    rates, steps = [], []
    for _ in range(3):
        requests = fill(engine, prompts, effort.new)
        before, first = sum(len(x.token_ids) for x in requests), engine.num_steps
        start = time.perf_counter()
        while engine.num_running == num_slots:
            engine.step()
        taken = time.perf_counter() - start
        rates.append((sum(len(x.token_ids) for x in requests) - before) / taken)
        steps.append(1e3 * taken / (engine.num_steps - first))
        engine.run()
    fill(engine, prompts, effort.new)
    bare = bare_step_ms(engine, effort.bare)
    seconds = decode_seconds(pair, num_slots, effort)
    theirs = num_slots * (effort.new - 1) / seconds
    return {
        "case": "full slots",
        "slots": num_slots,
        "tokens_per_s": max(rates),
        "generate_tokens_per_s": theirs,
        "share_of_generate": max(rates) / theirs,
        "step_ms": min(steps),
        "bare_step_ms": bare,
        "host_share": min(steps) / bare - 1,
    }


def mixed_load(engine: specjax.Engine, effort: Effort) -> dict[str, Any]:
    """A queue of requests of many lengths, all submitted at once, next to the bound they have."""
    rng = np.random.default_rng(0)
    sizes = [
        (int(rng.integers(*effort.prompts)), int(rng.integers(*effort.texts)))
        for _ in range(effort.queue)
    ]
    low, high = effort.prompts
    held = [prompt + new // 2 for prompt, new in sizes[: engine.num_slots]]
    longer = [(length + high) // 2 for length in held]
    times = measure_times(engine, [[low] * engine.num_slots, held, longer], effort.bare)
    first, occupied = engine.num_steps, engine._scheduler.num_occupied
    requests = [
        engine.submit(prompt_of(prompt, i), key=jax.random.key(i), max_new_tokens=new)
        for i, (prompt, new) in enumerate(sizes)
    ]
    start, queued = time.perf_counter(), None
    while engine.step():
        if queued is None and engine.num_waiting == 0:
            steps = engine.num_steps - first
            queued = (engine._scheduler.num_occupied - occupied) / (steps * engine.num_slots)
    taken = time.perf_counter() - start
    # The step that feeds the prompt's last token is none of speculation.
    lasting = [1 + int(x.metrics.num_steps) for x in requests if x.metrics is not None]
    asked = [(*size, steps) for size, steps in zip(sizes, lasting, strict=True)]
    bound = bound_seconds(times, asked, engine.num_slots, engine._scheduler._programs.chunk_size)
    return {
        "case": "mixed load",
        "slots": engine.num_slots,
        "requests": effort.queue,
        "seconds": taken,
        **bound,
        "over_bound": taken / bound["bound_seconds"] - 1,
        "occupancy_while_queued": queued,
        "steps": engine.num_steps - first,
        "tokens_per_s": sum(len(x.token_ids) for x in requests) / taken,
    }


def late_prompt(engine: specjax.Engine, effort: Effort) -> dict[str, Any]:
    """How long a prompt that finds one empty slot waits for its first token, and the others."""
    few = effort._replace(prompt=effort.prompts[0], new=effort.texts[1])
    others = [
        engine.submit(prompt_of(few.prompt, i), key=jax.random.key(i), max_new_tokens=few.new)
        for i in range(engine.num_slots - 1)
    ]
    while engine.num_running < engine.num_slots - 1:
        engine.step()
    usual = []
    for _ in range(8):
        start = time.perf_counter()
        engine.step()
        usual.append(time.perf_counter() - start)
    begun, apart = time.perf_counter(), []
    last = engine.submit(prompt_of(effort.late, 99), key=jax.random.key(99), max_new_tokens=8)
    while not last.token_ids:
        start = time.perf_counter()
        engine.step()
        apart.append(time.perf_counter() - start)
    first_token = time.perf_counter() - begun
    engine.run()
    step = float(np.median(usual))
    return {
        "case": "late prompt",
        "slots": engine.num_slots,
        "prompt": effort.late,
        "others": len(others),
        "first_token_ms": 1e3 * first_token,
        "step_ms": 1e3 * step,
        "longest_between_steps": max(apart) / step,
    }


def measure(pair: Pair, effort: Effort, cases: list[str]) -> Iterator[dict[str, Any]]:
    """A record of each measurement, the queue first."""
    if {"queue", "late"} & set(cases):
        engine = pair.engine(effort.queue_slots, effort.max_length, effort.chunk)
        if "queue" in cases:
            yield mixed_load(engine, effort) | {"slot_mb": engine.slot_bytes / 1e6}
        if "late" in cases:
            yield late_prompt(engine, effort)
        del engine
    if "full" in cases:
        for num_slots in effort.slots:
            yield full_slots(pair, num_slots, effort)


def main() -> None:
    parser = gpu_parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--slots", type=int, nargs="+", help="that are kept full")
    parser.add_argument("--queue-slots", type=int, help="of the queue and the late prompt")
    parser.add_argument("--chunk", type=int, help="tokens of a prompt that are read at once")
    parser.add_argument("--section", default="engine", help="of the JSON")
    args = parse_on_gpu(parser)
    sizes, effort = (TARGET, DRAFT), REHEARSAL if args.smoke else Effort()
    asked = {"slots": args.slots, "queue_slots": args.queue_slots, "chunk": args.chunk}
    effort = effort._replace(**{name: value for name, value in asked.items() if value})
    if args.smoke:
        sizes = tuple(dataclasses.replace(config, **SMALL) for config in sizes)
    target, draft = (build(config, seed=seed) for seed, config in enumerate(sizes))
    config = specjax.SpeculativeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_length=LENGTH,
    )
    floor = read_ms(target, sizes[0]) + K * read_ms(draft, sizes[1])
    section: dict[str, Any] = {
        "environment": environment(),
        "read_ms_per_step": floor,
        "cases": [],
    }
    pair = Pair(target, specjax.model_drafter(draft), config)
    for record in measure(pair, effort, args.cases):
        section["cases"].append(record)
        save(args.out, {args.section: section})
        shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in record.items()}
        print(" ".join(f"{k}={v}" for k, v in shown.items()), flush=True)


if __name__ == "__main__":
    main()
