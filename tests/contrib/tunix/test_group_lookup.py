"""Drafts by what followed a request's last tokens in the texts of its group."""

import jax
import jax.numpy as jnp
import pytest

import specjax
from specjax.contrib.tunix import group_lookup_drafter
from specjax.markov_chain import markov_chain

# A drafter like others: those of specjax.decode say what another JAX does to one.
pytestmark = pytest.mark.once

CONFIG = specjax.SpeculativeConfig(num_speculative_tokens=3)


def lookup(groups, texts, **options):
    """Returns the drafts of texts, which are rows of ids padded with -1."""
    texts = jnp.array(texts, jnp.int32)
    drafter = group_lookup_drafter(groups, **options)
    draft, _ = drafter.propose(
        drafter.params,
        (),
        texts,
        None,
        specjax.DraftInputs(
            None,
            positions=jnp.sum(texts >= 0, axis=1, dtype=jnp.int32),
            num_tokens=jnp.full((len(groups),), 3, jnp.int32),
        ),
        config=CONFIG,
    )
    return specjax.unpad(draft.token_ids)


def test_a_request_drafts_what_followed_in_its_group_alone():
    texts = [[5, 6, 7, 8, -1], [1, 5, 6, -1, -1], [2, 5, 6, 9, 9], [3, 5, 6, -1, -1]]
    assert lookup([0, 0, 1, 1], texts) == [[], [7, 8], [9], [9, 9]]


def test_the_longest_suffix_wins_then_the_most_tokens_then_its_own_text():
    texts = [[4, 5, 1, 5, 2, 2, 2], [9, 9, 4, 5, -1, -1, -1], [5, 3, 3, 3, 4, 5, -1]]
    # "4 5" is followed by three tokens in the first text, "5" by three in the first and the third.
    assert lookup([0, 0, 0], texts)[1:] == [[1, 5, 2], [1, 5, 2]]
    assert lookup([0, 0, 0], texts, max_ngram=1)[1:] == [[2, 2, 2], [3, 3, 3]]


def test_an_empty_range_of_suffixes_is_refused():
    with pytest.raises(ValueError, match="min_ngram is 3 and max_ngram 2"):
        group_lookup_drafter([0], max_ngram=2, min_ngram=3)


def test_greedy_texts_do_not_depend_on_the_group():
    model = markov_chain(jax.nn.softmax(jax.random.normal(jax.random.key(1), (6, 6))))
    options = dict(keys=jax.random.key(0), config=CONFIG, max_new_tokens=20, temperature=0)
    prompts = [[0, 1], [3, 2], [0, 1]]
    plain = specjax.generate(model, None, prompts, **options)
    drafted = specjax.generate(model, group_lookup_drafter([0, 0, 0]), prompts, **options)
    assert specjax.unpad(drafted.token_ids) == specjax.unpad(plain.token_ids)
    assert drafted.metrics.num_accepted.sum() > 0
