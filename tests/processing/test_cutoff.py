"""`logit_cutoff` against a sort, at every edge, and the samplers that take it."""

import functools
import types
from typing import Any, NamedTuple

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle_cutoff
import pytest
import scipy
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import specjax
from specjax.core import bisection
from specjax.core import truncation as order
from specjax.processing import cutoff_xla
from specjax.processing.logit_cutoff import find_cutoff

pytestmark = pytest.mark.once

# Each size and dtype is a program of its own, of two seconds: narrow logits have other sizes.
SIZES = [1, 129, 5000]
NARROW = [(128, jnp.bfloat16), (1025, jnp.float16)]
INF, NAN = np.float32(np.inf), np.float32(np.nan)
TEMPERATURES = [0.01, 0.3, 0.7, 1.0, 2.5, 100.0]


def adversaries(rng, v):
    """Rows that are hard for a search, float32 [V] each, by what they are."""
    normal = rng.normal(size=v).astype(np.float32)
    alone = np.full(v, np.float32(0))
    alone[rng.integers(v)] = np.log(0.999999 / 1e-6 * max(v - 1, 1))
    masked = np.where(rng.random(v) < 0.7, -INF, 3 * normal)
    masked[rng.integers(v)] = 1.0
    subnormal = np.where(rng.random(v) < 0.5, np.float32(1e-40), normal * np.float32(1e-39))
    zeros = np.where(rng.random(v) < 0.5, np.float32(0.0), np.float32(-0.0))
    zeros[: v // 3] = normal[: v // 3]
    huge = np.where(rng.random(v) < 0.5, np.float32(3e38), np.float32(-3e38))
    huge[::3] = normal[::3]
    return {
        "normal": 3 * normal,
        "nearly flat": np.float32(0.01) * normal,
        "equal": np.full(v, np.float32(-2.5)),
        "two values": np.where(rng.random(v) < 0.9, np.float32(1), np.float32(2)),
        "ties": np.round(3 * normal),
        "below zero": np.minimum(np.round(3 * normal), np.float32(0)),
        "one token": alone,
        "masked": masked,
        "one finite": np.where(np.arange(v) == v // 2, np.float32(5), -INF),
        "subnormal": subnormal,
        "zeros": zeros,
        "huge": huge,
        "far": np.float32(1e6) + normal,
        "ranks": -np.log(1 + rng.permutation(v).astype(np.float32)),
        "wide": normal * np.float32(1e30),
    }


def batch(seed, v, rounds=9):
    """Every adversary under many filters, some of them off: logits [R, V], parameters [R]."""
    rng = np.random.default_rng(seed)
    rows, top_k, top_p, min_p = [], [], [], []
    edges = [1, 2, 3, v // 2, v - 1, v, v + 7, 0, -1]
    for number in range(rounds):
        for row in adversaries(rng, v).values():
            rows.append(row)
            top_k.append(rng.choice([edges[number % len(edges)], rng.integers(1, v + 1), 0]))
            top_p.append(rng.choice([1.0, 1.5, 1e-9, 0.0, -1.0, 0.5, 0.9, 0.99, rng.random()]))
            min_p.append(rng.choice([0.0, 0.0, -0.5, 1.0, 2.0, 0.5, 1e-3, rng.random()]))
    return types.SimpleNamespace(
        logits=np.stack(rows).astype(np.float32),
        temperature=rng.choice(TEMPERATURES, len(rows)).astype(np.float32),
        top_k=np.array(top_k, np.int32),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
    )


def check(rows, cut=None, max_unclear=0.05, implementation=None, **options):
    """The cutoff of each row is the oracle's; returns the cutoffs."""
    if cut is None:
        cut = functools.partial(specjax.logit_cutoff, implementation=implementation)
    filters = {
        name: getattr(rows, name) for name in ("temperature", "top_k", "top_p", "min_p")
    } | options
    given = {name: value for name, value in filters.items() if value is not None}
    asked = {name: jnp.asarray(value) for name, value in given.items()}
    got = np.asarray(cut(jnp.asarray(rows.logits), **asked))
    assert got.dtype == np.float32
    assert got.shape == rows.logits.shape[:-1]
    logits = np.asarray(rows.logits).astype(np.float32)
    sure = [
        oracle_cutoff.check(logits[r], got[r], **{n: value[r] for n, value in given.items()})
        for r in range(len(got))
    ]
    assert np.mean(sure) >= 1 - max_unclear
    return got


NUM_ROWS, WIDTH = 135, 129
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def cutoffs(rows, implementation=None, **given):
    """Cutoffs f32[R] of rows [R, V] in the shape of `batch(seed, 129)`: one program serves many.

    Rows are filled with masked tokens, which no filter counts, and the batch with its first row.
    """
    rows = np.asarray(rows, np.float32)
    given = {name: np.broadcast_to(x, len(rows)) for name, x in (OFF | given).items()}
    index = np.where(np.arange(NUM_ROWS) < len(rows), np.arange(NUM_ROWS), 0)
    padding = np.full((NUM_ROWS, WIDTH - rows.shape[1]), -INF)
    filters = {
        name: jnp.asarray(x[index].astype(np.int32 if name == "top_k" else np.float32))
        for name, x in given.items()
    }
    logits = jnp.asarray(np.concatenate([rows[index], padding], axis=1))
    return np.asarray(specjax.logit_cutoff(logits, implementation=implementation, **filters))[
        : len(rows)
    ]


def distribution(row, temperature, cutoff):
    """The truncated distribution, float64."""
    kept = np.where(row < cutoff, -np.inf, np.asarray(row, np.float64)) / temperature
    p = np.exp(kept - kept.max())
    return p / p.sum()


# Against the sort.


# As its users run it, who have no use for the interpreter.
@pytest.mark.optimised(interpreter=False)
@pytest.mark.parametrize("v", SIZES)
def test_cutoffs_are_those_of_a_sort(v, implementation):
    check(batch(v, v), implementation=implementation)


@pytest.mark.parametrize(("v", "dtype"), NARROW)
def test_narrow_logits_are_read_exactly(v, dtype, implementation):
    rows = batch(v, v)
    rows.logits = np.clip(rows.logits, -6e4, 6e4).astype(dtype)
    check(rows, implementation=implementation)


def test_none_is_a_filter_that_is_off(implementation):
    rows, every = batch(2, 129), ("top_k", "top_p", "min_p")
    # Interpreted, where each takes two seconds, every filter is there once and absent once.
    asked = [("top_k",), ("top_p", "min_p")]
    if implementation == "xla":
        asked += [("top_p",), ("min_p",), ("top_k", "top_p"), ()]
    for names in asked:
        off = {name: None for name in every if name not in names}
        check(rows, implementation=implementation, **off)


# What kernels read again of such rows is in test_cutoff_team.
@pytest.mark.interpreted_elsewhere
def test_the_blocks_that_are_gathered_are_those_that_matter(implementation):
    # More blocks than are gathered twice over: first where few can hold the threshold, then where
    # one row of the batch has its threshold in all of them.
    v = 2 * 128 * 128 + 128 + 5
    rng = np.random.default_rng(0)
    logits = (3 * rng.normal(size=(6, v))).astype(np.float32)
    logits[3] = np.round(logits[3])
    logits[4, rng.integers(0, v, 30)] = 30.0
    logits[5, -3:] = 40.0
    rows = types.SimpleNamespace(
        logits=logits,
        temperature=np.full(6, 0.5, np.float32),
        top_k=np.array([50, 7, 1, 20, 0, 2], np.int32),
        top_p=np.array([0.9, 1.0, 0.5, 1.0, 0.95, 0.9], np.float32),
        min_p=np.array([0.0, 0.1, 0.0, 0.0, 0.0, 0.0], np.float32),
    )
    few = check(rows, max_unclear=0.2, implementation=implementation)
    rows.temperature[0], rows.top_k[0] = 3.0, 0
    spread = check(rows, max_unclear=0.2, implementation=implementation)
    assert spread[0] < few[0]
    np.testing.assert_array_equal(spread[1:], few[1:])
    # And where the threshold is in more blocks than are gathered, one token in each.
    logits[0, : 200 * 128 : 128] = np.linspace(50, 60, 200)
    rows.top_k[0], rows.top_p[0] = 200, 1.0
    assert check(rows, max_unclear=0.2, implementation=implementation)[0] == 50


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
    logits=st.lists(
        st.one_of(
            st.sampled_from([0.0, -0.0, 1.0, -np.inf, 3e38, -3e38, 1e-40, 1.0000001]),
            st.floats(-50, 50, width=32),
        ),
        min_size=9,
        max_size=9,
    ).filter(lambda row: max(row) > -np.inf),
    temperature=st.sampled_from(TEMPERATURES),
    top_k=st.integers(-1, 11),
    top_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32)),
    # Not a subnormal one, which is 0 and off where a machine flushes it.
    min_p=st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1, width=32, allow_subnormal=False)),
)
def test_cutoffs_are_those_of_a_sort_for_any_values(logits, temperature, top_k, top_p, min_p):
    filters = dict(top_k=np.int32(top_k), top_p=np.float32(top_p), min_p=np.float32(min_p))
    temperature = np.float32(temperature)
    row = np.array(logits, np.float32)
    got = specjax.logit_cutoff(jnp.asarray(row), temperature=temperature, **filters)
    oracle_cutoff.check(row, np.asarray(got), temperature, **filters)


