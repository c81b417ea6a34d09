"""The decode loop: speculation changes the time, not the text."""

import functools

import bigrams
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Finish, Origin, SpeculativeConfig, generate
from specjax.decode.generate import loop_in_place

V = 4
TARGET, DRAFT = bigrams.pair(V, seed=1)
PROMPTS = [[1, 2, 3], [3], [0, 1], [2, 2, 2, 0, 1]]
DRAFTERS = {
    "model": specjax.model_drafter(bigrams.model(DRAFT)),
    "ngram": specjax.ngram_drafter(),
}


def run(drafter, rows=PROMPTS, *, k=3, max_new_tokens=24, target=TARGET, key_seed=0, **options):
    options.setdefault("keys", bigrams.keys(len(rows), key_seed))
    # Two tokens that no model has: as many as where a request ends, which shares compilations.
    options.setdefault("eos_token_ids", (98, 99))
    # A number per request, which shares them too; `init` is given none below, which is a scalar.
    temperature = np.asarray(options.pop("temperature", 1.0), np.float32)
    options["temperature"] = temperature if temperature.ndim else np.repeat(temperature, len(rows))
    method = options.pop("draft_sample_method", "probabilistic")
    config = options.pop(
        "config", SpeculativeConfig(num_speculative_tokens=k, draft_sample_method=method)
    )
    return generate(
        bigrams.model(target),
        drafter,
        bigrams.prompts(rows),
        config=config,
        max_new_tokens=max_new_tokens,
        **options,
    )


def texts(output):
    ids, lengths = np.asarray(output.token_ids), np.asarray(output.lengths)
    return [row[:n].tolist() for row, n in zip(ids, lengths, strict=True)]


@pytest.mark.once
@pytest.mark.parametrize(
    ("drafter", "method"),
    # The method is how a model drafts: prompt lookup draws nothing.
    [("model", "greedy"), ("model", "probabilistic"), ("ngram", "probabilistic")],
)
def test_greedy_speculation_is_plain_greedy_decoding(drafter, method):
    plain = run(None, temperature=0.0)
    spoken = run(DRAFTERS[drafter], temperature=0.0, draft_sample_method=method)
    assert texts(spoken) == texts(plain)
    np.testing.assert_allclose(spoken.logprobs, plain.logprobs, rtol=1e-5)
    for row, text in zip(PROMPTS, texts(plain), strict=True):
        past = [0, *row]
        while len(past) - 1 < len(text):
            past.append(int(np.argmax(TARGET[past[-2], past[-1]])))
        assert text == past[1:]


def test_plain_decoding_is_gumbel_sample_token_by_token():
    output = run(None, temperature=0.9)
    keys = bigrams.keys(len(PROMPTS))
    for b, row in enumerate(PROMPTS):
        past = [0, *row]
        for _ in range(6):
            sample = specjax.gumbel_sample(
                jnp.asarray(TARGET[past[-2], past[-1]], jnp.float32)[None],
                keys=keys[b : b + 1],
                positions=len(past) - 1,
                stream=specjax.Stream.TARGET,
                temperature=0.9,
            )
            past.append(int(sample.token_ids[0]))
        assert texts(output)[b][: len(past) - 1] == past[1:]


def chi_square(counts, probs):
    """Standardised chi-square of counts: about N(0, 1) if these are their probabilities."""
    expected = probs * counts.sum()
    assert expected.min() > 2
    df = probs.size - 1
    return (((counts - expected) ** 2 / expected).sum() - df) / np.sqrt(2 * df)


NUM_SAMPLED, NUM_JOINT, HOT = 20_000, 4, 1.2
SMALL_TARGET, SMALL_DRAFT = TARGET[:3, :3, :3], DRAFT[:3, :3, :3]


@functools.cache
def sampled(drafter, k):
    """Many texts of four tokens after [1, 2], over three tokens."""
    small = specjax.model_drafter(bigrams.model(SMALL_DRAFT))
    return run(
        small if drafter == "model" else DRAFTERS[drafter],
        [[1, 2]] * NUM_SAMPLED,
        k=k,
        max_new_tokens=NUM_JOINT,
        target=SMALL_TARGET,
        temperature=HOT,
        options=specjax.LoopOptions(max_length=2 + NUM_JOINT),
    )


