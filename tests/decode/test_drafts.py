"""Drafts from probabilities, from a model's steps, and from the cache of another batch."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import specjax
from specjax import Draft, Stream

pytestmark = pytest.mark.once

SLOTS, K, VOCAB, DRAFT_VOCAB = 6, 3, 40, 32
IDS = jnp.array([10, 11, 12, 13, 14, 15], jnp.int32)


def make_keys(n, seed=0):
    return jax.random.split(jax.random.key(seed), n)


def i32(*values):
    return jnp.array(values, jnp.int32)


def normal(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# One program for the shapes of a case, where each of its operations would be one.
gather_drafts = jax.jit(specjax.gather_drafts)


@functools.cache
def make_cache():
    """Drawn drafts of six requests at two temperatures, with every field filled."""
    logits = jnp.asarray(normal(0, (SLOTS, K, DRAFT_VOCAB)) * np.float32(2))
    temperature = jnp.tile(jnp.array([1.0, 0.7], jnp.float32), 3)
    draft, _ = specjax.propose(
        lambda i, token_ids, positions: (jax.lax.dynamic_index_in_dim(logits, i, 1, False), i + 1),
        jnp.int32(0),
        jnp.zeros(SLOTS, jnp.int32),
        specjax.DraftInputs(make_keys(SLOTS), positions=0, temperature=temperature),
        num_tokens=K,
    )
    cutoff = jnp.full((SLOTS, K), -jnp.inf, jnp.float32)
    return draft.replace(cutoff=cutoff, num_tokens=i32(3, 3, 2, 3, 1, 3))


def close_target(cache):
    """Target logits near the cached draft's, so that every length is accepted."""
    size = cache.token_ids.shape[0]
    noise = normal(100, (size, K + 1, VOCAB))
    noise[:, :K, :DRAFT_VOCAB] += 2 * np.asarray(cache.logits)
    return jnp.asarray(np.float32(0.5) * noise)


def test_counts_take_the_first_drafts_of_each_request():
    cache = Draft(jnp.array([[1, 2], [3, 4], [5, 6]], jnp.int32))
    draft = gather_drafts(cache, i32(7, 8, 9), i32(7, 8, 9), i32(2, 0, 1))
    assert draft.num_tokens.tolist() == [2, 0, 1]
    rows = [row[:n] for row, n in zip(draft.token_ids.tolist(), [2, 0, 1], strict=True)]
    assert rows == [[1, 2], [], [5]]
    assert draft.num_tokens.dtype == jnp.int32
    assert draft == Draft(draft.token_ids, num_tokens=draft.num_tokens)
    assert draft.rows is None


@pytest.mark.parametrize(
    ("request_ids", "wanted", "counts", "slots"),
    [
        ([15, 10, 12, 11, 14, 13], [3] * 6, [3, 3, 2, 3, 1, 3], [5, 0, 2, 1, 4, 3]),
        ([14, 11], [3, 2], [1, 2], [4, 1]),
        ([13], [9], [3], [3]),
        ([99, 10, 98, 11, 12, 13, 14, 15], [3] * 8, [0, 3, 0, 3, 2, 3, 1, 3], None),
        ([10, 11, 99], [-1, 0, -1], [-1, 0, -1], None),
        ([10, 11], [-7, 1], [-1, 1], None),
        ([-1, -2, 10], [3, 3, 3], [0, 0, 3], None),
    ],
    ids=["reordered", "shrunk", "one", "grown", "inactive", "far below", "negative"],
)
def test_drafts_follow_their_requests(request_ids, wanted, counts, slots):
    cache = make_cache()
    draft = gather_drafts(cache, IDS, i32(*request_ids), i32(*wanted))
    assert draft.num_tokens.tolist() == counts
    for name in ("token_ids", "temperature", "logprobs", "logsumexp", "cutoff"):
        values, held = getattr(draft, name), getattr(cache, name)
        assert values.shape == (len(request_ids), *held.shape[1:])
        if slots is not None:
            np.testing.assert_array_equal(values, held[np.array(slots)], err_msg=name)
    if slots is not None:
        assert draft.rows.tolist() == slots


def test_empty_slots_match_no_request():
    cached = i32(10, -1, 12, -1, -2, 15)
    requests = i32(-1, 12, -2, 11, 15)
    draft = gather_drafts(make_cache(), cached, requests, i32(3, 3, 3, 3, 3))
    assert draft.num_tokens.tolist() == [0, 2, 0, 0, 3]