def test_cutoffs_computed_by_hand(implementation):
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1], jnp.float32))
    # Filters, the kept token that is least likely.
    cases = [
        ({"top_k": 2}, 1),
        ({"top_p": 0.69}, 1),
        ({"top_p": 0.71}, 2),
        # 0.4 is 4 / 7 of what top-k keeps.
        ({"top_k": 2, "top_p": 0.56}, 0),
        ({"top_p": 0.56}, 1),
        ({"min_p": 0.45}, 2),
        ({"min_p": 0.45, "top_p": 0.6}, 1),
    ]
    filters = {name: np.array([case.get(name, OFF[name]) for case, _ in cases]) for name in OFF}
    got = cutoffs(np.tile(logits, (len(cases), 1)), implementation, **filters)
    np.testing.assert_array_equal(got, np.asarray(logits)[[last for _, last in cases]])


def test_ties_at_an_edge_are_kept_and_a_masked_token_never_counts():
    row = np.array([2.0, 1.0, 1.0, 1.0, 0.0, -INF])
    two = np.where(np.arange(6) < 2, row, -INF)
    top_k, top_p = [2, 0, 5, 4], [1.0, 0.5, 1.0, 1.0]
    got = cutoffs([row, row, row, two], top_k=top_k, top_p=top_p)
    np.testing.assert_array_equal(got, [1, 1, 0, 1])
    alone = jnp.asarray(row, jnp.float32)
    assert specjax.logit_cutoff(alone, temperature=1.0, top_k=2) == 1.0