@pytest.mark.checks
@pytest.mark.once
@pytest.mark.optimised
@pytest.mark.parametrize(("drafter", "k"), [("model", 3), ("ngram", 1)])
def test_several_steps_of_generate_follow_the_target_jointly(drafter, k):
    new = np.asarray(sampled(drafter, k).token_ids)[:, 2:]
    counts = np.zeros((3,) * NUM_JOINT)
    np.add.at(counts, tuple(new.T), 1)
    probs = bigrams.joint_probs(SMALL_TARGET, [1, 2], NUM_JOINT, temperature=HOT)
    z = chi_square(counts, probs)
    assert abs(z) < 5, z
    # A token 10 % too likely at every position would stand far out at this size.
    wrong = probs * 1.1 ** (np.indices(probs.shape) == 0).sum(0)
    wrong /= wrong.sum()
    assert NUM_SAMPLED * ((wrong - probs) ** 2 / probs).sum() / np.sqrt(2 * probs.size - 2) > 10


@pytest.mark.once
@pytest.mark.optimised
def test_acceptance_per_position_is_the_mean_overlap_of_p_and_q():
    """A q that is lost leaves the output exact and shows here alone."""
    output = sampled("model", 3)
    p, q = bigrams.probs(SMALL_TARGET, HOT), bigrams.probs(SMALL_DRAFT, HOT)
    kept = np.minimum(p, q)
    overlap = kept.sum(-1)
    first = p[1, 2]
    accepted = [first @ overlap[2], first @ (kept[2] * overlap).sum(-1)]
    # The first speculative step of each request: later ones have fewer drafts left.
    metrics = output.metrics
    np.testing.assert_array_equal(np.asarray(metrics.num_drafted)[:, 1], 1)
    np.testing.assert_array_equal(np.asarray(metrics.num_drafted)[:, 2], 0)
    rates = [
        (np.asarray(output.origins)[:, 3] == Origin.ACCEPTED).mean(),
        np.asarray(metrics.num_accepted)[:, 1].mean(),
    ]
    for rate, want in zip(rates, accepted, strict=True):
        assert abs(rate - want) < 4.5 * np.sqrt(want * (1 - want) / NUM_SAMPLED)
    # Without q the first position would be accepted with probability sum p q, far below.
    assert (first[:, None] * (p * q)[2]).sum() < accepted[0] - 0.1


@pytest.mark.once
def test_a_model_drafting_for_itself_is_accepted_over_120_tokens():
    itself = specjax.model_drafter(bigrams.model(TARGET))
    output = run(itself, max_new_tokens=120, temperature=jnp.array([1.0, 0.3, 2.0, 0.0]))
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)
    assert float(output.metrics.draft_acceptance_rate) > 0.999


@pytest.mark.once
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_tokens_do_not_depend_on_the_order_or_the_other_requests_of_a_batch(drafter):
    proposer = DRAFTERS.get(drafter)
    temperature = np.array([0.0, 1.0, 0.7, 1.5], np.float32)
    keys = bigrams.keys(4)
    together = texts(run(proposer, temperature=temperature, keys=keys))
    order = np.array([2, 0, 3, 1])
    turned = run(
        proposer, [PROMPTS[i] for i in order], temperature=temperature[order], keys=keys[order]
    )
    assert texts(turned) == [together[i] for i in order]
    # Among others of other keys, in a batch of the size that is compiled already; for one drafter
    # alone, too.
    others = bigrams.keys(4, 1)
    for b, row in enumerate(PROMPTS):
        among = run(
            proposer,
            [row if i == b else PROMPTS[i - 1] for i in range(4)],
            temperature=np.where(np.arange(4) == b, temperature, np.roll(temperature, 1)),
            keys=others.at[b].set(keys[b]),
        )
        assert texts(among)[b] == together[b]
        if drafter == "model":
            alone = run(proposer, [row], temperature=temperature[b : b + 1], keys=keys[b : b + 1])
            assert texts(alone) == together[b : b + 1]


@pytest.mark.once
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_request_that_ends_changes_no_other(drafter):
    proposer = DRAFTERS[drafter]
    free = run(proposer)
    ended = run(proposer, eos_token_ids=(3, 0))
    for whole, cut, reason, row in zip(
        texts(free), texts(ended), np.asarray(ended.finish), PROMPTS, strict=True
    ):
        new = whole[len(row) :]
        ends = [i for i, token in enumerate(new) if token in (3, 0)]
        assert ends, "the case must end somewhere"
        assert cut == row + new[: ends[0] + 1]
        assert reason == Finish.END_OF_SEQUENCE
    np.testing.assert_array_equal(free.finish, Finish.LENGTH)
    np.testing.assert_array_equal(free.lengths, [len(row) + 24 for row in PROMPTS])


