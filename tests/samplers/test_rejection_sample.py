"""`rejection_sample` against the oracle, token for token, over mixed batches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
)


def check_every_length_is_accepted(verification, k):
    assert set(np.asarray(verification.num_accepted).tolist()) == set(range(k + 1))


@pytest.mark.once
def test_sampled_drafts_are_verified_as_the_oracle_does(implementation):
    ours = check_against_oracle(library(implementation), sampled_case(1))
    check_every_length_is_accepted(ours, K)


@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_are_verified_as_the_oracle_does(seed, implementation):
    ours = check_against_oracle(library(implementation), mixed_case(seed))
    check_every_length_is_accepted(ours, K)


@pytest.mark.once
def test_any_mixed_batch_is_verified_as_the_oracle_does(implementation):
    @settings(max_examples=8, deadline=None, database=None)
    @given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
    def holds(seed, key_seed):
        check_against_oracle(library(implementation), mixed_case(seed), make_keys(BATCH, key_seed))

    holds()


@pytest.mark.once
@pytest.mark.interpreted_elsewhere
def test_one_hot_batches_carry_no_logits(implementation):
    case = mixed_case(6)
    for name in ("draft_logits", "draft_cutoff", "draft_temperature", "rows"):
        del case[name]
    ours = check_against_oracle(library(implementation), case)
    check_every_length_is_accepted(ours, K)


@pytest.mark.once
@pytest.mark.interpreted_elsewhere
@pytest.mark.parametrize(
    ("vocab_size", "draft_vocab", "k"), [(300, 200, 3), (5, 420, 2), (1, 1, 2), (1025, 1024, 1)]
)
def test_any_vocabularies_and_any_number_of_drafts(vocab_size, draft_vocab, k, implementation):
    case = mixed_case(9, 32, k, vocab_size, draft_vocab=draft_vocab)
    check_against_oracle(library(implementation), case, max_uncertain=0.2)


@pytest.mark.once
def test_a_token_past_the_draft_s_vocabulary_is_rejected(implementation):
    case = sampled_case(3, 32, K, 300, 200)
    case["token_ids"][:, 0] = 250
    case["target_logits"][:, 0, 250] = 20.0
    ours = check_against_oracle(library(implementation), case)
    np.testing.assert_array_equal(np.asarray(ours.num_accepted), 0)
    assert np.mean(np.asarray(ours.token_ids)[:, 0] == 250) > 0.9


# Plain JAX is compiled as users compile it here, where what it rounds may be left out.
@pytest.mark.once
@pytest.mark.interpreted_elsewhere
@pytest.mark.optimised
def test_narrow_logits_are_read_exactly(implementation):
    for case in (mixed_case(11), mixed_case(13), sampled_case(11)):
        for name, dtype in [("target_logits", jnp.bfloat16), ("draft_logits", jnp.float16)]:
            case[name] = case[name].astype(dtype)
        ours = check_against_oracle(library(implementation), case)
        check_every_length_is_accepted(ours, K)


@pytest.mark.once
@pytest.mark.interpreted_elsewhere
def test_float64_noise_is_the_oracle_s(implementation):
    with jax.enable_x64(True):
        check_against_oracle(library(implementation, jnp.float64), mixed_case(12), noise=np.float64)


@pytest.mark.once
def test_logits_are_found_through_rows(implementation):
    case = mixed_case(15)
    gathered = case | dict(
        draft_logits=case["draft_logits"][case["rows"]], rows=np.arange(BATCH, dtype=np.int32)
    )
    chex.assert_trees_all_equal(
        run(library(implementation), case), run(library(implementation), gathered)
    )


@pytest.mark.once
def test_several_requests_may_share_draft_rows(implementation):
    case = sampled_case(16)
    case["rows"] = (np.arange(BATCH, dtype=np.int32) // 8) * 8
    gathered = case | dict(
        draft_logits=case["draft_logits"][case["rows"]], rows=np.arange(BATCH, dtype=np.int32)
    )
    chex.assert_trees_all_equal(
        run(library(implementation), case), run(library(implementation), gathered)
    )


@pytest.mark.once
def test_tokens_do_not_depend_on_batch_order(implementation):
    case = mixed_case(17)
    keys = make_keys(BATCH)
    whole = run(library(implementation), case, keys)
    order = np.random.default_rng(0).permutation(BATCH)
    moved = {k: v if k == "draft_logits" else v[order] for k, v in case.items()}
    shuffled = run(library(implementation), moved, keys[order])
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[order], whole), shuffled)


@pytest.mark.once
def test_tokens_do_not_depend_on_batch_company(implementation):
    case = mixed_case(18)
    keys = make_keys(BATCH)
    whole = run(library(implementation), case, keys)
    others = mixed_case(19)
    mine = np.arange(BATCH) % 4 == 1
    company = {
        k: np.where(mine.reshape(-1, *[1] * (v.ndim - 1)), v, others[k]) for k, v in case.items()
    }
    company["rows"] = case["rows"]
    slots = case["rows"][mine]
    company["draft_logits"] = others["draft_logits"].copy()
    company["draft_logits"][slots] = case["draft_logits"][slots]
    again = run(library(implementation), company, keys)
    chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[mine], v) for v in (whole, again)))


@pytest.mark.once
@pytest.mark.interpreted_elsewhere
def test_tokens_do_not_depend_on_the_most_drafts_of_the_batch(implementation):
    case = sampled_case(20)
    case["num_tokens"][:] = 1
    long = run(library(implementation), case)
    names = ("token_ids", "draft_logits", "draft_cutoff")
    short = case | {name: case[name][:, :1] for name in names}
    short |= {name: case[name][:, :2] for name in ("target_logits", "cutoff")}
    short = run(library(implementation), short)
    np.testing.assert_array_equal(np.asarray(long.token_ids)[:, :2], np.asarray(short.token_ids))


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("target_logits has 3 rows", {"target_logits": np.zeros((BATCH, 3, VOCAB), np.float32)}),
        ("target_logits", {"target_logits": np.zeros((BATCH, VOCAB), np.float32)}),
        ("target_logits", {"target_logits": np.zeros((BATCH, 4, VOCAB), np.int32)}),
        ("target_logits", {"target_logits": np.zeros((BATCH - 1, 4, VOCAB), np.float32)}),
        ("token_ids", {"token_ids": np.zeros(K, np.int32)}),
        ("token_ids", {"token_ids": np.zeros((BATCH, K), np.float32)}),
        ("draft.logits", {"draft_logits": np.zeros((BATCH, 2, VOCAB), np.float32)}),
        ("draft.temperature", {"draft_temperature": np.ones((BATCH, K), np.float32)}),
        ("draft.num_tokens", {"num_tokens": np.ones((BATCH, K), np.int32)}),
        ("draft.rows", {"rows": np.zeros(3, np.int32)}),
        ("draft.cutoff", {"draft_cutoff": np.zeros(BATCH, np.float32)}),
        ("draft.logprobs", {"draft_logprobs": np.zeros(BATCH, np.float32)}),
        ("draft.logsumexp", {"draft_logsumexp": np.zeros(BATCH, np.float32)}),
        ("conditional_rates", {"conditional_rates": np.ones(K + 1, np.float32)}),
        ("conditional_rates", {"conditional_rates": np.ones(BATCH, np.float32)}),
        ("bonus_token_ids", {"bonus_token_ids": np.zeros((BATCH, 1), np.int32)}),
        ("cutoff", {"cutoff": np.zeros((BATCH, K), np.float32)}),
        ("positions", {"positions": np.zeros(3, np.int32)}),
        ("positions", {"positions": np.zeros(BATCH, np.float32)}),
        ("temperature", {"temperature": np.ones((BATCH, 1), np.float32)}),
    ],
)
def test_wrong_arguments_are_refused_by_name(named, change, implementation):
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        run(library(implementation), sampled_case() | change)


def test_draft_logits_for_other_than_the_batch_need_rows(implementation):
    case = sampled_case()
    del case["rows"]
    case["draft_logits"] = case["draft_logits"][:-1]
    with pytest.raises(ValueError, match=r"draft\.logits"):
        run(library(implementation), case)


@pytest.mark.parametrize(
    "keys",
    [
        lambda: jnp.zeros((BATCH, 2), jnp.uint32),
        lambda: jax.random.split(jax.random.key(0, impl="rbg"), BATCH),
        lambda: make_keys(BATCH + 1),
        lambda: make_keys(BATCH).reshape(8, 8),
    ],
)
def test_wrong_keys_are_refused(keys, implementation):
    with pytest.raises(ValueError, match="keys"):
        run(library(implementation), sampled_case(), keys())


def test_refusals_come_at_trace_time(implementation):
    case = sampled_case() | dict(conditional_rates=np.ones(K + 1, np.float32))
    with pytest.raises(ValueError, match="conditional_rates"):
        jax.eval_shape(lambda: run(library(implementation), case))


def test_float64_noise_without_x64_is_refused_with_the_cure(implementation):
    with pytest.raises(ValueError, match="jax_enable_x64"):
        run(library(implementation, jnp.float64), sampled_case())
