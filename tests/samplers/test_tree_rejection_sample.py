"""Decisions of `tree_rejection_sample` are those of NumPy, on a chain those of block."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import oracle_block
import oracle_tree
import pytest
import trees

import specjax
from specjax.samplers.trees.tree import place_nodes

pytestmark = pytest.mark.once

B, N, D, V = 128, 7, 4, 300
CHAIN = np.array([-1, 0, 1, 2, -2, -2, -2])
KEY = jax.random.key(0)


def random_parents(rng):
    """Trees of any shape: some deeper than D, a few nodes with an impossible parent."""
    parents = np.stack([rng.integers(-1, v, B) if v else np.full(B, -1) for v in range(N)], axis=1)
    bad = rng.choice([-7, -2, N - 1, N], (B, N))
    return np.where(rng.random((B, N)) < 0.03, bad, parents)


def fill_nodes(rng, parents, rows):
    """Siblings sampled without replacement from their parents' rows, by NumPy."""
    order = np.argsort(-(rows + rng.gumbel(size=rows.shape)), axis=-1)
    ids, num_drawn = np.zeros((B, N), int), np.zeros((B, N + 1), int)
    for b, v in np.ndindex(B, N):
        row = parents[b, v] + 1 if -1 <= parents[b, v] < v else 0
        ids[b, v] = order[b, row, num_drawn[b, row]]
        num_drawn[b, row] += 1
    return ids


@functools.cache
def batch(seed, draft_vocab, is_chain=False):
    """Requests of every kind, and every edge: padding, ids of no token, q = 0, invalid rows.

    Rows of a request are alike, so that cousins share tokens. A draft has a temperature of its own
    and a cutoff that takes probability from it.
    """
    rng = np.random.default_rng(seed)
    wide = max(V, draft_vocab)
    base = 2.4 * rng.standard_normal((B, 1, wide)) + 1.8 * rng.standard_normal((B, N + 1, wide))
    draft_logits = base[..., :draft_vocab]
    spread = rng.choice([0.0, 0.5, 1.0, 2.0], (B, 1, 1), p=[0.2, 0.3, 0.3, 0.2])
    target_logits = (base + spread * rng.standard_normal(base.shape))[..., :V]
    temperature = rng.choice([0.7, 1.0, 1.3, 0.0, -1.0], B, p=[0.4, 0.25, 0.2, 0.1, 0.05])
    one_hot = np.where(np.arange(B) % 2, 0.0, np.nan)
    draft_temperature = np.maximum(temperature, 0.5) * rng.choice([0.7, 1.0, 1.5], B)
    draft_temperature = np.where(rng.random(B) < 0.15, one_hot, draft_temperature)
    draft_cutoff = np.where(rng.random((B, N + 1)) < 0.3, 5.0, -np.inf)
    parents = np.broadcast_to(CHAIN, (B, N)) if is_chain else random_parents(rng)
    is_walk = (temperature < 1e-5) | ~(draft_temperature > 0)
    rows = draft_logits / np.fmax(draft_temperature, 0.35)[:, None, None]
    rows = np.where(draft_logits < draft_cutoff[..., None], -1e9, rows)
    likely = 10 * np.pad(target_logits, ((0, 0), (0, 0), (0, wide - V)), constant_values=-99)
    ids = fill_nodes(rng, parents, rows)
    ids = np.where(is_walk[:, None], fill_nodes(rng, parents, likely), ids)
    # Outside the vocabulary, padding, of q = 0, or some sibling's.
    unlikely = np.argmin(draft_logits[:, 1:, :V], axis=-1)
    for other in (2 * V, -5, V + 1, -1, *(() if is_chain else (unlikely, ids[:, ::-1]))):
        ids = np.where(rng.random((B, N)) < 0.02, other, ids)
    target_logits[rng.random((B, N + 1)) < 0.06, 7] = np.nan
    draft_logits[rng.random((B, N + 1)) < 0.06, 7] = np.inf
    return dict(
        token_ids=ids.astype(np.int32),
        parents=parents.astype(np.int32),
        target_logits=target_logits.astype(np.float32),
        draft_logits=draft_logits.astype(np.float32),
        draft_temperature=draft_temperature.astype(np.float32),
        draft_cutoff=draft_cutoff.astype(np.float32),
        temperature=temperature.astype(np.float32),
        cutoff=np.where(rng.random((B, N + 1)) < 0.3, -1.0, -np.inf).astype(np.float32),
        positions=rng.integers(0, 1000, B).astype(np.int32),
    )


