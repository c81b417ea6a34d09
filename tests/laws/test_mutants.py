"""Wrong samplers, each seen by a check that the right ones pass.

A mutant is the library with another input or with one function replaced. The check next to it,
which other tests run on the library itself, must fail.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from fixed_noise import replace_everywhere
from scipy import stats
from test_edges import check_impossible_tokens_are_rejected, check_no_masked_token_at
from test_laws import (
    ALPHA,
    Setting,
    check_acceptance,
    check_accepted_plus_residual_mass,
    check_output_distribution,
    check_several_steps,
    check_synthetic_rates,
    library_samplers,
    make_keys,
)
from verify_cases import check_against_oracle, sampled_case

import specjax
from specjax import Stream
from specjax.core import acceptance, noise, residual

pytestmark = pytest.mark.once


def with_draft(samplers, change):
    """Samplers whose verification sees `change(draft, target_logits, options)` as its draft."""

    def verify(draft, target_logits, **options):
        return samplers.verify(change(draft, target_logits, options), target_logits, **options)

    return samplers._replace(verify=verify)


def residual_is_the_target(samplers):
    """Carried statistics accept rightly; logits that say q = 0 subtract nothing."""
    return with_draft(samplers, lambda draft, *_: draft.replace(logits=draft.logits * 0 - 1e30))


def ratio_is_five_percent_too_large(samplers):
    inflation = jnp.float32(np.log(1.05))

    def inflate(draft, *_):
        return draft.replace(logprobs=draft.logprobs - inflation)

    return with_draft(samplers, inflate)


def noise_is_shared_by_draft_and_residual(samplers):
    def sample(logits, *, stream, **options):
        return samplers.sample(logits, stream=Stream.TARGET, **options)

    return samplers._replace(sample=sample)


def bonus_is_from_the_draft(samplers):
    def verify(draft, target_logits, **options):
        bonus = jnp.broadcast_to(draft.logits[:, -1], target_logits[:, -1].shape)
        return samplers.verify(draft, target_logits.at[:, -1].set(bonus), **options)

    return samplers._replace(verify=verify)


def rows_are_off_by_one(samplers):
    def verify(draft, target_logits, **options):
        return samplers.verify(draft, jnp.roll(target_logits, -1, axis=1), **options)

    return samplers._replace(verify=verify)


def temperature_is_on_one_side_only(samplers):
    def forget(draft, *_):
        one = jnp.ones_like(draft.temperature)
        return draft.replace(temperature=one, logprobs=None, logsumexp=None)

    return with_draft(samplers, forget)


def sampled_tokens_are_cut_off(samplers):
    """What the target cannot emit becomes -1, "nothing drafted", instead of being rejected."""

    def cut(draft, target_logits, options):
        rows = target_logits[:, :-1]
        ids = jnp.clip(draft.token_ids, 0, rows.shape[-1] - 1)
        logits = jnp.take_along_axis(rows, ids[..., None], axis=-1)[..., 0]
        possible = (logits > -jnp.inf) & (logits >= options["cutoff"][:, :-1])
        return draft.replace(token_ids=jnp.where(possible, draft.token_ids, -1))

    return with_draft(samplers, cut)


def q_is_dropped(samplers):
    def drop(draft, *_):
        return draft.replace(logits=None, logprobs=None, logsumexp=None, cutoff=None, rows=None)

    return with_draft(samplers, drop)


def coupled_drafts_are_verified_as_one_hot(samplers):
    return q_is_dropped(noise_is_shared_by_draft_and_residual(samplers))


def rates_are_taken_as_they_are(samplers):
    return samplers._replace(conditional_rates=lambda rates: rates)


@pytest.mark.parametrize(
    ("mutate", "check", "complaint"),
    [
        (residual_is_the_target, check_output_distribution, "distribution"),
        (ratio_is_five_percent_too_large, check_output_distribution, "distribution"),
        (noise_is_shared_by_draft_and_residual, check_output_distribution, "another distribution"),
        (coupled_drafts_are_verified_as_one_hot, check_output_distribution, "distribution"),
        (bonus_is_from_the_draft, check_output_distribution, "outside the distribution"),
        (rows_are_off_by_one, check_output_distribution, "distribution"),
        (temperature_is_on_one_side_only, check_output_distribution, "distribution"),
        (sampled_tokens_are_cut_off, check_output_distribution, "distribution"),
        (q_is_dropped, check_acceptance, "accepted at"),
        (rates_are_taken_as_they_are, check_synthetic_rates, "accepted at"),
    ],
)
def test_a_wrong_sampler_is_seen(mutate, check, complaint, implementation):
    with pytest.raises(AssertionError, match=complaint):
        check(mutate(library_samplers(implementation)))


def test_a_dropped_q_stays_lossless_and_shows_in_the_acceptance_alone(implementation):
    check_several_steps(q_is_dropped(library_samplers(implementation)))


def test_noise_at_the_wrong_position_is_seen_by_the_oracle(implementation):
    """A constant shift keeps the distribution of one step: only the address tells."""

    def shifted(draft, target_logits, *, positions, **options):
        verify = library_samplers(implementation).verify
        return verify(draft, target_logits, positions=positions + jnp.int32(1), **options)

    with pytest.raises(AssertionError, match="num_accepted"):
        check_against_oracle(shifted, sampled_case(1))


def test_a_wrong_ratio_is_seen_by_the_exact_identity():
    def inflated(coin, target_logprob, draft_logprob):
        larger = target_logprob + jnp.float32(np.log(1.05))
        return acceptance.accept_random(coin, larger, draft_logprob)

    check_accepted_plus_residual_mass(acceptance.accept_random, residual.residual_probs)
    with pytest.raises(AssertionError, match="tolerance"):
        check_accepted_plus_residual_mass(inflated, residual.residual_probs)
    with pytest.raises(AssertionError, match="tolerance"):
        check_accepted_plus_residual_mass(
            acceptance.accept_random, lambda target, draft: jnp.exp(target)
        )


def coin_may_be_zero(monkeypatch):
    """The textbook rule `u q <= p` with u in [0, 1): at u = 0 it accepts p = 0."""

    def uniform_from_bits(bits):
        return bits.astype(jnp.float32) * jnp.float32(2.0**-32)

    def accept(coin, target_logprob, draft_logprob):
        return coin * jnp.exp(draft_logprob) <= jnp.exp(target_logprob)

    replace_everywhere(monkeypatch, noise.uniform_from_bits, uniform_from_bits)
    replace_everywhere(monkeypatch, acceptance.accept_random, accept)


def test_a_coin_that_can_accept_p_zero_is_seen(monkeypatch, implementation):
    coin_may_be_zero(monkeypatch)
    verify = library_samplers(implementation).verify
    with pytest.raises(AssertionError, match="a masked token"):
        check_no_masked_token_at(0, monkeypatch, verify, vocab_size=306)


def test_accepting_p_zero_is_seen_whatever_is_drawn(monkeypatch, implementation):
    """A rule that forgets p altogether, in a shape of its own."""

    def padded(columns):
        def verify(draft, logits, **options):
            logits = jnp.pad(logits, ((0, 0), (0, 0), (0, columns)), constant_values=-jnp.inf)
            return library_samplers(implementation).verify(draft, logits, **options)

        return verify

    check_impossible_tokens_are_rejected(padded(7))
    replace_everywhere(
        monkeypatch, acceptance.accept_random, lambda coin, p, q: jnp.ones_like(p, bool)
    )
    with pytest.raises(AssertionError, match="num_accepted"):
        check_impossible_tokens_are_rejected(padded(8))


# The decode loop: a model that reads its cache, so that a gap in it shows.

VOCAB = 5


def apply(params, token_ids, positions, cache):
    if token_ids.shape[1] == 2:
        fed_again = positions[:, 0]
        positions = positions.at[:, 0].set(jnp.where(params["forgets"], -1, fed_again))
    slots = jnp.where(positions < 0, cache.shape[1], positions)
    rows = jnp.arange(cache.shape[0])[:, None]
    cache = cache.at[rows, slots].set(token_ids, mode="drop")
    before = jnp.take_along_axis(cache, jnp.maximum(positions - 1, 0), axis=1)
    return jnp.stack([before, token_ids], axis=-1).astype(jnp.float32), cache


def logits(params, hidden):
    before, last = jnp.moveaxis(hidden.astype(jnp.int32), -1, 0)
    return params["table"][before, last]


def init_cache(batch_size, max_length):
    return jnp.zeros((batch_size, max_length), jnp.int32)


def second_order_model(table, forgets=False):
    """Logits from the last two tokens, the one before the last read from the cache.

    What it forgets is data, so that the right model and the wrong one share a program.
    """
    params = {"table": table, "forgets": jnp.asarray(forgets)}
    return specjax.Model(params, init_cache, apply, logits)


def random_table(seed):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(VOCAB,) * 3) * 2, jnp.float32)


@functools.cache
def changed_model_drafter(change):
    """The functions of a model's drafter that hands on `change(draft, params["fault"])`."""
    model = specjax.model_drafter(second_order_model(random_table(0)))

    def init(params, *sizes):
        return model.init(params["model"], *sizes)

    def extend(params, *chunk):
        return model.extend(params["model"], *chunk)

    def propose(params, *arguments, **options):
        draft, state = model.propose(params["model"], *arguments, **options)
        return change(draft, params["fault"]), state

    return init, extend, propose