def test_a_cached_draft_that_is_inactive_or_short_stays_so():
    token_ids = jnp.array([[4, -1, 6], [1, 2, 3], [-1, 2, 3]], jnp.int32)
    cache = Draft(token_ids, num_tokens=i32(3, -1, 3))
    draft = gather_drafts(cache, i32(0, 1, 2), i32(2, 1, 0), i32(3, 3, 3))
    assert draft.num_tokens.tolist() == [0, 0, 1]


def test_gathering_what_was_gathered_composes_the_rows():
    cache = make_cache()
    first = i32(13, 10, 15, 11)
    once = gather_drafts(cache, IDS, first, i32(3, 2, 3, 3))
    twice = gather_drafts(once, first, i32(11, 13, 10), i32(3, 3, 3))
    assert twice.rows.tolist() == [1, 3, 0]
    assert twice.num_tokens.tolist() == [3, 3, 2]
    straight = gather_drafts(cache, IDS, i32(11, 13, 10), i32(3, 3, 2))
    chex.assert_trees_all_equal(twice, straight)


def test_the_logits_are_those_of_the_cache_and_no_copy():
    cache = make_cache()
    draft = specjax.gather_drafts(cache, IDS, i32(13, 10), i32(3, 3))
    assert draft.logits is cache.logits

    def gather(cache):
        return specjax.gather_drafts(cache, IDS, i32(13, 10), i32(3, 3))

    jaxpr = jax.make_jaxpr(gather)(cache).jaxpr
    (given,) = (v for v in jaxpr.invars if v.aval.shape == cache.logits.shape)
    assert [v for v in jaxpr.outvars if v is given] == [given]
    assert all(given not in equation.invars for equation in jaxpr.eqns)


def verify(draft, target_logits, keys, positions, temperature=None):
    """Verified at the draft's temperatures, or at others: arrays, so that tests share programs."""
    size = draft.token_ids.shape[0]
    temperature = draft.temperature if temperature is None else temperature
    return specjax.rejection_sample(
        draft,
        target_logits,
        keys=keys,
        positions=jnp.broadcast_to(jnp.asarray(positions, jnp.int32), (size,)),
        temperature=jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), (size,)),
    )


# As its users run it.
@pytest.mark.optimised
@pytest.mark.parametrize("one_hot", [False, True])
def test_gathered_drafts_are_verified_as_they_are_in_place(one_hot):
    cache, keys = make_cache(), make_keys(SLOTS)
    target_logits, positions = close_target(cache), jnp.arange(SLOTS, dtype=jnp.int32)
    temperature = cache.temperature
    if one_hot:
        # Sharp, or no greedy draft would be accepted.
        target_logits = 5 * target_logits
        cache = Draft(cache.token_ids, num_tokens=cache.num_tokens)
    whole = verify(cache, target_logits, keys, positions, temperature=temperature)
    assert len(set(whole.num_accepted.tolist())) > 1
    # One request is left out, another comes twice.
    order = np.array([5, 0, 2, 1, 4, 1])
    draft = gather_drafts(cache, IDS, IDS[order], jnp.full(SLOTS, K, jnp.int32))
    again = verify(
        draft,
        target_logits[order],
        keys[order],
        positions[order],
        temperature=temperature[order],
    )
    chex.assert_trees_all_equal(again, jax.tree.map(lambda x: x[order], whole))


def test_fewer_gathered_drafts_are_verified_as_fewer_sampled_ones():
    cache, keys = make_cache(), make_keys(SLOTS)
    target_logits = close_target(cache)
    wanted = i32(1, 2, 0, 3, 1, -1)
    draft = gather_drafts(cache, IDS, IDS, wanted)
    ours = verify(draft, target_logits, keys, 0)
    cut = verify(cache.replace(num_tokens=wanted), target_logits, keys, 0)
    chex.assert_trees_all_equal(ours, cut)
    stranger = gather_drafts(cache, IDS, IDS + 50, jnp.full(SLOTS, K, jnp.int32))
    ours = verify(stranger, target_logits, keys, 0, temperature=1.0)
    plain = specjax.gumbel_sample(
        target_logits[:, 0], keys=keys, positions=0, stream=Stream.TARGET, temperature=1.0
    )
    assert ours.num_emitted.tolist() == [1] * SLOTS
    np.testing.assert_array_equal(ours.token_ids[:, 0], plain.token_ids)


