"""Every edge of token-level verification, one by one."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from fixed_noise import draw_the_key, keys_of
from verify_cases import (
    BATCH,
    VOCAB,
    K,
    check_against_oracle,
    library,
    make_keys,
    mixed_case,
    run,
    sampled_case,
    with_statistics,
)

import specjax
from specjax import Stream
from specjax.core import noise
from specjax.core.acceptance import accept_random

pytestmark = pytest.mark.once

REQUESTS = np.arange(BATCH)
# Of these two every third request is random, greedy, or of a one-hot draft.
MODES = ["judged", "synthetic"]
KINDS = {"random": [0], "greedy": [1], "judged": [0, 1, 2], "synthetic": [0, 1, 2]}


def mode_case(mode, seed=0):
    """A batch whose drafts are all accepted, each of its requests of one kind."""
    case = sampled_case(seed)
    kind = np.resize(KINDS[mode], BATCH)
    case["temperature"][kind == 1] = 0
    case["draft_temperature"][kind == 2] = 0
    if mode == "synthetic":
        return case | dict(conditional_rates=np.ones((BATCH, K), np.float32))
    argmax = np.argmax(case["target_logits"][:, :K], axis=-1).astype(np.int32)
    case["token_ids"][kind == 1] = argmax[kind == 1]
    at = np.take_along_axis(case["target_logits"][:, :K], case["token_ids"][..., None], 2)
    at[kind != 1] += 60
    np.put_along_axis(case["target_logits"][:, :K], case["token_ids"][..., None], at, 2)
    return case


def sampled_from_row(case, row, implementation, stream=Stream.TARGET):
    """What plain sampling draws from a target row, at the position that row decides."""
    size = len(case["token_ids"])

    def padded(x):
        """The rows again and again: a small batch shares the program of a large one."""
        return jnp.asarray(np.resize(x, (BATCH, *x.shape[1:])))

    sample = specjax.gumbel_sample(
        padded(case["target_logits"][:, row]),
        keys=make_keys(size)[np.arange(BATCH) % size],
        positions=padded(case["positions"] + np.int32(row)),
        stream=stream,
        temperature=padded(case["temperature"]),
        options=specjax.Options(implementation=implementation),
    )
    return jax.tree.map(lambda x: np.asarray(x)[:size], sample)


def emitted(verification):
    return [
        tokens[:n].tolist()
        for tokens, n in zip(
            np.asarray(verification.token_ids), np.asarray(verification.num_emitted), strict=True
        )
    ]


def check_nothing_emitted(verification, requests):
    np.testing.assert_array_equal(np.asarray(verification.num_emitted)[requests], 0)
    np.testing.assert_array_equal(np.asarray(verification.num_accepted)[requests], 0)
    np.testing.assert_array_equal(np.asarray(verification.token_ids)[requests], -1)
    np.testing.assert_array_equal(np.asarray(verification.logprobs)[requests], 0.0)


def check_same(ours, theirs, requests=REQUESTS):
    chex.assert_trees_all_equal(
        *(jax.tree.map(lambda x: np.asarray(x)[requests], v) for v in (ours, theirs))
    )


@pytest.mark.interpreted_elsewhere
def test_carried_statistics_change_nothing(implementation):
    case = mixed_case(5)
    plain = run(library(implementation), case)
    carried = check_against_oracle(library(implementation), with_statistics(case))
    same = np.mean(np.asarray(plain.token_ids) == np.asarray(carried.token_ids))
    assert same > 0.98


@pytest.mark.interpreted_elsewhere
def test_synthetic_batches_follow_their_rates_and_the_ordinary_residual(implementation):
    case = mixed_case(8)
    rates = np.random.default_rng(8).choice([0.0, 0.3, 0.7, 1.0], (BATCH, K))
    case["conditional_rates"] = rates.astype(np.float32)
    ours = check_against_oracle(library(implementation), case)
    assert set(np.asarray(ours.num_accepted).tolist()) == set(range(K + 1))


def test_absent_fields_mean_their_defaults_and_scalars_serve_every_request(implementation):
    """Rates of each position, too, serve every request; where they reject, q is asked for."""
    single = jax.random.key(5)
    case = sampled_case(7)
    case["temperature"][:] = case["draft_temperature"][:] = 0.8
    case["positions"][:] = 17
    rates = np.array([0.8, 0.6, 0.5], np.float32)
    case["conditional_rates"] = np.tile(rates, (BATCH, 1))
    each = jax.vmap(jax.random.fold_in, (None, 0))(single, jnp.arange(BATCH, dtype=jnp.uint32))
    full = check_against_oracle(library(implementation), case, each)
    names = ("token_ids", "draft_logits", "target_logits")
    bare = {name: case[name] for name in names} | dict(conditional_rates=rates)
    bare |= dict(temperature=np.float32(0.8), positions=np.int32(17))
    bare = check_against_oracle(library(implementation), bare, single)
    for name in ("token_ids", "num_accepted", "num_emitted"):
        chex.assert_trees_all_equal(getattr(bare, name), getattr(full, name))
    assert set(np.asarray(full.num_accepted).tolist()) == set(range(K + 1))
    # Two compilations of one formula may differ in the last bit.
    chex.assert_trees_all_close(bare.logprobs, full.logprobs, rtol=1e-5)


def check_impossible_tokens_are_rejected(verify):
    """p(x) = 0 at the first drafted token of every request."""
    case = sampled_case(1)
    case["target_logits"][REQUESTS, 0, case["token_ids"][:, 0]] = -np.inf
    ours = check_against_oracle(verify, case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 0)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), 1)
    assert np.all(np.asarray(ours.token_ids)[:, 0] != case["token_ids"][:, 0])


def test_a_token_the_target_cannot_emit_is_never_accepted(implementation):
    check_impossible_tokens_are_rejected(library(implementation))


def test_a_token_below_the_target_s_cutoff_is_never_accepted(implementation):
    case = sampled_case(2)
    first = case["target_logits"][REQUESTS, 0, case["token_ids"][:, 0]]
    case["cutoff"][:, 0] = np.nextafter(first, np.float32(np.inf))
    ours = check_against_oracle(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 0)


@pytest.mark.parametrize("how", ["masked", "cut", "carried"])
def test_a_token_the_draft_cannot_draw_is_rejected(how, implementation):
    case = sampled_case(3)
    x = case["token_ids"][:, 0]
    case["target_logits"][REQUESTS, 0, x] = 20.0
    if how == "cut":
        own = case["draft_logits"][REQUESTS, 0, x]
        case["draft_cutoff"][:, 0] = np.nextafter(own, np.float32(np.inf))
        case["draft_logits"][REQUESTS, 0, (x + 1) % VOCAB] = 15.0
    else:
        case["draft_logits"][REQUESTS, 0, x] = -np.inf
    if how == "carried":
        case = with_statistics(case)
        assert np.all(np.isneginf(case["draft_logprobs"][:, 0]))
    ours = check_against_oracle(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 0)
    recovered = np.asarray(ours.token_ids)[:, 0]
    assert np.mean(recovered == case["token_ids"][:, 0]) > 0.9


def test_an_empty_residual_falls_back_to_the_target(implementation):
    case = sampled_case(4)
    case["draft_logits"] = case["target_logits"][:, :K].copy()
    case["conditional_rates"] = np.zeros((BATCH, K), np.float32)
    ours = run(library(implementation), case)
    plain = sampled_from_row(case, 0, implementation)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 0)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, 0], np.asarray(plain.token_ids))


def test_a_one_hot_target_on_a_one_hot_draft_has_an_empty_residual(implementation):
    case = sampled_case(5)
    case["draft_temperature"][:] = 0
    case["target_logits"][:] = -np.inf
    for i in range(K):
        case["target_logits"][REQUESTS, i, case["token_ids"][:, i]] = 0.0
    case["target_logits"][:, K, 7] = 0.0
    kept = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(kept.num_accepted), K)
    case["conditional_rates"] = np.zeros((BATCH, K), np.float32)
    refused = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(refused.token_ids)[:, 0], case["token_ids"][:, 0])


def size_of_schedule(size, implementation):
    """The kernels end a small batch and a large one by two schedules; plain JAX has one."""
    return BATCH if implementation == "xla" else size


@pytest.mark.parametrize("size", [8, BATCH])
def test_a_residual_of_rounding_alone_falls_back_to_the_target(size, implementation):
    """One size's drafts carry their statistics, as those of the test below, in its programs."""
    is_carried = size == 8
    size = size_of_schedule(size, implementation)
    case = sampled_case(6, size)
    case["target_logits"][:, :, ::3] = -np.inf
    # The rejected token is likely to be drawn again.
    case["token_ids"][:, 0] = 1
    case["target_logits"][:, 0, 1] = 8
    case["draft_logits"] = case["target_logits"][:, :K] + np.float32(0.3)
    case["conditional_rates"] = np.zeros((size, K), np.float32)
    ours = run(library(implementation), with_statistics(case) if is_carried else case)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), 1)
    assert np.all(np.asarray(ours.token_ids)[:, 0] % 3 != 0)
    plain = sampled_from_row(case, 0, implementation)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, 0], np.asarray(plain.token_ids))


