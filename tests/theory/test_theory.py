"""The formulas of expected acceptance and speed, each against an enumeration of what it sums."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_block
import pytest
import scipy

from specjax import theory

pytestmark = pytest.mark.once

METHODS = {
    "standard": oracle.output_distribution,
    "block": oracle_block.output_distribution,
}


def rows(seed, size, spread=0.7):
    """p and q; those of an odd seed have a token of no probability each."""
    p, q = np.random.default_rng(seed).dirichlet(np.full(size, spread), 2)
    if seed % 2:
        p[0] = q[1] = 0
    return p / p.sum(), q / q.sum()


def tables(seed, size, K):
    """p and q after every prefix: callables, and arrays of K + 1 lengths of prefixes."""
    rng = np.random.default_rng(seed)
    arrays = [[rng.dirichlet(np.ones(size), (size,) * i) for i in range(K + 1)] for _ in range(2)]
    callables = [lambda prefix, x=x: x[len(prefix)][prefix] for x in arrays]
    return callables, [x[:K] for x in arrays]


# One drafted token


@pytest.mark.parametrize("seed", range(4))
def test_the_acceptance_rate_is_that_of_the_rule_over_all_drafts(seed):
    p, q = rows(seed, 5)
    accepted = sum(q[x] * min(1, p[x] / q[x]) for x in range(5) if q[x])
    assert theory.acceptance_rate(p, q) == pytest.approx(accepted, abs=1e-14)
    step = oracle.output_distribution(lambda _: p, lambda _: q, 1)
    mean = sum((len(tokens) - 1) * mass for tokens, mass in step.items())
    assert theory.acceptance_rate(p, q) == pytest.approx(mean, abs=1e-14)


def test_many_rows_are_one_call_traced_or_not():
    p, q = (np.stack(x) for x in zip(*[rows(seed, 6) for seed in range(6)], strict=True))
    each = [theory.acceptance_rate(*pair) for pair in zip(p, q, strict=True)]
    whole = theory.acceptance_rate(p.reshape(2, 3, 6), q.reshape(2, 3, 6))
    assert whole.dtype == np.float64
    np.testing.assert_array_equal(whole, np.reshape(each, (2, 3)))
    traced = jax.jit(theory.acceptance_rate)(jnp.float32(p), jnp.float32(q))
    np.testing.assert_allclose(traced, each, rtol=1e-6)


def race(p, q):
    """P(token i wins under p and under q), by the integral over its own Gumbel noise."""
    noise = np.linspace(-6, 45, 40001)
    density = np.exp(-noise - np.exp(-noise))
    wins = np.zeros(len(p))
    for i in np.flatnonzero((p > 0) & (q > 0)):
        others = np.ones_like(noise)
        for j in range(len(p)):
            if j != i:
                lead = min(np.log(x[i] / x[j]) if x[j] else np.inf for x in (p, q))
                others *= np.exp(-np.exp(-noise - lead))
        wins[i] = np.trapezoid(density * others, noise)
    return wins


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_size", [1, 2, 3, 128])
def test_coupled_draws_match_as_often_as_both_levels_are_won_together(seed, block_size):
    p, q = rows(seed, 5)
    blocks = [slice(start, start + block_size) for start in range(0, 5, block_size)]
    masses = [np.array([x[block].sum() for block in blocks]) for x in (p, q)]
    total = sum(
        both * race(p[block] / p[block].sum(), q[block] / q[block].sum()).sum()
        for both, block in zip(race(*masses), blocks, strict=True)
        if both
    )
    found = theory.match_probability(p, q, block_size)
    assert found == pytest.approx(total, abs=1e-6)
    assert found <= theory.acceptance_rate(p, q) + 1e-14


def test_draws_on_one_level_may_match_more_or_less_than_on_two():
    p = np.array([0.5, 0, 0.5, 0])
    assert theory.match_probability(p, [0.5, 0, 0, 0.5], 2) == pytest.approx(0.5)
    assert theory.match_probability(p, [0.5, 0, 0, 0.5], 4) == pytest.approx(1 / 3)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    assert theory.match_probability(p, q, 2) < theory.match_probability(p, q, 3)


# Several candidates


def drawn_tuples(q, num_drafts, replacement):
    """Every sequence of drafts and its probability."""
    for drafts in itertools.product(range(len(q)), repeat=num_drafts):
        mass, rest = 1.0, q.copy()
        for x in drafts:
            mass *= rest[x] / rest.sum() if rest[x] else 0
            if not replacement:
                rest[x] = 0
        if mass:
            yield drafts, mass


def most_accepted(p, q, num_drafts, replacement):
    """The transport problem: a joint distribution of drafts and y with most mass on y in drafts."""
    drafts, masses = zip(*drawn_tuples(q, num_drafts, replacement), strict=True)
    assert sum(masses) == pytest.approx(1)
    gain = np.array([[y in x for y in range(len(p))] for x in drafts], float)
    of_drafts = [np.zeros(gain.shape) for _ in drafts]
    of_tokens = [np.zeros(gain.shape) for _ in p]
    for i, rule in enumerate(of_drafts):
        rule[i] = 1
    for y, rule in enumerate(of_tokens):
        rule[:, y] = 1
    equal = np.stack([rule.ravel() for rule in (*of_drafts, *of_tokens)])
    solution = scipy.optimize.linprog(-gain.ravel(), A_eq=equal, b_eq=np.concatenate([masses, p]))
    assert solution.success
    return -solution.fun


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("size", "num_drafts"), [(3, 1), (4, 2), (5, 2), (4, 3)])
def test_the_optimum_of_several_candidates_is_that_of_the_linear_program(
    size, num_drafts, replacement
):
    for seed in range(4):
        p, q = rows(seed, size)
        found = theory.optimal_acceptance_rate(p, q, num_drafts, replacement=replacement)
        solved = most_accepted(p, q, num_drafts, replacement)
        assert found == pytest.approx(solved, abs=1e-9)
        if num_drafts == 1:
            assert found == pytest.approx(theory.acceptance_rate(p, q), abs=1e-14)


def test_sixteen_tokens_are_the_most_and_agree_with_counting():
    p = np.random.default_rng(0).dirichlet(np.ones(16))
    q = np.full(16, 1 / 16)
    likeliest_last = np.cumsum(np.sort(p))
    for num_drafts in (1, 3, 16):
        # Of sets of n tokens that of the least likely is worst; drafts are as likely in any.
        counts = [np.prod([max(n - m, 0) / (16 - m) for m in range(num_drafts)]) for n in range(17)]
        wanted = 1 + min(0, *(likeliest_last - counts[1:]))
        found = theory.optimal_acceptance_rate(p, q, num_drafts, replacement=False)
        assert found == pytest.approx(wanted, abs=1e-12)
        wanted = 1 + min(0, *(likeliest_last - (np.arange(1, 17) / 16) ** num_drafts))
        found = theory.optimal_acceptance_rate(p, q, num_drafts, replacement=True)
        assert found == pytest.approx(wanted, abs=1e-12)


# A step of several tokens


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "K"), [(2, 3), (3, 3), (4, 2)])
def test_rates_and_lengths_of_a_step_are_those_of_all_that_it_may_emit(size, K, method):
    for seed in range(3):
        (p, q), arrays = tables(seed, size, K)
        rates = theory.unconditional_rates(*arrays, method)
        lengths = theory.acceptance_lengths(rates)
        for k in range(K + 1):
            step = METHODS[method](p, q, k)
            emitted = np.array([(len(tokens), mass) for tokens, mass in step.items()])
            assert lengths[k] == pytest.approx(emitted.prod(axis=1).sum(), abs=1e-13)
            for i in range(k):
                at_least = emitted[emitted[:, 0] > i + 1, 1].sum()
                assert rates[i] == pytest.approx(at_least, abs=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_a_draft_of_the_target_s_own_distribution_is_accepted_whole(method):
    for seed in range(20):
        _, (p, _) = tables(seed, 3, 5)
        lengths = theory.acceptance_lengths(theory.unconditional_rates(p, p, method))
        np.testing.assert_allclose(lengths, np.arange(1, 7), rtol=1e-14)


@pytest.mark.parametrize("method", METHODS)
def test_rates_given_a_text_are_those_of_what_a_step_emits(method):
    K = 3
    (p, q), arrays = tables(5, 3, K)
    step = METHODS[method](p, q, K)
    mean = np.zeros(K)
    for text in itertools.product(range(3), repeat=K + 1):
        of_target = [p(text[:i])[x] for i, x in enumerate(text)]
        of_draft = [q(text[:i])[x] for i, x in enumerate(text[:K])]
        log_ratios = np.log(of_target[:K]) - np.log(of_draft)
        rates = theory.rates_given_text(log_ratios, method)
        mean += np.prod(of_target) * np.cumprod(rates)
        for i in range(K + 1):
            stops = 1 - rates[i] if i < K else 1
            wanted = np.prod(of_target[: i + 1]) * np.prod(rates[:i]) * stops
            assert step.get(text[: i + 1], 0) == pytest.approx(wanted, abs=1e-14)
    np.testing.assert_allclose(mean, theory.unconditional_rates(*arrays, method), atol=1e-13)


def test_a_text_that_the_draft_would_not_write_ends_its_step_there():
    log_ratios = np.array([[0.5, np.inf, -1.0]])
    for method in METHODS:
        np.testing.assert_allclose(
            theory.rates_given_text(log_ratios, method), [[np.exp(-0.5), 0, 1]], rtol=1e-15
        )


@pytest.mark.parametrize("seed", range(5))
def test_a_block_accepts_no_less_than_token_by_token(seed):
    _, arrays = tables(seed, 3, 4)
    standard, block = (theory.unconditional_rates(*arrays, method) for method in METHODS)
    assert block[0] == pytest.approx(standard[0], abs=1e-15)
    assert np.all(block[1:] > standard[1:])


def test_lengths_of_conditional_rates_are_those_of_all_runs_of_coins():
    conditional = [0.9, 0.5, 0.75]
    lengths = theory.acceptance_lengths(np.cumprod(conditional))
    for k, length in enumerate(lengths):
        total = 0.0
        for outcomes in itertools.product([True, False], repeat=k):
            pairs = zip(outcomes, conditional, strict=False)
            probability = np.prod([c if is_accepted else 1 - c for is_accepted, c in pairs])
            run = next((n for n, is_accepted in enumerate(outcomes) if not is_accepted), k)
            total += probability * (run + 1)
        assert length == pytest.approx(total, abs=1e-15)
    traced = jax.jit(theory.acceptance_lengths)(jnp.cumprod(jnp.array([conditional] * 2), axis=1))
    np.testing.assert_allclose(traced, [lengths] * 2, rtol=1e-6)
    assert theory.acceptance_lengths([]).tolist() == [1.0]


# Speed


def test_the_best_k_emits_the_most_tokens_in_the_time_of_many_steps():
    rng = np.random.default_rng(0)
    for size in (1, 2, 4, 9):
        rates = np.sort(rng.uniform(size=size - 1))[::-1]
        seconds = np.cumsum(rng.uniform(0.1, 1, size))
        lengths = theory.acceptance_lengths(rates)
        choice = theory.best_k(lengths, seconds)
        emitted = [1000 / t * (1 + sum(rates[:k])) for k, t in enumerate(seconds)]
        assert choice.k == max(range(size), key=lambda k: emitted[k])
        np.testing.assert_allclose(choice.tokens_per_second, np.array(emitted) / 1000, rtol=1e-12)
        arrays = jnp.float32(lengths), jnp.float32(seconds)
        traced = jax.jit(theory.best_k)(*arrays)
        assert traced.k == choice.k
        np.testing.assert_allclose(traced.tokens_per_second, choice.tokens_per_second, rtol=1e-6)


def test_of_equal_speeds_the_fewest_drafts_are_best_and_rows_are_chosen_alone():
    lengths, seconds = [1.0, 1.5, 2.0], [[1.0, 1.5, 2.0], [1.0, 1.5, 1.9], [1.0, 1.4, 1.9]]
    for convert in (np.array, jnp.array):
        assert theory.best_k(convert(lengths), convert(seconds)).k.tolist() == [0, 2, 1]


# Wrong calls

P = [0.5, 0.5]
TABLE = [P, [P, P]]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: theory.acceptance_rate(P, [1.0]), r"q has shape \(1,\) and p \(2,\)"),
        (lambda: theory.acceptance_rate(0.5, 0.5), "needs a last axis of V"),
        (lambda: theory.acceptance_rate([0.0, 3.0], P), "p has a row .* sum is 3; .* softmax"),
        (
            lambda: theory.acceptance_rate(P, [1.5, -0.5]),
            "q has a row whose smallest entry is -0.5",
        ),
        (lambda: theory.acceptance_rate(P, [np.nan, 1.0]), "q has a row"),
        (
            lambda: theory.optimal_acceptance_rate(
                np.full(17, 1 / 17), np.full(17, 1 / 17), 2, replacement=True
            ),
            r"shape \(17,\); .*V <= 16, because all 2\^V sets",
        ),
        (
            lambda: theory.optimal_acceptance_rate(P, [1.0, 0.0], 2, replacement=False),
            "num_drafts is 2; .*the 1 tokens",
        ),
        (lambda: theory.optimal_acceptance_rate(P, P, 0, replacement=True), "num_drafts is 0"),
        (lambda: theory.match_probability(P, [1.0]), r"p has shape \(2,\) and q \(1,\)"),
        (lambda: theory.unconditional_rates(TABLE, TABLE, "coupled"), "method is 'coupled'"),
        (lambda: theory.unconditional_rates(TABLE, TABLE[:1], "block"), "has 2 arrays and draft 1"),
        (lambda: theory.unconditional_rates([P, P], [P, P], "block"), r"target\[1\] has shape"),
        (
            lambda: theory.unconditional_rates(TABLE, [P, [P, [0.5, 0.9]]], "block"),
            r"draft\[1\] has a row",
        ),
        (lambda: theory.rates_given_text([0.0, -np.inf], "block"), "none is NaN or -inf"),
        (lambda: theory.rates_given_text([0.0], "greedy"), "method is 'greedy'"),
        (lambda: theory.acceptance_lengths(0.5), "unconditional is a scalar"),
        (lambda: theory.acceptance_lengths([0.5, 0.6]), "rises from 0.5"),
        (lambda: theory.acceptance_lengths(jnp.array([1.5])), "unconditional holds 1.5"),
        (lambda: theory.best_k([1.0, 1.5], [1.0]), r"shape \(2,\) and step_seconds \(1,\)"),
        (lambda: theory.best_k([1.0], [0.0]), "step_seconds holds 0.0"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence_that_names_the_argument(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()
