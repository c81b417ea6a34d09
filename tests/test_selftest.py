"""`python -m specjax.selftest` passes here, and sees samplers that are wrong on purpose."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixed_noise import replace_everywhere

import specjax
from specjax import selftest
from specjax.core import residual


def run(capsys, *argv):
    code = selftest.main(argv)
    return code, capsys.readouterr().out


def test_it_passes_here_and_names_versions_and_devices(capsys):
    code, table = run(capsys, "--quick")
    assert code == 0, table
    assert f"specjax {specjax.__version__}, jax {jax.__version__}" in table
    assert jax.local_devices()[0].device_kind in table
    kinds = list(selftest._KINDS)
    assert [name for name in kinds if f"ok    standard: {name} " in table] == kinds
    assert table.count("ok    gumbel_sample: ") == 5
    assert re.search(r"^12 comparisons, 0 faults", table, re.MULTILINE)


def test_a_residual_that_is_the_target_is_a_fault(capsys, monkeypatch):
    def wrong(target_logprobs, draft_logprobs, exp2=jnp.exp2):
        return jnp.exp(target_logprobs)

    replace_everywhere(monkeypatch, residual.residual_probs, wrong)
    # Traces are kept by shape, and outlive the patch: a number of samples of its own.
    monkeypatch.setattr(selftest, "_NUM_QUICK_SAMPLES", 3_001)
    code, table = run(capsys, "--quick")
    assert code == 1
    for name in ("sampled", "sampled, T = 0.7, of drafts 1.3", "sampled, top-p 0.8"):
        assert f"FAULT standard: {name} " in table
    assert "ok    gumbel_sample: sampled " in table
    assert "ok    standard: greedy target, sampled drafts " in table


def test_a_step_that_raises_is_a_fault(capsys, monkeypatch):
    def refuse(batch, rule, options):
        raise ValueError("no such step")

    monkeypatch.setattr(selftest, "_verify", refuse)
    code, table = run(capsys, "--quick")
    assert code == 1
    assert "FAULT  ValueError: no such step" in table


def continued(outcomes, target):
    """The distribution of K + 1 tokens: what a step emitted, and the target's tokens after it."""
    size = target[0].size
    joint = np.zeros((size,) * len(target))
    for step in np.argwhere(outcomes > 0):
        tokens = [int(token) for token in step if token < size]
        rows = [np.eye(size)[token] for token in tokens] + list(target[len(tokens) :])
        joint += outcomes[tuple(step)] * outer(rows)
    return joint


def outer(rows):
    joint = np.ones(())
    for row in rows:
        joint = np.multiply.outer(joint, row)
    return joint


SAMPLED = [name for name, kind in selftest._KINDS.items() if kind.num_tokens == 2]


@pytest.mark.parametrize(
    ("rule", "name"), list(itertools.product(selftest._RULES, SAMPLED)), ids=" ".join
)
def test_an_enumerated_step_and_what_follows_have_the_target_s_distribution(rule, name):
    kind = selftest._KINDS[name]
    target, draft = selftest._make_rows(0, 5, 2)
    rows = [selftest._probs(row, kind.temperature, kind.top_p) for row in target]
    joint = continued(selftest._outcomes(rule, kind, target, draft), rows)
    np.testing.assert_allclose(joint, outer(rows), rtol=0, atol=1e-14)


def test_a_ratio_that_is_five_percent_too_large_is_seen_and_the_right_one_is_not(monkeypatch):
    def inflated(rule, x, p, q):
        rest = 1.0
        for i, token in enumerate(x):
            accept = min(1.0, 1.05 * p[i, token] / q[i, token])
            yield rest * (1 - accept), np.maximum(p[i] - q[i], 0)
            rest *= accept
        yield rest, p[len(x)]

    kind, rows = selftest._KINDS["sampled"], selftest._make_rows(0, 5, 2)
    right = selftest._outcomes("standard", kind, *rows)
    monkeypatch.setattr(selftest, "_stops", inflated)
    wrong = selftest._outcomes("standard", kind, *rows)
    rng, number = np.random.default_rng(0), selftest._NUM_SAMPLES
    z = {}
    for name, probs in (("right", right), ("wrong", wrong)):
        counts = rng.multinomial(number, probs.ravel() / probs.sum())
        z[name] = selftest._difference(counts, right)[1]
    assert abs(z["right"]) < 4
    assert z["wrong"] > selftest._MAX_Z


def test_an_outcome_of_probability_zero_is_a_fault_whatever_the_rest():
    probs = np.array([0.5, 0.5, 0.0])
    assert selftest._difference(np.array([500, 500, 0]), probs) == (0.0, pytest.approx(0, abs=5))
    assert selftest._difference(np.array([499, 500, 1]), probs)[1] == np.inf


def test_implementations_that_differ_in_tokens_or_log_probabilities_are_a_fault():
    ones = jnp.ones((4, 2), jnp.int32)
    first = specjax.Verification(ones, ones[:, 0], ones[:, 0], jnp.zeros((4, 2)))
    others = {
        "tokens": first._replace(token_ids=ones.at[1, 0].set(3)),
        "log-probabilities": first._replace(logprobs=first.logprobs.at[2, 1].set(0.01)),
        "NaN": first._replace(logprobs=first.logprobs.at[2, 1].set(jnp.nan)),
    }
    assert not selftest._compare_steps("", first, first).is_fault
    assert all(selftest._compare_steps("", first, one).is_fault for one in others.values())


@pytest.mark.checks
@pytest.mark.once
def test_the_kernels_in_the_interpreter_agree_with_plain_jax(capsys):
    found = list(selftest._compare_implementations(0))
    assert [one.name for one in found][:3] == [
        f"{rule}: xla and interpret" for rule in selftest._RULES
    ]
    assert not [one for one in found if one.is_fault]


def test_a_wrong_argument_is_no_fault_of_the_machine(capsys):
    with pytest.raises(SystemExit, match="2"):
        selftest.main(["--quick", "--seed", "-1"])
    assert "--seed is -1; it needs to be at least 0." in capsys.readouterr().err
