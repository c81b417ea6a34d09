"""A rule decides what is accepted and what replaces it, in plain JAX and in the kernels alike."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy
from generic_rules import STANDARD_BY_FUNCTIONS
from test_ragged import check_same, ragged_case, run_ragged
from verify_cases import (
    check_against_oracle,
    library,
    make_keys,
    mixed_case,
    run,
    sampled_case,
)

import specjax
from specjax import Draft, RaggedDraft, Rule, rules
from specjax.core.rule import RowValues, accepts, log_weights

pytestmark = pytest.mark.once

# The example of the docstrings.
P, Q = np.array([0.5, 0.3, 0.15, 0.05]), np.array([0.3, 0.2, 0.3, 0.2])
RESIDUAL = np.maximum(P - Q, 0)
ENTROPY = -np.sum(P * np.log(P))
RANK = np.sum(P[None] > P[:, None], axis=1)
# Rule, acceptance of each token, what replaces a rejected one, total variation.
EXAMPLES = {
    "standard": (STANDARD_BY_FUNCTIONS, np.minimum(1, P / Q), RESIDUAL, 0.0),
    "lenience": (rules.lenience(0.5), np.minimum(1, P / (0.5 * Q)), RESIDUAL, 0.2),
    "typical": (
        rules.typical_acceptance(0.3, 0.6),
        min(0.3, 0.6 * np.exp(-ENTROPY)) < P,
        P,
        0.1,
    ),
    "relaxed": (rules.relaxed(2, 0.25), (RANK < 2) & (np.max(P) - 0.25 <= P), P, 0.1),
    "ensemble": (rules.ensemble(0.5), np.minimum(1, (0.5 * P + 0.5 * Q) / Q), RESIDUAL, 0.15),
}
PAIRS = 8000


def enumerated(acceptance, residual):
    """Distribution of one emitted token after a drafted one."""
    accepted = Q * acceptance
    return accepted + (1 - accepted.sum()) * residual / residual.sum()


def of_functions(rule, num_uniforms=4096):
    """How often a rule's own functions accept each token, and their residual."""
    lp, lq = (jnp.log(jnp.asarray(x, jnp.float32))[None] for x in (P, Q))
    u = (jnp.arange(num_uniforms, dtype=jnp.float32)[:, None] + 0.5) / num_uniforms
    row = RowValues(
        rule.statistics,
        max_logprob=lambda: jnp.max(lp),
        entropy=lambda: -jnp.sum(jnp.exp(lp) * lp),
        rank=lambda: jnp.asarray(RANK, jnp.float32)[None],
    )
    acceptance = np.mean(accepts(rule, lp, lq, u, row), axis=0)
    return acceptance, np.exp(np.asarray(log_weights(rule, lp, lq, row)))[0]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_s_total_variation_is_that_of_its_docstring(name):
    rule, acceptance, residual, variation = EXAMPLES[name]
    measured = np.abs(enumerated(acceptance, residual) - P).sum() / 2
    assert measured == pytest.approx(variation, abs=1e-12)
    np.testing.assert_allclose(
        enumerated(*of_functions(rule)), enumerated(acceptance, residual), atol=2 / 4096
    )
    text = getattr(rules, {"typical": "typical_acceptance"}.get(name, name)).__doc__
    assert ("not exact" in text) == (variation > 0)
    assert variation == 0 or f": {variation}." in " ".join(text.split())


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_rule_s_text_is_the_same_in_every_process(name):
    # `specjax generate` keeps its programs under a key that holds this text.
    assert " at 0x" not in repr(EXAMPLES[name][0])


def test_typical_acceptance_asks_for_a_probability_above_its_threshold_alone():
    rule = rules.typical_acceptance(0.3, 0.6)
    row = RowValues(rule.statistics, entropy=lambda: np.float32(ENTROPY))
    accepted = rule.accept(np.log(P, dtype=np.float32), np.float32(0), np.float32(0.99), row)
    # The threshold is 0.19.
    assert np.asarray(accepted).tolist() == [True, True, False, False]


