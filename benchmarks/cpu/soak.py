"""Sends thousands of requests through an engine, cancels and preempts some, and looks for faults.

python -m benchmarks.cpu.soak --out benchmarks/results/cpu_soak.json

A table is the model, of the last token and of the sum of all. Requests are of a few kinds, each
decoded alone first. A seed draws their order, and which of them are cancelled or preempted. These
are faults: a wrong text for the kind, an occupied slot or a new array on the device at the end, a
request that begins before an earlier one, never ends or ends twice.

Half as many requests then meet errors: panics of the tokenizer and of matchers, errors of programs
before they take their operands, and signals (SIGINT and SIGTERM) with handlers that raise. If a
program fails after it took its operands, its engine must end all of its requests as `engine_error`.
"""

import argparse
import collections
import contextlib
import functools
import gc
import json
import os
import pathlib
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from benchmarks.record import environment, save
from specjax.engine.request import FinishReason, Request

V, LENGTH, CHUNK, NUM_KINDS = 8, 64, 8, 48
SHARES = {"abort": 0.1, "preempt": 0.1, "preempt, cache dropped": 0.05}
# Of the calls of each, those that fail; the most seconds between two interrupts.
FAULTS = {"tokenizer panics": 0.002, "matcher panics": 0.01, "device errors": 0.02}
MAX_SECONDS = 0.02
# Programs that take the memory of their first operand.
TAKERS = (
    "admit",
    "step",
    "release",
    "resume",
    "prefill_chunk",
    "put_caches",
    "prefill_batch",
)
# Reasons of a request whose text ends where the fault was.
CUT_SHORT = (FinishReason.ABORTED, FinishReason.TOKENIZER_ERROR, FinishReason.MATCHER_ERROR)


class Panic(BaseException):
    """Stands for a panic of Rust, which in Python is no `Exception`."""


class Faults:
    """Draws which calls fail; none while `is_on` is False."""

    def __init__(self, seed: int) -> None:
        self._rng, self.is_on = np.random.default_rng(seed), False
        self.counts: collections.Counter[str] = collections.Counter()

    def draw(self, what: str, error: type[BaseException]) -> None:
        """Raises an error, at a share of the calls."""
        if self.is_on and self._rng.uniform() < FAULTS[what]:
            self.counts[what] += 1
            raise error(f"{what}: this one was drawn")