# Rows that are not cut, and rows that must not be.


def test_filters_that_are_off_and_greedy_rows_keep_all(implementation):
    cutoff = cutoffs(
        np.random.default_rng(0).normal(size=(6, WIDTH)),
        implementation,
        temperature=[1.0, 1.0, 0.0, 1e-6, -1.0, NAN],
        top_k=[0, WIDTH, 3, 3, 3, 3],
        top_p=[1.0, 7.0, 0.5, 0.5, 0.5, 0.5],
        min_p=[0.0, -1.0, 0.5, 0.5, 0.5, 0.5],
    )
    np.testing.assert_array_equal(cutoff, np.full(6, -INF))


@pytest.mark.parametrize("bad", [NAN, INF, "masked"])
def test_an_invalid_row_stays_invalid_to_the_samplers(bad, implementation):
    logits = np.random.default_rng(0).normal(size=(2, WIDTH)).astype(np.float32)
    logits[1] = -INF if bad == "masked" else logits[1]
    logits[1, 17] = -INF if bad == "masked" else bad
    cutoff = cutoffs(logits, implementation, top_k=3, top_p=0.9, min_p=0.1)
    assert cutoff[0] > -INF
    assert cutoff[1] == -INF
    tokens = specjax.gumbel_sample(
        jnp.asarray(logits), keys=jax.random.key(0), positions=0, stream=0, cutoff=cutoff
    ).token_ids
    assert tokens[0] >= 0
    assert tokens[1] == -1