@pytest.mark.parametrize("size", [8, BATCH])
@pytest.mark.parametrize("temperature", [1.0, 1e-4])
def test_a_residual_of_one_token_is_that_token(temperature, size, implementation):
    """Its mass is 1e-4: far above rounding, also where the carried logsumexp is 2e5."""
    size = size_of_schedule(size, implementation)
    case = sampled_case(45, size)
    case["temperature"][:] = case["draft_temperature"][:] = temperature
    case["target_logits"] = np.float32(20) + np.float32(temperature) * case["target_logits"]
    case["draft_logits"] = case["target_logits"][:, :K].copy()
    for row in case["draft_logits"][:, 0]:
        only = np.argmin(np.abs(oracle.log_softmax(row, temperature) - np.log(1e-3)))
        row[only] -= 0.1 * temperature
    case["conditional_rates"] = np.zeros((size, K), np.float32)
    ours = run(library(implementation), with_statistics(case))
    recovered = np.argmax(case["target_logits"][:, 0] - case["draft_logits"][:, 0], axis=-1)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, 0], recovered)


def test_what_the_draft_cut_off_is_all_that_an_equal_target_leaves(implementation):
    case = sampled_case(47)
    case["draft_logits"] = case["target_logits"][:, :K].copy()
    case["draft_cutoff"][:] = 1.0
    case["conditional_rates"] = np.zeros((BATCH, K), np.float32)
    ours = check_against_oracle(library(implementation), case)
    logits = case["target_logits"][REQUESTS, 0, np.asarray(ours.token_ids)[:, 0]]
    assert np.all(logits < 1)


