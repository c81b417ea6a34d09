"""Speculation under truncation, penalties and masks: the law is the processed target's.

The law of a continuation is enumerated in float64 from the definitions in `processed`; the
faults at the end are what the size of the sample was chosen to see.
"""

import functools
import itertools

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import processed
import pytest

import specjax
from specjax import Finish, SamplingParams, SpeculativeConfig
from specjax.decode import loop
from specjax.processing.apply_sampling import apply_rules_and_filters

pytestmark = [pytest.mark.once, pytest.mark.optimised]

V, K, PROMPT, NUM_TOKENS, SIZE = 5, 2, [1, 2], 4, 30_000
_RNG = np.random.default_rng(1)
# Flat enough that truncation leaves several tokens, and a draft whose tail is another.
TARGET = 0.7 * _RNG.normal(size=(V,) * 3)
DRAFT = TARGET + 1.5 * _RNG.normal(size=TARGET.shape)
TEMPERATURE = 0.9
THRESHOLDS = {"top_k": 4, "top_p": 0.93, "min_p": 0.05}
RULES = {
    "bias": [0.3, 0.0, -0.4, 0.2, 0.0],
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "allowed": [True, True, True, True, False],
    "bad_words": [[2, 0], [1, 1]],
}
EVERYTHING = SamplingParams(
    **THRESHOLDS, **(RULES | {"bad_words": specjax.bad_words_array(RULES["bad_words"])})
)


def row_law(prompt, generated, temperature=TEMPERATURE, rules=RULES, thresholds=THRESHOLDS):
    """The processed target's law of the token behind a prompt and what was generated."""
    past = [0, *prompt, *generated]
    row = processed.process(np.float32(TARGET[past[-2], past[-1]]), prompt, generated, **rules)
    return row, processed.truncate(row, temperature, **thresholds)


def joint_law(num_tokens=NUM_TOKENS):
    """f64[V, ..., V], one axis per token."""
    law = np.zeros((V,) * num_tokens)
    law[...] = 1
    for n in range(num_tokens):
        for generated in itertools.product(range(V), repeat=n):
            behind = (slice(None),) * (num_tokens - n - 1)
            _, p = row_law(PROMPT, list(generated))
            for token in range(V):
                law[(*generated, token, *behind)] *= p[token]
    return law


def deviation(counts, law):
    """Standardised chi-square: about N(0, 1) if the law is right. Rare cells are one cell."""
    assert counts[law == 0].sum() == 0, "emitted what the law cannot"
    expected = law * counts.sum()
    usual = expected >= 5
    seen = np.append(counts[usual], counts[~usual].sum())
    due = np.append(expected[usual], expected[~usual].sum())
    seen, due = seen[due > 0], due[due > 0]
    df = len(due) - 1
    return (((seen - due) ** 2 / due).sum() - df) / np.sqrt(2 * df)


def draw(drafter, size=SIZE):
    """The continuations that `generate` draws, i32[size, NUM_TOKENS]."""
    ids, lengths = bigrams.prompts([PROMPT] * size)
    output = specjax.generate(
        bigrams.model(TARGET),
        drafter,
        ids,
        lengths,
        keys=bigrams.keys(size),
        config=SpeculativeConfig(num_speculative_tokens=K),
        max_new_tokens=NUM_TOKENS,
        temperature=TEMPERATURE,
        sampling=EVERYTHING,
    )
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)
    return np.asarray(output.token_ids)[:, len(PROMPT) : len(PROMPT) + NUM_TOKENS]


def check_law(drawn):
    counts = np.zeros((V,) * NUM_TOKENS)
    np.add.at(counts, tuple(drawn.T), 1)
    z = deviation(counts, joint_law())
    assert abs(z) < 5, f"the law is another: {z:.1f}"


