"""Coupled sampling emits the target's own draws, whatever drafted; drafts decide how many."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_ragged import NUM_ROWS, check_same, ragged_case
from verify_cases import BATCH, VOCAB, K, make_keys, mixed_case, sampled_case, with_sizes

import specjax
from specjax import Draft, RaggedDraft, Stream, rules
from specjax.theory.coupling import match_probability

pytestmark = pytest.mark.once

REQUESTS = np.arange(BATCH)
OPTIONS = ("positions", "temperature", "cutoff", "bonus_token_ids")


def couple(case, implementation, **changes):
    case = case | changes
    return specjax.rejection_sample(
        Draft(case["token_ids"], num_tokens=case["num_tokens"]),
        case["target_logits"],
        rule=rules.coupled(),
        keys=make_keys(len(case["token_ids"])),
        options=specjax.Options(implementation=implementation),
        **{name: case[name] for name in OPTIONS},
    )


def couple_end_to_end(case, cu, implementation):
    """By the launches of a small batch, where the padded form takes those of a large one."""
    draft = RaggedDraft(case["token_ids"], cu, max_draft_tokens=K, num_tokens=case["num_tokens"])
    return specjax.rejection_sample(
        draft,
        case["target_logits"],
        rule=rules.coupled(),
        keys=make_keys(BATCH),
        options=specjax.Options(
            implementation=with_sizes(implementation, max_small_programs=10**6, num_noise_splits=2)
        ),
        **{name: case[name] for name in OPTIONS},
    )


def exact(case):
    keys = np.asarray(jax.random.key_data(make_keys(BATCH)))
    options = {name: case[name] for name in ("num_tokens", *OPTIONS)}
    rows = [case["token_ids"], case["target_logits"]]
    return oracle.verify(*rows, keys=keys, one=oracle.couple_one, **options)


def target_draws(case):
    """What the target draws from every row: NumPy's, of its own noise."""
    keys = np.asarray(jax.random.key_data(make_keys(BATCH)))
    draw = functools.partial(oracle.sample, keys=keys, stream=Stream.TARGET)
    return np.stack(
        [
            draw(
                case["target_logits"][:, i],
                positions=case["positions"] + i,
                temperature=case["temperature"],
                cutoff=case["cutoff"][:, i],
            ).token_ids
            for i in range(K + 1)
        ],
        axis=1,
    )


def often_right(case, seed=0):
    """The case with drafts that are mostly what the target draws."""
    keep = np.random.default_rng(seed).random((BATCH, K)) < 0.2
    drawn = target_draws(case)[:, :K]
    ids = np.where(keep | (case["token_ids"] < 0), case["token_ids"], drawn)
    return case | dict(token_ids=ids.astype(np.int32))


@functools.cache
def shared_case():
    """Greedy and random requests, cutoffs, masks, ids of no token, bonuses handed in."""
    return often_right(mixed_case(0))


def test_tokens_are_the_oracle_s(implementation):
    case = shared_case()
    ours, theirs = couple(case, implementation), exact(case)
    certain = theirs.certain
    assert np.mean(certain) > 0.95
    assert set(theirs.num_accepted.tolist()) == set(range(K + 1))
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(
            np.asarray(getattr(ours, name))[certain], getattr(theirs, name)[certain], err_msg=name
        )
    np.testing.assert_allclose(
        np.asarray(ours.logprobs)[certain], theirs.logprobs[certain], atol=2e-4, rtol=1e-5
    )


def test_requests_end_to_end_are_those_of_the_padded_form(implementation):
    _, ragged, cu = ragged_case(0)
    ids = np.asarray(ragged["token_ids"]).copy()
    case = shared_case()
    counts = np.diff(cu)
    for b in range(BATCH):
        ids[cu[b] : cu[b + 1]] = case["token_ids"][b, : counts[b]]
    ours = couple_end_to_end(ragged | dict(token_ids=ids), cu, implementation)
    check_same(ours, couple(case, implementation))
    assert len(ids) == NUM_ROWS