def test_a_one_hot_draft_of_nearly_all_mass_is_left_out(implementation):
    """A one-hot draft is exact, and so is the rest of the target: no part of it is rounding."""
    case = sampled_case(46)
    case["draft_temperature"][:] = 0
    case["target_logits"][REQUESTS, 0, case["token_ids"][:, 0]] = 26
    case["conditional_rates"] = np.zeros((BATCH, K), np.float32)
    ours = check_against_oracle(library(implementation), case)
    assert np.all(np.asarray(ours.token_ids)[:, 0] != case["token_ids"][:, 0])


@pytest.mark.parametrize("how", ["num_tokens", "token_ids"])
@pytest.mark.parametrize("mode", MODES)
def test_zero_drafts_emit_one_bonus_token(mode, how, implementation):
    case = mode_case(mode, 7)
    if how == "num_tokens":
        case["num_tokens"][:] = 0
    else:
        case["token_ids"][:, 0] = -1
    ours = run(library(implementation), case)
    plain = sampled_from_row(case, 0, implementation)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), 1)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 0)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, 0], np.asarray(plain.token_ids))
    np.testing.assert_allclose(
        np.asarray(ours.logprobs)[:, 0], np.asarray(plain.logprobs), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_the_bonus_is_what_plain_sampling_draws_at_its_position(mode, implementation):
    case = mode_case(mode, 8)
    # The last drafted token is likely again: it may be the bonus, too.
    case["target_logits"][REQUESTS, K, case["token_ids"][:, -1]] += 9
    ours = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), K)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, :K], case["token_ids"])
    bonus = np.asarray(sampled_from_row(case, K, implementation).token_ids)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, K], bonus)
    again = bonus == case["token_ids"][:, -1]
    assert np.any(again[REQUESTS % 3 == 0])
    assert np.any(again[REQUESTS % 3 == 2])