@pytest.mark.once
def test_a_drafter_without_counts_keeps_no_request_from_ending():
    """`Draft.num_tokens` None, as `propose` leaves it, is cut to the tokens that are left."""
    inner = DRAFTERS["model"]

    def propose(*arguments, **options):
        draft, state = inner.propose(*arguments, **options)
        return draft.replace(num_tokens=None), state

    careless = specjax.Drafter(inner.params, inner.init, inner.extend, propose)
    ended, whole = run(inner, eos_token_ids=(3, 0)), run(careless, eos_token_ids=(3, 0))
    assert texts(whole) == texts(ended)
    np.testing.assert_array_equal(whole.finish, ended.finish)


def init_counted(params, *sizes):
    return DRAFTERS["model"].init(params[0], *sizes)


def extend_counted(params, *chunk):
    return DRAFTERS["model"].extend(params[0], *chunk)


def propose_counted(params, state, token_ids, hidden, inputs, **options):
    """The model's drafts, counted as the requests' even and odd positions are given."""
    inner, even, odd = params
    given = (state, token_ids, hidden, inputs)
    draft, state = DRAFTERS["model"].propose(inner, *given, **options)
    return draft.replace(num_tokens=jnp.where(inputs.positions % 2 == 0, even, odd)), state


def counted(even, odd):
    """A drafter that counts so many tokens for each request, as data."""
    return specjax.Drafter(
        (DRAFTERS["model"].params, i32(even), i32(odd)),
        init_counted,
        extend_counted,
        propose_counted,
    )


def i32(values):
    return jnp.asarray(values, jnp.int32)


@pytest.mark.once
@pytest.mark.parametrize("count_given", [-1, -7, 0])
def test_a_count_of_minus_one_from_a_drafter_is_no_draft_and_ends_no_request(count_given):
    """At every other position."""
    given = [count_given, 3] * 2
    output = run(counted(given, given[::-1]), temperature=0.0)
    plain = run(None, temperature=0.0)
    assert texts(output) == texts(plain)
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)
    drafted, steps = np.asarray(output.metrics.num_drafted), np.asarray(output.metrics.num_steps)
    assert np.all(drafted[:, 0] > 0)
    assert np.all(drafted[:, 0] < steps)


@pytest.mark.once
def test_a_drafter_may_count_fewer_tokens_than_it_returns():
    """Counts 0, 1, 2 and 3 of three ids: no id after them is verified."""
    output = run(counted(np.arange(4), np.arange(4)), temperature=0.0)
    drafted = np.asarray(output.metrics.num_drafted) > 0
    np.testing.assert_array_equal(drafted, np.arange(3)[None] < np.arange(4)[:, None])
    assert texts(output) == texts(run(None, temperature=0.0))


def looked_up(row, k, max_ngram, min_ngram):
    """What prompt lookup drafts after a row, from its definition."""
    for n in range(max_ngram, min_ngram - 1, -1):
        places = [i for i in range(len(row) - n) if row[i : i + n] == row[len(row) - n :]]
        if len(row) > n and places:
            _, place = max((min(k, len(row) - i - n), i) for i in places)
            return row[place + n : place + n + k]
    return []


NUM_ROWS = 200


def looked_up_by_the_library(rows, k, *ngrams):
    # Always as many rows, which shares compilations.
    ids, lengths = bigrams.prompts(rows + rows[:1] * (NUM_ROWS - len(rows)), width=16)
    draft, _ = specjax.ngram_drafter(*ngrams).propose(
        (),
        (),
        ids,
        None,
        specjax.DraftInputs(None, lengths, jnp.full(NUM_ROWS, k, jnp.int32)),
        config=SpeculativeConfig(num_speculative_tokens=k),
    )
    counts = np.asarray(draft.num_tokens).tolist()
    return specjax.unpad(draft.token_ids)[: len(rows)], counts[: len(rows)]