@pytest.mark.parametrize("form", ["padded", "end to end"])
def test_an_invalid_row_that_decides_emits_nothing_from_there_on(form, implementation):
    case = sampled_case(1)
    case["token_ids"] = target_draws(case)[:, :K].astype(np.int32)
    row = REQUESTS % (K + 1)
    # Each row is invalid in each way.
    bad = np.array([np.nan, np.inf, -np.inf], np.float32)[REQUESTS // (K + 1) % 3]
    case["target_logits"][REQUESTS, row] = bad[:, None]
    # The lowest id is what a draw from such a row would come to.
    case["token_ids"][REQUESTS[row < K], row[row < K]] = 0
    if form == "padded":
        ours = couple(case, implementation)
    else:
        for name in ("token_ids", "target_logits", "cutoff"):
            case[name] = case[name].reshape(-1, *case[name].shape[2:])
        ours = couple_end_to_end(case, np.arange(BATCH + 1, dtype=np.int32) * K, implementation)
    np.testing.assert_array_equal(ours.num_accepted, row)
    np.testing.assert_array_equal(ours.num_emitted, row)
    tail = np.arange(K + 1) >= row[:, None]
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[tail], -1)
    np.testing.assert_array_equal(np.asarray(ours.logprobs)[tail], 0)


def test_rows_after_the_first_disagreement_decide_nothing(implementation):
    case = shared_case()
    ours = couple(case, implementation)
    after = np.arange(K + 1) > np.asarray(ours.num_accepted)[:, None]
    target = np.where(after[..., None], np.float32(np.nan), case["target_logits"])
    chex.assert_trees_all_equal(couple(case, implementation, target_logits=target), ours)


def test_a_given_bonus_of_an_invalid_row_is_emitted(implementation):
    case = sampled_case(2)
    case["token_ids"] = target_draws(case)[:, :K].astype(np.int32)
    case["target_logits"][:, K] = np.nan
    case["bonus_token_ids"][:] = 5
    ours = couple(case, implementation)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, K], 5)
    np.testing.assert_array_equal(np.asarray(ours.logprobs)[:, K], -np.inf)


NO_DRAFTS = {"num_tokens": 0, "bonus_token_ids": -1}


def test_without_drafts_the_first_row_is_drawn_from(implementation):
    case = shared_case()
    few = {name: case[name] for name in ("positions", "temperature")}
    step = specjax.rejection_sample(
        Draft(np.zeros((BATCH, 0), np.int32)),
        case["target_logits"][:, :1],
        keys=make_keys(BATCH),
        options=specjax.Options(implementation=implementation),
        rule=rules.coupled(),
        cutoff=case["cutoff"][:, :1],
        **few,
    )
    none = {name: np.full(BATCH, x, np.int32) for name, x in NO_DRAFTS.items()}
    theirs = couple(case, implementation, **none)
    np.testing.assert_array_equal(step.token_ids[:, 0], theirs.token_ids[:, 0])
    sure = exact(case | none).certain
    np.testing.assert_array_equal(step.token_ids[sure, 0], target_draws(case)[sure, 0])


def test_no_requests_are_verified_as_none():
    step = specjax.rejection_sample(
        Draft(np.zeros((0, 2), np.int32)),
        jnp.zeros((0, 3, 5)),
        keys=jax.random.key(0),
        positions=0,
        rule=rules.coupled(),
    )
    assert step.token_ids.shape == (0, 3)