@pytest.mark.parametrize("mode", MODES)
def test_minus_one_ends_the_drafts_like_num_tokens(mode, implementation):
    case = mode_case(mode, 9)
    cut, counted = dict(case), dict(case)
    ends = REQUESTS % (K + 1)
    cut["token_ids"] = np.where(np.arange(K) == ends[:, None], -1, case["token_ids"])
    counted["num_tokens"] = ends.astype(np.int32)
    ours = run(library(implementation), counted)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), ends)
    check_same(run(library(implementation), cut), ours)


def test_the_shorter_of_num_tokens_and_minus_one_counts(implementation):
    case = mode_case("random", 10)
    case["token_ids"][:, 2] = -1
    case["num_tokens"][: BATCH // 2] = 1
    ours = run(library(implementation), case)
    np.testing.assert_array_equal(
        np.asarray(ours.num_accepted), np.where(REQUESTS < BATCH // 2, 1, 2)
    )


def test_num_tokens_is_clipped(implementation):
    case = mode_case("random", 11)
    full = run(library(implementation), case)
    case["num_tokens"] = np.where(REQUESTS % 2, 2**31 - 1, -5).astype(np.int32)
    ours = run(library(implementation), case)
    check_same(ours, full, REQUESTS % 2 == 1)
    check_nothing_emitted(ours, REQUESTS % 2 == 0)


OUTSIDE = np.array([-2, -(2**31), VOCAB, VOCAB + 5, 2**31 - 1], np.int32)


@pytest.mark.parametrize("mode", MODES)
def test_an_id_outside_the_vocabulary_is_rejected_into_the_residual(mode, implementation):
    """The drafts do not end there, as at -1: a recovered token replaces it, not a bonus."""
    case = mode_case(mode, 12)
    # Each id next to each kind of request.
    case["token_ids"][:, 1] = OUTSIDE[REQUESTS % len(OUTSIDE)]
    # The ids at both ends are likely: a wrong index would read one of them.
    case["target_logits"][:, 1, [0, -1]] = 80
    case["bonus_token_ids"][:] = 4
    ours = check_against_oracle(library(implementation), case, max_uncertain=0.2)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 1)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), 2)
    assert np.mean(np.asarray(ours.token_ids)[:, 1] == 4) < 0.2


BAD = np.array([np.nan, np.inf, -np.inf], np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_an_invalid_target_row_emits_nothing_from_there_on(mode, implementation):
    case = mode_case(mode, 13)
    good = run(library(implementation), case)
    # Each row invalid in each way, next to each kind of request.
    where, how = REQUESTS % (K + 2), REQUESTS // 15 % 3
    for b in REQUESTS[where <= K]:
        columns = slice(None) if how[b] == 2 else (b * 37) % VOCAB
        case["target_logits"][b, where[b], columns] = BAD[how[b]]
    ours = run(library(implementation), case)
    before = np.minimum(where, K + 1)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), before)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), np.minimum(where, K))
    kept = np.arange(K + 1) < before[:, None]
    np.testing.assert_array_equal(
        np.asarray(ours.token_ids), np.where(kept, np.asarray(good.token_ids), -1)
    )
    np.testing.assert_array_equal(np.asarray(ours.logprobs)[~kept], 0.0)


