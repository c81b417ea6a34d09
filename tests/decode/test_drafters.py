"""Drafters on a Markov chain: a greedy text is the target's, whatever drafts it, in fewer steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Draft, Origin, SpeculativeConfig
from specjax.markov_chain import markov_chain

pytestmark = pytest.mark.once

K, NEW, PROMPTS = 2, 9, [[3, 1], [2]]
# The token after 0 to 3 is 1, 2, 3 and 0, or, by the draft, 1, 2, 0 and 0.
TARGET = markov_chain(np.eye(4)[[1, 2, 3, 0]] * 0.9 + 0.025)
DRAFT = markov_chain(np.eye(4)[[1, 2, 0, 0]] * 0.9 + 0.025)
TEXTS = [[3, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2], [2, 3, 0, 1, 2, 3, 0, 1, 2, 3]]
CONFIG = SpeculativeConfig(num_speculative_tokens=K)
VALUES = dict(keys=jax.random.key(0), temperature=0.0, max_new_tokens=NEW, config=CONFIG)


def draft_one_and_two(params, state, token_ids, hidden, inputs, **options):
    return Draft(jnp.tile(jnp.arange(1, 1 + K), (len(PROMPTS), 1))), state


DRAFTERS = {
    "ngram": specjax.ngram_drafter(),
    "whole prompt": specjax.whole_prompt_drafter((), lambda *prompts: (), draft_one_and_two),
}


def texts(output):
    rows = specjax.unpad(output.token_ids)
    return [row[: len(text)] for row, text in zip(rows, TEXTS, strict=True)]


def test_a_model_s_drafts_are_accepted_where_the_target_would_have_said_them():
    output = specjax.generate(TARGET, specjax.model_drafter(DRAFT), PROMPTS, **VALUES)
    assert texts(output) == TEXTS
    assert output.finish.tolist() == [specjax.Finish.LENGTH] * 2
    # The draft is wrong after token 2 alone, and of two drafted tokens both may be accepted.
    origins = np.asarray(output.origins)
    accepted = (origins == Origin.ACCEPTED).sum(1)
    assert accepted.tolist() == output.metrics.num_accepted.sum(1).tolist()
    assert accepted.min() >= NEW // 2
    after_two = np.asarray(output.token_ids)[:, :-1] == 2
    assert not (after_two & (origins[:, 1:] == Origin.ACCEPTED)).any()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_loop_of_steps_ends_with_the_target_s_texts_before_it_took_a_step_for_each_token(name):
    drafter = DRAFTERS[name]
    state = specjax.init(TARGET, drafter, PROMPTS, **VALUES)
    num_steps = 0
    while np.any(state.finish == 0):
        state, _ = specjax.step(TARGET, drafter, state, config=CONFIG)
        num_steps += 1
    assert texts(state) == TEXTS
    assert state.finish.tolist() == [specjax.Finish.LENGTH] * 2
    assert num_steps == state.metrics.num_steps.max() < NEW - 1


def test_step_costs_are_measured_and_come_back_from_a_file(tmp_path):
    costs = specjax.measure_step_costs(
        TARGET,
        DRAFTERS["ngram"],
        batch_sizes=(2,),
        max_num_speculative_tokens=1,
        context=4,
        num_steps=2,
        rounds=1,
    )
    assert min(costs.milliseconds[0]) > 0
    costs.save(tmp_path / "costs.json")
    config = SpeculativeConfig("auto", step_costs=specjax.StepCosts.load(tmp_path / "costs.json"))
    assert config.for_batch_size(7).step_costs == costs.milliseconds[0]
