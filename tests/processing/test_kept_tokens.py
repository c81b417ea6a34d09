"""Kept sets are the support of what is sampled, and the trainer's half normalises over them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax


def support(row, temperature=1.0, cutoff=-np.inf):
    """The ids that a row gives a probability above 0; the argmax alone where it is greedy."""
    x = np.asarray(row, np.float32).astype(np.float64)
    x = np.where(np.abs(x) < 2.0**-126, 0, x)  # Subnormal numbers count as 0.
    cutoff = 0 if abs(cutoff) < 2.0**-126 else cutoff
    ids = [v for v in range(len(x)) if x[v] > -np.inf and x[v] >= cutoff]
    return [max(ids, key=lambda v: (x[v], -v))] if temperature < 1e-5 else ids


def rows_of(kept):
    starts, ids = kept.to_csr()
    return [ids[a:b].tolist() for a, b in itertools.pairwise(starts)]


def bits_of(mask):
    return [np.flatnonzero(np.unpackbits(w.view(np.uint8), bitorder="little")) for w in mask]


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sets_and_masks_are_the_support_of_the_rows(vocab_size, dtype):
    rng = np.random.default_rng(vocab_size)
    # Multiples of 1/4 up to 2, so that many tokens tie, with the cutoff and the argmax, too.
    logits = np.minimum(np.round(rng.normal(size=(12, vocab_size)) * 8) / 4, 2)
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[:, rng.integers(vocab_size)] = 1.0
    logits[0] = 0.5
    cutoff = np.array([-np.inf, *rng.choice([-1.0, 0.5, 1.0], 11)], np.float32)
    temperature = np.where(np.arange(12) % 4 == 3, 0.0, 0.7).astype(np.float32)
    max_kept = min(vocab_size, 40)
    kept = specjax.kept_tokens(
        jnp.asarray(logits, dtype), max_kept, temperature=temperature, cutoff=cutoff, with_mask=True
    )
    expected = [support(*row) for row in zip(logits, temperature, cutoff, strict=True)]
    assert kept.num_kept.tolist() == list(map(len, expected))
    for ids, listed, bits in zip(
        expected, kept.token_ids, bits_of(np.asarray(kept.mask)), strict=True
    ):
        assert bits.tolist() == ids
        listed_ids = [] if len(ids) == vocab_size else ids[:max_kept]
        assert listed.tolist() == listed_ids + [-1] * (max_kept - len(listed_ids))
    assert rows_of(kept) == [[] if len(ids) == vocab_size else ids for ids in expected]


def test_kept_sets_are_what_the_sampler_draws_with_ties_at_the_cutoff():
    """Of 4,096 draws of a row each kept token is drawn, and no other one."""
    logits = jnp.array([[2.0, 1.0, 1.0, 0.5, 1.0, -1.0, 0.5, 0.0, -jnp.inf]])
    for filters in ({"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.35}, {"top_k": 5, "top_p": 0.9}):
        cutoff = specjax.logit_cutoff(logits, temperature=1.3, **filters)
        kept = specjax.kept_tokens(logits, 9, temperature=1.3, cutoff=cutoff)
        keys = jax.random.split(jax.random.key(0), 4096)
        rows = jnp.broadcast_to(logits, (4096, 9))
        sample = specjax.gumbel_sample(
            rows,
            keys=keys,
            positions=0,
            stream=specjax.Stream.TARGET,
            temperature=1.3,
            cutoff=jnp.broadcast_to(cutoff, (4096,)),
        )
        assert np.unique(sample.token_ids).tolist() == rows_of(kept)[0]


def test_zeros_of_both_signs_and_subnormal_numbers_tie():
    logits = jnp.array([[-0.0, 0.0, -1.0, 4e-40, -4e-40]])
    for cutoff in (0.0, -0.0, 4e-40, -4e-40):
        kept = specjax.kept_tokens(logits, 5, cutoff=jnp.array([cutoff]))
        assert rows_of(kept) == [[0, 1, 3, 4]]
    assert rows_of(specjax.kept_tokens(logits, 5, temperature=0.0)) == [[0]]


def test_rows_that_no_sampler_takes_keep_nothing():
    bad = jnp.array([[jnp.nan, 1, 2], [jnp.inf, 1, 2], [-jnp.inf] * 3, [0, 1, 2], [0, 1, 2]])
    kept = specjax.kept_tokens(
        bad,
        2,
        temperature=jnp.array([1.0, 0.0, 1, -1, 1]),
        cutoff=jnp.array([-jnp.inf] * 4 + [jnp.inf]),
        with_mask=True,
    )
    assert kept.num_kept.tolist() == [0] * 5
    assert not kept.mask.any()
    assert (np.asarray(kept.token_ids) == -1).all()


def test_sets_that_do_not_fit_are_refused_and_had_from_masks():
    logits = jnp.arange(70.0)[None]
    cutoff = jnp.array([30.0])
    kept = specjax.kept_tokens(logits, 3, cutoff=cutoff)
    assert kept.num_kept.tolist() == [40]
    assert kept.token_ids.tolist() == [[30, 31, 32]]
    assert not kept.is_complete().any()
    with pytest.raises(ValueError, match=r"has 40 kept tokens and 3 ids are listed"):
        kept.to_csr()
    assert np.isnan(specjax.kept_logprobs(logits, jnp.array([40]), kept)).all()
    kept = specjax.kept_tokens(logits, 3, cutoff=cutoff, with_mask=True)
    assert rows_of(kept) == [list(range(30, 70))]
    for wrong in (0, 71, 2.0):
        with pytest.raises(ValueError, match=r"max_kept is "):
            specjax.kept_tokens(logits, wrong)


@pytest.mark.parametrize("with_mask", [False, True])
def test_kept_logprobs_and_their_gradient_are_those_of_the_definition(with_mask):
    """Rows: cut, cut above M (with masks), whole, greedy, padding, a token outside its set."""
    rng = np.random.default_rng(0)
    old, new = rng.normal(size=(2, 6, 50)).astype(np.float32) * 2
    temperature = np.array([0.7, 1.5, 0.7, 0.0, 1.0, 1.0], np.float32)
    top_k = jnp.array([4, 20 if with_mask else 6, 0, 0, 5, 3])
    cutoff = specjax.logit_cutoff(old, temperature=temperature, top_k=top_k)
    kept = specjax.kept_tokens(old, 8, temperature=temperature, cutoff=cutoff, with_mask=with_mask)
    sets = [support(*row) for row in zip(old, temperature, cutoff, strict=True)]
    outside = next(v for v in range(50) if v not in sets[5])
    ids = np.array([sets[0][2], sets[1][-1], 7, sets[3][0], -1, outside], np.int32)

    def total(logits):
        logprobs = specjax.kept_logprobs(logits, ids, kept, temperature=temperature)
        return jnp.sum(jnp.where(jnp.arange(6) < 5, logprobs, 0)), logprobs

    # Operation by operation: no NaN stands in a place that another branch decides.
    with jax.debug_nans(True):
        (_, found), gradient = jax.value_and_grad(total, has_aux=True)(new)
    expected, slopes = np.zeros(6), np.zeros((6, 50))
    for r in range(4):
        scale = 1 / temperature[r] if temperature[r] else 1.0
        x = new[r].astype(np.float64) * scale
        weights = np.where(np.isin(np.arange(50), sets[r]), np.exp(x), 0)
        expected[r] = x[ids[r]] - np.log(weights.sum())
        slopes[r] = (np.eye(50)[ids[r]] - weights / weights.sum()) * scale
    expected[5] = -np.inf
    np.testing.assert_allclose(found, expected, atol=2e-6)
    np.testing.assert_allclose(gradient, slopes, atol=2e-6)
    assert not np.asarray(gradient)[3:].any()


@pytest.mark.parametrize("cutoff", [-np.inf, 1.0])
@pytest.mark.parametrize("with_mask", [False, True])
def test_an_id_past_the_vocabulary_is_outside_every_set(cutoff, with_mask):
    logits = jnp.array([0.0, 1.0, 2.0])
    kept = specjax.kept_tokens(logits, 2, cutoff=cutoff, with_mask=with_mask)
    for token_id in (3, 2**31 - 1):
        assert specjax.kept_logprobs(logits, token_id, kept) == -np.inf
        slopes = jax.grad(lambda x, i=token_id: specjax.kept_logprobs(x, i, kept))(logits)
        assert not slopes.any()


def test_one_row_without_axes_and_no_rows_have_sets():
    logits = jnp.array([0.0, 1.0, 2.0])
    kept = specjax.kept_tokens(logits, 2, cutoff=1.0, with_mask=True)
    assert kept.token_ids.tolist() == [1, 2]
    logprob = specjax.kept_logprobs(logits, 2, kept)
    assert logprob.tolist() == pytest.approx(1 - np.log(np.e + np.e**2) + 1)
    none = specjax.kept_tokens(jnp.zeros((0, 3)), 2, with_mask=True)
    assert specjax.kept_logprobs(jnp.zeros((0, 3)), np.zeros(0, np.int32), none).shape == (0,)
    assert [array.tolist() for array in none.to_csr()] == [[0], []]