def q_is_dropped_by(draft, fault):
    temperature = jnp.where(fault, 0, draft.temperature)
    return draft.replace(temperature=temperature)


def statistics_are_dropped(draft, fault):
    return draft.replace(logprobs=None, logsumexp=None)


NUM_DRAFTS = 2


def generate(target, draft, change=q_is_dropped_by, fault=False):
    """Metrics of 128 requests of 60 tokens; one program for models and faults, which are data."""
    params = {"model": draft.params, "fault": jnp.asarray(fault)}
    return specjax.generate(
        target,
        specjax.Drafter(params, *changed_model_drafter(change)),
        (np.ones((128, 2), np.int32), np.full(128, 2, np.int32)),
        keys=make_keys(128, 3),
        config=specjax.SpeculativeConfig(num_speculative_tokens=NUM_DRAFTS),
        max_new_tokens=60,
    ).metrics


def check_a_model_accepts_itself(forgets=False):
    """Over 2000 steps and more."""
    table = random_table(0)
    metrics = generate(second_order_model(table), second_order_model(table, forgets))
    assert int(metrics.num_steps.sum()) >= 2000
    rate = float(metrics.draft_acceptance_rate)
    assert rate > 0.999, f"accepted at {rate}"


def test_a_model_that_drafts_for_itself_accepts_everything():
    check_a_model_accepts_itself()


