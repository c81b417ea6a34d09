"""Block verification: its exact distribution, and its decisions next to those of NumPy."""

import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_block
import pytest
from scripts import ROOT
from verify_cases import with_sizes

import specjax
from specjax import Draft, RaggedDraft, rules
from specjax.core.block_acceptance import ACCEPTED, OPEN, REJECTED, accept_block, accept_by_bounds
from specjax.pallas.kernel_config import Tile


def random_model(rng, vocab_size, depth, zeros=False):
    """Rows for every prefix of at most `depth` tokens."""
    rows = {}
    for length in range(depth + 1):
        for prefix in itertools.product(range(vocab_size), repeat=length):
            p = rng.dirichlet(np.ones(vocab_size))
            if zeros and rng.random() < 0.4:
                p[rng.integers(vocab_size)] = 0.0
            rows[prefix] = p / p.sum()
    return rows.__getitem__


def total_variation(step, target, length):
    """Between plain sampling and a step whose text the target goes on with."""
    full = {}
    for tokens, mass in step.items():
        rest = oracle.joint_distribution(lambda x, t=tokens: target(t + x), length - len(tokens))
        for more, share in rest.items():
            full[tokens + more] = full.get(tokens + more, 0.0) + mass * share
    plain = oracle.joint_distribution(target, length)
    return sum(abs(full.get(x, 0.0) - plain.get(x, 0.0)) for x in full.keys() | plain.keys()) / 2


def without_rows(rng, model, first):
    """A model of which a quarter of the rows after `first` tokens and more are None."""
    lost = {}

    def row(prefix):
        is_lost = len(prefix) >= first and lost.setdefault(prefix, rng.random() < 0.25)
        return None if is_lost else model(prefix)

    return row


MODELS = [(3, 2), (3, 3), (3, 4), (4, 2), (4, 3), (4, 4)]


@pytest.mark.once
@pytest.mark.parametrize(("vocab_size", "k"), MODELS)
def test_a_step_follows_the_target_and_accepts_no_less_than_token_by_token(vocab_size, k):
    for seed in range(8):
        rng = np.random.default_rng([seed, vocab_size, k])
        target, draft = (random_model(rng, vocab_size, k, zeros=seed % 2) for _ in range(2))
        step = oracle_block.output_distribution(target, draft, k)
        assert total_variation(step, target, k + 1) < 1e-12
        block, tokens = oracle_block.mean_acceptance(target, draft, k)
        assert block > tokens - 1e-12
        # Rows that are no distributions: the target's end the drafts, the draft's are one-hot.
        target, draft = without_rows(rng, target, 1), without_rows(rng, draft, 0)
        step = oracle_block.output_distribution(target, draft, k)
        assert sum(step.values()) == pytest.approx(1, abs=1e-12)
        assert total_variation(step, target, k + 1) < 1e-12


@pytest.mark.parametrize("fault", ["rho is missing in the residual", "rho is not capped"])
def test_a_wrong_rule_is_seen_by_the_exact_distribution(fault):
    rng = np.random.default_rng(2)
    target, draft = (random_model(rng, 3, 3) for _ in range(2))
    step = oracle_block.output_distribution(target, draft, 3, fault)
    assert total_variation(step, target, 4) > 1e-3


def test_the_example_of_the_paper_accepts_eleven_ninths():
    p, q = np.array([1, 2]) / 3, np.array([2, 1]) / 3
    means = oracle_block.mean_acceptance(lambda _: p, lambda _: q, 2)
    np.testing.assert_allclose(means, (11 / 9, 10 / 9), rtol=1e-12)


B, K, V = 96, 4, 300