@pytest.mark.parametrize(
    ("row", "drafted"),
    [
        # Of two places the earlier has three tokens after it, the latest one.
        ([5, 1, 2, 3, 5, 5], [1, 2, 3]),
        # Two have three: the later of them.
        ([5, 1, 2, 3, 5, 6, 7, 8, 5], [6, 7, 8]),
        # 4, 5 stood there once; 5 alone stands nearer, and would be followed by 9.
        ([4, 5, 1, 2, 3, 5, 9, 9, 9, 4, 5], [1, 2, 3]),
        ([1, 2, 3], []),
    ],
)
def test_prompt_lookup_takes_the_longest_suffix_and_its_occurrence_with_most_tokens_after_it(
    row, drafted
):
    assert looked_up(row, 3, 3, 1) == drafted
    assert looked_up_by_the_library([row], 3, 3, 1) == ([drafted], [len(drafted)])


@pytest.mark.once
@pytest.mark.parametrize(("k", "ngrams"), [(3, (3, 1)), (2, (4, 2)), (4, (1, 1))])
def test_prompt_lookup_is_that_of_its_definition(k, ngrams):
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, rng.integers(1, 16)).tolist() for _ in range(NUM_ROWS)]
    found, counts = looked_up_by_the_library(rows, k, *ngrams)
    assert found == [looked_up(row, k, *ngrams) for row in rows]
    assert counts == [len(row) for row in found]


@pytest.mark.lenient
def test_float64_noise_reaches_verification_and_the_drafts():
    """The words of float64 noise are others, so that float32's would give other tokens."""
    size, row = 32, [1, 2]
    ids, lengths = bigrams.prompts([row] * size)
    with jax.enable_x64(True):
        state = specjax.init(
            bigrams.model(TARGET),
            DRAFTERS["model"],
            (ids, lengths),
            keys=bigrams.keys(size),
            config=SpeculativeConfig(num_speculative_tokens=1, use_fp64_gumbel=True),
            max_new_tokens=4,
        )
        first, drafted = np.asarray(state.token_ids)[:, 2], np.asarray(state.draft.token_ids)[:, 0]
        for tokens, table, past, position, stream in [
            (first, TARGET, (1, 2), 2, specjax.Stream.TARGET),
            (drafted, DRAFT, (2, first), 3, specjax.Stream.draft(0)),
        ]:
            ours, others = [
                specjax.gumbel_sample(
                    jnp.broadcast_to(jnp.asarray(table[past], jnp.float32), (size, V)),
                    keys=bigrams.keys(size),
                    positions=position,
                    stream=stream,
                    options=specjax.Options(noise_dtype=dtype),
                ).token_ids
                for dtype in (jnp.float64, jnp.float32)
            ]
            np.testing.assert_array_equal(tokens, ours)
            assert np.sum(tokens != np.asarray(others)) > 5


@pytest.mark.once
@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
def test_invalid_logits_end_a_request_as_invalid(drafter):
    table = TARGET.copy()
    table[:, 3] = np.nan
    output = run(DRAFTERS.get(drafter), [[1, 2], [0, 1], [2], [1, 1, 0]], target=table)
    for text, reason in zip(texts(output), np.asarray(output.finish), strict=True):
        assert reason == Finish.INVALID
        assert text[-1] == 3
        assert 3 not in text[:-1]


@pytest.mark.once
def test_an_invalid_temperature_emits_nothing():
    output = run(DRAFTERS["model"], temperature=jnp.array([1.0, -1.0, np.nan, np.inf]))
    assert texts(output)[1:] == PROMPTS[1:]
    np.testing.assert_array_equal(output.finish, [Finish.LENGTH] + [Finish.INVALID] * 3)


@pytest.mark.parametrize("drafter", [None, pytest.param("model", marks=pytest.mark.once)])
def test_streaming_gives_the_tokens_of_generate(drafter):
    proposer, model = DRAFTERS.get(drafter), bigrams.model(TARGET)
    config = SpeculativeConfig(num_speculative_tokens=3)
    ids, lengths = bigrams.prompts(PROMPTS)
    keys = bigrams.keys(4)
    whole = run(proposer, keys=keys)
    state = specjax.init(
        model, proposer, (ids, lengths), keys=keys, config=config, max_new_tokens=24
    )
    emitted = np.ones(4, np.int64)
    while np.any(state.finish == 0):
        before = np.asarray(state.lengths)
        state, info = specjax.step(model, proposer, state, config=config)
        grown = np.asarray(state.lengths) - before
        assert np.all(grown <= np.asarray(info.verification.num_emitted))
        emitted += grown
    for name in ("token_ids", "lengths", "logprobs", "origins", "finish"):
        chex.assert_trees_all_equal(getattr(state, name), getattr(whole, name))
    np.testing.assert_array_equal(emitted, 24)


