"""The gain of block verification, summed over drafts, is that of enumerated steps of both rules."""

import importlib
import itertools
import json
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "pair_block_gain.json"
V, K = 3, 3
TEXTS = list(itertools.product(range(V), repeat=K + 1))

pytestmark = pytest.mark.once


@pytest.fixture
def benchmark(monkeypatch):
    """A module of benchmarks/ by its name there."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture(scope="module")
def tables():
    """Two models, p and q: a row per prefix."""
    rng = np.random.default_rng(0)
    prefixes = [x for n in range(K + 1) for x in itertools.product(range(V), repeat=n)]
    return [{x: rng.dirichlet(np.ones(V)) for x in prefixes} for _ in range(2)]


def chances_of_prefixes(p, q, draft, method):
    """P(exactly i drafted tokens are accepted), and rho_i, of one draft, as the documents say.

    Block verification: the longest prefix of which u_i < h_i, the uniforms independent.
    """
    rho, each = [1.0], []
    for i, token in enumerate(draft):
        ratio = p[draft[:i]][token] / q[draft[:i]][token]
        each.append(min(1, ratio))
        rho.append(min(1, rho[-1] * ratio))
    if method == "standard":
        reached = np.cumprod([1, *each])
        return -np.diff(reached, append=0), [1] * len(rho)
    h = [1.0]
    for i in range(1, K):
        mass = np.maximum(rho[i] * p[draft[:i]] - q[draft[:i]], 0).sum()
        h.append(mass / (mass + 1 - rho[i]) if mass + 1 - rho[i] > 0 else 1.0)
    h.append(rho[K])
    later = np.cumprod([1, *(1 - np.array(h[:0:-1]))])[::-1]
    return np.array(h) * later, rho


def enumerate_step(p, q, method):
    """P(a step accepts i drafted tokens and emits these i + 1), over all drafts."""
    found = {}
    for draft in itertools.product(range(V), repeat=K):
        drafted = np.prod([q[draft[:i]][token] for i, token in enumerate(draft)])
        exactly, rho = chances_of_prefixes(p, q, draft, method)
        for i in range(K + 1):
            row = p[draft[:i]]
            if i < K:
                row = np.maximum(rho[i] * row - q[draft[:i]], 0)
            for token in range(V):
                emitted = (*draft[:i], token)
                chance = drafted * exactly[i] * row[token] / row.sum() if row.sum() > 0 else 0
                found[emitted] = found.get(emitted, 0) + chance
    return found


@pytest.mark.parametrize("method", ["standard", "block"])
def test_acceptance_given_a_text_is_that_of_all_drafts(method, tables, benchmark):
    p, q = tables
    found = enumerate_step(p, q, method)
    for text in TEXTS:
        rows = [(p[text[:i]][x], q[text[:i]][x]) for i, x in enumerate(text)]
        log_ratios = np.array([np.log(a / b) for a, b in rows])
        (chances,) = benchmark("pair.block_gain").acceptance_given_text(log_ratios, K, method)
        target = np.cumprod([a for a, _ in rows])
        for i in range(K + 1):
            stops = 1 - chances[i] if i < K else 1
            wanted = target[i] * np.prod(chances[:i]) * stops
            assert found[text[: i + 1]] == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_step_that_begins_later_reads_the_text_from_there(method, benchmark):
    chances = benchmark("pair.block_gain").acceptance_given_text
    log_ratios = np.random.default_rng(1).normal(size=(2, 9))
    whole = chances(log_ratios, K, method)
    assert whole.shape == (2, 9 - K, K)
    for s in range(9 - K):
        alone = chances(log_ratios[:, s : s + K + 1], K, method)
        np.testing.assert_array_equal(alone[:, 0], whole[:, s])


def test_steps_and_tokens_are_those_of_all_ways_to_cut_a_text(benchmark):
    chances = np.random.default_rng(2).uniform(size=(2, 5, 3))

    def walk(of_text, s):
        """Expected steps and tokens from token s on."""
        if s >= len(of_text):
            return np.zeros(2)
        total = np.zeros(2)
        for i in range(4):
            chance = of_text[s, :i].prod() * (1 - of_text[s, i] if i < 3 else 1)
            total += chance * (np.array([1, i + 1]) + walk(of_text, s + i + 1))
        return total

    found = benchmark("pair.block_gain").steps_and_tokens(chances)
    np.testing.assert_allclose(found, [walk(of_text, 0) for of_text in chances], rtol=1e-12)


def test_texts_of_one_file_are_one_observation(benchmark):
    record_of = benchmark("pair.block_gain").record_of
    sums = np.random.default_rng(3).uniform(1, 2, size=(2, 6, 2))
    once = record_of(sums, np.arange(6))
    # Each text twice is no more knowledge.
    twice = record_of(np.concatenate([sums, sums], axis=1), np.tile(np.arange(6), 2))
    assert once == pytest.approx(twice)
    steps, tokens = sums[1].T
    ratio = tokens.sum() / steps.sum()
    error = np.sqrt(6 * np.var(tokens - ratio * steps, ddof=1)) / steps.sum()
    assert (once["block"], once["block_error"]) == pytest.approx((ratio, error))
    assert once["gain"] == pytest.approx(once["block"] / once["standard"] - 1)
    # Methods that differ by a factor alone gain it without an error.
    sums[1] = sums[0] * [1, 1.5]
    same = record_of(sums, np.arange(6))
    assert (same["gain"], same["gain_error"]) == pytest.approx((0.5, 0), abs=1e-12)


def test_the_table_and_the_plot_are_those_of_the_measurement(benchmark):
    made, result = benchmark("tables.block_gain"), json.loads(RESULT.read_text(encoding="utf-8"))
    text = (ROOT / "docs" / "measurements.md").read_text(encoding="utf-8")
    table, put = made.block_gain_table(result), benchmark("tables.publish").put_between_markers
    assert put(text, table, made.BEGIN, made.END) == text, "run benchmarks.tables.block_gain"
    drawn = RESULT.with_suffix(".svg").read_text(encoding="utf-8")
    assert json.dumps(made.points_of(result)) in drawn, "run benchmarks.tables.block_gain"


def test_expected_and_counted_tokens_per_step_agree():
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    expected = {(x["K"], x["temperature"]): x for x in result["expected"]}
    assert result["counted"]
    for x in result["counted"]:
        same = expected[x["K"], x["temperature"]]
        for name in ("standard", "block", "gain"):
            error = np.hypot(x[f"{name}_error"], same[f"{name}_error"])
            assert abs(x[name] - same[name]) < 4 * error


def test_the_page_of_rules_quotes_the_gain():
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    gains = {(x["K"], x["temperature"]): 100 * x["gain"] for x in result["expected"]}
    quoted = f"{gains[4, 0.7]:.0f} % more tokens per step at K = 4, {gains[8, 0.7]:.0f} % at K = 8"
    assert quoted in (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