def batch(seed, draft_vocab=V):
    """Requests of every kind: sampled, greedy, one-hot, short, with rows that are not finite."""
    rng = np.random.default_rng(seed)
    spread = rng.choice([0.2, 0.6, 1.5], (B, 1, 1))
    draft_logits = 2 * rng.standard_normal((B, K, draft_vocab))
    common = np.pad(draft_logits[..., :V], ((0, 0), (0, 1), (0, max(V - draft_vocab, 0))))
    target_logits = common + spread * rng.standard_normal((B, K + 1, V))
    temperature = rng.choice([0.7, 1.0, 1.3, 0.0, np.nan], B, p=[0.3, 0.25, 0.2, 0.1, 0.15])
    draft_temperature = np.where(rng.random(B) < 0.1, 0.0, np.fmax(temperature, 0.5))
    cutoff = np.where(rng.random((B, K + 1)) < 0.3, -1.0, -np.inf)
    draft_cutoff = np.where(rng.random((B, K)) < 0.3, -1.0, -np.inf)
    with np.errstate(all="ignore"):
        scaled = np.where(draft_logits < draft_cutoff[..., None], -np.inf, draft_logits)
        scaled = scaled / np.where(draft_temperature > 0, draft_temperature, 1)[:, None, None]
        token_ids = np.argmax(scaled + rng.gumbel(size=scaled.shape), axis=-1)
    num_tokens = rng.choice([-1, 0, 1, 3, 4, 4, 4, 4, 4], B)
    is_one_hot = rng.random((B, K)) < 0.25
    # These are wholly one-hot: a row that nothing was drafted from does not count.
    is_one_hot[::8, :2], num_tokens[::8] = True, 2
    draft_logits[is_one_hot, 7] = np.inf
    at = np.nonzero(is_one_hot & (token_ids < V) & (rng.random((B, K)) < 0.5))
    target_logits[(*at, token_ids[at])] += 6
    target_logits[rng.random((B, K + 1)) < 0.1, 7] = np.nan
    token_ids[rng.random((B, K)) < 0.02] = 2 * V
    options = {
        "keys": jax.random.split(jax.random.key(seed), B),
        "positions": jnp.asarray(rng.integers(0, 1000, B), jnp.int32),
        "temperature": jnp.asarray(temperature, jnp.float32),
        "bonus_token_ids": jnp.where(rng.random(B) < 0.2, 5, -1).astype(jnp.int32),
    }
    draft = Draft(
        jnp.asarray(token_ids, jnp.int32),
        jnp.asarray(draft_logits, jnp.float32),
        temperature=jnp.asarray(draft_temperature, jnp.float32),
        cutoff=jnp.asarray(draft_cutoff, jnp.float32),
        num_tokens=jnp.asarray(num_tokens, jnp.int32),
    )
    return draft, jnp.asarray(target_logits, jnp.float32), jnp.asarray(cutoff, jnp.float32), options


def with_statistics(draft):
    """The draft with log q of its tokens, and its rows of logits in another order."""
    logits = np.asarray(draft.logits, np.float64)
    temperature = np.asarray(draft.temperature, np.float64)
    with np.errstate(all="ignore"):
        scaled = np.where(logits < np.asarray(draft.cutoff)[..., None], -np.inf, logits)
        scaled = scaled / np.where(temperature > 0, temperature, 1)[:, None, None]
        logsumexp = np.log(np.sum(np.exp(scaled), axis=-1))
        ids = np.asarray(draft.token_ids)
        inside = (ids >= 0) & (ids < logits.shape[-1])
        at = np.where(inside, ids, 0)[..., None]
        of_tokens = np.take_along_axis(scaled, at, axis=-1)[..., 0] - logsumexp
    rows = np.random.default_rng(0).permutation(B)
    return draft.replace(
        logits=draft.logits[np.argsort(rows)],
        rows=jnp.asarray(rows, jnp.int32),
        logprobs=jnp.asarray(np.where(inside, of_tokens, -np.inf), jnp.float32),
        logsumexp=jnp.asarray(logsumexp, jnp.float32),
    )