def test_more_sub_blocks_than_one_scan_counts(implementation):
    # Every 32 tokens hold one large logit, different from all others.
    v = 33000 * 32
    logits = np.full((2, v), -5.0, np.float32)
    logits[:, ::32] = np.linspace(0.0, 1.0, 33000)
    cutoff = specjax.logit_cutoff(
        jnp.asarray(logits),
        temperature=1.0,
        top_k=np.array([32900, 0], np.int32),
        min_p=np.array([0.0, 0.9], np.float32),
        implementation=implementation,
    )
    ranked = np.sort(logits[0, ::32])[::-1]
    wanted = [ranked[32900 - 1], ranked[ranked >= 1 + np.log(0.9)][-1]]
    np.testing.assert_allclose(cutoff, wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_a_nan_filter_makes_the_row_invalid(name, implementation):
    logits = np.random.default_rng(0).normal(size=(2, WIDTH)).astype(np.float32)
    cutoff = cutoffs(logits, implementation, **{name: [0.5, NAN]})
    assert np.isfinite(cutoff[0])
    assert cutoff[1] == INF
    logits = jnp.asarray(logits)
    sample = specjax.gumbel_sample(
        logits, keys=jax.random.key(0), positions=0, stream=0, cutoff=cutoff
    )
    assert sample.token_ids[1] == -1
    step = specjax.rejection_sample(
        specjax.Draft(jnp.zeros((2, 0), jnp.int32)),
        logits[:, None],
        keys=jax.random.key(0),
        positions=0,
        cutoff=cutoff[:, None],
    )
    np.testing.assert_array_equal(step.num_emitted, [1, 0])


# Shapes.


def test_a_parameter_goes_with_the_leading_axes():
    rng = np.random.default_rng(3)
    logits = jnp.asarray(rng.normal(size=(3, 4, 60)).astype(np.float32))
    temperature = np.array([0.5, 1.0, 2.0], np.float32)
    top_k = rng.integers(1, 20, (3, 4)).astype(np.int32)
    together = specjax.logit_cutoff(logits, temperature=temperature, top_k=top_k, top_p=0.8)
    assert together.shape == (3, 4)
    for b in range(3):
        for i in range(4):
            alone = specjax.logit_cutoff(
                logits[b, i], temperature=temperature[b], top_k=int(top_k[b, i]), top_p=0.8
            )
            assert alone.shape == ()
            assert alone == together[b, i]
    assert specjax.logit_cutoff(logits[:0], temperature=1.0, top_k=3).shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(top_p=np.ones(4, np.float32)), r"top_p has shape \(4,\); it needs \(\) or \(3,\)"),
        (dict(temperature=np.ones((4, 3), np.float32)), "temperature has shape"),
        (dict(top_k=0.5), "top_k has dtype float32; it needs integers"),
        (dict(min_p="x"), "min_p is str"),
        (dict(logits=np.float32(1)), r"logits has shape \(\)"),
        (dict(logits=np.zeros((3, 4, 6), np.int32)), "logits has dtype int32"),
        (dict(logits=np.zeros((3, 4, 0), np.float32)), "empty vocabulary"),
        (dict(implementation="cuda"), "implementation is 'cuda'"),
    ],
)
def test_wrong_calls_are_refused_in_a_sentence(change, says):
    arguments = dict(logits=jnp.zeros((3, 4, 6), jnp.float32), temperature=1.0, top_k=2) | change
    with pytest.raises(ValueError, match=says):
        specjax.logit_cutoff(arguments.pop("logits"), **arguments)


