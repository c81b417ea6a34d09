"""`gumbel_sample` token for token, and the distribution of its draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import scipy
from fixed_noise import draw_the_key, keys_of

import specjax
from specjax import Stream
from specjax.core.gumbel_max import first_argmax

pytestmark = pytest.mark.once

# Other tests here have vocabularies of 5 and 300.
SIZES = [1, 129, 1025]


def make_keys(n, seed=0):
    """Keys of random words, the first n of one sequence; no program makes them."""
    words = np.random.default_rng(seed).integers(0, 2**32, (n, 2), np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words))


def key_data(keys):
    return np.asarray(jax.random.key_data(keys))


def draw(
    logits, keys, implementation, *, positions, stream, temperature=1.0, cutoff=-np.inf, **options
):
    """Every argument as an array and at least 128 rows, so that tests share programs."""
    logits = np.asarray(logits)
    num_rows = len(logits)
    padding = max(128 - num_rows, 0)

    def each(value, dtype):
        value = np.broadcast_to(np.asarray(value, dtype), (num_rows,))
        return jnp.asarray(np.pad(value, (0, padding)))

    if keys.shape and padding:
        words = np.pad(key_data(keys), ((0, padding), (0, 0)))
        keys = jax.random.wrap_key_data(jnp.asarray(words))
    sample = specjax.gumbel_sample(
        jnp.asarray(np.pad(logits, ((0, padding), (0, 0)))),
        keys=keys,
        positions=each(positions, np.int32),
        stream=each(stream, np.int32),
        temperature=each(temperature, np.float32),
        cutoff=each(cutoff, np.float32),
        options=specjax.Options(implementation=implementation, **options),
    )
    return jax.tree.map(lambda x: np.asarray(x)[:num_rows], sample)


def check_sample(logits, keys, implementation, *, noise=np.float32, max_unclear=0.02, **options):
    """The library's tokens are the oracle's wherever rounding cannot decide."""
    dtype = {} if noise == np.float32 else {"noise_dtype": jnp.float64}
    ours = draw(logits, keys, implementation, **dtype, **options)
    theirs = oracle.sample(np.asarray(logits), keys=key_data(keys), noise=noise, **options)
    sure = theirs.certain
    assert np.mean(~sure) <= max_unclear
    tokens = np.asarray(ours.token_ids)
    np.testing.assert_array_equal(tokens[sure], theirs.token_ids[sure])
    same = tokens == theirs.token_ids
    np.testing.assert_allclose(
        np.asarray(ours.logprobs)[same], theirs.logprobs[same], atol=1e-4, rtol=1e-5
    )
    emitted = tokens >= 0
    np.testing.assert_allclose(
        np.asarray(ours.logsumexp)[emitted], theirs.logsumexp[emitted], atol=1e-5, rtol=1e-5
    )
    return tokens


def mixed_rows(seed, batch_size, vocab_size):
    rng = np.random.default_rng(seed)
    return dict(
        logits=(3 * rng.normal(size=(batch_size, vocab_size))).astype(np.float32),
        positions=rng.integers(0, 2**31 - 1, batch_size).astype(np.int32),
        temperature=rng.choice([0.0, 1e-6, 0.3, 0.8, 1.0, 2.5], batch_size).astype(np.float32),
        cutoff=rng.choice([-np.inf, -2.0, 0.5], batch_size).astype(np.float32),
    )


@pytest.mark.parametrize("vocab_size", SIZES)
def test_tokens_are_the_oracle_s(vocab_size, implementation):
    rows = mixed_rows(vocab_size, 128, vocab_size)
    rows["logits"][:, 0] = 3.0
    logits = rows.pop("logits")
    check_sample(logits, make_keys(128), implementation, stream=Stream.draft(1), **rows)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_logits_are_read_exactly(dtype, implementation):
    rows = mixed_rows(3, 128, 300)
    logits = jnp.asarray(rows.pop("logits")).astype(dtype)
    rows["cutoff"] = np.full(128, -np.inf, np.float32)
    check_sample(logits, make_keys(128), implementation, stream=Stream.TARGET, **rows)


def test_a_scalar_key_folds_in_the_row(implementation):
    rows = mixed_rows(4, 128, 300)
    logits = rows.pop("logits")
    check_sample(logits, jax.random.key(8), implementation, stream=Stream.TARGET, **rows)


def test_defaults_are_temperature_one_and_every_logit(implementation):
    logits = mixed_rows(5, 128, 300)["logits"]
    check_sample(logits, make_keys(128), implementation, stream=0, positions=3)


def test_rows_may_have_streams_of_their_own(implementation):
    rows = mixed_rows(14, 128, 300)
    streams = jnp.arange(128, dtype=jnp.int32) % 7
    together = draw(rows["logits"], make_keys(128), implementation, positions=0, stream=streams)
    for stream in (0, 3):
        alone = draw(rows["logits"], make_keys(128), implementation, positions=0, stream=stream)
        chosen = np.asarray(streams) == stream
        np.testing.assert_array_equal(
            np.asarray(together.token_ids)[chosen], np.asarray(alone.token_ids)[chosen]
        )


def check_distribution(counts, probs, alpha=1e-5):
    """Chi-square over the cells that expect at least 5, the others pooled."""
    n = counts.sum()
    assert counts[probs == 0].sum() == 0
    rare = n * probs < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(n * probs[~rare], n * probs[rare].sum())
    used = expected > 0
    assert scipy.stats.chisquare(observed[used], expected[used]).pvalue > alpha


def example_logits(vocab_size):
    rng = np.random.default_rng(vocab_size)
    logits = (1.5 * rng.normal(size=vocab_size)).astype(np.float32)
    logits[vocab_size // 2] = -np.inf
    return logits


# By vocabulary. The interpreter takes seconds for as many, and draws a tenth.
NUM_DRAWS = {5: 50_000, 300: 20_000}


@functools.cache
def draw_tokens(
    implementation, num_draws, vocab_size, one_key=False, temperature=1.0, cutoff=-np.inf
):
    """Tokens of as many requests with the same logits: of one key, or of one position."""
    if one_key:
        keys, positions = jnp.broadcast_to(jax.random.key(3), (num_draws,)), np.arange(num_draws)
    else:
        keys, positions = make_keys(num_draws), 0
    logits = np.tile(example_logits(vocab_size), (num_draws, 1))
    options = {"temperature": temperature, "cutoff": cutoff}
    sample = draw(logits, keys, implementation, positions=positions, stream=0, **options)
    return sample.token_ids


def check_draws(implementation, vocab_size=5, temperature=1.0, cutoff=-np.inf, **options):
    """A 4 % error in any likely token is beyond 5 sigma at 50,000 draws.

    The interpreter draws the tokens of plain JAX, whose distribution is tested: rounding changes
    one in 100,000.
    """
    options |= {"vocab_size": vocab_size, "temperature": temperature, "cutoff": cutoff}
    num_draws = NUM_DRAWS[vocab_size]
    if getattr(implementation, "interpret", False):
        plain = draw_tokens("xla", num_draws, **options)[: num_draws // 10]
        tokens = draw_tokens(implementation, num_draws // 10, **options)
        assert np.mean(tokens != plain) < 1e-3
        return
    tokens = draw_tokens(implementation, num_draws, **options)
    counts = np.bincount(tokens, minlength=vocab_size)
    check_distribution(counts, oracle.target_probs(example_logits(vocab_size), temperature, cutoff))


@pytest.mark.optimised
@pytest.mark.parametrize(("temperature", "cutoff"), [(0.7, -np.inf), (1.0, -0.5)])
def test_draws_follow_the_softmax(temperature, cutoff, implementation):
    check_draws(implementation, temperature=temperature, cutoff=cutoff)


@pytest.mark.optimised
def test_one_key_and_true_positions_follow_the_softmax_too(implementation):
    check_draws(implementation, one_key=True)


def test_draws_over_several_blocks_follow_the_softmax(implementation):
    check_draws(implementation, vocab_size=300)


def test_a_masked_token_is_never_sampled_at_either_end(monkeypatch, implementation):
    """Every word of a draw is the smallest, or the largest; in a shape no other test traces."""
    draw_the_key(monkeypatch)
    logits = np.full((16, 301), -np.inf, np.float32)
    possible = np.arange(16) % 8 * 37 + 3
    logits[np.arange(16), possible] = -80.0
    keys = keys_of(np.where(np.arange(16) < 8, 0, 2**32 - 1))
    sample = draw(logits, keys, implementation, positions=0, stream=0)
    np.testing.assert_array_equal(np.asarray(sample.token_ids), possible)


def test_masked_tokens_and_those_below_the_cutoff_are_never_drawn(implementation):
    """Each of 68 possible tokens is expected 25 times and more."""
    rng = np.random.default_rng(9)
    n = NUM_DRAWS[300] // (10 if getattr(implementation, "interpret", False) else 1)
    logits = np.tile(rng.normal(size=300).astype(np.float32), (n, 1))
    logits[:, ::2] = -np.inf
    sample = draw(
        logits, make_keys(n), implementation, positions=1, stream=0, cutoff=0.3, temperature=5.0
    )
    tokens = np.unique(np.asarray(sample.token_ids))
    np.testing.assert_array_equal(tokens, np.flatnonzero(logits[0] >= 0.3))


def test_a_logit_at_the_cutoff_is_kept(implementation):
    logits = np.tile(np.array([1.0, 2.0, 2.0, 3.0, 0.0], np.float32), (128, 1))
    sample = draw(logits, make_keys(128), implementation, positions=0, stream=0, cutoff=2.0)
    assert set(np.asarray(sample.token_ids).tolist()) == {1, 2, 3}


def test_greedy_rows_take_the_lowest_of_tied_ids(implementation):
    logits = np.zeros((4, 300), np.float32)
    logits[1, [7, 200]] = 5.0
    logits[2, [131, 140, 299]] = 1.0
    logits[3] = np.float32(-1e30)
    sample = draw(logits, make_keys(4), implementation, positions=0, stream=0, temperature=0.0)
    np.testing.assert_array_equal(np.asarray(sample.token_ids), [0, 7, 131, 0])
    exact = [oracle.log_softmax(row).max() for row in logits]
    np.testing.assert_allclose(np.asarray(sample.logprobs), exact, rtol=1e-5)


def test_the_least_temperature_is_random_and_the_largest_keeps_a_mask(implementation):
    logits = np.tile(np.array([1.0, 3.0, -np.inf, 0.0, -np.inf], np.float32), (128, 1))
    temperature = np.where(np.arange(128) < 64, np.float32(1e-5), np.float32(3e38))
    options = {"positions": 0, "stream": 0, "temperature": temperature}
    sample = draw(logits, make_keys(128), implementation, **options)
    tokens, logprobs = np.asarray(sample.token_ids), np.asarray(sample.logprobs)
    # A greedy request's statistics are at temperature 1.
    np.testing.assert_array_equal(tokens[:64], 1)
    np.testing.assert_array_equal(logprobs[:64], 0.0)
    assert set(tokens[64:].tolist()) == {0, 1, 3}
    np.testing.assert_allclose(logprobs[64:], -np.log(3), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_invalid_row_draws_nothing_and_changes_no_other_row(temperature, implementation):
    rng = np.random.default_rng(10)
    logits = rng.normal(size=(8, 300)).astype(np.float32)
    good = draw(
        logits, make_keys(8), implementation, positions=0, stream=0, temperature=temperature
    )
    bad = logits.copy()
    bad[1, 299] = np.nan
    bad[3, 0] = np.inf
    bad[5] = -np.inf
    cutoff = np.full(8, -np.inf, np.float32)
    cutoff[6] = 1e9
    sample = draw(
        bad,
        make_keys(8),
        implementation,
        positions=0,
        stream=0,
        temperature=temperature,
        cutoff=cutoff,
    )
    invalid = np.isin(np.arange(8), [1, 3, 5, 6])
    tokens = np.asarray(sample.token_ids)
    np.testing.assert_array_equal(tokens[invalid], -1)
    np.testing.assert_array_equal(np.asarray(sample.logprobs)[invalid], 0.0)
    np.testing.assert_array_equal(tokens[~invalid], np.asarray(good.token_ids)[~invalid])


def test_a_nan_below_the_cutoff_still_invalidates_its_row(implementation):
    logits = np.array([[np.nan, 0.0, 0.0, 0.0, 5.0]], np.float32)
    sample = draw(logits, make_keys(1), implementation, positions=0, stream=0, cutoff=1.0)
    assert int(sample.token_ids[0]) == -1


def test_the_first_argmax_is_inside_whatever_the_scores_are():
    scores = jnp.array([[np.nan] * 3, [-np.inf] * 3, [1.0, 2.0, 2.0]], jnp.float32)
    np.testing.assert_array_equal(first_argmax(scores), [0, 0, 1])


def test_an_invalid_temperature_draws_nothing(implementation):
    logits = np.zeros((5, 5), np.float32)
    temperature = np.array([-1.0, np.nan, np.inf, 0.0, 1.0], np.float32)
    sample = draw(
        logits, make_keys(5), implementation, positions=0, stream=0, temperature=temperature
    )
    tokens = np.asarray(sample.token_ids)
    np.testing.assert_array_equal(tokens[:3], -1)
    assert np.all(tokens[3:] >= 0)


def test_tokens_do_not_depend_on_batch_order_or_batch_company(implementation):
    rows = mixed_rows(11, 128, 300)
    keys = make_keys(128)
    whole = np.asarray(draw(keys=keys, implementation=implementation, stream=2, **rows).token_ids)
    order = np.random.default_rng(0).permutation(128)
    moved = {name: value[order] for name, value in rows.items()}
    shuffled = draw(keys=keys[order], implementation=implementation, stream=2, **moved)
    np.testing.assert_array_equal(np.asarray(shuffled.token_ids), whole[order])
    few = {name: value[5:8] for name, value in rows.items()}
    alone = draw(keys=keys[5:8], implementation=implementation, stream=2, **few)
    np.testing.assert_array_equal(np.asarray(alone.token_ids), whole[5:8])


def test_different_streams_and_positions_draw_different_tokens(implementation):
    logits = np.zeros((128, 300), np.float32)
    keys = make_keys(128)
    draws = [
        draw(logits, keys, implementation, positions=position, stream=stream).token_ids
        for position, stream in [(0, 0), (1, 0), (0, 1), (0, 2)]
    ]
    for i in range(4):
        for j in range(i):
            assert np.mean(np.asarray(draws[i]) == np.asarray(draws[j])) < 0.1


def test_huge_and_offset_logits_do_not_overflow(implementation):
    rng = np.random.default_rng(12)
    logits = rng.normal(size=(64, 300)).astype(np.float32)
    logits = np.where(np.arange(64)[:, None] % 2 == 0, logits * 1e30, logits + 1e4)
    logits = logits.astype(np.float32)
    sample = draw(logits, make_keys(64), implementation, positions=0, stream=0)
    tokens = np.asarray(sample.token_ids)
    np.testing.assert_array_equal(tokens[::2], np.argmax(logits[::2], axis=1))
    assert np.all(np.isfinite(np.asarray(sample.logprobs)))


def test_float64_noise_draws_the_oracle_s_tokens(implementation):
    rows = mixed_rows(13, 128, 300)
    logits = rows.pop("logits")
    with jax.enable_x64(True):
        wide = check_sample(
            logits, make_keys(128), implementation, noise=np.float64, stream=2, **rows
        )
    narrow = check_sample(logits, make_keys(128), implementation, stream=2, **rows)
    random = rows["temperature"] > 0.1
    assert np.mean(wide[random] != narrow[random]) > 0.1


def test_stream_has_no_default(implementation):
    with pytest.raises(TypeError, match="stream"):
        specjax.gumbel_sample(
            np.zeros((2, 5)),
            keys=make_keys(2),
            positions=0,
            options=specjax.Options(implementation=implementation),
        )


def refused(named, implementation="xla", **change):
    arguments = dict(logits=np.zeros((2, 5), np.float32), keys=make_keys(2), positions=0, stream=0)
    options = specjax.Options(change.pop("noise_dtype", jnp.float32), implementation)
    arguments |= change
    with pytest.raises(ValueError, match=named) as refusal:
        specjax.gumbel_sample(arguments.pop("logits"), options=options, **arguments)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("keys", "hint"),
    [
        (lambda: jnp.zeros((2, 2), jnp.uint32), "jax.random.key"),
        (lambda: jnp.zeros((2,), jnp.int32), "jax.random.key"),
        (lambda: jax.random.split(jax.random.key(0, impl="rbg"), 2), "threefry"),
        (lambda: make_keys(3), r"\(2,\)"),
    ],
)
def test_wrong_keys_are_refused_with_the_cure(keys, hint, implementation):
    assert "keys" in refused(hint, implementation, keys=keys())


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("logits", {"logits": np.zeros(5, np.float32)}),
        ("logits", {"logits": np.zeros((2, 5), np.int32)}),
        ("positions", {"positions": np.zeros(3, np.int32)}),
        ("positions", {"positions": np.zeros(2, np.float32)}),
        ("temperature", {"temperature": np.ones(3, np.float32)}),
        ("cutoff", {"cutoff": np.ones((2, 5), np.float32)}),
        ("noise_dtype", {"noise_dtype": jnp.float16}),
    ],
)
def test_wrong_arguments_are_refused_by_name(named, change, implementation):
    refused(
        named,
        implementation,
        **{k: jnp.asarray(v) if k != "noise_dtype" else v for k, v in change.items()},
    )


def test_an_unknown_implementation_is_refused():
    refused("implementation", "cuda")


def test_float64_noise_without_x64_is_refused_with_the_cure(implementation):
    assert "noise_dtype" in refused("jax_enable_x64", implementation, noise_dtype=jnp.float64)