@pytest.mark.once
def test_origins_and_metrics_agree():
    output = run(DRAFTERS["model"])
    origins = np.asarray(output.origins)
    for b, row in enumerate(PROMPTS):
        assert not origins[b, : len(row)].any()
        assert origins[b, len(row)] == Origin.BONUS
        assert origins[b, len(row) : len(row) + 24].all()
    accepted = (origins == Origin.ACCEPTED).sum(1)
    metrics = output.metrics
    np.testing.assert_array_equal(accepted, np.asarray(metrics.num_accepted).sum(1))
    np.testing.assert_array_equal(metrics.num_emitted, 23)
    np.testing.assert_array_equal(metrics.num_steps, 23 - accepted)


def count_again(output, rows, k, room):
    """Metrics from the origins of committed tokens, and the positions that verified a draft."""
    lengths, finish = np.asarray(output.lengths), np.asarray(output.finish)
    is_accepted = (np.asarray(output.origins) == Origin.ACCEPTED).tolist()
    steps, drafted, accepted = ([[0] * width for _ in rows] for width in (1, k, k))
    judged = []
    for b, (row, length) in enumerate(zip(rows, lengths.tolist(), strict=True)):
        place, limit = len(row) + 1, len(row) + room
        goes_on = finish[b] != Finish.END_OF_SEQUENCE
        while place < length:
            steps[b][0] += 1
            end = place
            while is_accepted[b][end] and end + 1 < length:
                end += 1
            end += 1
            for i in range(min(k, limit - place - 1)):
                drafted[b][i] += bool(goes_on or end < length or place + i < end)
                if place + i < end:
                    accepted[b][i] += is_accepted[b][place + i]
                    judged.append((b, i, place + i))
            place = end
    counts = np.ravel(steps), lengths - [len(row) + 1 for row in rows], drafted, accepted
    return counts, judged


# As many as the sampling test needs: one program.
NUM_ENDING = 1_000


