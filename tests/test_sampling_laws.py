"""Speculation under truncation, penalties and masks: the law is the processed target's.

The law of a continuation is enumerated in float64 from the definitions in `processed`; the
faults at the end are what the size of the sample was chosen to see.
"""

import itertools

import bigrams
import jax
import numpy as np
import processed
import pytest

import specjax
from specjax import Finish, SamplingParams, SpeculativeConfig, loop

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


def draw(drafter, size, sampling=EVERYTHING, method="probabilistic"):
    """Counts of the continuations that `generate` draws."""
    ids, lengths = bigrams.prompts([PROMPT] * size)
    output = specjax.generate(
        bigrams.model(TARGET),
        drafter,
        ids,
        lengths,
        keys=bigrams.keys(size),
        config=SpeculativeConfig(num_speculative_tokens=K, draft_sample_method=method),
        max_new_tokens=NUM_TOKENS,
        temperature=TEMPERATURE,
        sampling=sampling,
    )
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)
    new = np.asarray(output.token_ids)[:, len(PROMPT) : len(PROMPT) + NUM_TOKENS]
    counts = np.zeros((V,) * NUM_TOKENS)
    np.add.at(counts, tuple(new.T), 1)
    return counts, output


def check_law(drafter, size=SIZE, **options):
    z = deviation(draw(drafter, size, **options)[0], joint_law())
    assert abs(z) < 5, f"the law is another: {z:.1f}"


def wrap(drafter, change_options=lambda options: options, change_draft=lambda draft: draft):
    """The drafter with other options than the loop gave, and another draft than it made."""

    def propose(*arguments, **options):
        draft, state = drafter.propose(*arguments, **change_options(options))
        return change_draft(draft), state

    return specjax.Drafter(drafter.params, drafter.init, propose)


MODEL = specjax.model_drafter(bigrams.model(DRAFT))


def otherwise(options):
    """Truncated and penalised by other numbers than the target, masked and biased by none."""
    other = SamplingParams(top_k=2, presence_penalty=-1.0, bad_words=np.array([[1, 2]]))
    return options | {"sampling": other}


DRAFTERS = {
    "a model processed like the target": MODEL,
    "a model processed otherwise": wrap(MODEL, otherwise),
    "a model of fewer tokens": specjax.model_drafter(bigrams.model(DRAFT[..., :3])),
    "a model of more tokens": specjax.model_drafter(bigrams.model(bigrams.pair(V + 2, 8)[1])),
    "its own past": specjax.ngram_drafter(),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_several_steps_follow_the_processed_target_jointly(name):
    check_law(DRAFTERS[name])


# Faults, each of which must be seen --------------------------------------------------------------


def q_is_of_the_whole_row(draft):
    """Drawn from the truncated law and judged as if from the whole one."""
    return draft._replace(cutoff=None, logprobs=None, logsumexp=None)


def statistics_are_of_the_whole_row(draft):
    """The cutoff arrives, and the statistics do not know of it."""
    whole = specjax.top_logprobs(draft.logits, draft.token_ids, 0, temperature=draft.temperature)
    scaled = draft.logits / draft.temperature[:, None, None]
    return draft._replace(logprobs=whole.logprob, logsumexp=jax.nn.logsumexp(scaled, axis=-1))


def every_row_counts_all_drafts(logits, sampling, **options):
    late = options | {"first_row": logits.shape[1] - 1}
    return specjax.apply_sampling(logits, sampling, **late)


def temperature_is_applied_twice(logits, sampling, **options):
    logits, cutoff = specjax.apply_sampling(logits, sampling, **options)
    heat = options["temperature"][:, None]
    return logits / heat[..., None], cutoff / heat


@pytest.mark.parametrize("fault", [q_is_of_the_whole_row, statistics_are_of_the_whole_row])
def test_a_draft_that_hides_its_truncation_is_seen(fault):
    with pytest.raises(AssertionError, match="the law"):
        check_law(wrap(MODEL, change_draft=fault))


@pytest.mark.parametrize(
    ("size", "fault"),
    # Of sizes of their own: a compiled program would not see the fault.
    [(SIZE + 1, every_row_counts_all_drafts), (SIZE + 2, temperature_is_applied_twice)],
)
def test_a_target_processed_wrongly_is_seen(size, fault, monkeypatch):
    monkeypatch.setattr(loop, "apply_sampling", fault)
    with pytest.raises(AssertionError, match="the law"):
        check_law(MODEL, size)
