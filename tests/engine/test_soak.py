"""Hundreds of requests with cancels and preemptions leave no slot, array, order or text wrong."""

import pytest

from benchmarks.cpu.soak import soak

pytestmark = pytest.mark.once


def test_a_soak_finds_nothing_wrong(monkeypatch):
    # Its chunks are short; some prompts are read together all the same.
    monkeypatch.setattr("specjax.engine.programs._LEAST_CHUNK", 1)
    record = soak(200)
    assert record["wrong"] == {}
    counts = record["counts"]
    assert counts["aborted"] + counts["end_of_sequence"] + counts["length"] == 200
    assert min(counts.values()) > 5
