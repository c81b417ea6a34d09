"""The models of docs/your_model.md: sampled texts follow them, and the page's check sees faults."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pages
import pytest
from flax import nnx
from scipy import stats

import specjax

pytestmark = [pytest.mark.lenient, pytest.mark.once]

VOCAB, NUM_NEW, COPIES, PROMPT = 5, 3, 3000, [1, 4, 0]


@pytest.fixture(scope="module")
def page():
    """The names that the page's code defines."""
    return pages.define("your_model.md")


def build(page, kind, seed=0):
    if kind == "linen":
        decoder = page["Decoder"](vocab_size=VOCAB, num_layers=1)
        return page["linen_model"](decoder, page["make_variables"](decoder, seed))
    module = page["NNXDecoder"](nnx.Rngs(seed), vocab_size=VOCAB, num_layers=1, max_length=32)
    return page["nnx_model"](module, widest_call=8)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_sampled_texts_have_the_probabilities_that_the_model_gives_them(page, kind):
    target, draft = build(page, kind), build(page, kind, seed=1)
    output = specjax.generate(
        target,
        specjax.model_drafter(draft),
        [PROMPT] * COPIES,
        keys=jax.random.key(0),
        max_new_tokens=NUM_NEW,
        temperature=1.0,
        config=specjax.SpeculativeConfig(num_speculative_tokens=2),
        options=specjax.LoopOptions(prefill_chunk_size=8, max_length=16),
    )
    counted = np.zeros((VOCAB,) * NUM_NEW)
    texts = np.asarray(output.token_ids)[:, len(PROMPT) : len(PROMPT) + NUM_NEW]
    np.add.at(counted, tuple(texts.T), 1)
    rate = float(output.metrics.draft_acceptance_rate)
    assert 0.2 < rate < 0.95  # drafts of both fates

    endings = np.array(list(itertools.product(range(VOCAB), repeat=NUM_NEW)))
    whole = np.concatenate([np.tile(PROMPT, (len(endings), 1)), endings], axis=1)
    places = np.broadcast_to(np.arange(whole.shape[1]), whole.shape)
    cache = target.init_cache(*whole.shape)
    hidden, _ = target.apply(target.params, jnp.asarray(whole), jnp.asarray(places), cache)
    logprobs = jax.nn.log_softmax(target.logits(target.params, hidden)[:, len(PROMPT) - 1 : -1])
    of_text = np.take_along_axis(np.asarray(logprobs), endings[..., None], axis=2).sum((1, 2))
    expected = np.exp(of_text.astype(np.float64)) * COPIES
    counted, rare = counted.ravel(), expected < 5
    counted = np.append(counted[~rare], counted[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(counted, expected * counted.sum() / expected.sum()).pvalue > 1e-4


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_the_check_of_the_page_passes_its_models(page, kind):
    page["check_model"](build(page, kind), [1, 2, 3, 4, 0, 2])


def shift_positions(token_ids, positions):
    return token_ids, positions + 1


def share_an_index(token_ids, positions):
    return token_ids, jnp.broadcast_to(positions[:1], positions.shape)


def write_padding(token_ids, positions):
    return token_ids, jnp.maximum(positions, 0)


@pytest.mark.parametrize("fault", [share_an_index, write_padding, shift_positions])
def test_the_check_of_the_page_sees_models_that_break_a_rule(page, fault):
    model = build(page, "linen")

    def apply(params, token_ids, positions, cache):
        # The whole text is read rightly, so that the step after it differs.
        if positions.shape[0] == 1:
            return model.apply(params, token_ids, positions, cache)
        return model.apply(params, *fault(token_ids, positions), cache)

    broken = specjax.Model(model.params, model.init_cache, apply, model.logits)
    with pytest.raises(AssertionError):
        page["check_model"](broken, [1, 2, 3, 4, 0, 2])