@pytest.mark.once
@pytest.mark.parametrize("invalid_past_the_end", [False, True])
def test_metrics_count_what_was_committed_up_to_the_end_of_a_sequence(invalid_past_the_end):
    rows = [PROMPTS[b % 4][:2] + [b // 4 % 3] for b in range(NUM_ENDING)]
    table = TARGET.copy()
    if invalid_past_the_end:
        table[:, 3] = np.nan
    options = dict(target=table, max_new_tokens=12, eos_token_ids=(3, 99), temperature=0.5)
    output = run(DRAFTERS["model"], rows, **options)
    counts, judged = count_again(output, rows, 3, 12)
    for ours, theirs in zip(output.metrics, counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    ids, ends = np.asarray(output.token_ids), np.asarray(output.finish) == Finish.END_OF_SEQUENCE
    assert ends.sum() > 20
    # The case has steps that drafted past an accepted end.
    last = [np.asarray(output.origins)[b, output.lengths[b] - 1] for b in np.flatnonzero(ends)]
    assert (np.array(last) == Origin.ACCEPTED).sum() > 5
    assert all(ids[b, place - 1] != 3 for b, _, place in judged)


@pytest.mark.once
def test_acceptance_is_the_mean_overlap_where_texts_end():
    """Each position counts that was reached before the end, the end among them."""
    size, k, prompt = NUM_ENDING, 3, [1, 2]
    output = run(DRAFTERS["model"], [prompt] * size, k=k, max_new_tokens=12, eos_token_ids=(0, 3))
    _, judged = count_again(output, [prompt] * size, k, 12)
    b, i, place = np.array(judged).T
    ids = np.asarray(output.token_ids)
    overlap = np.minimum(bigrams.probs(TARGET), bigrams.probs(DRAFT)).sum(-1)
    chance = overlap[ids[b, place - 2], ids[b, place - 1]]
    accepted = np.asarray(output.metrics.num_accepted).sum(0)
    for position in range(k):
        here = chance[i == position]
        error = np.sqrt((here * (1 - here)).sum())
        assert abs(accepted[position] - here.sum()) < 4.5 * error
    # What was verified past the ends would stand out: a position more for each end but the last.
    ended = np.asarray(output.origins)[np.arange(size), np.asarray(output.lengths) - 1]
    past = (ended == Origin.ACCEPTED) & (np.asarray(output.finish) == Finish.END_OF_SEQUENCE)
    assert past.sum() * overlap.min() / 2 > 9 * np.sqrt(len(judged) / 4 / k)


@pytest.mark.once
def test_the_logprobs_are_those_of_the_target():
    output = run(DRAFTERS["model"], temperature=0.6)
    p, logprobs = bigrams.probs(TARGET, 0.6), np.asarray(output.logprobs)
    for b, row in enumerate(PROMPTS):
        past = [0, *texts(output)[b]]
        for i in range(len(row), len(past) - 1):
            want = np.log(p[past[i - 1], past[i], past[i + 1]])
            assert abs(logprobs[b, i] - want) < 1e-5


def synthetic(seed=0, temperature=1.0, eos=99, table=TARGET, **acceptance):
    """What `generate` returns, of arguments that it is given as they are."""
    ids, lengths = bigrams.prompts([[1, 2]] * 64)
    return generate(
        bigrams.model(table),
        DRAFTERS["model"],
        ((ids + seed) % V, lengths),
        keys=bigrams.keys(64, seed),
        temperature=temperature,
        eos_token_ids=(eos,),
        max_new_tokens=100,
        config=SpeculativeConfig(
            num_speculative_tokens=4, rejection_sample_method="synthetic", **acceptance
        ),
    )


@pytest.mark.checks
@pytest.mark.once
def test_synthetic_acceptance_has_the_length_asked_for():
    output = synthetic(synthetic_acceptance_length=2.5)
    steps = float(np.asarray(output.metrics.num_steps).sum())
    # A step emits 2 or 3 tokens, half and half: standard deviation 1 / 2.
    assert abs(float(output.metrics.mean_acceptance_length) - 2.5) < 5 * 0.5 / np.sqrt(steps) + 0.01


@pytest.mark.once
def test_the_rule_of_the_config_is_the_one_that_accepts():
    """A rule that accepts what the target may emit; plain decoding has nothing to ask it for."""
    anything = specjax.Rule(lambda lp, lq, u, row: lp > -9, lambda lp, lq, row: lp)
    config = SpeculativeConfig(num_speculative_tokens=3, rule=anything)
    output = run(DRAFTERS["model"], config=config)
    assert float(output.metrics.draft_acceptance_rate) == 1.0
    assert texts(run(None, config=config)) == texts(run(None))


def test_values_never_recompile():
    synthetic(0, 1.0, 3, synthetic_acceptance_rate=0.5)
    compiled = loop_in_place._cache_size()
    synthetic(1, 0.3, 1, synthetic_acceptance_rate=0.7)
    synthetic(2, 2, 2, DRAFT, synthetic_acceptance_rate=0.1)
    assert loop_in_place._cache_size() == compiled


def test_parameters_are_arguments_and_not_constants():
    ids, lengths = bigrams.prompts(PROMPTS)

    def call(target, drafter):
        return generate(
            target,
            drafter,
            (ids, lengths),
            keys=bigrams.keys(4),
            max_new_tokens=5,
            options=specjax.LoopOptions(max_length=12),
        ).token_ids

    jaxpr = jax.make_jaxpr(call)(bigrams.model(TARGET), DRAFTERS["model"])
    assert all(np.size(const) < TARGET.size for const in jaxpr.consts)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": 2**33}, "max_new_tokens is 8589934592"),
        ({"rows": [[]]}, "an empty prompt gives"),
        ({"keys": jnp.zeros((4, 2), jnp.uint32)}, "jax.random.key"),
        ({"temperature": np.zeros(3)}, "temperature has shape"),
    ],
)
def test_a_wrong_call_is_refused_in_a_sentence(change, words):
    with pytest.raises(ValueError, match=words):
        run(DRAFTERS["model"], change.pop("rows", PROMPTS), **change)


def test_an_empty_prompt_among_others_is_refused():
    with pytest.raises(ValueError, match="empty prompt"):
        generate(
            bigrams.model(TARGET),
            None,
            (jnp.ones((2, 3), jnp.int32), jnp.array([3, 0])),
            keys=jax.random.key(0),
            max_new_tokens=2,
        )
