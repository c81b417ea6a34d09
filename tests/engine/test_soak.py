"""Hundreds of requests with cancels, preemptions and faults leave no slot, text or order wrong."""

import collections
import contextlib

import jax
import numpy as np
import pytest

from benchmarks.cpu.soak import (
    TAKERS,
    Faults,
    before_programs,
    lose,
    make_engine,
    make_kinds,
    soak,
    what_came,
)

pytestmark = [pytest.mark.once, pytest.mark.checks]
ENDS = ("length", "end_of_sequence", "stop_string")
CUT_SHORT = ("aborted", "tokenizer_error", "matcher_error")


def test_a_soak_finds_nothing_wrong():
    record = soak(150)
    assert record["wrong"] == {}
    counts = record["counts"]
    assert sum(counts[reason] for reason in (*ENDS, "aborted")) == 150
    assert min(counts.values()) > 3


def test_a_soak_with_panics_device_errors_and_interrupts_finds_nothing_wrong():
    record = soak(300, has_faults=True)
    assert record["wrong"] == {}
    counts = record["counts"]
    assert sum(counts[reason] for reason in (*ENDS, *CUT_SHORT)) == 300
    assert counts["tokenizer panics"] == counts["tokenizer_error"] > 3
    # Some panic when they are submitted, and leave no request.
    assert counts["matcher panics"] >= counts["matcher_error"] > 3
    assert counts["device errors"] > 10
    # How many signals come depends on the machine's speed.
    assert min(counts["interrupts"], counts["exits"]) > 0


@pytest.mark.parametrize("name", TAKERS)
def test_an_engine_that_lost_what_a_program_took_ends_all_requests_and_says_so(name):
    reasons, said = lose(name)
    assert reasons == ["engine_error"]
    assert said == (
        "the engine lost what the device held for its requests, when it raised JaxRuntimeError: "
        f"INTERNAL: {name} failed; make another one."
    )


def test_an_error_before_a_program_takes_anything_moves_nothing():
    engine, calls, failed = make_engine(8, Faults(0)), collections.Counter(), set()
    kinds = [kind | {"matcher": None} for kind in make_kinds(np.random.default_rng(1))]
    expected = [what_came(engine.submit(**kind).result()) for kind in kinds]

    def fail(name, operands):
        calls[name] += 1
        # Each other call fails, two in a row at times.
        if calls[name] % 5 in (1, 2, 4):
            failed.add(name)
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {name}")

    before_programs(engine, fail)
    requests = [engine.submit(**kind) for kind in kinds]
    for number in range(4000):
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            if not engine.step():
                break
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            engine.preempt(requests[number % len(kinds)], drops_cache=number % 3 == 0)
    assert list(map(what_came, requests)) == expected
    assert failed == {
        *TAKERS,
        "new_caches",
        "grow_caches",
        "new_target_caches",
        "park",
        "take_caches",
    }
