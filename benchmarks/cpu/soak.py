"""Sends thousands of requests through an engine, cancels and preempts some, and looks for faults.

python -m benchmarks.cpu.soak --out benchmarks/results/cpu_soak.json

A table is the model. Requests are of a few kinds, each decoded alone first; which kind comes when,
which request is cancelled or preempted and when, is drawn by a seed. Wrong would be: a text that is
not the kind's, a slot that is not empty at the end, an array that is left on the device, a request
that begins before one that came earlier, or one that never ends.
"""

import argparse
import collections
import datetime
import gc
import json
import os
import pathlib
import resource
import shlex
import sys
import time
from typing import Any

import jax
import numpy as np

import specjax
from benchmarks.cpu.verify import environment
from specjax.engine.request import FinishReason, Request
from specjax.markov_chain import markov_chain

V, LENGTH, CHUNK, NUM_KINDS = 8, 64, 8, 48
SHARES = {"abort": 0.1, "preempt": 0.1, "preempt, cache dropped": 0.05}


def make_engine(num_slots: int, max_waiting: int) -> specjax.Engine:
    """An engine of two tables, whose requests choose K by their past."""
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.full(V, 0.5), V)
    draft = 0.7 * target + 0.3 * rng.dirichlet(np.full(V, 0.5), V)
    return specjax.Engine(
        markov_chain(target),
        specjax.model_drafter(markov_chain(draft)),
        specjax.SpeculativeConfig("auto", step_costs=(1.0, 1.3, 1.4, 1.5)),
        num_slots=num_slots,
        max_length=LENGTH,
        prefill_chunk_size=CHUNK,
        max_waiting=max_waiting,
        sampling=specjax.SamplingParams(top_k=0),
    )


def make_kinds(rng: np.random.Generator) -> list[dict[str, Any]]:
    """What the requests of each kind ask for."""
    kinds: list[dict[str, Any]] = []
    for i in range(NUM_KINDS):
        num_tokens = int(rng.integers(1, LENGTH // 2))
        kinds.append(
            {
                "prompt_token_ids": rng.integers(0, V, num_tokens).tolist(),
                "key": jax.random.key(i),
                "max_new_tokens": int(rng.integers(1, LENGTH // 2)),
                "temperature": float(rng.choice([0.0, 0.7, 1.3])),
                "stop_token_ids": [int(rng.integers(V))] if i % 4 == 0 else [],
                "sampling": specjax.SamplingParams(top_k=int(rng.integers(0, V))),
            }
        )
    return kinds


class Soak:
    """A soak that goes on: the requests that have not ended, and what was wrong so far."""

    def __init__(self, engine: specjax.Engine, seed: int) -> None:
        self.engine, self.rng = engine, np.random.default_rng(seed)
        self.kinds = make_kinds(self.rng)
        self.alone = [engine.submit(**kind).result().token_ids for kind in self.kinds]
        # Requests in the order in which they came, and their kinds; those that no slot had yet.
        self.going: dict[Request, int] = {}
        self.to_begin: collections.deque[Any] = collections.deque()
        self.wrong: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.moved: set[Any] = set()

    def submit(self, number: int) -> None:
        """Submits requests of drawn kinds."""
        for kind in self.rng.integers(NUM_KINDS, size=number).tolist():
            request = self.engine.submit(**self.kinds[kind])
            self.going[request] = kind
            self.to_begin.append(request)

    def disturb(self) -> None:
        """Cancels or preempts a drawn request, or none."""
        for what, share in SHARES.items():
            # Of the first ones, which are in slots or come next.
            if self.going and self.rng.uniform() < share * self.engine.num_slots / 4:
                first = list(self.going)[: 2 * self.engine.num_slots]
                request = first[self.rng.integers(len(first))]
                if what == "abort":
                    self.engine.abort(request)
                    self.counts[what] += 1
                elif self.engine.preempt(request, drops_cache=what != "preempt"):
                    self.counts[what] += 1
                    self.moved.add(request)

    def check_order(self) -> None:
        """Notes requests that have tokens while one before them, which was left alone, has none."""
        while self.to_begin and self._has_begun(self.to_begin[0]):
            self.to_begin.popleft()
        behind = list(self.to_begin)[1 : 4 * self.engine.num_slots]
        self.wrong["began before an earlier one"] += sum(bool(r.token_ids) for r in behind)

    def _has_begun(self, request: Any) -> bool:
        return bool(request.token_ids) or request.finish_reason is not None or request in self.moved

    def collect(self) -> None:
        """Compares the texts of requests that ended with those alone."""
        for request in [r for r in self.going if r.finish_reason is not None]:
            text, reason = self.alone[self.going.pop(request)], request.finish_reason
            self.moved.discard(request)
            self.counts[reason] += 1
            expected = text[: len(request.token_ids)] if reason == FinishReason.ABORTED else text
            self.wrong["another text than alone"] += request.token_ids != expected

    def check_end(self) -> None:
        """Notes what is left in an engine that has nothing to do."""
        self.collect()
        self.wrong["did not end"] += len(self.going)
        self.wrong["a slot or the queue is not empty"] += (
            self.engine.num_running + self.engine.num_waiting
        )
        finish = np.asarray(self.engine._scheduler._slots.finish)
        self.wrong["the device decodes in a slot"] += int(np.sum(finish == 0))


def live() -> tuple[int, int]:
    """Arrays on the device, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def soak(num_requests: int, num_slots: int = 8, seed: int = 0) -> dict[str, Any]:
    """Runs a soak, and returns what it counted; `wrong` has the faults that it found."""
    engine = make_engine(num_slots, max_waiting=8 * num_slots)
    state = Soak(engine, seed)
    engine.run()
    before, begin, steps, num_submitted = live(), time.perf_counter(), engine.num_steps, 0
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while engine.num_waiting + engine.num_running or num_submitted < num_requests:
        # Waves: the queue runs dry at times.
        if engine.num_waiting < num_slots and state.rng.uniform() < 0.3:
            number = int(state.rng.integers(1, 4 * num_slots))
            state.submit(min(number, num_requests - num_submitted))
            num_submitted += min(number, num_requests - num_submitted)
        state.disturb()
        engine.step()
        state.check_order()
        state.collect()
    engine.run()
    state.check_end()
    after = live()
    state.wrong["arrays left on the device"] += after[0] - before[0]
    state.wrong["bytes left on the device"] += after[1] - before[1]
    return {
        "requests": num_submitted,
        "slots": num_slots,
        "steps": engine.num_steps - steps,
        "seconds": round(time.perf_counter() - begin, 1),
        "counts": dict(sorted(state.counts.items())),
        "wrong": {what: number for what, number in state.wrong.items() if number},
        "arrays_on_the_device": {"before": before, "after": after},
        "most_resident_kib": {
            "before": rss,
            "after": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    record = soak(args.requests, args.slots, args.seed)
    print(json.dumps(record, indent=1))
    if args.out is not None:
        command = shlex.join(["python", "-m", "benchmarks.cpu.soak", *sys.argv[1:]])
        where = environment() | {"command": command, "load_average": os.getloadavg()}
        where["date"] = datetime.date.today().isoformat()
        args.out.write_text(json.dumps({"environment": where, **record}, indent=1) + "\n")
    if record["wrong"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
