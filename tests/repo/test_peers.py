"""The page of what peers emit is that of the measurement, whose arithmetic is checked here."""

import importlib
import json
import pathlib
import re

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "peers.json"
DOCUMENT = ROOT / "docs" / "peers.md"

pytestmark = [pytest.mark.lenient, pytest.mark.once]


@pytest.fixture
def benchmark(monkeypatch):
    """A module of benchmarks/ by its name there."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_the_tables_of_the_page_are_those_of_the_measurement(benchmark):
    made, publish = benchmark("tables.peers"), benchmark("tables.publish")
    table = made.peers_table(json.loads(RESULT.read_text(encoding="utf-8")))
    text = DOCUMENT.read_text(encoding="utf-8")
    put = publish.put_between_markers
    assert put(text, table, made.BEGIN, made.END) == text, "run benchmarks.tables.peers"


def test_the_versions_are_those_that_make_installs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    installed = re.findall(r"(transformers|keras-hub|tpu-inference)==([\d.]+)", makefile)
    assert len(installed) == 3
    for name, version in installed:
        assert f"{name} {version}" in result[name]["version"]


def test_specjax_is_exact_in_every_case_and_a_peer_that_is_not_has_its_smallest_input(benchmark):
    is_exact = benchmark("tables.peers").is_exact
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    ours = [section for name, section in result.items() if name.startswith("specjax")]
    cases = [case for section in ours for case in section["cases"]]
    assert len(cases) > 10
    assert not [case["case"] for case in cases if not is_exact(case)]
    assert not [case["case"] for case in cases if not is_exact(case, "step")]
    for name in ("transformers", "keras-hub", "tpu-inference"):
        faults = [case for case in result[name]["cases"] if not is_exact(case)]
        assert {case["rows"] for case in faults} >= {"usual", "smallest"}


def outcomes_of(inputs, rows, residual):
    """The outcomes of a step of one drafted token, where a rejected one leaves `residual(p, q)`."""
    p = inputs.target_probs(rows, inputs.Kind())
    q = np.stack([inputs.probs(row, inputs.Kind()) for row in rows.draft])
    outcomes = inputs.empty_outcomes(rows)
    for (token,), mass in inputs.drafts_of(q):
        accept = min(1.0, p[0, token] / q[0, token])
        outcomes[token, :-1] += mass * accept * p[1]
        weights = residual(p[0], q[0])
        outcomes[:-1, -1] += mass * (1 - accept) * weights / weights.sum()
    return outcomes


def test_the_total_variation_of_a_right_step_is_zero_and_of_a_wrong_residual_one_eighth(benchmark):
    inputs, measure = benchmark("peers.inputs"), benchmark("peers.measure").measure
    rows = inputs.smallest_rows()
    right = outcomes_of(inputs, rows, lambda p, q: np.maximum(p - q, 0))
    wrong = outcomes_of(inputs, rows, lambda p, q: p)
    records = [
        measure("case", "call", outcomes, rows, inputs.Kind(), size="smallest")
        for outcomes in (right, wrong)
    ]
    assert records[0]["first_token"] == pytest.approx(0, abs=1e-7)
    assert records[0]["step"] == pytest.approx(0, abs=1e-7)
    # A quarter is rejected, and half of it comes back as token 0.
    assert records[1]["first_token"] == pytest.approx(1 / 8, abs=1e-7)
    assert records[1]["emitted"] == pytest.approx([0.625, 0.375], abs=1e-6)
    assert records[0]["tokens_per_step"] == pytest.approx(1.75)


def test_samples_are_counted_by_their_tokens_and_chance_is_what_right_samples_show(benchmark):
    inputs = benchmark("peers.inputs")
    counts = inputs.count_outcomes(np.array([[0, 1], [0, -1], [0, -1]]), vocab_size=2)
    assert counts[0, 1] == 1
    assert counts[0, 2] == 2
    p, rng = np.array([0.5, 0.3, 0.2]), np.random.default_rng(0)
    shown = [inputs.total_variation(rng.multinomial(1000, p) / 1000, p) for _ in range(400)]
    assert inputs.variation_by_chance(p, 1000) == pytest.approx(np.mean(shown), rel=0.1)


def test_the_target_of_a_request_is_cut_after_its_temperature(benchmark):
    inputs = benchmark("peers.inputs")
    row = np.log(np.array([0.5, 0.3, 0.2]))
    cold = np.array([0.25, 0.09, 0.04]) / 0.38
    kept = cold[:2] / cold[:2].sum()
    assert inputs.probs(row, inputs.Kind(0.5)) == pytest.approx(cold)
    assert inputs.probs(row, inputs.Kind(0.5, 0.8)) == pytest.approx([*kept, 0])
    assert inputs.probs(row, inputs.Kind(0.0)) == pytest.approx([1, 0, 0])


def test_the_obvious_lines_are_right_but_for_their_mistake(benchmark, monkeypatch):
    obvious, made = benchmark("peers.obvious"), benchmark("tables.peers")
    inputs = benchmark("peers.inputs")
    monkeypatch.setattr(obvious, "BATCH", 2**12)
    monkeypatch.setattr(obvious, "BATCHES", 1)
    monkeypatch.setattr(obvious, "ROWS", {"smallest": inputs.smallest_rows})
    kept = ["none", "argmax drafts are verified with q = softmax(draft logits)"]
    monkeypatch.setattr(obvious, "MISTAKES", {name: obvious.MISTAKES[name] for name in kept})
    right, wrong = obvious.cases()
    assert made.is_exact(right)
    assert made.is_exact(right, "step")
    assert wrong["first_token"] == pytest.approx(1 / 6, abs=0.04)


def test_chance_of_a_step_is_what_samples_of_the_right_step_show(benchmark):
    inputs, measure = benchmark("peers.inputs"), benchmark("peers.measure").measure
    rows, kind, rng = inputs.smallest_rows(), inputs.Kind(), np.random.default_rng(1)
    right = outcomes_of(inputs, rows, lambda p, q: np.maximum(p - q, 0))
    shown, chances = [], []
    for _ in range(200):
        counts = rng.multinomial(2000, right.ravel() / right.sum()).reshape(right.shape)
        record = measure("", "", counts, rows, kind, size="usual", num_samples=2000)
        shown.append(record["step"])
        chances.append(record["step_by_chance"])
    assert np.mean(chances) == pytest.approx(np.mean(shown), rel=0.15)
