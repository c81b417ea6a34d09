"""Under a grammar the texts of several steps follow the masked target, drafts masked or not.

The distribution is enumerated in float64. Texts that the grammar forbids have probability 0, so a
mask of a wrong row is seen in some requests; one that forbids too much is seen by chi-square.
"""

import functools

import automata
import bigrams
import jax.numpy as jnp
import numpy as np
import pytest
from test_sampling_laws import deviation

import specjax
from specjax import Finish, RowMasks, SamplingParams, SpeculativeConfig

pytestmark = pytest.mark.once

V, K, PROMPT, NUM_TOKENS, TEMPERATURE = automata.V, 3, [1, 2], 5, 0.8
TARGET, DRAFT = bigrams.pair(V, seed=4)
GRAMMAR = specjax.Grammar(*automata.tables())
SIZE = 600
# Requests, the state in which they begin, by the automaton on the device or a host's matcher (-1 is
# no grammar of that kind), and whether their draft is masked.
KINDS = [(0, -1, True), (0, -1, False), (2, -1, True), (2, -1, False), (-1, -1, True)]
BY_HOST = [(-1, 0, True), (-1, 2, True)]
MODEL = specjax.model_drafter(bigrams.model(DRAFT))


def propose(params, state, token_ids, hidden, inputs, **options):
    """Drafts by a model, of some requests without the grammar."""
    table, is_masked = params
    grammar_state = jnp.where(is_masked, inputs.history.grammar_state, -1)
    inputs = inputs._replace(history=inputs.history._replace(grammar_state=grammar_state))
    return MODEL.propose(table, state, token_ids, hidden, inputs, **options)


@functools.cache
def draw():
    """Continuations of each kind of request, i32[SIZE, NUM_TOKENS], and their acceptance rates."""
    kinds = [*KINDS, *BY_HOST]
    starts, hosts, is_masked = (np.repeat(column, SIZE) for column in zip(*kinds, strict=True))
    target, config = bigrams.model(TARGET), SpeculativeConfig(K)
    drafter = specjax.Drafter(
        (MODEL.params, jnp.asarray(is_masked)),
        lambda params, *sizes: MODEL.init(params[0], *sizes),
        lambda params, *chunk: MODEL.extend(params[0], *chunk),
        propose,
    )
    matchers = [None if start < 0 else automata.Matcher(start) for start in hosts]
    masks = RowMasks(matchers, [len(PROMPT)] * len(starts), V)
    state = specjax.init(
        target,
        drafter,
        [PROMPT] * len(starts),
        keys=bigrams.keys(len(starts), seed=3),
        config=config,
        max_new_tokens=NUM_TOKENS,
        options=specjax.LoopOptions(max_length=len(PROMPT) + NUM_TOKENS),
        temperature=TEMPERATURE,
        sampling=SamplingParams(
            grammar=GRAMMAR, grammar_state=starts.astype(np.int32), allowed=masks.first()
        ),
    )
    while not np.all(state.finish):
        rows = masks.of_rows(state)
        state, _ = specjax.step(target, drafter, state, config=config, allowed=rows)
    np.testing.assert_array_equal(state.finish, Finish.LENGTH)
    drawn = np.asarray(state.token_ids)[:, len(PROMPT) :]
    counts = [np.sum(x, axis=1) for x in (state.metrics.num_accepted, state.metrics.num_drafted)]
    accepted, drafted = (np.split(x, len(kinds)) for x in counts)
    rates = [np.sum(x) / np.sum(y) for x, y in zip(accepted, drafted, strict=True)]
    return dict(zip(kinds, zip(np.split(drawn, len(kinds)), rates, strict=True), strict=True))


def check_distribution(drawn, start):
    """Compares all tokens, the first three and the last three with the masked target's."""
    probs = automata.joint_probs(TARGET, PROMPT, NUM_TOKENS, start, TEMPERATURE)
    counts = np.zeros_like(probs)
    np.add.at(counts, tuple(drawn.T), 1)
    for axes in ((), (3, 4), (0, 1)):
        z = deviation(counts.sum(axes), probs.sum(axes))
        assert abs(z) < 5, f"another distribution than the masked target's: {z:.1f}"


@pytest.mark.parametrize("kind", KINDS)
def test_several_steps_follow_the_masked_target_jointly(kind):
    check_distribution(draw()[kind][0], kind[0])


@pytest.mark.parametrize("kind", BY_HOST)
def test_several_steps_with_masks_of_a_host_follow_the_masked_target_jointly(kind):
    check_distribution(draw()[kind][0], kind[1])


def test_a_draft_that_the_grammar_masks_is_accepted_more():
    rates = [draw()[kind][1] for kind in (*KINDS, *BY_HOST)]
    assert rates[0] > rates[1] + 0.1
    assert rates[2] > rates[3] + 0.1
    # Masks of a host are the target's alone.
    assert abs(rates[5] - rates[1]) < 0.06
    assert abs(rates[6] - rates[3]) < 0.06
