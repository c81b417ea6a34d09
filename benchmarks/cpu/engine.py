"""Times a list of prompts through an engine, next to compiled `generate` calls of one prompt each.

python -m benchmarks.cpu.engine --slots 100 --out benchmarks/results/cpu_engine.json

The embedded pair continues pieces of held-out files, with K drafted tokens, for each K that is
asked for; 0 is plain decoding. Both decode the same prompts with the same keys, and have to give
the same tokens with equal K. They alternate in one process. Each is at its best with another K: a
single request gains more by drafts than a full batch. So the fastest of both are compared, too.
"""

import argparse
import os
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.pair.heldout import HELDOUT, read_heldout
from benchmarks.record import environment, save
from specjax import models

TEMPERATURE, CHUNK = 0.7, 128
LONGEST = 200

Run = Callable[[list[list[int]]], list[list[int]]]


def read_prompts(number: int) -> list[list[int]]:
    """Pieces of 20 to 200 tokens of held-out files, fixed by a seed."""
    folder = models.pretrained_folder("target")
    rows = [row for row in read_heldout(HELDOUT, folder, None).rows if len(row) > 400]
    rng = np.random.default_rng(0)
    prompts = []
    for _ in range(number):
        row, length = rows[rng.integers(len(rows))], int(rng.integers(20, LONGEST + 1))
        start = int(rng.integers(len(row) - length))
        prompts.append(row[start : start + length].tolist())
    return prompts


def contenders(num_prompts: int, num_new: int, num_slots: int, ks: list[int]) -> dict[str, Run]:
    """What is timed: each returns the tokens of every prompt that it is given."""
    target, _ = models.load(models.pretrained_folder("target"))
    draft, _ = models.load(models.pretrained_folder("draft"))
    keys = [jax.random.key(seed) for seed in range(num_prompts)]
    values = {"max_new_tokens": num_new, "temperature": TEMPERATURE}
    found: dict[str, Run] = {}
    max_length = LONGEST + num_new
    for k in ks:
        drafter = specjax.model_drafter(draft) if k else None
        config = specjax.SpeculativeConfig(num_speculative_tokens=max(k, 1))
        compiled = specjax.compile_generate(
            target,
            drafter,
            batch_size=1,
            config=config,
            options=specjax.LoopOptions(max_length=max_length),
        )
        engine = specjax.Engine(
            target,
            drafter,
            num_slots=num_slots,
            options=specjax.LoopOptions(max_length, prefill_chunk_size=CHUNK),
            config=config,
        )

        def one_by_one(
            prompts: list[list[int]], compiled: Any = compiled, drafter: Any = drafter
        ) -> list[list[int]]:
            texts = []
            for prompt, key in zip(prompts, keys, strict=False):
                output = compiled(target, drafter, [prompt], keys=key[None], **values)
                row = np.asarray(output.token_ids)[0, len(prompt) : int(output.lengths[0])]
                texts.append(row.tolist())
            return texts

        def through_engine(
            prompts: list[list[int]], engine: specjax.Engine = engine
        ) -> list[list[int]]:
            requests = [
                engine.submit(prompt, key=key, **values)
                for prompt, key in zip(prompts, keys, strict=False)
            ]
            engine.run()
            return [request.token_ids for request in requests]

        found[f"generate, K = {k}"] = one_by_one
        found[f"engine, K = {k}"] = through_engine
    return found


def measure(
    timed: dict[str, Run], prompts: list[list[int]], rounds: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, int]]:
    """Seconds of each contender in every round, after some prompts apart, and equal texts."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in timed}
    texts = {}
    for run in timed.values():
        run(prompts[:3])
    for _ in range(rounds):
        for name, run in timed.items():
            wall, cpu = time.perf_counter(), time.process_time()
            texts[name] = run(prompts)
            seconds[name]["wall"].append(time.perf_counter() - wall)
            seconds[name]["cpu"].append(time.process_time() - cpu)
    equal = {
        kind: sum(map(list.__eq__, texts[f"generate, {kind}"], texts[f"engine, {kind}"]))
        for kind in kinds(timed)
    }
    return seconds, equal


def kinds(names: Iterable[str]) -> list[str]:
    """The numbers of drafted tokens among names of contenders."""
    return [name.removeprefix("engine, ") for name in names if name.startswith("engine, ")]


def summarise(seconds: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """How many times as fast the engine was, lower quartile, median and upper over the rounds.

    With equal K, and each with the K of the least median by the wall's clock.
    """
    pairs = {kind: (f"generate, {kind}", f"engine, {kind}") for kind in kinds(seconds)}

    def fastest(which: str) -> str:
        names = [name for name in seconds if name.startswith(which)]
        return min(names, key=lambda name: float(np.median(seconds[name]["wall"])))

    best = fastest("generate"), fastest("engine")
    pairs[f"fastest: {best[1]}; {best[0]}"] = best
    return {
        kind: {
            clock: np.percentile(
                np.divide(seconds[slow][clock], seconds[fast][clock]), [25, 50, 75]
            ).tolist()
            for clock in ("wall", "cpu")
        }
        for kind, (slow, fast) in pairs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--k", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    prompts = read_prompts(args.prompts)
    timed = contenders(len(prompts), args.new_tokens, args.slots, args.k)
    load_before = os.getloadavg()
    seconds, equal = measure(timed, prompts, args.rounds)
    ratios = summarise(seconds)
    for name, clocks in seconds.items():
        print(f"{name}: {np.median(clocks['wall']):.2f} s, {np.median(clocks['cpu']):.2f} s of CPU")
    for kind, clocks in ratios.items():
        low, middle, high = clocks["wall"]
        print(f"{kind}: the engine is {middle:.2f} ({low:.2f} to {high:.2f}) times as fast")
    print(f"equal texts: {equal} of {len(prompts)}")
    where = environment() | {"load_average": [load_before, os.getloadavg()]}
    setting = {"K": args.k, "temperature": TEMPERATURE, "chunk": CHUNK}
    setting |= {"prompts": args.prompts, "new_tokens": args.new_tokens, "slots": args.slots}
    record = {"environment": where, "setting": setting, "equal_texts": equal}
    record |= {"seconds": seconds, "times_as_fast": ratios}
    save(args.out, record)


if __name__ == "__main__":
    main()
