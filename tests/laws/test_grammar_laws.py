"""Under a grammar the texts of several steps follow the masked target, drafts masked or not.

The distribution is enumerated in float64. Texts that the grammar forbids have probability 0, so a
mask of a wrong row is seen in some requests; one that forbids too much is seen by chi-square.
"""

import automata
import bigrams
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling_laws import deviation

import specjax
from specjax import Finish, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.once

V, K, PROMPT, NUM_TOKENS, TEMPERATURE = automata.V, 3, [1, 2], 5, 0.8
TARGET, DRAFT = bigrams.pair(V, seed=4)
GRAMMAR = specjax.Grammar(*automata.tables())
# Requests, the state in which they begin, and whether their draft is masked.
SIZE = 1_500
KINDS = [(0, True), (0, False), (2, True), (2, False), (-1, True)]
MODEL = specjax.model_drafter(bigrams.model(DRAFT))


def propose(params, state, token_ids, hidden, *, history, **options):
    """Drafts by a model, of some requests without the grammar."""
    table, is_masked = params
    grammar_state = jnp.where(is_masked, history.grammar_state, -1)
    history = history._replace(grammar_state=grammar_state)
    return MODEL.propose(table, state, token_ids, hidden, history=history, **options)


def draw():
    """Continuations of all requests, i32[B, NUM_TOKENS], kind after kind, and the metrics."""
    starts, is_masked = (np.repeat(column, SIZE) for column in zip(*KINDS, strict=True))
    drafter = specjax.Drafter(
        (MODEL.params, jnp.asarray(is_masked)),
        lambda params, *sizes: MODEL.init(params[0], *sizes),
        lambda params, *chunk: MODEL.extend(params[0], *chunk),
        propose,
    )
    output = specjax.generate(
        bigrams.model(TARGET),
        drafter,
        *bigrams.prompts([PROMPT] * len(starts)),
        keys=bigrams.keys(len(starts), seed=3),
        config=SpeculativeConfig(K),
        max_new_tokens=NUM_TOKENS,
        max_length=len(PROMPT) + NUM_TOKENS,
        temperature=TEMPERATURE,
        sampling=SamplingParams(grammar=GRAMMAR, grammar_state=starts.astype(np.int32)),
    )
    np.testing.assert_array_equal(output.finish, Finish.LENGTH)
    return np.asarray(output.token_ids)[:, len(PROMPT) :], output.metrics


def test_several_steps_follow_the_masked_target_jointly():
    drawn, metrics = draw()
    rates = []
    for n, (start, _) in enumerate(KINDS):
        rows = slice(n * SIZE, (n + 1) * SIZE)
        probs = automata.joint_probs(TARGET, PROMPT, NUM_TOKENS, start, TEMPERATURE)
        counts = np.zeros_like(probs)
        np.add.at(counts, tuple(drawn[rows].T), 1)
        for axes in ((), (3, 4), (0, 1)):
            z = deviation(counts.sum(axes), probs.sum(axes))
            assert abs(z) < 5, f"another distribution than the masked target's: {z:.1f}"
        drafted, accepted = metrics.num_drafted[rows], metrics.num_accepted[rows]
        rates.append(float(accepted.sum() / drafted.sum()))
    # A draft that the grammar masks, too, is accepted more.
    assert rates[0] > rates[1] + 0.1
    assert rates[2] > rates[3] + 0.1