def test_a_vocabulary_beyond_what_float32_counts_is_refused():
    logits = jax.ShapeDtypeStruct((2, 2**24 + 1), jnp.float32)
    with pytest.raises(ValueError, match="at most 16777216"):
        jax.eval_shape(functools.partial(specjax.logit_cutoff, temperature=1.0, top_k=3), logits)


# The samplers.


@pytest.mark.checks
def test_sampling_with_a_cutoff_follows_the_truncated_distribution():
    n, v, temperature = 20_000, 16, 0.8
    row = np.random.default_rng(5).normal(size=v).astype(np.float32)
    row[3] = -INF
    [cutoff] = cutoffs([row], temperature=temperature, top_k=9, top_p=0.9, min_p=0.02)
    p = distribution(row, temperature, cutoff)
    assert 2 < np.count_nonzero(p) < 9
    sample = specjax.gumbel_sample(
        jnp.broadcast_to(jnp.asarray(row), (n, v)),
        keys=jax.random.key(0),
        positions=0,
        stream=0,
        temperature=temperature,
        cutoff=jnp.broadcast_to(cutoff, (n,)),
    )
    tokens = np.asarray(sample.token_ids)
    assert set(tokens) == set(np.flatnonzero(p))
    np.testing.assert_allclose(sample.logprobs, np.log(p[tokens]), atol=1e-5)
    counts = np.bincount(tokens, minlength=v)
    assert scipy.stats.chisquare(counts[p > 0], n * p[p > 0]).pvalue > 1e-4


@pytest.mark.checks
def test_verification_with_cutoffs_follows_the_truncated_distribution():
    n, v, temperature = 20_000, 16, 0.8
    rng = np.random.default_rng(11)
    q_row = rng.normal(size=v).astype(np.float32)
    p_rows = (q_row + rng.normal(size=(2, v))).astype(np.float32)
    rows = [q_row, *p_rows]
    q_cutoff, *p_cutoff = cutoffs(rows, temperature=temperature, top_k=8, top_p=0.85)
    p_cutoff = jnp.stack(p_cutoff)
    p, q = (
        distribution(p_rows[0], temperature, p_cutoff[0]),
        distribution(q_row, temperature, q_cutoff),
    )
    assert np.any((p > 0) & (q == 0))
    assert np.any((p == 0) & (q > 0))
    every = functools.partial(jnp.broadcast_to, shape=(n,))
    logits = jnp.broadcast_to(jnp.asarray(q_row), (n, v))
    drawn = specjax.gumbel_sample(
        logits,
        keys=jax.random.key(1),
        positions=0,
        stream=specjax.Stream.draft(0),
        temperature=temperature,
        cutoff=every(q_cutoff),
    )
    step = specjax.rejection_sample(
        specjax.Draft(
            drawn.token_ids[:, None], logits=logits[:, None], cutoff=every(q_cutoff)[:, None]
        ),
        jnp.broadcast_to(jnp.asarray(p_rows), (n, 2, v)),
        keys=jax.random.key(1),
        positions=0,
        temperature=temperature,
        cutoff=jnp.broadcast_to(p_cutoff, (n, 2)),
    )
    first = np.bincount(np.asarray(step.token_ids[:, 0]), minlength=v)
    assert not first[p == 0].any()
    assert scipy.stats.chisquare(first[p > 0], n * p[p > 0]).pvalue > 1e-4
    kept = np.minimum(p, q).sum()
    accepted = float(step.num_accepted.mean())
    assert abs(accepted - kept) < 5 * np.sqrt(kept * (1 - kept) / n)


def test_a_cutoff_of_minus_infinity_is_none():
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(NUM_ROWS, WIDTH)).astype(np.float32))
    draw = functools.partial(
        specjax.gumbel_sample, logits, keys=jax.random.key(2), positions=0, stream=0
    )
    all_kept = cutoffs(logits, top_k=0)
    jax.tree.map(np.testing.assert_array_equal, draw(), draw(cutoff=all_kept))