def test_a_cache_at_temperature_zero_is_verified_as_one_hot():
    cache, keys = make_cache(), make_keys(SLOTS)
    target_logits = close_target(cache)
    lost = cache.replace(
        temperature=jnp.zeros(SLOTS, jnp.float32), logits=jnp.full_like(cache.logits, jnp.nan)
    )
    draft = gather_drafts(lost, IDS, IDS[::-1], jnp.full(SLOTS, K, jnp.int32))
    ours = verify(draft, target_logits[::-1], keys[::-1], 0, temperature=1.0)
    bare = Draft(draft.token_ids, num_tokens=draft.num_tokens)
    theirs = verify(bare, target_logits[::-1], keys[::-1], 0, temperature=1.0)
    chex.assert_trees_all_equal(ours, theirs)


@pytest.mark.parametrize(
    ("cached", "requests", "wanted", "named"),
    [
        (IDS[:5], i32(10), i32(3), "cached_request_ids has shape"),
        (IDS, i32(10, 11), i32(3), "num_tokens has shape"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(cached, requests, wanted, named):
    with pytest.raises(ValueError, match=named):
        specjax.gather_drafts(make_cache(), cached, requests, wanted)


def test_probabilities_are_verified_as_their_logits():
    size, rng = 512, np.random.default_rng(3)
    logits = (2 * rng.normal(size=(size, K, DRAFT_VOCAB))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.4] = -np.inf
    logits[..., 0] = 0.0
    noisy = logits + rng.gumbel(size=logits.shape)
    token_ids = jnp.asarray(np.argmax(noisy, axis=-1).astype(np.int32))
    # Unnormalised, as whole numbers of any scale.
    probs = 3 * jnp.exp(jnp.asarray(logits))
    target_logits = jnp.asarray(rng.normal(size=(size, K + 1, VOCAB)).astype(np.float32))
    target_logits = target_logits.at[:, :K, :DRAFT_VOCAB].add(
        jnp.maximum(jnp.asarray(logits), -1.0)
    )
    draft = specjax.draft_from_probs(token_ids, probs)
    plain = Draft(token_ids, jnp.asarray(logits), jnp.ones(size, jnp.float32))
    keys = make_keys(size)
    ours, theirs = (verify(d, target_logits, keys, 5, temperature=0.9) for d in (draft, plain))
    assert np.bincount(theirs.num_accepted, minlength=K + 1).min() > 20
    for name in ("token_ids", "num_accepted", "num_emitted"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    np.testing.assert_array_equal(np.isneginf(draft.logits), np.isneginf(logits))
    for b in range(8):
        np.testing.assert_allclose(
            np.exp(oracle.log_softmax(np.asarray(draft.logits[b, 0]))),
            oracle.target_probs(logits[b, 0]),
            atol=1e-6,
        )


def test_a_token_of_probability_zero_is_rejected_and_its_residual_is_the_target_elsewhere():
    size = 512
    probs = jnp.zeros((size, K, DRAFT_VOCAB), jnp.float32).at[..., 1:3].set(0.5)
    draft = specjax.draft_from_probs(jnp.zeros((size, K), jnp.int32), probs)
    target_logits = jnp.full((size, K + 1, VOCAB), -jnp.inf, jnp.float32).at[..., :3].set(0.0)
    ours = verify(draft, target_logits, make_keys(size), 0)
    assert ours.num_accepted.tolist() == [0] * size
    # p - q is positive at token 0 alone.
    assert ours.token_ids[:, 0].tolist() == [0] * size


def test_a_draft_of_probabilities_has_their_logs_as_logits_at_temperature_one():
    probs = np.array([[[0.25, 0.75, 0], [1, 0, 0]]], np.float32)
    draft = specjax.draft_from_probs(np.array([[1, 0]], np.int32), probs)
    np.testing.assert_allclose(np.exp(draft.logits), probs, rtol=1e-6)
    assert (draft.token_ids.tolist(), draft.temperature.tolist()) == ([[1, 0]], [1])


@pytest.mark.parametrize("shape", [(4, 3, 5), (4, 2), (3, 2, 5)])
def test_probabilities_are_one_distribution_per_token(shape):
    with pytest.raises(ValueError, match="one distribution per drafted token"):
        specjax.draft_from_probs(jnp.zeros((4, 2), jnp.int32), jnp.ones(shape, jnp.float32))


SIZE = 5
TABLE = jnp.asarray(normal(42, (3, DRAFT_VOCAB, DRAFT_VOCAB)) * np.float32(2))


def bigram_step(carry, token_ids, positions):
    """Logits of the last token and the position; the carry records what was fed."""
    fed, places, count = carry
    fed = fed.at[:, count].set(token_ids)
    places = places.at[:, count].set(positions)
    return TABLE[positions % 3, token_ids], (fed, places, count + 1)


@functools.partial(jax.jit, static_argnames=("num_tokens", "draft_sample_method", "options"))
def jitted_propose(*args, **options):
    return specjax.propose(bigram_step, *args, **options)


INPUTS = specjax.DraftInputs(
    make_keys(SIZE, 1),
    positions=i32(3, 8, 2, 11, 5),
    temperature=jnp.array([1.0, 0.5, 0.0, 1.7, 1e-6], jnp.float32),
)


def bigram_propose(num_tokens=K, draft_sample_method="probabilistic", options=None, **inputs):
    blank, last = jnp.full((SIZE, K), -9, jnp.int32), i32(1, 2, 3, 4, 5)
    given = {"num_tokens": num_tokens, "draft_sample_method": draft_sample_method}
    given |= {} if options is None else {"options": options}
    carry = blank, blank, jnp.int32(0)
    return jitted_propose(carry, last, INPUTS._replace(**inputs), **given)


def test_each_token_is_fed_at_its_own_position():
    draft, (fed, places, count) = bigram_propose()
    assert int(count) == K
    np.testing.assert_array_equal(places, np.array([3, 8, 2, 11, 5])[:, None] - 1 + np.arange(K))
    np.testing.assert_array_equal(fed[:, 0], [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(fed[:, 1:], draft.token_ids[:, :-1])


def test_proposals_are_the_draws_of_their_streams_and_positions():
    draft, (fed, places, _) = bigram_propose()
    positions = i32(3, 8, 2, 11, 5)
    for i in range(K):
        logits = TABLE[places[:, i] % 3, fed[:, i]]
        sample = specjax.gumbel_sample(
            logits,
            keys=make_keys(SIZE, 1),
            positions=positions + i,
            stream=Stream.draft(i),
            temperature=draft.temperature,
        )
        np.testing.assert_array_equal(draft.token_ids[:, i], sample.token_ids)
        np.testing.assert_array_equal(draft.logits[:, i], logits)


def test_the_statistics_that_a_proposal_carries_are_those_of_its_logits():
    draft, _ = bigram_propose()
    assert draft.num_tokens is None
    temperature = np.asarray(draft.temperature, np.float64)
    # A greedy request's statistics are at temperature 1.
    scale = np.where(temperature < 1e-5, 1.0, temperature)
    for b in range(SIZE):
        for i in range(K):
            w = np.asarray(draft.logits[b, i], np.float64) / scale[b]
            total = oracle.logsumexp(w)
            np.testing.assert_allclose(draft.logsumexp[b, i], total, atol=1e-5)
            chosen = w[draft.token_ids[b, i]] - total
            np.testing.assert_allclose(draft.logprobs[b, i], chosen, atol=1e-5)
    greedy = temperature < 1e-5
    argmax = np.argmax(np.asarray(draft.logits), axis=-1)
    np.testing.assert_array_equal(draft.token_ids[greedy], argmax[greedy])


def test_greedy_drafting_follows_the_argmax_and_keeps_no_logits():
    draft, (fed, places, _) = bigram_propose(draft_sample_method="greedy")
    assert draft == specjax.Draft(draft.token_ids)
    np.testing.assert_array_equal(draft.token_ids, jnp.argmax(TABLE[places % 3, fed], axis=-1))


def test_a_shorter_proposal_is_the_beginning_of_a_longer_one():
    long, _ = bigram_propose()
    short, _ = bigram_propose(num_tokens=1)
    chex.assert_trees_all_equal(
        short,
        long.replace(
            **{
                name: getattr(long, name)[:, :1]
                for name in ("token_ids", "logits", "logprobs", "logsumexp")
            }
        ),
    )


def test_the_first_step_may_be_given_another_carry_than_it_returns():
    def step_fn(carry, token_ids, positions):
        prompt_sum = carry.sum(axis=1) if not isinstance(carry, dict) else carry["sum"]
        logits = TABLE[prompt_sum % 3, token_ids]
        return logits, {"sum": prompt_sum + token_ids}

    prompt = jnp.arange(2 * SIZE, dtype=jnp.int32).reshape(SIZE, 2)
    last = i32(1, 2, 3, 4, 5)
    inputs = specjax.DraftInputs(make_keys(SIZE), positions=2)
    draft, carry = specjax.propose(step_fn, prompt, last, inputs, num_tokens=K)
    same, _ = specjax.propose(step_fn, {"sum": prompt.sum(axis=1)}, last, inputs, num_tokens=K)
    chex.assert_trees_all_equal(draft, same)
    fed = last + draft.token_ids[:, :-1].sum(axis=1)
    np.testing.assert_array_equal(carry["sum"], prompt.sum(axis=1) + fed)


def test_proposals_of_arrays_over_explicit_axes_are_the_same():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    last, keys = i32(1, 2, 3, 4), make_keys(4)

    def tokens(last, keys, sharding=None):
        def step_fn(carry, token_ids, positions):
            return TABLE[0].at[token_ids].get(out_sharding=sharding), carry

        inputs = specjax.DraftInputs(keys, positions=2)
        return specjax.propose(step_fn, (), last, inputs, num_tokens=K)[0].token_ids

    with jax.set_mesh(mesh):
        laid = jax.device_put((last, keys), rows)
        found = jax.jit(functools.partial(tokens, sharding=rows))(*laid)
    assert found.sharding.spec == jax.P("data", None)
    np.testing.assert_array_equal(found, tokens(last, keys))


def test_one_key_is_folded_with_each_row():
    single = jax.random.key(7)
    each = jax.vmap(jax.random.fold_in, (None, 0))(single, jnp.arange(SIZE, dtype=jnp.uint32))
    chex.assert_trees_all_equal(bigram_propose(keys=single), bigram_propose(keys=each))


def test_an_invalid_row_ends_the_drafts_of_its_request():
    def step_fn(carry, token_ids, positions):
        logits = TABLE[positions % 3, token_ids]
        return jnp.where((positions == 4)[:, None] & carry[:, None], jnp.nan, logits), carry

    broken = jnp.array([True, False, True])
    inputs = specjax.DraftInputs(make_keys(3), positions=i32(4, 4, 9))
    draft, _ = specjax.propose(step_fn, broken, i32(1, 2, 3), inputs, num_tokens=K)
    whole, _ = specjax.propose(step_fn, jnp.zeros(3, bool), i32(1, 2, 3), inputs, num_tokens=K)
    assert draft.token_ids[0, 1] == -1
    assert draft.token_ids[0, 0] == whole.token_ids[0, 0]
    np.testing.assert_array_equal(draft.token_ids[1:], whole.token_ids[1:])
    target_logits = jnp.zeros((3, K + 1, VOCAB), jnp.float32)
    ours = verify(draft, target_logits, make_keys(3), i32(4, 4, 9))
    assert ours.num_accepted[0] <= 1
    assert ours.num_emitted[0] == ours.num_accepted[0] + 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"num_tokens": -1}, "num_tokens is -1"),
        ({"draft_sample_method": "gumbel"}, "'probabilistic' or 'greedy'"),
        ({"positions": 1.0}, "positions"),
        ({"positions": i32(1, 2)}, "positions"),
        ({"temperature": jnp.ones((SIZE, 1), jnp.float32)}, "temperature"),
        ({"keys": jnp.zeros((SIZE, 2), jnp.uint32)}, "keys"),
        ({"options": "xla"}, "options is str"),
        ({"options": specjax.Options(axis_name="x")}, "drawn from whole rows"),
    ],
)
def test_wrong_proposals_are_refused_by_name(options, named):
    with pytest.raises(ValueError, match=named):
        bigram_propose(**options)


def test_inputs_that_are_no_draft_inputs_are_refused():
    with pytest.raises(ValueError, match=r"inputs is dict; it needs a specjax\.DraftInputs"):
        specjax.propose(bigram_step, (), i32(1, 2), {"positions": 0}, num_tokens=K)


def test_a_draft_has_the_numbers_of_tokens_that_its_inputs_ask_for():
    num_tokens = i32(3, 2, -1, 0, 1)
    draft, _ = bigram_propose()
    fewer, _ = jitted_propose(
        (jnp.full((SIZE, K), -9, jnp.int32),) * 2 + (jnp.int32(0),),
        i32(1, 2, 3, 4, 5),
        INPUTS._replace(num_tokens=num_tokens),
        num_tokens=K,
        draft_sample_method="probabilistic",
    )
    assert draft.num_tokens is None
    chex.assert_trees_all_equal(fewer, draft.replace(num_tokens=num_tokens))
