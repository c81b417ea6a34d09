"""Requests laid end to end are verified as the padded form verifies them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verify_cases import BATCH, VOCAB, K, library, make_draft, make_keys, mixed_case, run

import specjax

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
    return specjax.rejection_sample_ragged(
        make_draft(ragged),
        jnp.asarray(ragged["target_logits"]),
        cu_num_draft_tokens=jnp.asarray(cu),
        max_draft_tokens=k,
        keys=make_keys(len(cu) - 1),
        implementation=implementation,
        **rest,
        **options,
    )


def check_same(ours, theirs):
    for name in ("token_ids", "num_accepted", "num_emitted"):
        chex.assert_trees_all_equal(getattr(ours, name), getattr(theirs, name))
    chex.assert_trees_all_close(ours.logprobs, theirs.logprobs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_ragged_equals_padded(seed, implementation):
    case, ragged, cu = ragged_case(seed)
    padded = run(library(implementation), case)
    assert set(np.asarray(padded.num_accepted).tolist()) == set(range(K + 1))
    check_same(run_ragged(ragged, cu, implementation), padded)


def test_ragged_equals_padded_under_synthetic_rates(implementation):
    case, ragged, cu = ragged_case(3)
    rates = np.random.default_rng(3).random((BATCH, K)).astype(np.float32)
    padded = run(library(implementation), case | dict(conditional_rates=rates))
    check_same(run_ragged(ragged, cu, implementation, conditional_rates=jnp.asarray(rates)), padded)


def test_rows_of_padding_touch_nothing(implementation):
    _, ragged, cu = ragged_case(4)
    _, clean, _ = ragged_case(4, fill=0.0)
    ours = run_ragged(ragged, cu, implementation)
    chex.assert_trees_all_equal(ours, run_ragged(clean, cu, implementation))
    assert np.all(np.isfinite(np.asarray(ours.logprobs)))


def test_ragged_logits_are_found_through_rows(implementation):
    _, ragged, cu = ragged_case(5)
    ours = run_ragged(ragged, cu, implementation)
    order = np.random.default_rng(5).permutation(NUM_ROWS)
    moved = ragged | dict(
        draft_logits=ragged["draft_logits"][order], rows=np.argsort(order).astype(np.int32)
    )
    moved_result = run_ragged(moved, cu, implementation)
    chex.assert_trees_all_equal(moved_result[:3], ours[:3])
    # Interpreted it is another program, which XLA may round otherwise.
    rtol = 0 if implementation == "xla" else 1e-6
    chex.assert_trees_all_close(moved_result.logprobs, ours.logprobs, rtol=rtol, atol=0)


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
    padded = run(library(implementation), case)
    ours = run_ragged(ragged, cu, implementation, k=k)
    chex.assert_trees_all_equal(ours.token_ids, padded.token_ids[:, : k + 1])


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
            specjax.rejection_sample_ragged(
                make_draft(ragged),
                jnp.asarray(ragged["target_logits"]),
                cu_num_draft_tokens=jnp.asarray(wrong),
                max_draft_tokens=K,
                keys=make_keys(BATCH),
                positions=0,
                implementation=implementation,
            )


def test_rows_split_over_a_mesh_are_refused_by_name():
    mesh = jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        rows = jax.device_put(jnp.zeros((4, 8)), jax.P("batch"))
        with pytest.raises(ValueError, match="target_logits is sharded over mesh axis 'batch'"):
            specjax.rejection_sample_ragged(
                specjax.Draft(jnp.array([1, 2])),
                rows,
                cu_num_draft_tokens=jnp.array([0, 1, 2]),
                max_draft_tokens=1,
                keys=jax.random.key(0),
                positions=0,
            )