# The standard one is the default, as a test below says; lenience and ensemble differ in a factor.
@pytest.mark.parametrize("name", ["typical", "relaxed"])
def test_emitted_tokens_follow_the_enumeration(name):
    rule, acceptance, residual, _ = EXAMPLES[name]
    keys = make_keys(PAIRS)
    p, q = (jnp.broadcast_to(jnp.log(jnp.asarray(x, jnp.float32)), (PAIRS, 4)) for x in (P, Q))
    drawn = specjax.gumbel_sample(q, keys=keys, positions=5, stream=specjax.Stream.draft(0))
    draft = Draft(drawn.token_ids[:, None], logits=q[:, None])
    target = jnp.broadcast_to(p[:, None], (PAIRS, 2, 4))
    step = specjax.rejection_sample(draft, target, keys=keys, positions=5, rule=rule)
    counts = np.bincount(np.asarray(step.token_ids)[:, 0], minlength=4)
    expected = PAIRS * enumerated(acceptance, residual)
    assert scipy.stats.chisquare(counts, expected).pvalue > 1e-6
    rate = np.sum(Q * acceptance)
    margin = 5 * np.sqrt(rate * (1 - rate) / PAIRS)
    assert abs(np.mean(step.num_accepted) - rate) < margin


def test_the_standard_rule_as_a_value_is_the_default(implementation):
    verify = functools.partial(library(implementation), rule=STANDARD_BY_FUNCTIONS)
    check_against_oracle(verify, mixed_case(0, draft_vocab=200))


_TYPICAL, _RELAXED = rules.typical_acceptance(0.05, 0.3), rules.relaxed(2, 0.1)
# Of all that a rule can ask for: some tokens are judged by one rule, some by the other.
BOTH = Rule(
    lambda lp, lq, u, row: jnp.where(
        lp > lq, _TYPICAL.accept(lp, lq, u, row), _RELAXED.accept(lp, lq, u, row)
    ),
    rules.ensemble(0.5).log_residual,
    (*_TYPICAL.statistics, *_RELAXED.statistics),
)


@functools.cache
def verified(implementation, seed):
    step = run(library(implementation), mixed_case(seed), rule=BOTH)
    return jax.tree.map(np.asarray, step)


@pytest.mark.interpret
def test_the_kernels_emit_the_reference_s_tokens():
    for seed in (0, 2):
        ours, theirs = (verified(name, seed) for name in ("interpret", "xla"))
        chex.assert_trees_all_equal(ours[:3], theirs[:3])
        assert len(set(theirs.num_accepted.tolist())) > 2


def test_requests_end_to_end_follow_the_rule_too():
    _, ragged, cu = ragged_case(2)
    check_same(run_ragged(ragged, cu, "xla", rule=BOTH), verified("xla", 2))


# What is asked accepts each token; then the target's, or anything at all, replaces one.
ALWAYS_GREEDY = Rule(lambda lp, lq, u, row: lp <= 0, lambda lp, lq, row: lp * jnp.nan, greedy=True)
ALWAYS = Rule(ALWAYS_GREEDY.accept, lambda lp, lq, row: 0 * jnp.exp(lp))