def test_a_cutoff_above_every_logit_makes_the_row_invalid(implementation):
    case = mode_case("random", 14)
    case["cutoff"][:, 1] = 1e9
    ours = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), 1)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, 1:], -1)


def test_a_nan_below_the_cutoff_is_seen(implementation):
    case = mode_case("random", 15)
    case["target_logits"][:, 0, 5] = np.nan
    case["cutoff"][:, 0] = 0.0
    check_nothing_emitted(run(library(implementation), case), REQUESTS)


@pytest.mark.parametrize("synthetic", [False, True])
def test_rows_after_the_end_change_nothing_whatever_they_hold(synthetic, implementation):
    """NaN after the first rejection and after num_tokens, in target and draft rows."""
    case = mixed_case(16)
    if synthetic:
        case["conditional_rates"] = np.full((BATCH, K), 0.6, np.float32)
    case["draft_logits"] = case["draft_logits"][case["rows"]]
    case["rows"] = REQUESTS.astype(np.int32)
    ours = run(library(implementation), case)
    end = np.asarray(ours.num_accepted)
    inactive = np.asarray(ours.num_emitted) == 0
    after_end = np.arange(K + 1) > np.where(inactive & (case["num_tokens"] < 0), -1, end)[:, None]
    asked = zip(case["token_ids"], case["num_tokens"], strict=True)
    usable = np.array([oracle.num_drafted(*request) for request in asked])
    unread = np.arange(K) >= np.minimum(usable, end + 1)[:, None]
    dirty = dict(case)
    dirty["target_logits"] = np.where(after_end[..., None], np.nan, case["target_logits"])
    dirty["draft_logits"] = np.where(unread[..., None], np.nan, case["draft_logits"])
    dirty["cutoff"] = np.where(after_end, np.nan, case["cutoff"])
    dirty["draft_cutoff"] = np.where(unread, np.nan, case["draft_cutoff"])
    dirty = {k: v.astype(case[k].dtype) for k, v in dirty.items()}
    assert np.isnan(dirty["target_logits"]).any()
    check_same(run(library(implementation), dirty), ours)


def test_carried_statistics_after_the_end_change_nothing(implementation):
    case = with_statistics(sampled_case(17))
    ours = run(library(implementation), case)
    unread = np.arange(K) > np.asarray(ours.num_accepted)[:, None]
    for name in ("draft_logprobs", "draft_logsumexp"):
        case[name] = np.where(unread, np.float32(np.nan), case[name])
    check_same(run(library(implementation), case), ours)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_a_masked_token_is_never_emitted_even_at_u_zero(word, monkeypatch, implementation):
    check_no_masked_token_at(word, monkeypatch, library(implementation))


def check_no_masked_token_at(word, monkeypatch, verify, vocab_size=303):
    """Every coin and Gumbel is the least, or the largest; in a shape no other test traces."""
    draw_the_key(monkeypatch)
    case = mixed_case(18, 32, K, vocab_size)
    drafted = np.clip(case["token_ids"], 0, vocab_size - 1)
    np.put_along_axis(case["target_logits"][:, :K], drafted[..., None], -np.inf, 2)
    ours = run(verify, case, keys_of(np.full(32, word)))
    num_emitted = np.asarray(ours.num_emitted)
    assert np.sum(num_emitted) > 20
    for b, tokens in enumerate(emitted(ours)):
        sampled = tokens if case["bonus_token_ids"][b] < 0 else tokens[:-1]
        for i, x in enumerate(sampled):
            logit = case["target_logits"][b, i, x]
            assert logit > -np.inf, "a masked token"
            assert logit >= case["cutoff"][b, i], "a token below the cutoff"