def verify(case, **changes):
    keys = jax.random.split(KEY, len(case["token_ids"]))
    return trees.verify(**{"max_depth": D, "keys": keys} | case | changes)


def check(ours, case, **changes):
    keys = np.asarray(jax.random.key_data(jax.random.split(KEY, B)))
    theirs = oracle_tree.verify(**{"max_depth": D, "keys": keys} | case | changes)
    sure = theirs.certain
    assert np.mean(sure) > 0.85
    for name in ("token_ids", "num_accepted", "num_emitted", "nodes"):
        np.testing.assert_array_equal(
            np.asarray(getattr(ours, name))[sure], getattr(theirs, name)[sure], err_msg=name
        )
    np.testing.assert_allclose(np.asarray(ours.logprobs)[sure], theirs.logprobs[sure], atol=2e-4)
    return theirs


@pytest.mark.parametrize("draft_vocab", [200])
def test_decisions_are_those_of_numpy(draft_vocab):
    case = batch(1, draft_vocab)
    theirs = check(verify(case), case)
    sure = theirs.certain
    assert set(theirs.num_accepted[sure]) >= set(range(D))
    # Some paths turn off at a later sibling, and some end where nothing follows.
    later = (theirs.nodes >= 0) & (theirs.nodes != np.arange(D))
    assert np.sum(later[sure]) > B / 8
    assert np.any((theirs.num_emitted == theirs.num_accepted) & (theirs.num_accepted > 0))
    place = np.stack(place_nodes(case["parents"]), axis=1)
    for b in range(B):
        shape = oracle_tree.shape_of(case["token_ids"][b], case["parents"][b], D)
        for v, depth in enumerate(shape.depths):
            if depth is None:
                assert place[b, 0, v] == -1
            else:
                assert tuple(place[b, :, v]) == (depth, shape.indices[v])


def test_nodes_without_draft_logits_are_walked():
    case = {k: v for k, v in batch(2, 200).items() if not k.startswith("draft")}
    # The lowest id is what a draw from an invalid row would come to.
    invalid = np.isnan(case["target_logits"][:, 0, 7])
    case["token_ids"] = np.where(invalid[:, None], 0, case["token_ids"])
    theirs = check(verify(case), case)
    assert set(theirs.num_accepted) >= set(range(D))


def test_a_chain_is_verified_as_by_the_block_rule():
    """Where q(x) > 0; a block whose rows of q are all invalid is one-hot throughout."""
    case = batch(3, 200, is_chain=True)
    draft_logits = case["draft_logits"][:, :D]
    options = {name: case[name] for name in ("positions", "temperature", "draft_temperature")}
    block = oracle.verify(
        case["token_ids"][:, :D],
        case["target_logits"][:, : D + 1],
        cutoff=case["cutoff"][:, : D + 1],
        draft_logits=draft_logits,
        draft_cutoff=case["draft_cutoff"][:, :D],
        draft_logsumexp=np.where(np.all(np.isfinite(draft_logits), axis=-1), 0, np.nan),
        keys=np.asarray(jax.random.key_data(jax.random.split(KEY, B))),
        one=oracle_block.verify_one,
        **options,
    )
    ours = verify(case)
    is_drawn = (case["draft_temperature"] > 0) & (case["temperature"] > 0)
    is_drawn &= np.all(np.isfinite(case["draft_logits"][:, 0]), axis=-1)
    is_drawn &= block.certain
    assert np.sum(is_drawn) > B / 2
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(
            np.asarray(getattr(ours, name))[is_drawn], np.asarray(getattr(block, name))[is_drawn]
        )
    np.testing.assert_allclose(ours.logprobs[is_drawn], block.logprobs[is_drawn], atol=2e-4)
    accepted = np.arange(D) < np.asarray(ours.num_accepted)[:, None]
    np.testing.assert_array_equal(ours.nodes, np.where(accepted, np.arange(D), -1))


