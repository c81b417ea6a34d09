"""The measured rules are those of `specjax.core.rules`, and their table is the measurement's."""

import importlib
import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from generic_rules import STANDARD_BY_FUNCTIONS

from specjax.core import rules
from specjax.core.rule import RowValues, accepts, log_weights
from specjax.theory.coupling import match_probability

ROOT = pathlib.Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "pair_rules.json"
CALLS = {
    "standard()": STANDARD_BY_FUNCTIONS,
    "lenience(0.5)": rules.lenience(0.5),
    "typical_acceptance(0.09, 0.3)": rules.typical_acceptance(0.09, 0.3),
    "relaxed(10, 0.6)": rules.relaxed(10, 0.6),
    "ensemble(0.5)": rules.ensemble(0.5),
}

pytestmark = pytest.mark.once


@pytest.fixture
def benchmark(monkeypatch):
    """A module of benchmarks/ by its name there."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def rows_of(rule, p, q, uniforms):
    """P(accepted), and the emitted token's total variation from p, by the rule's own functions."""
    lp, lq = jnp.log(p), jnp.log(q)
    row = RowValues(
        rule.statistics,
        max_logprob=lambda: lp.max(),
        entropy=lambda: -jnp.sum(p * lp),
        rank=lambda: jnp.sum(lp[None, :] > lp[:, None], axis=1)[None],
    )
    share = np.mean(accepts(rule, lp[None], lq[None], uniforms[:, None], row), axis=0)
    residual = np.exp(log_weights(rule, lp, lq, row))
    accepted = q * share
    emitted = accepted + (1 - accepted.sum()) * residual / residual.sum()
    return accepted.sum(), np.abs(emitted - p).sum() / 2


@pytest.mark.parametrize("name", CALLS)
def test_a_measured_rule_is_the_library_s(name, benchmark):
    measured = benchmark("pair.rules")
    assert set(measured.RULES) == set(CALLS)
    uniforms = ((np.arange(4096) + 0.5) / 4096).astype(np.float32)
    for seed, spread in ((0, 0.3), (1, 1.0), (2, 5.0)):
        rng = np.random.default_rng(seed)
        p, q = rng.dirichlet(np.full(24, spread), 2).astype(np.float32) * 0.99 + 0.01 / 24
        found = measured.acceptance_and_distance(p, q, measured.RULES[name])
        wanted = rows_of(CALLS[name], p, q, uniforms)
        np.testing.assert_allclose(found, wanted, atol=2 / 4096)


def test_equal_rows_leave_no_residual_and_no_distance(benchmark):
    measured = benchmark("pair.rules")
    p = np.array([0.5, 0.25, 0.25, 0], np.float32)
    for name in ("standard()", "lenience(0.5)", "ensemble(0.5)"):
        found = measured.acceptance_and_distance(p, p, measured.RULES[name])
        np.testing.assert_array_equal(found, [1, 0])
    assert match_probability(p, p) == pytest.approx(1)


def test_the_table_of_rules_is_that_of_the_measurement(benchmark):
    made, result = benchmark("tables.rules"), json.loads(RESULT.read_text(encoding="utf-8"))
    assert [case["rule"] for case in result["cases"]] == [*CALLS, "coupled"]
    text = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    table, put = made.rules_table(result), benchmark("tables.publish").put_between_markers
    assert put(text, table, made.BEGIN, made.END) == text, "run benchmarks.tables.rules"


def test_what_a_rule_promises_is_what_was_measured(benchmark):
    cases = json.loads(RESULT.read_text(encoding="utf-8"))["cases"]
    by_rule = {case["rule"].split("(")[0]: case for case in cases}
    standard = by_rule.pop("standard")
    assert standard["total_variation"] < 1e-6
    coupled = by_rule.pop("coupled")
    assert coupled["acceptance"] < standard["acceptance"] + 3 * coupled["acceptance_error"]
    for name, case in by_rule.items():
        # None of these is exact, and each accepts more.
        assert case["total_variation"] > 0.01, name
        assert case["acceptance"] > standard["acceptance"], name