def test_masked_and_cut_tokens_are_never_emitted(implementation):
    for seed in range(20, 24):
        case = mixed_case(seed)
        case["bonus_token_ids"][:] = -1
        for b, tokens in enumerate(emitted(run(library(implementation), case))):
            for i, x in enumerate(tokens):
                assert case["target_logits"][b, i, x] > -np.inf
                assert case["target_logits"][b, i, x] >= case["cutoff"][b, i]


def test_an_inactive_request_reads_nothing_and_emits_nothing(implementation):
    case = mixed_case(25)
    ours = run(library(implementation), case)
    inactive = REQUESTS % 3 == 0
    case["num_tokens"] = np.where(inactive, -1, case["num_tokens"]).astype(np.int32)
    case["target_logits"][inactive] = np.nan
    case["temperature"][inactive] = np.nan
    case["draft_temperature"][inactive] = np.nan
    case["token_ids"][inactive] = 2**31 - 1
    case["bonus_token_ids"][inactive] = 3
    for b in REQUESTS[inactive]:
        case["draft_logits"][case["rows"][b]] = np.nan
    again = run(library(implementation), case)
    check_nothing_emitted(again, inactive)
    check_same(again, ours, ~inactive)


def test_a_request_without_drafts_changes_no_other_request_s_noise(implementation):
    case = mixed_case(26)
    ours = run(library(implementation), case)
    without_drafts = REQUESTS % 2 == 0
    case["num_tokens"] = np.where(without_drafts, 0, case["num_tokens"]).astype(np.int32)
    check_same(run(library(implementation), case), ours, ~without_drafts)


@pytest.mark.parametrize("synthetic", [False, True])
def test_an_invalid_draft_row_is_verified_as_one_hot(synthetic, implementation):
    case = sampled_case(27)
    one_hot = case | dict(draft_temperature=np.zeros(BATCH, np.float32))
    case["draft_logits"] = case["draft_logits"].copy()
    case["draft_logits"][:, :, 11] = BAD[REQUESTS % 3, None]
    case["draft_logits"][2::3] = -np.inf
    if synthetic:
        rates = np.full((BATCH, K), 0.5, np.float32)
        case["conditional_rates"] = one_hot["conditional_rates"] = rates
    ours = run(library(implementation), case)
    check_same(ours, run(library(implementation), one_hot))
    assert set(np.asarray(ours.num_accepted).tolist()) >= {0, 1}


def test_a_draft_row_whose_carried_sum_is_not_finite_is_verified_as_one_hot(implementation):
    case = with_statistics(sampled_case(28))
    one_hot = case | dict(draft_temperature=np.zeros(BATCH, np.float32))
    case["draft_logsumexp"] = np.resize(BAD, (BATCH, K))
    check_same(run(library(implementation), case), run(library(implementation), one_hot))


@pytest.mark.parametrize("lost", ["draft_logprobs", "draft_logsumexp"])
def test_one_carried_statistic_without_the_other_is_not_read(lost, implementation):
    case = sampled_case(28)
    ours = run(library(implementation), case)
    carried = with_statistics(case)
    kept = {name: value + 1 for name, value in carried.items() if name not in (*case, lost)}
    check_same(run(library(implementation), case | kept), ours)


def test_a_draft_whose_carried_log_q_is_invalid_is_verified_as_one_hot(implementation):
    """Its logsumexp is finite. A log q of -inf is valid: the draft cannot emit the token."""
    case = with_statistics(sampled_case(28))
    one_hot = case | dict(draft_temperature=np.zeros(BATCH, np.float32))
    case["draft_logprobs"] = np.resize(BAD[:2], (BATCH, K))
    check_same(run(library(implementation), case), run(library(implementation), one_hot))


