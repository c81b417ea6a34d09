"""Block verification through `generate`: texts of several steps follow the target jointly.

A step of block verification looks at all its drafts and uniforms, also at those after the prefix
that it accepts. The next step draws at the same positions: were draws keyed by position alone, its
drafts would be those that were looked at. Token by token this fault shows nowhere.
"""

import functools

import bigrams
import numpy as np
import oracle
import oracle_block
import pytest
from test_laws import check_counts, make_keys

import specjax
from specjax import Origin, SamplingParams, SpeculativeConfig

pytestmark = [pytest.mark.once, pytest.mark.lenient]

V, K, LENGTH, PROMPT = 3, 3, 4, (1, 2)
# Of the tables of 300 seeds this one shows both faults best. Of 13,000 texts of 4 tokens a residual
# without rho is seen with probability 0.999 (asserted below). Drafts keyed by position alone need
# more: 24,000 gave a chi-square of 318 where 80 is expected and 155 refused.
NUM_REQUESTS, SEED = 20_000, 244
# Requests after those, of which each row keeps its two likeliest tokens: so few show as much.
NUM_CUT, TOP_K = 4_000, 2


@functools.cache
def tables():
    """log p of target and draft [V, V, V], by the last two tokens; no token is rare."""
    rng = np.random.default_rng(SEED)
    return [np.log(0.9 * rng.dirichlet(np.ones(V), (V, V)) + 0.1 / V) for _ in range(2)]


def rows_after(table, top_k=V):
    def row_after(text):
        p = np.exp(table[(*PROMPT, *text)[-2:]])
        p = np.where(p >= np.sort(p)[-top_k], p, 0.0)
        return p / p.sum()

    return row_after


@functools.cache
def decode():
    """Texts [B, LENGTH] and the origins of their tokens; more is generated, so that K stays 3."""
    target, draft = map(bigrams.model, tables())
    size = NUM_REQUESTS + NUM_CUT
    output = specjax.generate(
        target,
        specjax.model_drafter(draft),
        (np.tile(np.int32(PROMPT), (size, 1)), np.full(size, len(PROMPT), np.int32)),
        keys=make_keys(size, SEED),
        config=SpeculativeConfig(K, rejection_sample_method="block"),
        sampling=SamplingParams(top_k=np.repeat([0, TOP_K], [NUM_REQUESTS, NUM_CUT])),
        max_new_tokens=LENGTH + K,
        options=specjax.LoopOptions(max_length=16),
    )
    new = slice(len(PROMPT), len(PROMPT) + LENGTH)
    return np.asarray(output.token_ids)[:, new], np.asarray(output.origins)[:, new]


def without_rho(target, draft):
    """The distribution of texts if rho were missing in the residual; no draft comes first."""
    fault = "rho is missing in the residual"
    of_step = functools.partial(oracle_block.output_distribution, fault=fault)
    return {
        (first, *text): target(())[first] * mass
        for first in range(V)
        for text, mass in oracle.steps_distribution(
            lambda x, first=first: target((first, *x)),
            lambda x, first=first: draft((first, *x)),
            K,
            LENGTH - 1,
            of_step=of_step,
        ).items()
    }


def check_texts(texts, origins, **options):
    # A step ends with the token that it does not accept. The first has no drafts.
    num_drafted_steps = np.sum(origins[:, :-1] != Origin.ACCEPTED, axis=1)
    assert np.mean(num_drafted_steps >= 3) > 0.1
    target, draft = (rows_after(table, **options) for table in tables())
    distribution = oracle.joint_distribution(target, LENGTH)
    check_counts(texts, distribution, without_rho(target, draft))


def test_texts_of_several_steps_follow_the_target_jointly():
    check_texts(*(x[:NUM_REQUESTS] for x in decode()))


def test_texts_under_sampling_parameters_follow_the_processed_target_jointly():
    check_texts(*(x[NUM_REQUESTS:] for x in decode()), top_k=TOP_K)