# Transformations.


def test_a_change_of_values_compiles_nothing():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 77)).astype(np.float32))
    specjax.logit_cutoff(logits, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1)
    compiled = find_cutoff._cache_size()
    for change in [
        dict(top_k=7),
        dict(top_k=np.int64(0)),
        dict(top_p=1),
        dict(top_p=np.float64(0.3)),
        dict(min_p=0),
        dict(temperature=0),
        dict(temperature=np.float32(2)),
    ]:
        specjax.logit_cutoff(
            logits, **dict(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1) | change
        )
    assert find_cutoff._cache_size() == compiled


def test_a_filter_that_is_none_is_not_in_the_program():
    logits = jnp.zeros((2, 77), jnp.float32)

    def searches(**filters):
        jaxpr = jax.make_jaxpr(functools.partial(specjax.logit_cutoff, temperature=1.0, **filters))
        return str(jaxpr(logits)).count("while[")

    assert searches(min_p=0.1) == 0
    assert 0 < searches(top_k=3) < searches(top_k=3, top_p=0.5)
    assert "sort" not in str(jax.make_jaxpr(cutoff_xla.cutoff_of_rows)(logits, *_few_filters()))


def _few_filters():
    each = jnp.ones(2, jnp.float32)
    return each, order.Filters(jnp.ones(2, jnp.int32), each, each)


def test_jit_and_vmap_change_nothing():
    rows = batch(4, 129)
    arguments = (rows.logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p)
    arguments = tuple(map(jnp.asarray, arguments))

    def cut(logits, temperature, top_k, top_p, min_p):
        return specjax.logit_cutoff(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )

    plain = cut(*arguments)
    np.testing.assert_array_equal(jax.jit(cut)(*arguments), plain)
    np.testing.assert_array_equal(jax.vmap(cut)(*arguments), plain)