def test_a_draft_of_an_invalid_temperature_is_verified_as_one_hot(implementation):
    case = with_statistics(sampled_case(28))
    one_hot = case | dict(draft_temperature=np.zeros(BATCH, np.float32))
    case["draft_temperature"][:] = np.resize([np.nan, -1.0, np.inf], BATCH)
    check_same(run(library(implementation), case), run(library(implementation), one_hot))


def test_a_one_hot_draft_s_logits_are_not_read(implementation):
    case = sampled_case(29)
    case["draft_temperature"][:] = 0
    ours = check_against_oracle(library(implementation), case)
    case["draft_logits"][:] = np.nan
    check_same(run(library(implementation), case), ours)


def test_a_draft_cutoff_above_every_logit_is_verified_as_one_hot(implementation):
    case = sampled_case(30)
    one_hot = case | dict(draft_temperature=np.zeros(BATCH, np.float32))
    case["draft_cutoff"][:] = 1e9
    check_same(run(library(implementation), case), run(library(implementation), one_hot))


@pytest.mark.parametrize("mode", MODES)
def test_a_given_bonus_replaces_the_sampled_one(mode, implementation):
    case = mode_case(mode, 31)
    ours = run(library(implementation), case)
    given = (REQUESTS * 7 % VOCAB).astype(np.int32)
    case["bonus_token_ids"] = given
    again = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(again.num_emitted), K + 1)
    np.testing.assert_array_equal(
        np.asarray(again.token_ids)[:, :K], np.asarray(ours.token_ids)[:, :K]
    )
    np.testing.assert_array_equal(np.asarray(again.token_ids)[:, K], given)
    logp = [oracle.log_softmax(case["target_logits"][b, K])[given[b]] for b in REQUESTS]
    np.testing.assert_allclose(np.asarray(again.logprobs)[:, K], logp, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_a_given_bonus_outside_the_vocabulary_is_sampled_as_usual(mode, implementation):
    case = mode_case(mode, 32)
    ours = run(library(implementation), case)
    case["bonus_token_ids"] = np.where(REQUESTS % 2, VOCAB, -9).astype(np.int32)
    check_same(run(library(implementation), case), ours)


@pytest.mark.parametrize("mode", MODES)
def test_a_given_bonus_without_drafts_is_the_only_token(mode, implementation):
    case = mode_case(mode, 33)
    case["num_tokens"][:] = 0
    case["bonus_token_ids"][:] = 42
    assert emitted(run(library(implementation), case)) == [[42]] * BATCH


def test_a_given_bonus_asks_nothing_of_its_row(implementation):
    """The row decides nothing then, so that it may be invalid."""
    case = mode_case("random", 31)
    case["target_logits"][:, K] = np.nan
    case["bonus_token_ids"][:] = 42
    ours = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), K + 1)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, K], 42)
    np.testing.assert_array_equal(np.asarray(ours.logprobs)[:, K], -np.inf)


def test_a_given_bonus_does_not_replace_a_recovered_token(implementation):
    case = sampled_case(34)
    ours = run(library(implementation), case)
    rejected = np.asarray(ours.num_accepted) < K
    case["bonus_token_ids"][:] = 42
    check_same(run(library(implementation), case), ours, rejected)
    assert rejected.any()


def test_an_invalid_temperature_emits_nothing(implementation):
    case = mixed_case(35)
    ours = run(library(implementation), case)
    invalid = REQUESTS % 2 == 0
    case["temperature"][invalid] = np.resize([-1.0, -1e-6, np.nan, np.inf], np.sum(invalid))
    again = run(library(implementation), case)
    check_nothing_emitted(again, invalid)
    check_same(again, ours, ~invalid)


def test_temperatures_below_the_least_are_greedy(implementation):
    case = mode_case("greedy", 36)
    greedy = run(library(implementation), case)
    case["temperature"][:] = 9e-6
    check_same(run(library(implementation), case), greedy)