FIVE = np.array([-1, -1, 0, 0, 1, 1, -1])
SMALL = 40


def small_case(seed=0):
    """Trees of two by two with a last child of the root, every request sampled."""
    rng = np.random.default_rng(seed)
    draft_logits = rng.standard_normal((B, N + 1, SMALL)).astype(np.float32)
    target_logits = draft_logits + rng.standard_normal(draft_logits.shape).astype(np.float32)
    parents = np.broadcast_to(FIVE, (B, N)).astype(np.int32)
    ids = fill_nodes(rng, parents, draft_logits)
    return dict(
        token_ids=ids.astype(np.int32),
        parents=parents,
        target_logits=target_logits,
        draft_logits=draft_logits,
        positions=np.zeros(B, np.int32),
        temperature=np.ones(B, np.float32),
        max_depth=2,
    )


def test_a_child_that_cannot_have_been_drawn_changes_nothing():
    """Of q(x) = 0, its sibling's token, or padding of any kind, with what is below it."""
    case = small_case()
    plain = verify(case | {"token_ids": np.where(np.arange(N) == N - 1, -1, case["token_ids"])})
    masked = case["draft_logits"].copy()
    masked[np.arange(B), 0, case["token_ids"][:, -1]] = -np.inf
    # The others' q is then another; it is what they are verified by in both calls.
    other = verify(case | {"draft_logits": masked})
    without = np.where(np.arange(N) == N - 1, -1, case["token_ids"])
    chex.assert_trees_all_equal(
        other, verify(case | {"draft_logits": masked, "token_ids": without})
    )
    twin = np.where(np.arange(N) == N - 1, case["token_ids"][:, :1], case["token_ids"])
    chex.assert_trees_all_equal(verify(case | {"token_ids": twin}), plain)
    for parent in (-2, N - 1, N, 2):  # below node 2 it is deeper than `max_depth`
        parents = np.where(np.arange(N) == N - 1, parent, case["parents"]).astype(np.int32)
        chex.assert_trees_all_equal(verify(case | {"parents": parents}), plain)


def test_a_node_before_its_parent_is_not_reached_through_it():
    """In a walk, where the last node holds what is drawn, and so does the one that names it."""
    case = {name: x for name, x in small_case(11).items() if not name.startswith("draft")}
    case["target_logits"][:, 0] += 60 * (np.arange(SMALL) == case["token_ids"][:, -1:])
    case["target_logits"][:, N] += 60 * (np.arange(SMALL) == case["token_ids"][:, -2:-1])
    parents = np.where(np.arange(N) == N - 2, N - 1, case["parents"]).astype(np.int32)
    ours = verify(case | {"parents": parents})
    np.testing.assert_array_equal(ours.num_accepted, 1)
    np.testing.assert_array_equal(np.asarray(ours.nodes)[:, 0], N - 1)


def test_no_sibling_follows_where_nothing_of_q_is_left():
    """One token has all of q. What is said to come after it, of no vocabulary, changes nothing."""
    case = small_case(6)
    draft_logits, ids = case["draft_logits"].copy(), case["token_ids"].copy()
    draft_logits[:, 0] = np.where(np.arange(SMALL) == ids[:, :1], 0, -np.inf)
    ids[:, 1:] = np.where(case["parents"][:, 1:] == -1, -1, ids[:, 1:])
    without = verify(case | {"draft_logits": draft_logits, "token_ids": ids})
    ids[:, 1] = SMALL + 5
    ours = verify(case | {"draft_logits": draft_logits, "token_ids": ids})
    chex.assert_trees_all_equal(ours[:3], without[:3])