def test_a_last_token_missing_from_the_draft_s_cache_is_seen():
    with pytest.raises(AssertionError, match="accepted at"):
        check_a_model_accepts_itself(forgets=True)


def check_acceptance_of_generate(change=q_is_dropped_by, fault=False):
    """Rows that do not depend on the past: position i is accepted at (sum min(p, q))^(i + 1)."""
    rng = np.random.default_rng(9)
    rows = rng.normal(size=(2, VOCAB)).astype(np.float32)
    setting = Setting(rows[:1], rows[1:])
    p, q = setting.target_probs(()), setting.draft_probs(())
    target, draft = (
        second_order_model(jnp.broadcast_to(jnp.asarray(row), (VOCAB,) * 3)) for row in rows
    )
    metrics = generate(target, draft, change, fault)
    rates = np.minimum(p, q).sum(), p @ q
    accepted, one_hot = (rate ** np.arange(1, NUM_DRAFTS + 1) for rate in rates)
    n = np.asarray(metrics.num_drafted).sum(0)
    tolerance = stats.norm.isf(ALPHA) * np.sqrt(accepted * (1 - accepted) / n)
    assert np.all(accepted - one_hot > 5 * tolerance)
    measured = np.asarray(metrics.num_accepted).sum(0) / n
    near = np.abs(measured - accepted) < tolerance
    assert np.all(near), f"accepted at {measured}, not at {accepted}"


def test_q_arrives_through_generate():
    check_acceptance_of_generate()


def test_a_q_dropped_on_the_way_through_generate_is_seen():
    with pytest.raises(AssertionError, match="accepted at"):
        check_acceptance_of_generate(fault=True)


def test_a_draft_s_own_temperature_is_what_generate_verifies_with():
    """The right drafter with its statistics recomputed by verification accepts as much."""
    check_acceptance_of_generate(statistics_are_dropped)