@pytest.mark.parametrize("explicit", [False, True])
def test_shards_of_a_batch_have_the_cutoffs_of_the_batch(explicit):
    rows = batch(5, 129, rounds=4)
    num = min(4, jax.device_count())
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh((num,), ("batch",), axis_types=(kind,))
    spec = PartitionSpec("batch")

    def cut(logits, top_k, top_p):
        # The temperature and min-p are scalars, which vary over no axis.
        return specjax.logit_cutoff(
            logits, temperature=0.7, top_k=top_k, top_p=top_p, min_p=0.01, implementation="xla"
        )

    arguments = tuple(map(jnp.asarray, (rows.logits, rows.top_k, rows.top_p)))
    plain = cut(*arguments)
    if not explicit:
        cut = jax.shard_map(cut, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    with jax.set_mesh(mesh):
        arguments = jax.device_put(arguments, NamedSharding(mesh, spec))
        np.testing.assert_array_equal(jax.jit(cut)(*arguments), plain)


def test_64_bit_types_change_nothing():
    rows = batch(6, 129)
    plain = check(rows)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(check(rows, top_k=rows.top_k.astype(np.int64)), plain)
        got = specjax.logit_cutoff(
            jnp.asarray(rows.logits), temperature=1.0, top_k=3, top_p=0.9, min_p=0.1
        )
        assert got.dtype == jnp.float32


# Mutants: what the battery above must see.


def _masked(logits, cutoff):
    return jnp.where(logits < cutoff[..., None], -jnp.inf, logits)


def min_p_first(logits, *, temperature, top_k, top_p, min_p):
    """vLLM's order."""
    first = specjax.logit_cutoff(logits, temperature=temperature, min_p=min_p)
    left = _masked(logits, first)
    rest = specjax.logit_cutoff(left, temperature=temperature, top_k=top_k, top_p=top_p)
    return jnp.maximum(first, rest)


def top_p_of_all(logits, *, temperature, top_k, top_p, min_p):
    cut = functools.partial(specjax.logit_cutoff, logits, temperature=temperature)
    return jnp.maximum(jnp.maximum(cut(top_k=top_k), cut(top_p=top_p)), cut(min_p=min_p))


def temperature_ignored(logits, *, temperature, **filters):
    # Greedy rows stay greedy.
    temperature = jnp.where(temperature < 1e-5, temperature, jnp.ones_like(temperature))
    return specjax.logit_cutoff(logits, temperature=temperature, **filters)


def one_token_too_many(logits, *, top_k, **filters):
    top_k = jnp.where(top_k > 0, top_k + 1, top_k)
    return specjax.logit_cutoff(logits, top_k=top_k, **filters)


def ties_dropped(logits, **filters):
    """The next value up where the smallest kept stands twice and is not the largest."""
    cutoff = specjax.logit_cutoff(logits, **filters)[..., None]
    above = jnp.min(jnp.where(logits > cutoff, logits, jnp.inf), axis=-1, keepdims=True)
    tied = (jnp.sum(logits == cutoff, axis=-1, keepdims=True) > 1) & jnp.isfinite(above)
    return jnp.where(tied, above, cutoff)[..., 0]


MUTANTS = [min_p_first, top_p_of_all, temperature_ignored, one_token_too_many, ties_dropped]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_seen(mutant):
    with pytest.raises(AssertionError, match="is not"):
        check(batch(129, 129), cut=mutant)


def _compiled_anew(logits, *, temperature, **filters):
    cut = jax.jit(lambda *arguments: cutoff_xla.cutoff_of_rows(*arguments))
    return cut(logits, temperature, order.Filters(**filters))


@pytest.mark.parametrize("name", ["bisect", "required_mass", "min_kept", "top_k_active"])
def test_a_fault_inside_the_search_is_seen(name, monkeypatch):
    room = {"bisect": bisection, "required_mass": order}.get(name, cutoff_xla)
    true = getattr(room, name)
    faults = {
        # More than the target where it has to be reached.
        "bisect": lambda bracket, pivot, mass, target: true(
            bracket, pivot, jnp.where(mass == target, jnp.float32(0), mass), target
        ),
        "required_mass": lambda top_p, mass: top_p,
        "min_kept": lambda blocks, low, *rest: true(blocks, low),
        "top_k_active": lambda top_k, v: (top_k > 1) & (top_k < v),
    }
    monkeypatch.setattr(room, name, faults[name])
    with pytest.raises(AssertionError, match=r"is not|inf"):
        check(batch(129, 129), cut=_compiled_anew)


# Last, because it forgets what the tests above compiled.


class _Held(NamedTuple):
    """What the search leaves, flat: each part may be given memory."""

    cutoff: Any
    sub_blocks: Any
    values: Any
    counters: Any
    sums: Any


def test_uninitialised_memory_is_no_logit(implementation, monkeypatch):
    """The interpreter begins floats at NaN, which no logit is; a GPU at what was there before."""
    if implementation == "xla":
        pytest.skip("plain JAX has no memory that is not initialised")
    from specjax.pallas.cutoff import rows as cutoff

    def launch(kernel, operands, outputs, **options):
        if not hasattr(outputs, "buffer"):
            return launch_as_it_is(kernel, operands, outputs, **options)
        parts = (outputs.buffer.values, outputs.sums)
        held = tuple(jnp.full(part.shape, 3e38, jnp.float32) for part in parts)

        def search(references, out):
            buffer = type(outputs.buffer)(out.sub_blocks, out.values)
            kernel(references[0], type(outputs)(out.cutoff, buffer, out.counters, out.sums))

        left = _Held(outputs.cutoff, outputs.buffer[0], held[0], outputs.counters, held[1])
        return launch_as_it_is(search, (operands, held), left, **options)

    launch_as_it_is = cutoff.launch
    monkeypatch.setattr(cutoff, "launch", launch)
    jax.clear_caches()
    check(batch(1025, 1025, rounds=3), implementation=implementation)
    jax.clear_caches()