def expected(draft, target_logits, cutoff, options, one=oracle_block.verify_one):
    logits = np.asarray(draft.logits)
    finite = np.all(np.isfinite(logits), axis=-1)
    return oracle.verify(
        draft.token_ids,
        target_logits,
        keys=jax.random.key_data(options["keys"]),
        positions=options["positions"],
        temperature=options["temperature"],
        cutoff=cutoff,
        draft_logits=logits,
        draft_temperature=draft.temperature,
        draft_cutoff=draft.cutoff,
        draft_logsumexp=np.where(finite, 0.0, np.nan),
        num_tokens=draft.num_tokens,
        bonus_token_ids=options["bonus_token_ids"],
        one=one,
    )


def check(step, exact, sure):
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(step, name)[sure], getattr(exact, name)[sure])
    np.testing.assert_allclose(step.logprobs[sure], exact.logprobs[sure], atol=2e-4)


# One block of three bounds a prefix, so that some stay open, and one program of a residual reduces
# both tiles of a bonus row; and the launches of a small batch.
SIZES = {V: dict(num_bound_groups=1, residual=Tile(512, 4)), 200: dict(max_small_programs=10**6)}


def verify(implementation, draft, target_logits, cutoff, options):
    """By the sizes of drafts of the whole vocabulary, which several tests share."""
    kernels = with_sizes(implementation, **SIZES[V])
    return specjax.rejection_sample(
        draft,
        target_logits,
        cutoff=cutoff,
        rule=rules.block(),
        options=specjax.Options(implementation=kernels),
        **options,
    )


@pytest.mark.once
@pytest.mark.parametrize("draft_vocab", SIZES)
def test_decisions_are_those_of_numpy(implementation, draft_vocab):
    kernels, lengths = with_sizes(implementation, **SIZES[draft_vocab]), set()
    # Of seeds 3 to 29 those that see most faults: a missing rho of one-hot drafts, and bounds.
    for seed in (10, 3, 6, 8):
        draft, target_logits, cutoff, options = batch(seed, draft_vocab)
        exact = expected(draft, target_logits, cutoff, options)
        if draft_vocab != V:
            draft = with_statistics(draft)
        step = specjax.rejection_sample(
            draft,
            target_logits,
            cutoff=cutoff,
            rule=rules.block(),
            options=specjax.Options(implementation=kernels),
            **options,
        )
        assert np.mean(exact.certain) > 0.9
        lengths |= set(exact.num_accepted[exact.certain])
        check(step, exact, exact.certain)
    # Each length occurs, so that each branch of the rule does.
    assert lengths == set(range(K + 1))


@pytest.mark.once
def test_a_ragged_batch_emits_what_the_padded_one_does(implementation):
    draft, target_logits, cutoff, options = batch(4)
    padded = verify(implementation, draft, target_logits, cutoff, options)
    rng = np.random.default_rng(1)
    counts = rng.integers(0, K + 1, B)
    cu = np.concatenate([[0], np.cumsum(counts)])
    rows = [(b, i) for b in range(B) for i in range(counts[b])]
    of_target = [(b, i) for b in range(B) for i in range(counts[b] + 1)]
    row, column = np.array(rows).T
    target_row, target_column = np.array(of_target).T
    ragged = specjax.rejection_sample(
        RaggedDraft(
            draft.token_ids[row, column],
            jnp.asarray(cu, jnp.int32),
            max_draft_tokens=K,
            logits=draft.logits[row, column],
            temperature=draft.temperature,
            cutoff=draft.cutoff[row, column],
            num_tokens=draft.num_tokens,
        ),
        target_logits[target_row, target_column],
        rule=rules.block(),
        cutoff=cutoff[target_row, target_column],
        options=specjax.Options(implementation=with_sizes(implementation, **SIZES[V])),
        **options,
    )
    # Where both have the same drafts.
    n = jnp.where(draft.num_tokens < 0, counts, jnp.minimum(draft.num_tokens, counts))
    same = np.asarray((n == draft.num_tokens) | (draft.num_tokens < 0))
    assert np.sum(same) > B / 4
    for mine, theirs in zip(ragged, padded, strict=True):
        np.testing.assert_array_equal(mine[same], theirs[same])