# The log-weights of a request whose drafted token has rank r are A log p + B. A number B is nothing
# to the token, and no number leaves the target row. All unmasked tokens are likelier than an id of
# no token.
WIDTH = 700
WEIGHTS = dict(
    enumerate(
        [
            *((3.0, added) for added in (0.0, -13.0, -200.0, 50.0)),
            *((0.0, added) for added in (2.0**24, -1e30, -np.inf, np.inf, np.nan)),
        ]
    )
)
WEIGHTS[WIDTH - WIDTH // 5] = (50.0, 0.0)
SIZE = 6 * len(WEIGHTS)


def weights_by_rank(lp, lq, row):
    weights = lp
    for rank, (power, added) in WEIGHTS.items():
        weights = jnp.where(row.rank == rank, power * lp + added, weights)
    return weights


BY_RANK = Rule(lambda lp, lq, u, row: lp > 0, weights_by_rank, ("rank",))


@functools.cache
def ranked_case():
    """Of nearly flat rows, sum p^3 is below 2^-18; a request of each rank has a one-hot draft."""
    rng, rank = np.random.default_rng(0), np.resize(list(WEIGHTS), SIZE)
    target = (0.1 * rng.normal(size=(SIZE, 2, WIDTH))).astype(np.float32)
    target[:, 0, 1::5] = -np.inf
    ids = np.argsort(-target[:, 0], axis=-1)[np.arange(SIZE), rank]
    is_none = rank == max(WEIGHTS)
    ids[is_none] = np.resize([-2, WIDTH, 6, 2**31 - 1], np.sum(is_none))
    draft = Draft(
        ids[:, None].astype(np.int32),
        rng.normal(size=(SIZE, 1, WIDTH)).astype(np.float32),
        temperature=np.where(np.arange(SIZE) < SIZE // 2, 0, 1).astype(np.float32),
    )
    logprobs = np.stack([oracle.log_softmax(row) for row in target[:, 0]])
    power, added = np.array([WEIGHTS[r] for r in rank]).T[..., None]
    with np.errstate(invalid="ignore"):
        weights = np.where(np.isneginf(logprobs), -np.inf, power * logprobs)
    weights = np.where(np.isfinite(added), weights, logprobs)
    words = np.asarray(jax.random.key_data(make_keys(SIZE)))
    exact = oracle.sample(weights, keys=words, positions=7, stream=specjax.Stream.TARGET)
    assert np.all(exact.certain)
    return draft, target, exact.token_ids


def test_only_differences_of_a_rule_s_log_weights_matter(implementation):
    """The kernels take requests end to end, and draw in the launch that other tests leave out."""
    draft, target, exact = ranked_case()
    options = dict(
        keys=make_keys(SIZE),
        positions=7,
        rule=BY_RANK,
        options=specjax.Options(implementation=implementation),
    )
    if implementation == "xla":
        step = specjax.rejection_sample(draft, target, **options)
    else:
        ragged = RaggedDraft(
            draft.token_ids[:, 0],
            np.arange(SIZE + 1, dtype=np.int32),
            max_draft_tokens=1,
            logits=draft.logits[:, 0],
        )
        step = specjax.rejection_sample(
            ragged,
            target.reshape(-1, WIDTH),
            greedy_logprobs=False,
            **options,
        )
    np.testing.assert_array_equal(step.num_accepted, 0)
    np.testing.assert_array_equal(np.asarray(step.token_ids)[:, 0], exact)


def test_what_no_rule_may_accept_is_rejected(implementation):
    """p(x) = 0, q(x) = 0 and ids of no token; a masked token is not emitted either."""
    case = sampled_case(4)
    b = np.arange(len(case["token_ids"]))
    ids = case["token_ids"]
    case["target_logits"][::4, 1, 150:] = -np.inf
    ids[::4, 1] = 200
    case["draft_logits"][b[1::4], 1, ids[1::4, 1]] = -np.inf
    ids[2::4, 1] = case["target_logits"].shape[2] + 3
    step = run(library(implementation), case, rule=ALWAYS)
    np.testing.assert_array_equal(step.num_accepted, np.where(b % 4 == 3, ids.shape[1], 1))
    recovered = np.asarray(step.token_ids)[::4, 1]
    assert np.all((recovered >= 0) & (recovered < 150))


def test_greedy_requests_ask_a_rule_that_is_for_them(implementation):
    case = sampled_case(5)
    case["temperature"][:] = 0
    for rule in (ALWAYS, ALWAYS_GREEDY):
        step = run(library(implementation), case, rule=rule)
        argmax = np.argmax(case["target_logits"][:, :-1], axis=-1) == case["token_ids"]
        expected = np.cumprod(argmax, axis=1).sum(axis=1)
        k = case["token_ids"].shape[1]
        np.testing.assert_array_equal(step.num_accepted, k if rule.greedy else expected)


def test_the_ends_of_lenience_and_ensemble_are_the_standard_rule():
    assert rules.lenience(1) == rules.ensemble(1) == rules.standard() != rules.ensemble(0.9)


def test_rules_are_equal_by_value_and_compile_once():
    assert rules.lenience(0.5) == rules.lenience(0.5) != rules.lenience(0.6)
    assert len({rules.relaxed(3, 0.1), rules.relaxed(3, 0.1), rules.relaxed(4, 0.1)}) == 2


def verify(**options):
    rows = jnp.zeros((2, 2, 5))
    draft = Draft(np.zeros((2, 1), np.int32))
    return specjax.rejection_sample(draft, rows, keys=jax.random.key(0), positions=0, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: verify(rule="lenient"), "rule is str; it needs a specjax.Rule"),
        (lambda: verify(rule=rules.standard), r"such as rules.standard\(\)"),
        (lambda: verify(rule=None), "rule is NoneType"),
        (lambda: Rule(None, lambda lp, lq, row: lp), "accept is None"),
        (lambda: Rule(ALWAYS.accept, ALWAYS.log_residual, ("mean",)), "statistics holds 'mean'"),
        (lambda: rules.lenience(0), r"factor is 0; .*\(0, 1\]"),
        (lambda: rules.relaxed(0, 0.1), "top_n is 0"),
    ],
)
def test_a_wrong_rule_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_statistic_that_a_rule_does_not_name_is_refused():
    rule = Rule(lambda lp, lq, u, row: lp > -row.entropy, ALWAYS.log_residual)
    with pytest.raises(AttributeError, match=r"row.entropy is read .* named there"):
        verify(rule=rule)