class Letters:
    """A tokenizer whose token i is the letter i, and which panics at times."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        self._faults.draw("tokenizer panics", Panic)
        return "".join("abcdefgh"[i] for i in ids)


class Turns:
    """A matcher that allows three tokens, by how many it read and the last; it panics at times."""

    def __init__(self, faults: Faults, vocab_size: int = V) -> None:
        self._faults, self._vocab_size, self._read = faults, vocab_size, list[int]()

    def compute_bitmask(self) -> bytes:
        self._faults.draw("matcher panics", Panic)
        first = len(self._read) + sum(self._read[-1:])
        allowed = {(first + step) % self._vocab_size for step in (0, 1, 3)}
        return np.uint32(sum(1 << token for token in allowed)).tobytes()

    def try_consume_tokens(self, tokens: list[int]) -> int:
        is_allowed = self.compute_bitmask()[0] >> tokens[0] & 1
        self._read += tokens if is_allowed else []
        return is_allowed

    def rollback(self, num_tokens: int) -> bool:
        del self._read[len(self._read) - num_tokens :]
        return True


def init_cache(batch_size: int, max_length: int) -> jax.Array:
    """The tokens so far, by position."""
    return jnp.zeros((batch_size, max_length), jnp.int32)


def apply(params: Any, token_ids: jax.Array, positions: jax.Array, cache: jax.Array) -> Any:
    """Hidden states: the sum of all tokens so far, modulo V, and the last token."""
    place = jnp.where(positions < 0, cache.shape[1], positions)
    rows = jnp.arange(cache.shape[0], dtype=jnp.int32)[:, None]
    cache = cache.at[rows, place].set(token_ids, mode="drop")
    sums = jnp.cumsum(cache, axis=1, dtype=jnp.int32) % V
    sums = jnp.take_along_axis(sums, jnp.maximum(positions, 0), axis=1)
    return jnp.stack([sums, token_ids], axis=-1), cache


def logits(params: jax.Array, hidden: jax.Array) -> jax.Array:
    return params[hidden[..., 0], hidden[..., 1]]


@functools.cache
def make_models() -> tuple[Any, Any]:
    """A target and a drafter; the same ones each time, so that programs are shared."""
    rng = np.random.default_rng(0)
    target = rng.dirichlet(np.full(V, 0.5), (V, V))
    draft = 0.7 * target + 0.3 * rng.dirichlet(np.full(V, 0.5), (V, V))
    models = (
        specjax.Model(jnp.log(jnp.asarray(table, jnp.float32)), init_cache, apply, logits)
        for table in (target, draft)
    )
    return next(models), specjax.model_drafter(next(models))


def make_engine(num_slots: int, faults: Faults) -> specjax.Engine:
    """An engine whose requests choose K by their past; its short prompts are read together."""
    with mock.patch.multiple(
        "specjax.engine.programs", _MIN_CHUNK=1, _MIN_CACHE_LENGTH=LENGTH // 2
    ):
        engine = specjax.Engine(
            *make_models(),
            num_slots=num_slots,
            options=specjax.LoopOptions(LENGTH, prefill_chunk_size=CHUNK),
            sampling=specjax.SamplingParams(top_k=0),
            # One to three tokens, by the rate of a request.
            config=specjax.SpeculativeConfig(
                "auto", step_costs=(1.0, 1.1, 1.14, 1.18), usual_acceptance_rate=0.2
            ),
            tokenizer=Letters(faults),
            max_waiting=8 * num_slots,
            takes_matchers=True,
        )
    before_programs(
        engine, lambda name, operands: faults.draw("device errors", jax.errors.JaxRuntimeError)
    )
    return engine


def before_programs(engine: specjax.Engine, call: Callable[[str, Any], None]) -> None:
    """Has an engine call `call(name, operands)` before each program that it dispatches.

    A chunk of a batch of prompts has the name "prefill_batch".
    """

    def wrapped(name: str, program: Any) -> Any:
        def run(*operands: Any, **options: Any) -> Any:
            # One program reads chunks of a prompt and of a batch of prompts.
            is_batch = name == "prefill_chunk" and len(operands[1]) > 1
            call("prefill_batch" if is_batch else name, operands)
            return program(*operands, **options)

        return run

    scheduler: Any = engine._scheduler
    each = scheduler._programs._asdict().items()
    scheduler._programs = scheduler._batch._programs = scheduler._programs._replace(
        **{name: wrapped(name, value) for name, value in each if callable(value)}
    )


def make_kinds(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Returns the options of each kind of request; some kinds have a matcher."""
    kinds: list[dict[str, Any]] = []
    for i in range(NUM_KINDS):
        num_tokens = int(rng.integers(1, 2 * LENGTH // 3))
        kinds.append(
            {
                "prompt": rng.integers(0, V, num_tokens).tolist(),
                "key": jax.random.key(i),
                "max_new_tokens": int(rng.integers(1, LENGTH // 3)),
                "temperature": float(rng.choice([0.0, 0.7, 1.3])),
                "eos_token_ids": [int(rng.integers(V))] if i % 4 == 0 else [],
                "stop": ["ab", "c", "fh"] if i % 6 == 1 else [],
                "matcher": Turns if i % 8 in (2, 5) else None,
                "sampling": specjax.SamplingParams(top_k=int(rng.integers(0, V))),
            }
        )
    return kinds


class Soak:
    """A soak that goes on: the requests that have not ended, and what was wrong so far."""

    def __init__(self, engine: specjax.Engine, faults: Faults, seed: int) -> None:
        self.engine, self.faults, self.rng = engine, faults, np.random.default_rng(seed)
        self.kinds = make_kinds(self.rng)
        self.alone = [what_came(self.ask(kind).result()) for kind in range(NUM_KINDS)]
        # Requests in the order in which they came, and their kinds; those that no slot had yet.
        self.going: dict[Request, int] = {}
        self.to_begin: collections.deque[Any] = collections.deque()
        self.ended: dict[Request, Any] = {}
        self.wrong: collections.Counter[str] = collections.Counter()
        self.counts: collections.Counter[str] = collections.Counter()
        self.moved: set[Any] = set()
        self.is_calling = False

    def ask(self, kind: int) -> Request:
        """Submits a request of a kind."""
        matcher = self.kinds[kind]["matcher"]
        given = {"matcher": None if matcher is None else matcher(self.faults)}
        return self.engine.submit(**self.kinds[kind] | given)

    def call(self, function: Any, *operands: Any, **options: Any) -> Any:
        """Calls the engine; returns None where a fault came out of it."""
        try:
            try:
                self.is_calling = True
                return function(*operands, **options)
            finally:
                self.is_calling = False
        except (KeyboardInterrupt, SystemExit) as error:
            self.counts["interrupts" if isinstance(error, KeyboardInterrupt) else "exits"] += 1
        # A matcher may panic when it is submitted. A SystemError is JAX's for an interrupt.
        except (jax.errors.JaxRuntimeError, Panic, SystemError):
            self.counts["errors that came out of a call"] += 1

    def interrupt(self, number: int, frame: Any) -> None:
        """Handles a signal: an interrupt of the engine is one, any other time is no matter."""
        if self.is_calling:
            self.is_calling = False
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit

    def submit(self, number: int) -> None:
        """Submits requests of drawn kinds; again where a fault kept a request from coming back."""
        for kind in self.rng.integers(NUM_KINDS, size=number).tolist():
            while (request := self.call(self.ask, kind)) is None:
                pass
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
                    self.call(self.engine.abort, request)
                    self.counts[what] += 1
                # One that was interrupted may have been preempted.
                elif self.call(self.engine.preempt, request, drops_cache=what != "preempt") in (
                    True,
                    None,
                ):
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
            token_ids, *others = self.alone[self.going.pop(request)]
            self.ended[request] = found = what_came(request)
            self.moved.discard(request)
            self.counts[str(request.finish_reason)] += 1
            if request.finish_reason in CUT_SHORT:
                is_right = found[0] == token_ids[: len(found[0])]
                has_reason = request.finish_reason == FinishReason.ABORTED or request.error
                self.wrong["ended without a reason"] += not has_reason
            else:
                is_right = found == (token_ids, *others)
            self.wrong["another text than alone"] += not is_right

    def check_end(self) -> None:
        """Notes what is left in an engine that has nothing to do."""
        self.collect()
        self.wrong["did not end"] += len(self.going)
        self.wrong["ended twice"] += sum(what_came(r) != end for r, end in self.ended.items())
        self.wrong["a slot or the queue is not empty"] += (
            self.engine.num_running + self.engine.num_waiting
        )
        finish = np.asarray(self.engine._scheduler._slots.finish)
        self.wrong["the device decodes in a slot"] += int(np.sum(finish == 0))


def what_came(request: Request) -> tuple[list[int], str | None, str | None]:
    """The tokens, the text and the reason of a request."""
    return list(request.token_ids), request.text, request.finish_reason


@contextlib.contextmanager
def interrupted(state: Soak, seed: int) -> Iterator[None]:
    """Interrupts this process at drawn times, and lets the faults be."""
    is_over, rng = threading.Event(), np.random.default_rng(seed)

    def send() -> None:
        while not is_over.wait(rng.uniform(0, MAX_SECONDS)):
            os.kill(os.getpid(), numbers[rng.integers(2)])

    def drop(unraisable: Any) -> None:
        """Drops an interrupt that came while Python collected garbage: kept, it keeps arrays."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
            hook(unraisable)

    numbers = signal.SIGINT, signal.SIGTERM
    hook, sys.unraisablehook = sys.unraisablehook, drop
    before = [signal.signal(number, state.interrupt) for number in numbers]
    sender = threading.Thread(target=send)
    sender.start()
    state.faults.is_on = True
    try:
        yield
    finally:
        state.faults.is_on = False
        is_over.set()
        sender.join()
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        sys.unraisablehook = hook


def lose(name: str, num_slots: int = 8) -> tuple[list[str], str]:
    """Runs an engine whose program fails after it took the memory of what it was given.

    Returns:
      The reasons of the requests that had not ended then, and what `step` says from then on.
    """
    going: list[Request] = []

    def fail(called: str, operands: Any) -> None:
        if called == name:
            going.extend(request for request in requests if request.finish_reason is None)
            for leaf in jax.tree.leaves(operands[0]):
                leaf.delete()
            raise jax.errors.JaxRuntimeError(f"INTERNAL: {name} failed")

    faults = Faults(0)
    engine = make_engine(num_slots, faults)
    kinds = make_kinds(np.random.default_rng(0))
    requests = [engine.submit(**kind | {"matcher": None}) for kind in kinds]
    for _ in range(3):
        engine.step()
    before_programs(engine, fail)
    while not going:
        with contextlib.suppress(RuntimeError):
            engine.abort(requests.pop())
            for request in requests[:num_slots]:
                engine.preempt(request, drops_cache=True)
            engine.step()
    said = ""
    try:
        engine.step()
    except RuntimeError as error:
        said = str(error)
    return sorted({str(request.finish_reason) for request in going}), said


def live() -> tuple[int, int]:
    """Arrays on the device, and their bytes."""
    gc.collect()
    arrays = jax.live_arrays()
    return len(arrays), sum(array.nbytes for array in arrays)


def soak(
    num_requests: int, num_slots: int = 8, seed: int = 0, *, has_faults: bool = False
) -> dict[str, Any]:
    """Runs a soak, and returns what it counted; `wrong` has the faults that it found."""
    faults = Faults(seed)
    engine = make_engine(num_slots, faults)
    state = Soak(engine, faults, seed)
    engine.run()
    before, begin, steps, num_submitted = live(), time.perf_counter(), engine.num_steps, 0
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with interrupted(state, seed) if has_faults else contextlib.nullcontext():
        while engine.num_waiting + engine.num_running or num_submitted < num_requests:
            # Waves: the queue runs dry at times.
            if engine.num_waiting < num_slots and state.rng.uniform() < 0.3:
                number = int(state.rng.integers(1, 4 * num_slots))
                state.submit(min(number, num_requests - num_submitted))
                num_submitted += min(number, num_requests - num_submitted)
            state.disturb()
            state.call(engine.step)
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
        "counts": dict(sorted((state.counts + faults.counts).items())),
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
    record["with_faults"] = soak(args.requests // 2, args.slots, args.seed, has_faults=True)
    record["lost"] = {name: lose(name, args.slots) for name in TAKERS}
    print(json.dumps(record, indent=1))
    where = environment() | {"load_average": os.getloadavg()}
    save(args.out, {"environment": where, **record})
    is_told = all(end == ([FinishReason.ENGINE_ERROR], mock.ANY) for end in record["lost"].values())
    if record["wrong"] or record["with_faults"]["wrong"] or not is_told:
        sys.exit(1)


if __name__ == "__main__":
    main()
