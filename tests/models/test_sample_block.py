"""Rows of logits that are there at once are drawn as if they came one after another."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import processed
import pytest

import specjax
from specjax import SamplingParams, SpeculativeConfig
from specjax.decode.propose import propose_step
from specjax.models.heads.sample_block import sample_block

pytestmark = pytest.mark.once

SIZE, K, VOCAB, DRAFT_VOCAB = 5, 3, 300, 140
TOKEN_MAP = np.random.default_rng(0).permutation(VOCAB)[:DRAFT_VOCAB].astype(np.int32)
LOGITS = 2 * np.random.default_rng(1).normal(size=(SIZE, K, DRAFT_VOCAB)).astype(np.float32)
RULES = SamplingParams(
    top_k=jnp.array([3, 9, 200, 40, 1]),
    bias=jnp.asarray(np.random.default_rng(2).normal(size=(SIZE, VOCAB)).astype(np.float32)),
    allowed=jnp.arange(VOCAB) % 3 > 0,
)


@functools.partial(jax.jit, static_argnames=("config", "is_mapped", "one_by_one"))
def draft(logits, sampling, keys, *, config, is_mapped, one_by_one, history=None):
    inputs = specjax.DraftInputs(
        keys,
        positions=jnp.arange(7, 7 + SIZE, dtype=jnp.int32),
        num_tokens=jnp.array([3, 2, -1, 3, 3], jnp.int32),
        temperature=jnp.array([0.0, 0.5, 1.0, 2.0, -1.0]),
        sampling=sampling,
        history=history,
    )
    given = {"config": config, "implementation": None}
    if is_mapped:
        given |= {"token_map": jnp.asarray(TOKEN_MAP), "vocab_size": VOCAB}
    if not one_by_one:
        return sample_block(logits, inputs, **given)
    last = jnp.zeros(SIZE, jnp.int32)

    def step(i, ids, at):
        return jax.lax.dynamic_index_in_dim(logits, i, axis=1, keepdims=False), i + 1

    return propose_step(step, jnp.int32(0), last, inputs, **given)[0]


@pytest.mark.parametrize(
    ("sampling", "is_mapped", "options"),
    [
        (None, False, {}),
        (None, True, {}),
        (RULES, True, {}),
        (RULES, True, {"rejection_sample_method": "coupled"}),
        (None, True, {"draft_sample_method": "greedy"}),
    ],
    ids=["plain", "mapped", "rules", "coupled", "greedy"],
)
def test_a_block_is_drawn_at_once_as_it_is_one_by_one(sampling, is_mapped, options):
    config = SpeculativeConfig(K, **options)
    keys = jax.random.split(jax.random.key(3), SIZE)
    found, wanted = (
        draft(LOGITS, sampling, keys, config=config, is_mapped=is_mapped, one_by_one=one_by_one)
        for one_by_one in (False, True)
    )
    assert len(np.unique(found.token_ids)) > K
    chex.assert_trees_all_close(found, wanted, rtol=1e-6)


def test_a_penalty_counts_the_tokens_drafted_before():
    """The likeliest token of every row is one: the first drafts it, the others their next."""
    logits, wanted = LOGITS + 20 * (np.arange(DRAFT_VOCAB) == 5), np.full((SIZE, K), 5)
    counts = specjax.count_tokens(
        jnp.zeros((SIZE, 1), jnp.int32), jnp.zeros(SIZE, jnp.int32), DRAFT_VOCAB
    )
    found = draft(
        jnp.asarray(logits),
        SamplingParams(frequency_penalty=1e4),
        jax.random.split(jax.random.key(3), SIZE),
        config=SpeculativeConfig(K, draft_sample_method="greedy"),
        is_mapped=False,
        one_by_one=False,
        history=specjax.History(counts=counts),
    )
    for i in range(1, K):
        left = logits[:, i].copy()
        np.put_along_axis(left, wanted[:, :i], -np.inf, axis=-1)
        wanted[:, i] = left.argmax(-1)
    np.testing.assert_array_equal(found.token_ids, wanted)


def test_a_grammar_masks_each_row_by_the_tokens_drafted_before():
    """In state s a token is allowed that leaves s when divided by 3; the next state is s + 1."""
    classes = np.arange(DRAFT_VOCAB, dtype=np.int32) % 3
    allowed = classes == np.arange(3)[:, None]
    found = draft(
        LOGITS,
        SamplingParams(
            grammar=specjax.Grammar(
                (np.eye(3, dtype=np.int32) + np.arange(3, dtype=np.int32)[:, None]) % 3,
                classes,
                processed.pack(allowed),
            ),
            grammar_state=2,
        ),
        jax.random.split(jax.random.key(3), SIZE),
        config=SpeculativeConfig(K, draft_sample_method="greedy"),
        is_mapped=False,
        one_by_one=False,
    )
    states = (2 + np.arange(K)) % 3
    wanted = np.where(allowed[states], LOGITS, -np.inf).argmax(-1)
    np.testing.assert_array_equal(found.token_ids, wanted)