MODEL = specjax.model_drafter(bigrams.model(DRAFT))
# Truncated and penalised by other numbers than the target, masked and biased by none.
OTHER = SamplingParams(
    top_k=np.int32(2),
    top_p=np.float32(1),
    min_p=np.float32(0),
    repetition_penalty=np.float32(1),
    frequency_penalty=np.float32(0),
    presence_penalty=np.float32(-1),
    bias=np.zeros(V, np.float32),
    allowed=np.ones(V, bool),
    bad_words=np.array([[1, 2]] * 2, np.int32),
)


def init_model(params, *prompt):
    return MODEL.init(params[0], *prompt)


def propose_by_model(params, *arguments, sampling, **options):
    """By the model, under the oddities of `model`."""
    table, (otherwise, cutoff_is_lost, statistics_are_whole) = params
    sampling = jax.tree.map(functools.partial(jnp.where, otherwise), OTHER, sampling)
    draft, state = MODEL.propose(table, *arguments, sampling=sampling, **options)
    whole = specjax.top_logprobs(draft.logits, draft.token_ids, 0, temperature=draft.temperature)
    scaled = draft.logits / draft.temperature[:, None, None]
    logsumexp = jax.nn.logsumexp(scaled, axis=-1)
    return draft._replace(
        cutoff=jnp.where(cutoff_is_lost, -jnp.inf, draft.cutoff),
        logprobs=jnp.where(statistics_are_whole, whole.logprob, draft.logprobs),
        logsumexp=jnp.where(statistics_are_whole, logsumexp, draft.logsumexp),
    ), state


def model(otherwise=False, cutoff_is_lost=False, statistics_are_whole=False):
    """A model processed like the target or otherwise, and faults of what it hands on.

    All are data: one program draws whatever is asked for.
    """
    odd = jnp.array([otherwise, cutoff_is_lost, statistics_are_whole])
    return specjax.Drafter((MODEL.params, odd), init_model, propose_by_model)


DRAFTERS = {
    "a model processed like the target": model(),
    "a model processed otherwise": model(otherwise=True),
    "a model of fewer tokens": specjax.model_drafter(bigrams.model(DRAFT[..., :3])),
    "a model of more tokens": specjax.model_drafter(bigrams.model(bigrams.pair(V + 2, 8)[1])),
    "its own past": specjax.ngram_drafter(),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_several_steps_follow_the_processed_target_jointly(name):
    check_law(draw(DRAFTERS[name]))


# Faults, each of which must be seen --------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        # Drawn from the truncated law and judged as if from the whole one.
        {"cutoff_is_lost": True, "statistics_are_whole": True},
        # The cutoff arrives, and the statistics do not know of it.
        {"statistics_are_whole": True},
    ],
    ids=" and ".join,
)
def test_a_draft_that_hides_its_truncation_is_seen(fault):
    with pytest.raises(AssertionError, match="the law"):
        check_law(draw(model(**fault)))


def every_row_counts_all_drafts(logits, rules, filters, context, **options):
    context = context._replace(first_row=jnp.int32(logits.shape[1] - 1))
    return apply_rules_and_filters(logits, rules, filters, context, **options)


def temperature_is_applied_twice(*arguments, temperature, **options):
    logits, cutoff = apply_rules_and_filters(*arguments, temperature=temperature, **options)
    temperature = temperature[:, None]
    return logits / temperature[..., None], cutoff / temperature


def test_a_target_processed_wrongly_is_seen(monkeypatch):
    """Each fault on requests of its own.

    Of a size of their own, too: a compiled program would not see the faults.
    """

    def wrong(*arguments, **options):
        late = every_row_counts_all_drafts(*arguments, **options)
        twice = temperature_is_applied_twice(*arguments, **options)
        return jax.tree.map(lambda x, y: jnp.concatenate([x[:SIZE], y[SIZE:]]), late, twice)

    monkeypatch.setattr(loop, "apply_rules_and_filters", wrong)
    for half in np.split(draw(MODEL, 2 * SIZE), 2):
        with pytest.raises(AssertionError, match="the law"):
            check_law(half)
