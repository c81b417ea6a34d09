"""The oracle against brute force: what judges the library is judged first."""

import itertools

import numpy as np
import oracle
import pytest
from scipy import stats

pytestmark = pytest.mark.once


def random_rows(rng, *shape):
    p = rng.dirichlet(np.full(shape[-1], 0.5), size=shape[:-1])
    return p.reshape(shape)


def test_accepted_mass_and_residual_mass_are_the_target():
    rng = np.random.default_rng(0)
    for vocab_size in (1, 2, 5, 129):
        p, q = random_rows(rng, 2, vocab_size)
        for draft in (q, p, np.eye(vocab_size)[0], np.roll(q, 1) * 0.9):
            accepted = draft * oracle.acceptance(p, draft)
            rest = 1 - accepted.sum()
            np.testing.assert_allclose(accepted + rest * oracle.residual(p, draft), p, atol=1e-15)


def test_one_step_is_lossless_by_enumeration():
    rng = np.random.default_rng(1)
    prefixes = [x for n in range(4) for x in itertools.product(range(3), repeat=n)]
    p, q = ({x: random_rows(rng, 3) for x in prefixes} for _ in range(2))
    distribution = oracle.output_distribution(p.get, q.get, 3)
    exact = oracle.joint_distribution(p.get, 4)
    continued = {}
    for tokens, mass in distribution.items():
        for rest in itertools.product(range(3), repeat=4 - len(tokens)):
            full = tokens + rest
            tail = np.prod([p[full[:i]][full[i]] for i in range(len(tokens), 4)])
            continued[full] = continued.get(full, 0.0) + mass * tail
    assert continued.keys() == exact.keys()
    for tokens, mass in exact.items():
        assert continued[tokens] == pytest.approx(mass, abs=1e-15)


def test_repeated_steps_are_lossless_by_enumeration():
    p, q = random_rows(np.random.default_rng(4), 2, 3, 3)
    distribution = oracle.steps_distribution(lambda x: p[sum(x) % 3], lambda x: q[sum(x) % 3], 2, 3)
    exact = oracle.joint_distribution(lambda x: p[sum(x) % 3], 3)
    assert distribution == pytest.approx(exact, abs=1e-15)


def test_an_inflated_ratio_is_not_lossless():
    rng = np.random.default_rng(2)
    p, q = random_rows(rng, 2, 5)
    distribution = oracle.output_distribution(lambda _: p, lambda _: q, 1, ratio=1.05)
    first = np.zeros(5)
    for tokens, mass in distribution.items():
        first[tokens[0]] += mass
    assert np.abs(first - p).sum() > 1e-3


def test_the_oracle_samples_the_distribution_it_states():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=300) * 2
    n = 4000
    keys = oracle.fold_in(np.array([0, 7], np.uint32), np.arange(n))
    draws = oracle.sample(
        np.broadcast_to(logits, (n, 300)), keys=keys, positions=0, stream=oracle.TARGET
    )
    p = oracle.target_probs(logits)
    order = np.argsort(p)[::-1]
    group = np.empty(300, int)
    group[order] = np.minimum(np.arange(300), 30)
    counts = np.bincount(group[draws.token_ids], minlength=31)
    expected = n * np.bincount(group, weights=p)
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    assert np.mean(draws.certain) > 0.99


def test_an_interval_that_holds_a_tie_is_not_certain():
    key = np.array([1, 2], np.uint32)
    p = np.full(6, 1 / 6)
    equal = oracle.residual_weights(p, p * (1 - 1e-9), 2e-5)
    assert not oracle.two_level(equal, key)[1]
    assert oracle.two_level(oracle.plain_weights(np.log(p), 2e-5), key)[1]


def test_uniforms_and_gumbels_have_the_stated_ends():
    assert oracle.uniform(np.uint32(0)) == 2.0**-33
    assert oracle.uniform(np.uint32(2**32 - 1)) == 1 - 2.0**-24
    assert oracle.uniform(np.uint64(0)) == 2.0**-54
    assert oracle.uniform(np.uint64(2**64 - 1)) == 1 - 2.0**-53
