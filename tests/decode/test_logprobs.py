"""The likeliest tokens, their log-probabilities, and a token's rank, from the definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import top_logprobs
from specjax.decode import logprobs

TOLERANCE = 1e-5


def oracle(row, token_id, n, temperature=1.0, cutoff=-np.inf):
    """(ids, log-probabilities, rank, log-probability) of one row in float64."""
    x = np.asarray(row).astype(np.float64)
    x = np.where(x < cutoff, -np.inf, x)
    w = (x - x.max()) / (temperature if temperature >= 1e-5 else 1.0)
    log_p = w - np.log(np.exp(w).sum())
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))[:n]
    ids = [v if x[v] > -np.inf else -1 for v in order]
    rank = 1 + sum(x > x[token_id])
    return ids, log_p[order], rank, log_p[token_id]


def check(logits, token_ids, n, *, temperature=None, cutoff=None):
    leading = np.shape(token_ids)
    options = {
        name: value
        for name, value in (("temperature", temperature), ("cutoff", cutoff))
        if value is not None
    }
    found = top_logprobs(logits, token_ids, n, **options)
    assert found.token_ids.shape == (*leading, n)
    assert found.logprobs.dtype == found.logprob.dtype == jnp.float32
    for at in np.ndindex(leading):
        ids, log_p, rank, own = oracle(
            np.asarray(logits, np.float64)[at],
            int(np.asarray(token_ids)[at]),
            n,
            1.0 if temperature is None else np.broadcast_to(temperature, leading)[at],
            -np.inf if cutoff is None else cutoff[at],
        )
        np.testing.assert_array_equal(found.token_ids[at], ids)
        np.testing.assert_allclose(found.logprobs[at], log_p, atol=TOLERANCE, rtol=TOLERANCE)
        assert found.rank[at] == rank
        np.testing.assert_allclose(found.logprob[at], own, atol=TOLERANCE, rtol=TOLERANCE)


def rows(seed, shape, scale=3.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def tokens(seed, shape, vocab_size):
    return np.random.default_rng(seed + 100).integers(0, vocab_size, shape).astype(np.int32)


@pytest.mark.once
@pytest.mark.parametrize(
    ("vocab_size", "n", "dtype"),
    [
        *((5, 5, dtype) for dtype in ("float32", "bfloat16", "float16")),
        *((129, 4, dtype) for dtype in ("float32", "bfloat16", "float16")),
        (1, 1, "bfloat16"),
        (300, 0, "float16"),
    ],
)
def test_top_logprobs_are_those_of_the_definition(vocab_size, n, dtype):
    for seed in range(3):
        logits = rows(seed, (2, 3, vocab_size))
        logits[0, 1, 1:3] = -np.inf
        check(jnp.asarray(logits.astype(dtype)), tokens(seed, (2, 3), vocab_size), n)


@pytest.mark.lenient
def test_x64_changes_nothing():
    with jax.enable_x64(True):
        check(rows(0, (2, 20)), tokens(0, (2,), 20).astype(np.int64), 3)


@pytest.mark.once
def test_a_temperature_and_a_cutoff_are_those_of_the_row():
    logits, ids = rows(1, (3, 2, 40)), tokens(1, (3, 2), 40)
    temperature = np.array([[0.5, 2.0], [0.0, 1e-6], [1.0, 0.1]], np.float32)
    cutoff = np.sort(logits, axis=-1)[..., [5, 30]][..., 0, :].repeat(3, 0)[:3, :2]
    check(logits, ids, 12, temperature=temperature, cutoff=cutoff)
    by_request = top_logprobs(logits, ids, 2, temperature=temperature[:, 0])
    one = top_logprobs(logits[:, 1], ids[:, 1], 2, temperature=temperature[:, 0])
    np.testing.assert_array_equal(by_request.logprobs[:, 1], one.logprobs)


@pytest.mark.once
@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_large_offset_costs_no_precision(offset):
    # Multiples of 1 / 512, which float32 holds at 10,000 too.
    logits = np.round(rows(2, (4, 130)) * 512) / 512
    check((logits + offset).astype(np.float32), tokens(2, (4,), 130), 5)
    near = top_logprobs(logits.astype(np.float32), tokens(2, (4,), 130), 5)
    far = top_logprobs((logits + offset).astype(np.float32), tokens(2, (4,), 130), 5)
    np.testing.assert_allclose(far.logprobs, near.logprobs, atol=TOLERANCE)


@pytest.mark.once
def test_ties_are_listed_by_the_lowest_id_and_share_the_best_rank():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0, 3.0, 1.0]] * 3)
    top = top_logprobs(logits, jnp.array([4, 5, 3]), 5)
    np.testing.assert_array_equal(top.token_ids, [[1, 2, 4, 0, 5]] * 3)
    np.testing.assert_array_equal(top.rank, [1, 4, 6])


@pytest.mark.once
@pytest.mark.parametrize(
    ("dtype", "cut"),
    [("float32", False), ("float32", True), ("bfloat16", True), ("float16", False)],
)
def test_zeros_of_both_signs_tie_and_so_do_subnormal_numbers(dtype, cut):
    """Of float32: those of float16 are ordinary numbers there, and stay apart."""
    rows = np.float32([[-0.0, 0.0, -1.0, 0.0, -0.0], [-4e-40, -0.0, 4e-40, 0.0, -2.0]])
    logits = np.concatenate([rows, np.float32([[0.0, -6e-8, 6e-8, -0.0, -1.0]])])
    logits = jnp.asarray(logits).astype(dtype)
    cutoff = jnp.full(3, -0.5, jnp.float32) if cut else None
    top = top_logprobs(logits, jnp.array([4, 2, 3]), 4, cutoff=cutoff)
    np.testing.assert_array_equal(top.token_ids, [[0, 1, 3, 4], [0, 1, 2, 3], [2, 0, 3, 1]])
    np.testing.assert_array_equal(top.rank, [1, 1, 2])
    sample = specjax.gumbel_sample(
        logits, keys=jax.random.key(0), positions=0, stream=0, temperature=0.0, cutoff=cutoff
    )
    np.testing.assert_array_equal(top.token_ids[:, 0], sample.token_ids)
    row = np.asarray(logits)[1]
    ranks = [int(top_logprobs(row, i, 0, cutoff=None).rank) for i in range(5)]
    assert ranks == [1, 1, 1, 1, 5]


@pytest.mark.once
def test_masked_tokens_are_not_listed_and_rank_last():
    logits = jnp.array([[0.0, -jnp.inf, 1.0, -jnp.inf]])
    top = top_logprobs(logits, jnp.array([3]), 4)
    np.testing.assert_array_equal(top.token_ids, [[2, 0, -1, -1]])
    np.testing.assert_array_equal(np.asarray(top.logprobs)[0, 2:], -np.inf)
    assert (int(top.rank[0]), float(top.logprob[0])) == (3, -np.inf)
    # No id of the vocabulary: no probability.
    for token in (4, 9):
        beyond = top_logprobs(logits[:, ::-1], jnp.array([token]), 1)
        assert (int(beyond.rank[0]), float(beyond.logprob[0])) == (3, -np.inf)


@pytest.mark.once
def test_padding_and_invalid_rows_list_nothing():
    logits = rows(3, (6, 10))
    logits[1, 4], logits[2, 2], logits[3] = np.nan, np.inf, -np.inf
    temperature = np.array([1, 1, 1, 1, -1, 1], np.float32)
    ids = np.array([-1, 2, 2, 2, 2, 2], np.int32)
    top = top_logprobs(logits, ids, 3, temperature=temperature)
    np.testing.assert_array_equal(np.asarray(top.token_ids)[:5], -1)
    for name in ("logprobs", "rank", "logprob"):
        np.testing.assert_array_equal(np.asarray(getattr(top, name))[:5], 0)
    assert int(top.rank[5]) > 0


@pytest.mark.once
def test_logprobs_agree_with_gumbel_sample():
    """What `gumbel_sample` says of its token is what is said of it here."""
    logits, temperature = rows(4, (8, 200)), np.linspace(0, 2, 8).astype(np.float32)
    cutoff = np.median(logits, axis=-1)
    sample = specjax.gumbel_sample(
        logits,
        keys=jax.random.key(0),
        positions=0,
        stream=0,
        temperature=temperature,
        cutoff=cutoff,
    )
    top = top_logprobs(logits, sample.token_ids, 1, temperature=temperature, cutoff=cutoff)
    np.testing.assert_allclose(top.logprob, sample.logprobs, atol=TOLERANCE)
    assert int(top.rank[0]) == 1


def test_values_never_recompile():
    top_logprobs(rows(0, (2, 20)), tokens(0, (2,), 20), 3, temperature=0.5)
    compiled = logprobs.list_top_logprobs._cache_size()
    top_logprobs(rows(1, (2, 20)), [1, -1], 3, temperature=2)
    assert logprobs.list_top_logprobs._cache_size() == compiled


def test_bfloat16_rows_are_not_copied_in_float32():
    """On a GPU, where XLA's top-k takes them as they are."""
    asked = jax.jit(lambda rows, ids: top_logprobs(rows, ids, 3))
    arguments = (jnp.zeros((4, 640), jnp.bfloat16), jnp.zeros(4, jnp.int32))
    module = jax.export.export(asked, platforms=["cuda"])(*arguments).mlir_module()
    listing = [line for line in module.splitlines() if "top_k" in line and "4x640x" in line]
    assert listing
    assert not any("4x640xf32" in line for line in listing)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((np.zeros((2, 5), np.float32), [0, 0], 6), {}, "n is 6 for a vocabulary of 5"),
        ((np.zeros((2, 5), np.float32), [0, 0], -1), {}, "n is -1"),
        ((np.zeros((2, 5), np.float32), [0], 1), {}, "token_ids has shape"),
        ((np.zeros((2, 5), np.int32), [0, 0], 1), {}, "logits are bfloat16"),
        ((np.zeros((2, 5), np.float32), [0, 0], 1), {"cutoff": np.zeros(3)}, "cutoff has shape"),
        ((np.zeros((2, 5), np.float32), [0, 0], 1), {"temperature": np.ones(3)}, "temperature"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        top_logprobs(*arguments, **options)