@pytest.mark.slow
def test_a_sibling_far_less_likely_than_the_first_is_judged_by_its_share_of_the_rest():
    """A gap of 40 leaves no other trace than one of 200, whose rest float32 cannot add to 1."""
    case, steps = small_case(8), []
    for gap in (40, 200):
        draft_logits = case["draft_logits"].copy()
        draft_logits[np.arange(B), 0, case["token_ids"][:, 0]] += gap
        steps.append(verify(case | {"draft_logits": draft_logits}))
    assert np.mean(np.asarray(steps[0].nodes)[:, 0] > 0) > 0.2
    chex.assert_trees_all_equal(*(step[:3] for step in steps))


def test_children_of_a_row_that_is_no_distribution_are_one_hot():
    """Each has a q of its own, so that the one with all of p is accepted."""
    case = small_case(9)
    case["draft_logits"][:, 0, 3] = np.inf
    which = np.arange(B) % 2
    case["target_logits"][np.arange(B), 0, case["token_ids"][np.arange(B), which]] += 60
    np.testing.assert_array_equal(np.asarray(verify(case).nodes)[:, 0], which)


def test_of_siblings_that_hold_the_target_s_draw_the_walk_takes_the_lowest():
    case = {name: x for name, x in small_case(10).items() if not name.startswith("draft")}
    drawn = np.asarray(verify(case).token_ids)[:, :1]
    twins = (case["parents"] == -1) & (np.arange(N) > 0)
    ours = verify(case | {"token_ids": np.where(twins, drawn, -1).astype(np.int32)})
    np.testing.assert_array_equal(np.asarray(ours.nodes)[:, 0], 1)


def test_equal_rows_accept_the_first_path():
    case = small_case(1)
    ours = verify(case | {"target_logits": case["draft_logits"]})
    np.testing.assert_array_equal(ours.num_accepted, 2)
    np.testing.assert_array_equal(ours.nodes, np.broadcast_to([0, 2], (B, 2)))


def test_an_empty_residual_falls_back_to_the_target_row():
    """Rows of the root are equal, and a child that is not accepted all the same leaves nothing."""
    case = small_case(7)
    case["target_logits"][:, 0] = case["draft_logits"][:, 0]
    of_root = case["parents"] == -1
    for rejected in (of_root, of_root & (np.arange(N) == 0)):
        outside, without = (np.where(rejected, x, case["token_ids"]) for x in (SMALL + 5, -1))
        ours = verify(case | {"token_ids": outside})
        chex.assert_trees_all_equal(ours[:3], verify(case | {"token_ids": without})[:3])


def test_a_residual_is_empty_by_its_share_of_the_rate():
    """A node of rate 1/16 has a child rejected, which leaves 2^-20: one token, which q has not.

    The uniform at this position is below the rate that is left, and the token follows the node.
    """
    case, only = small_case(), SMALL - 1
    draft_logits = np.zeros((B, N + 1, SMALL), np.float32)
    target_logits = draft_logits.copy()
    # p(x) = q(x) / 16 at the root's child; after it q is uniform but for the token that is left.
    target_logits[:, 0, 0] = np.log(1 / 16 * 39 / (40 - 1 / 16))
    draft_logits[:, 1, only] = -np.inf
    target_logits[:, 1, only] = np.log(39 * 2.0**-16)
    position = 1585586
    at = oracle.address(np.asarray(jax.random.key_data(KEY)), position, oracle.accept_stream(0))
    assert oracle.uniform(oracle.words(at, 0)) < 2.0**-21
    ids = np.broadcast_to([0, -1, SMALL + 5, -1, -1, -1, -1], (B, N))
    ours = verify(
        case
        | dict(
            token_ids=ids.astype(np.int32),
            draft_logits=draft_logits,
            target_logits=target_logits,
            positions=np.full(B, position, np.int32),
            keys=jnp.broadcast_to(KEY, (B,)),
        )
    )
    np.testing.assert_array_equal(ours.token_ids, np.broadcast_to([0, only, -1], (B, 3)))