def test_vmap_and_a_mesh_change_nothing():
    case = shared_case()
    draft = Draft(jnp.asarray(case["token_ids"]), num_tokens=jnp.asarray(case["num_tokens"]))
    arrays = [draft, jnp.asarray(case["target_logits"])]
    arrays += [make_keys(BATCH), {name: jnp.asarray(case[name]) for name in OPTIONS}]

    def verify(draft, rows, keys, options):
        plain = specjax.Options(implementation="xla")
        return specjax.rejection_sample(
            draft, rows, keys=keys, rule=rules.coupled(), options=plain, **options
        )

    plain = couple(case, "xla")
    both = jax.vmap(verify)(*jax.tree.map(lambda x: jnp.stack([x, x]), arrays))
    chex.assert_trees_all_equal(jax.tree.map(lambda x: x[1], both)[:3], plain[:3])
    with jax.set_mesh(jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Explicit,))):
        split = jax.device_put(arrays, jax.P("batch"))
        sharded = jax.jit(verify)(*split)
        assert sharded.token_ids.sharding.spec[0] == "batch"
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, x[:3]) for x in (sharded, plain)))


PAIRS = 5000
# Half of both is spread over eight tokens of one block. The other half of P is in another block,
# that of Q is not: noise on one level would match by 11 sigma more often.
P = 0.1 * np.random.default_rng(0).dirichlet(np.full(300, 0.05))
Q = 0.1 * np.random.default_rng(1).dirichlet(np.full(300, 0.05))
P[[*range(8), 200]] += 0.9 * np.array([1 / 16] * 8 + [1 / 2])
Q[[*range(8), 100]] += 0.9 * np.array([1 / 16] * 8 + [1 / 2])


def tiled(*rows):
    """Logits of distributions, of many requests."""
    return np.tile(np.log(np.stack(rows) + 1e-30).astype(np.float32), (PAIRS, 1, 1))


def acceptance_rate(ids):
    """How often a drafted token is accepted, of many."""
    step = specjax.rejection_sample(
        Draft(ids[:, None]),
        tiled(P, P),
        keys=make_keys(PAIRS),
        positions=4,
        rule=rules.coupled(),
    )
    return np.mean(np.asarray(step.num_accepted))


def match_rate(stream):
    """How often a draft that is drawn on a stream is accepted."""
    keys = make_keys(PAIRS)
    draft = specjax.gumbel_sample(tiled(Q)[:, 0], keys=keys, positions=4, stream=stream)
    return acceptance_rate(draft.token_ids)


def test_a_token_chosen_without_that_noise_is_accepted_with_probability_p():
    """As often as rejection accepts a one-hot draft: nothing is lost."""
    likeliest = int(np.argmax(P))
    rate = acceptance_rate(np.full(PAIRS, likeliest, np.int32))
    assert abs(rate - P[likeliest]) < 5 * np.sqrt(P[likeliest] * (1 - P[likeliest]) / PAIRS)


def check_match_rate(rate):
    expected = match_probability(P, Q)
    assert abs(rate - expected) < 5 * np.sqrt(expected * (1 - expected) / PAIRS), "match rate"


def test_drafts_on_the_target_s_stream_match_as_often_as_the_formula_says():
    check_match_rate(match_rate(Stream.TARGET))


def test_a_coupled_draft_on_a_draft_stream_shows_in_the_match_rate_alone():
    """Its tokens would be right: two draws from apart agree with probability sum p q."""
    rate = match_rate(Stream.draft(0))
    assert abs(rate - P @ Q) < 5 * np.sqrt(P @ Q / PAIRS)
    with pytest.raises(AssertionError, match="match rate"):
        check_match_rate(rate)


def test_one_draw_from_equal_rows_always_matches_and_never_beats_the_optimum():
    assert match_probability(P, P) == pytest.approx(1, abs=1e-12)
    best = np.sum(np.minimum(P, Q))
    assert match_probability(P, Q) < match_probability(P, Q, 300) < best
    assert match_probability([0.3, 0.7], [0, 1]) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": np.zeros(BATCH, np.int32)}, r"draft.token_ids has shape .* \[B, K\]"),
        ({"token_ids": np.zeros((BATCH, K), np.float32)}, "draft.token_ids has dtype float32"),
        ({"target_logits": np.zeros((BATCH, K, VOCAB), np.float32)}, "target_logits has 3 rows"),
        ({"num_tokens": np.zeros(3, np.int32)}, "num_tokens has shape"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        couple(shared_case(), "xla", **changes)
