"""Trees change nothing but the speed: exact distributions of one step, then texts of many steps."""

import functools

import jax
import numpy as np
import oracle
import oracle_block
import oracle_tree
import pytest
import trees
from scipy import stats
from test_block_rule import random_model, total_variation, without_rows

import specjax
from specjax import Stream

pytestmark = pytest.mark.once

ALPHA = 1e-6
V, TOKENS = 130, (0, 1, 128, 129)  # of two blocks
NUM_REQUESTS, LENGTH = 3_000, 3


def full(draft, num_children, depth):
    """Every node above `depth` has that many children, all drawn."""
    return lambda path, siblings: (
        draft(path) if len(path) < depth and len(siblings) < num_children else None
    )


def grown(draft, _, depth):
    """Children follow where the tokens drawn so far ask for them: 1 to 3, some of them one-hot."""

    def row(path, siblings):
        num_children = 1 + (sum(path) + sum(siblings[:1])) % 3
        if len(path) >= depth or len(siblings) >= num_children:
            return None
        if path and path[-1] == 1:
            return (path[0] + 2 * len(siblings)) % 4
        return draft(path)

    return row


TREES = [
    ("chain", full, 1, 3),
    ("two by two", full, 2, 2),
    ("two children, depth 3", full, 2, 3),
    ("three children", full, 3, 2),
    ("three children, depth 3", full, 3, 3),
    ("grown", grown, 0, 2),
    ("grown, depth 3", grown, 0, 3),
]


@pytest.mark.parametrize(("name", "make", "num_children", "depth"), TREES)
def test_a_step_follows_the_target(name, make, num_children, depth):
    for seed, zeros in enumerate((False, True)):
        rng = np.random.default_rng([seed, depth])
        target, draft = (random_model(rng, 4, depth, zeros=zeros) for _ in range(2))
        step = oracle_tree.output_distribution(target, make(draft, num_children, depth))
        assert total_variation(step, target, depth + 1) < 1e-12
        # A node whose row of the target is not a distribution is a leaf.
        target = without_rows(rng, target, 1)
        step = oracle_tree.output_distribution(target, make(draft, num_children, depth))
        assert total_variation(step, target, depth + 1) < 1e-12


@pytest.mark.parametrize(
    "fault",
    ["siblings are drawn with replacement", "r is missing in the residual", "r stays"],
)
def test_a_wrong_rule_is_seen_by_the_exact_distribution(fault):
    rng = np.random.default_rng(2)
    target, draft = (random_model(rng, 4, 2) for _ in range(2))
    step = oracle_tree.output_distribution(target, full(draft, 2, 2), fault)
    assert total_variation(step, target, 3) > 1e-2


def test_a_chain_is_block_verification():
    rng = np.random.default_rng(3)
    target, draft = (random_model(rng, 4, 3) for _ in range(2))
    tree = oracle_tree.output_distribution(target, full(draft, 1, 3))
    block = oracle_block.output_distribution(target, draft, 3)
    assert max(abs(tree.get(x, 0) - block.get(x, 0)) for x in tree.keys() | block.keys()) < 1e-12


def table(seed):
    """Next tokens by the last, target and draft [4, 4].

    The seeds below are those of forty with which the fault that a test is for shows most: noise by
    the number of a node alone, siblings at one address.
    """
    rng = np.random.default_rng(seed)
    concentration = np.full(4, rng.choice([0.3, 1.0]))
    return [0.9 * rng.dirichlet(concentration, 4) + 0.025 for _ in range(2)]


def embedded(p):
    """A table of the few tokens as one of the vocabulary; the rest has no probability."""
    wide = np.zeros((V, V))
    wide[np.ix_(TOKENS, TOKENS)] = p
    wide[[x for x in range(V) if x not in TOKENS], 0] = 1
    return wide


def decode(seed, shapes, length, **options):
    """Texts of many requests, each of the indices of its tokens among the few."""
    target, draft = (embedded(p) for p in table(seed))
    keys = jax.random.split(jax.random.key(seed), NUM_REQUESTS)
    texts = trees.decode(trees.verify, target, draft, shapes, length, keys, **options)
    return texts, target, keys


def check_texts(texts, p):
    """Texts after token 0 follow a table jointly."""
    length = texts.shape[1]
    few = np.searchsorted(TOKENS, texts)
    distribution = oracle.joint_distribution(lambda x: p[x[-1] if x else 0], length)
    counts = np.zeros((4,) * length)
    np.add.at(counts, tuple(few.T), 1)
    expected = np.zeros_like(counts)
    for x, mass in distribution.items():
        expected[x] = mass * len(texts)
    assert np.sum(counts) == len(texts)
    statistic = np.sum((counts - expected) ** 2 / expected)
    assert stats.chi2.sf(statistic, counts.size - 1) > ALPHA, "the texts are biased"


def test_texts_of_alternating_shapes_follow_the_target_jointly():
    """A node's number alone is no address: it comes back in a tree of another shape."""
    texts, _, _ = decode(39, (trees.CHAIN, trees.TWO_BY_TWO), LENGTH)
    for length in (2, LENGTH):
        check_texts(texts[:, :length], table(39)[0])


THREE = (-1, -1, -1, -2, -2, -2)


def test_three_siblings_follow_the_target():
    check_texts(decode(19, (THREE,), 1)[0], table(19)[0])


def test_siblings_drawn_at_one_address_are_seen():
    with pytest.raises(AssertionError, match="biased"):
        check_texts(decode(19, (THREE,), 1, place=trees.one_address)[0], table(19)[0])


def test_drafts_of_a_temperature_and_a_cutoff_of_their_own_follow_the_target_jointly():
    texts, _, _ = decode(39, (trees.TWO_BY_TWO,), 2, scales=(0.8, 1.6, np.log(0.2)))
    p = table(39)[0] ** (1 / 0.8)
    check_texts(texts, p / p.sum(axis=1, keepdims=True))


def test_a_walk_is_plain_seeded_decoding():
    texts, target, keys = decode(18, (trees.TWO_BY_TWO, trees.CHAIN), LENGTH, one_hot=True)
    with np.errstate(divide="ignore"):
        rows = np.log(target).astype(np.float32)
    draw = functools.partial(
        specjax.gumbel_sample,
        keys=keys,
        stream=Stream.TARGET,
        options=specjax.Options(implementation="xla"),
    )
    last = np.zeros(NUM_REQUESTS, int)
    for i in range(LENGTH):
        last = np.asarray(draw(rows[last], positions=i).token_ids)
        np.testing.assert_array_equal(texts[:, i], last)