def test_an_invalid_row_of_the_root_emits_nothing_and_an_invalid_request_neither():
    case = small_case(2)
    target_logits = case["target_logits"].copy()
    target_logits[::2, 0, 3] = np.nan
    temperature = np.where(np.arange(B) % 4 == 1, np.nan, 1).astype(np.float32)
    ours = verify(case | {"target_logits": target_logits, "temperature": temperature})
    nothing = (np.arange(B) % 2 == 0) | np.isnan(temperature)
    np.testing.assert_array_equal(np.asarray(ours.num_emitted) == 0, nothing)
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[nothing], -1)
    np.testing.assert_array_equal(np.asarray(ours.nodes)[nothing], -1)


def test_float64_noise_decides_as_numpy_s():
    """By drafts of the larger vocabulary."""
    case = batch(1, 400)
    with jax.enable_x64(True):
        ours = verify(case, options=specjax.Options(noise_dtype=jnp.float64))
        check(ours, case, noise=np.float64)
    assert ours.logprobs.dtype == jnp.float32


def test_a_tree_without_nodes_and_a_batch_without_requests():
    case = small_case(4)
    # A scalar temperature is every request's own.
    scalar = {"temperature": 1}
    none = {name: x for name, x in case.items() if not name.startswith("draft")} | scalar
    empty = none | {name: none[name][:, :0] for name in ("token_ids", "parents")}
    empty["target_logits"] = none["target_logits"][:, :1]
    ours = verify(empty)
    plain = specjax.gumbel_sample(
        empty["target_logits"][:, 0], keys=jax.random.split(KEY, B), positions=0, stream=0
    )
    np.testing.assert_array_equal(np.asarray(ours.token_ids)[:, 0], plain.token_ids)
    np.testing.assert_array_equal(ours.num_emitted, 1)
    ours = verify({name: x if name == "max_depth" else x[:0] for name, x in case.items()})
    assert (ours.token_ids.shape, ours.nodes.shape) == ((0, 3), (0, 2))


def test_a_mesh_changes_nothing():
    case = small_case(5)
    arrays = {name: jnp.asarray(x) for name, x in case.items() if name != "max_depth"}
    arrays["keys"] = jax.random.split(KEY, B)
    call = functools.partial(verify, max_depth=2)
    plain = call(arrays)
    with jax.set_mesh(jax.make_mesh((2,), ("batch",), (jax.sharding.AxisType.Explicit,))):
        split = jax.tree.map(lambda x: jax.device_put(x, jax.P("batch")), arrays)
        sharded = jax.jit(call)(split)
        assert sharded.token_ids.sharding.spec[0] == "batch"
    chex.assert_trees_all_equal(*(jax.tree.map(np.asarray, x[:3]) for x in (sharded, plain)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"token_ids": np.zeros(B, np.int32)}, r"token_ids has shape .* \[B, N\]"),
        ({"parents": np.zeros((B, N + 1), np.int32)}, "parents has shape"),
        ({"target_logits": np.zeros((B, N, V), np.float32)}, "target_logits has 7 rows"),
        ({"draft_logits": np.zeros((B, N, V), np.float32)}, "tree.logits has 7 rows"),
        ({"draft_logits": None, "draft_cutoff": np.zeros((B, N + 1))}, "without tree.logits"),
        ({"max_depth": 0}, "max_depth is 0"),
        ({"max_depth": 1025}, "max_depth is 1025; it needs at most 1024"),
        *(
            ({"options": specjax.Options(implementation=name)}, "there are none of trees")
            for name in ("interpret", "triton")
        ),
        ({"options": specjax.Options(axis_name="x")}, "options.axis_name is 'x'; .* whole rows"),
        ({"options": specjax.Options(vocab_size=4)}, "options.vocab_size is 4"),
        ({"options": "xla"}, "options is str"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, words):
    with pytest.raises(ValueError, match=words):
        verify(small_case() | changes)
