"""Requests laid end to end are verified as the padded form verifies them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verify_cases import (
    BATCH,
    VOCAB,
    K,
    exact,
    library,
    make_keys,
    make_ragged_draft,
    mixed_case,
    run,
)

import specjax
from specjax import RaggedDraft, rules

pytestmark = pytest.mark.once

NUM_ROWS = BATCH * K


def ragged_case(seed, fill=np.nan):
    """A mixed padded case and the same drafts end to end, `fill` in the rows of padding."""
    case = mixed_case(seed)
    case["draft_logits"] = case["draft_logits"][case["rows"]]
    case["rows"] = np.arange(BATCH, dtype=np.int32)
    counts = np.clip(case["num_tokens"], 0, K)
    cu = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    drafted = [(b, i) for b in range(BATCH) for i in range(counts[b])]
    verified = [(b, i) for b in range(BATCH) for i in range(counts[b] + 1)]

    def rows(name, places, num_rows, empty):
        out = np.full((num_rows, *case[name].shape[2:]), empty, case[name].dtype)
        out[: len(places)] = [case[name][place] for place in places]
        return out

    ragged = dict(
        token_ids=rows("token_ids", drafted, NUM_ROWS, 2**31 - 1),
        draft_logits=rows("draft_logits", drafted, NUM_ROWS, fill),
        draft_cutoff=rows("draft_cutoff", drafted, NUM_ROWS, fill),
        target_logits=rows("target_logits", verified, NUM_ROWS + BATCH, fill),
        cutoff=rows("cutoff", verified, NUM_ROWS + BATCH, fill),
        num_tokens=case["num_tokens"],
        **{
            name: case[name]
            for name in ("positions", "temperature", "draft_temperature", "bonus_token_ids")
        },
    )
    return case, ragged, cu


def run_ragged(ragged, cu, implementation, k=K, **options):
    rest = {
        name: jnp.asarray(ragged[name])
        for name in ("positions", "temperature", "cutoff", "bonus_token_ids")
    }
    return specjax.rejection_sample(
        make_ragged_draft(ragged, jnp.asarray(cu), k),
        jnp.asarray(ragged["target_logits"]),
        keys=make_keys(len(cu) - 1),
        options=specjax.Options(implementation=implementation),
        **rest,
        **options,
    )


def check_same(ours, theirs):
    for name in ("token_ids", "num_accepted", "num_emitted"):
        chex.assert_trees_all_equal(getattr(ours, name), getattr(theirs, name))
    chex.assert_trees_all_close(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=1e-5)


def check_exact(ours, case):
    """Decisions are those of the padded form, where rounding cannot decide."""
    theirs = exact(case)
    sure = theirs.certain
    assert np.mean(sure) > 0.9
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, name)[sure], getattr(theirs, name)[sure], name)
    np.testing.assert_allclose(ours.logprobs[sure], theirs.logprobs[sure], atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_ragged_equals_padded(seed, implementation):
    """In plain JAX bit for bit; of the kernels the padded form is held against the same oracle."""
    case, ragged, cu = ragged_case(seed)
    ours = run_ragged(ragged, cu, implementation)
    assert set(np.asarray(ours.num_accepted).tolist()) == set(range(K + 1))
    if implementation == "xla":
        check_same(ours, run(library(implementation), case))
    else:
        check_exact(ours, case)


def test_ragged_equals_padded_under_synthetic_rates(implementation):
    """With rows of draft logits in an order of their own."""
    case, ragged, cu = ragged_case(3)
    rates = np.random.default_rng(3).random((BATCH, K)).astype(np.float32)
    ours = run_ragged(in_other_rows(ragged), cu, implementation, rule=rules.synthetic(rates))
    check_exact(ours, case | dict(conditional_rates=rates))


def in_other_rows(ragged):
    order = np.random.default_rng(5).permutation(NUM_ROWS)
    rows = np.argsort(order).astype(np.int32)
    return ragged | dict(draft_logits=ragged["draft_logits"][order], rows=rows)


def test_rows_of_padding_touch_nothing(implementation):
    _, ragged, cu = ragged_case(4)
    _, clean, _ = ragged_case(4, fill=0.0)
    ours = run_ragged(ragged, cu, implementation)
    chex.assert_trees_all_equal(ours, run_ragged(clean, cu, implementation))
    assert np.all(np.isfinite(np.asarray(ours.logprobs)))


# The interpreter finds them with rates, above.
@pytest.mark.interpreted_elsewhere
def test_ragged_logits_are_found_through_rows(implementation):
    _, ragged, cu = ragged_case(5)
    ours = run_ragged(ragged, cu, implementation)
    chex.assert_trees_all_equal(run_ragged(in_other_rows(ragged), cu, implementation), ours)


def test_more_drafts_than_a_request_has_rows_are_not_read(implementation):
    _, ragged, cu = ragged_case(7)
    ours = run_ragged(ragged, cu, implementation)
    more = np.where(ragged["num_tokens"] < 0, -1, 9).astype(np.int32)
    chex.assert_trees_all_equal(
        run_ragged(ragged | dict(num_tokens=more), cu, implementation), ours
    )


@pytest.mark.parametrize("k", [0, 2])
def test_a_request_with_more_than_the_most_drafts_has_its_first_verified(k, implementation):
    """Its later drafts are not verified, and the row after the last verified is its bonus."""
    case, ragged, cu = ragged_case(6)
    case["num_tokens"] = np.minimum(case["num_tokens"], k)
    theirs = exact(case)
    ours = run_ragged(ragged, cu, implementation, k=k)
    np.testing.assert_array_equal(
        ours.token_ids[theirs.certain], theirs.token_ids[theirs.certain, : k + 1]
    )


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("target_logits", {"target_logits": np.zeros((NUM_ROWS, VOCAB), np.float32)}),
        ("token_ids", {"token_ids": np.zeros((BATCH, K), np.int32)}),
        ("draft.logits", {"draft_logits": np.zeros((BATCH, K, VOCAB), np.float32)}),
        ("cutoff", {"cutoff": np.zeros(NUM_ROWS, np.float32)}),
        ("positions", {"positions": np.zeros(NUM_ROWS, np.int32)}),
        ("temperature", {"temperature": np.ones(NUM_ROWS, np.float32)}),
    ],
)
def test_wrong_arguments_are_refused_by_name(named, change, implementation):
    _, ragged, cu = ragged_case(0)
    with pytest.raises(ValueError, match=named.replace(".", r"\.")):
        run_ragged(ragged | change, cu, implementation)


def test_a_wrong_cu_num_draft_tokens_is_refused_by_name(implementation):
    _, ragged, cu = ragged_case(0)
    for wrong in (cu.astype(np.float32), cu[None]):
        with pytest.raises(ValueError, match="cu_num_draft_tokens"):
            specjax.rejection_sample(
                make_ragged_draft(ragged, jnp.asarray(wrong)),
                jnp.asarray(ragged["target_logits"]),
                keys=make_keys(BATCH),
                positions=0,
                options=specjax.Options(implementation=implementation),
            )


def verify_counts(rule, cu):
    """Three drafted tokens, of two requests where `cu` says nothing else."""
    return specjax.rejection_sample(
        RaggedDraft(np.array([3, 1, 4]), cu, max_draft_tokens=2),
        np.zeros((5, 8), np.float32),
        keys=make_keys(2),
        positions=0,
        rule=rule,
    )


RULES = [rules.standard(), rules.block(), rules.coupled()]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_cumulative_counts_may_leave_out_their_first_0_as_those_of_vllm_do(rule):
    wanted = verify_counts(rule, jnp.array([0, 2, 3]))
    for cu in ([2, 3], np.array([2, 3], np.int64), jnp.array([2, 3])):
        chex.assert_trees_all_equal(verify_counts(rule, cu), wanted)
    under_jit = jax.jit(functools.partial(verify_counts, rule))(jnp.array([2, 3]))
    chex.assert_trees_all_equal(under_jit, wanted)
    # Of three rows the counts of the first request are 0 and 2: those of a batch of two.
    other = verify_counts(rule, [0, 2])
    assert other.token_ids[0, 1] == -1
    chex.assert_trees_all_equal(other, verify_counts(rule, [0, 0, 2]))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("cu", "words"),
    [
        ([0, 3, 2], r"is \[0, 3, 2\]; .* never to fall"),
        (
            [3, 2],
            r"is \[3, 2\]; it holds cumulative counts and needs to begin with 0, or to leave",
        ),
        ([1, 2, 3], r"is \[1, 2, 3\]; it holds cumulative counts and needs to begin with 0"),
        ([0, 2, 4], r"is \[0, 2, 4\]; .* end at 3, the drafted tokens"),
        ([-1, 3], r"is \[-1, 3\]; "),
        (
            [0, 1, 2, 3],
            r"shape \(4,\), and target_logits .* has 5 rows .* N = 3 .* B is 2; it needs",
        ),
        ([3], r"shape \(1,\), and"),
        (3, r"shape \(\), and"),
    ],
)
def test_counts_that_are_not_cumulative_are_refused(rule, cu, words):
    for counts in (cu, jnp.asarray(cu)):
        with pytest.raises(ValueError, match=f"^draft.cu_num_draft_tokens .*{words}"):
            verify_counts(rule, counts)


def test_rows_split_over_a_mesh_are_refused_by_name():
    mesh = jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(jnp.zeros((4, 8)), jax.P("batch"))
        with pytest.raises(ValueError, match="target_logits is sharded over mesh axis 'batch'"):
            specjax.rejection_sample(
                RaggedDraft(jnp.array([1, 2]), jnp.array([0, 1, 2]), max_draft_tokens=1),
                rows,
                keys=jax.random.key(0),
                positions=0,
            )