def test_a_greedy_tie_goes_to_the_lowest_id(implementation):
    case = mode_case("greedy", 37)
    case["target_logits"][:, 0, [20, 150, 299]] = 50.0
    lowest = REQUESTS % 2 == 0
    case["token_ids"][:, 0] = np.where(lowest, 20, 150)
    ours = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), np.where(lowest, K, 0))
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, 0], 20)


def test_greedy_statistics_are_at_temperature_one(implementation):
    case = mode_case("greedy", 38)
    ours = run(library(implementation), case)
    for b in (0, 5):
        logp = [oracle.log_softmax(row).max() for row in case["target_logits"][b]]
        np.testing.assert_allclose(np.asarray(ours.logprobs)[b], logp, atol=1e-4)


def test_greedy_requests_do_not_ask_how_the_drafts_were_drawn(implementation):
    case = mode_case("greedy", 39)
    case["token_ids"][::3, 1] = 1
    ours = run(library(implementation), case)
    case["draft_logits"][:] = np.nan
    case["draft_temperature"][:] = 3.0
    check_same(run(library(implementation), case), ours)


def test_synthetic_rates_of_one_accept_what_the_target_cannot_emit(implementation):
    case = mode_case("synthetic", 40)
    case["target_logits"][REQUESTS, 1, case["token_ids"][:, 1]] = -np.inf
    ours = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), K)


def test_synthetic_rates_of_zero_accept_nothing(implementation):
    case = mode_case("synthetic", 41)
    case["conditional_rates"][:] = 0
    ours = check_against_oracle(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 0)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted), 1)


def test_synthetic_greedy_rejections_emit_the_argmax(implementation):
    case = mode_case("greedy", 42)
    case["conditional_rates"] = np.full((BATCH, K), 0.5, np.float32)
    ours = run(library(implementation), case)
    assert set(np.asarray(ours.num_accepted).tolist()) == set(range(K + 1))
    argmax = np.argmax(case["target_logits"], axis=-1)
    for b, tokens in enumerate(emitted(ours)):
        assert tokens == argmax[b, : len(tokens)].tolist()


def equal_case(seed, *shape):
    """A draft that is the target, at the target's temperature, with any tokens."""
    case = sampled_case(seed, *shape)
    case["draft_logits"] = case["target_logits"][:, :-1].copy()
    batch_size, k, vocab_size = case["draft_logits"].shape
    rng = np.random.default_rng(seed)
    temperature = rng.choice([0.3, 0.8, 1.0, 1.9], batch_size).astype(np.float32)
    case["temperature"] = case["draft_temperature"] = temperature
    case["token_ids"] = rng.integers(0, vocab_size, (batch_size, k)).astype(np.int32)
    return case


def test_equal_models_accept_everything(implementation):
    case = equal_case(43)
    ours = run(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), K)


def test_equal_probabilities_are_accepted_even_at_the_largest_coin():
    """log u + log q < log p would round, and reject some of these."""
    logprobs = -np.exp(np.linspace(-8, 5, 4000, dtype=np.float32))
    coin = noise.uniform_from_bits(jnp.full((), 2**32 - 1, jnp.uint32))
    assert np.all(accept_random(coin, jnp.asarray(logprobs), jnp.asarray(logprobs)))
    assert not np.all(np.log(np.float32(coin)) + logprobs < logprobs)


def test_equal_models_accept_everything_but_for_rounding(monkeypatch, implementation):
    """Coins within 2^-17 of 1: two compilations of one formula differ by less than that."""
    draw_the_key(monkeypatch)
    keys = keys_of(np.full(32, 2**32 - 2**15))
    for seed in (44, 45):
        ours = run(library(implementation), equal_case(seed, 32, K, 303), keys)
        np.testing.assert_array_equal(np.asarray(ours.num_accepted), K)