@pytest.mark.once
def test_one_draft_is_verified_as_by_rejection_sample(implementation):
    """Which the oracle's decisions token by token stand for, as they do in its own test."""
    draft, target_logits, cutoff, options = batch(5)
    one = draft.replace(num_tokens=jnp.minimum(draft.num_tokens, 1))
    exact = expected(one, target_logits, cutoff, options, oracle.verify_one)
    assert np.mean(exact.certain) > 0.95
    assert set(exact.num_accepted[exact.certain]) == {0, 1}
    check(verify(implementation, one, target_logits, cutoff, options), exact, exact.certain)


def test_bounds_decide_as_any_mass_between_them_would():
    rng = np.random.default_rng(8)
    size = 20_000
    rho, u, at = rng.random((3, size))
    rho[: size // 10] = 1.0
    u *= rho
    bounds = np.sort(rng.random((2, size)) ** 3, axis=0) * rho
    mass = bounds[0] + at * (bounds[1] - bounds[0])
    u, log_rho, low, high, mass = (
        jnp.asarray(x, jnp.float32) for x in (u, np.log(rho), *bounds, mass)
    )
    known = np.asarray(accept_by_bounds(u, log_rho, low, high))
    accepted = np.asarray(accept_block(u, log_rho, mass))
    assert np.all(accepted[known == ACCEPTED])
    assert not np.any(accepted[known == REJECTED])
    # Where the bounds meet, hardly anything is left open.
    same = np.asarray(accept_by_bounds(u, log_rho, mass, mass))
    assert np.mean(known == OPEN) < 0.5
    assert np.mean(same == OPEN) < 0.01


def flat(masses):
    """A row of probabilities that is flat but for the masses of some tokens."""
    row = np.full(V, (1 - sum(masses.values())) / (V - len(masses)))
    row[list(masses)] = list(masses.values())
    return row


# An id that the target has no token for: rho is 0 from there on, so that tau is below 2.
NONE = 2 * V


def verify_two(implementation, p, q, token_ids, positions):
    """Verifies two drafts of key 0 at each position, by rows [V] of p and of q; None is one-hot."""
    draft, *_, options = batch(7)
    ids, logits = np.full((B, K), -1, np.int32), np.zeros((B, K, V), np.float32)
    rows = np.zeros((B, K + 1, V), np.float32)
    ids[:, :2] = token_ids
    for i in range(2):
        rows[:, i] = np.log(p[i])
        logits[:, i] = np.nan if q[i] is None else np.log(q[i])
    one, all_kept = jnp.ones(B), jnp.full((B, K + 1), -jnp.inf)
    draft = draft.replace(
        token_ids=jnp.asarray(ids),
        logits=jnp.asarray(logits),
        temperature=one,
        cutoff=all_kept[:, :K],
        num_tokens=jnp.full(B, K, jnp.int32),
    )
    options |= dict(
        keys=jax.random.wrap_key_data(jnp.zeros((B, 2), jnp.uint32)),
        positions=jnp.asarray(np.resize(positions, B), jnp.int32),
        temperature=one,
        bonus_token_ids=jnp.full(B, -1, jnp.int32),
    )
    return verify(implementation, draft, jnp.asarray(rows), all_kept, options)


@pytest.mark.slow
@pytest.mark.once
def test_a_one_hot_draft_of_nearly_all_mass_is_left_out(implementation):
    """As p = q in the second row, no prefix is accepted; the rest of the first has mass 1e-6."""
    p, q = [flat({11: 1 - 1e-6}), flat({})], [None, flat({})]
    step = verify_two(implementation, p, q, [11, NONE], np.arange(B))
    np.testing.assert_array_equal(step.num_accepted, 0)
    assert np.all(np.asarray(step.token_ids)[:, 0] != 11)


# Where the uniform of the first draft is below 2^-22; just below 1 / 3; and just above.
RARE = [3437522, 3789208, 5550880, 8822890, 12727112]
BELOW, ABOVE = [368, 19461, 36070, 47747, 49761, 55207], [25938, 26607, 42437, 56085, 58501]


@pytest.mark.slow
@pytest.mark.once
def test_the_least_residual_of_a_prefix_is_relative_to_its_ratio(implementation):
    """With rho = 2^-6 a residual of mass 2^-20 is no rounding: its only token is emitted.

    Of the tokens after it, p - q would leave more.
    """
    p = [flat({11: 2.0**-12}), flat({5: 2.0**-13})]
    q = [flat({11: 2.0**-6}), flat({5: 2.0**-20} | dict.fromkeys(range(6, 20), 0.5 / V))]
    step = verify_two(implementation, p, q, [11, NONE], RARE)
    np.testing.assert_array_equal(step.num_accepted, 1)
    np.testing.assert_array_equal(np.asarray(step.token_ids)[:, 1], 5)


@pytest.mark.once
def test_a_prefix_of_ratio_one_is_accepted_and_leaves_the_target_where_p_is_q(implementation):
    """Of h = 0 / 0 nothing is rejected, and the empty residual falls back to the row."""
    row = np.random.default_rng(7).dirichlet(np.ones(V))
    positions = np.arange(B)
    p, q = [flat({11: 0.5}), row], [flat({}), row]
    step = verify_two(implementation, p, q, [11, NONE], positions)
    exact = oracle.sample(
        np.tile(np.log(row), (B, 1)),
        keys=np.zeros((B, 2), np.uint32),
        positions=positions + 1,
        stream=specjax.Stream.TARGET,
    )
    np.testing.assert_array_equal(step.num_accepted, 1)
    sure = exact.certain
    assert np.mean(sure) > 0.95
    np.testing.assert_array_equal(np.asarray(step.token_ids)[sure, 1], exact.token_ids[sure])


@pytest.mark.once
@pytest.mark.parametrize("num_accepted", [0, 1])
def test_a_prefix_before_a_one_hot_draft_is_accepted_below_its_h(num_accepted, implementation):
    """rho = 1 / 2 and Z = 1 / 4 make h = 1 / 3, too near for the bounds of the kernels."""
    p, q = [flat({11: 0.25}), flat({12: 0.5})], [flat({11: 0.5}), None]
    positions = BELOW if num_accepted else ABOVE
    step = verify_two(implementation, p, q, [11, 12], positions)
    np.testing.assert_array_equal(step.num_accepted, num_accepted)


@pytest.mark.once
def test_a_mesh_changes_nothing():
    """In plain JAX, whose branches and loops say over which axes their values vary."""
    arrays = batch(6)
    plain = verify("xla", *arrays)
    with jax.set_mesh(jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Explicit,))):
        split = jax.device_put(arrays, jax.P("batch"))
        sharded = jax.jit(functools.partial(verify, "xla"))(*split)
        assert sharded.token_ids.sharding.spec[0] == "batch"
    for mine, theirs in zip(sharded[:3], plain[:3], strict=True):
        np.testing.assert_array_equal(np.asarray(mine), theirs)


COMPILED = """
import jax, jax.numpy as jnp, specjax
draft = specjax.Draft(jnp.zeros((1, 4), jnp.int32), jnp.zeros((1, 4, 16)))
options = specjax.Options(implementation="xla")
specjax.rejection_sample(
    draft, jnp.zeros((1, 5, 16)), keys=jax.random.key(0), positions=0,
    rule=specjax.rules.block(), options=options
)
"""


@pytest.mark.optimised
def test_a_block_compiles_in_seconds_with_all_optimisations(tmp_path):
    """The vectorizer of jaxlib 0.12 takes minutes unless a barrier parts hash and arithmetic."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-c", COMPILED], env=environment, cwd=tmp_path, check=True, timeout=60
    )
