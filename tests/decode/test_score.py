"""`score` gives the log-probabilities of one forward pass over each text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.markov_chain import markov_chain
from specjax.models import TransformerConfig, build

pytestmark = pytest.mark.lenient

V = 64
LENGTHS = (37, 1, 2, 140, 90, 2, 133)


def texts(lengths=LENGTHS, vocab_size=V):
    return [np.random.default_rng(n).integers(0, vocab_size, n).tolist() for n in lengths]


def chain():
    """A Markov chain with a token of probability 0 in each row."""
    weights = np.random.default_rng(0).random((V, V)).astype(np.float32)
    np.fill_diagonal(weights, 0)
    return markov_chain(weights / weights.sum(axis=1, keepdims=True))


def recurrent(size=16):
    """A recurrent network that keeps its state after each position, so that it can go back."""
    random = np.random.default_rng(1)
    params = {
        name: jnp.asarray(random.normal(size=shape), jnp.float32)
        for name, shape in (("embed", (V, size)), ("turn", (size, size)), ("head", (size, V)))
    }

    def init_cache(batch_size, max_length):
        return jnp.zeros((batch_size, max_length, size))

    def read(params, cache, token_id, position):
        before = jnp.where(position > 0, cache[position - 1], 0.0)
        state = jnp.tanh(0.3 * before @ params["turn"] + params["embed"][token_id])
        after = cache.at[position].set(state)
        return jnp.where(position >= 0, after, cache), state

    def apply(params, token_ids, positions, cache):
        def of_text(cache, ids, positions):
            return jax.lax.scan(lambda c, x: read(params, c, *x), cache, (ids, positions))

        cache, states = jax.vmap(of_text)(cache, token_ids, positions)
        return states, cache

    return specjax.Model(params, init_cache, apply, lambda params, h: h @ params["head"])


def decoder(dtype="float32"):
    return build(TransformerConfig(V, 32, 64, 2, 4, 2, 8, dtype=dtype, layer_windows=(16, None)))


# Largest difference of a log-probability. A chunk sums in another order than one pass; bfloat16
# has 8 bits, and a logit here is up to about 4.
MODELS = {
    "chain": (chain, 1e-6),
    "recurrent": (recurrent, 1e-5),
    "decoder": (decoder, 1e-5),
    "bfloat16 decoder": (lambda: decoder("bfloat16"), 0.06),
}


@jax.jit
def forward(model, ids):
    """Logits [L, V] of one forward pass over a whole text."""
    cache = model.init_cache(1, ids.size)
    hidden, _ = model.apply(model.params, ids[None], jnp.arange(ids.size)[None], cache)
    return model.logits(model.params, hidden)[0]


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check(model, text, scores, tolerance, num_listed):
    assert scores.logprobs.shape == scores.is_argmax.shape == (len(text),)
    assert scores.logprobs.dtype == np.float32
    assert np.isnan(scores.logprobs[0])
    assert not scores.is_argmax[0]
    top = scores.top_logprobs
    assert top.token_ids.shape == (len(text), num_listed)
    assert (top.token_ids[0] == -1).all()
    assert top.rank[0] == 0
    logits = np.asarray(forward(model, jnp.asarray(text)), np.float64)[:-1]
    rows, after = log_softmax(logits), np.asarray(text[1:], int)
    own = rows[np.arange(len(after)), after]
    np.testing.assert_allclose(scores.logprobs[1:], own, atol=tolerance, rtol=1e-5)
    np.testing.assert_array_equal(top.logprob[1:], scores.logprobs[1:])
    np.testing.assert_allclose(top.logprobs[1:], -np.sort(-rows)[:, :num_listed], atol=tolerance)
    # The order of logits that differ by more than rounding.
    listed = np.take_along_axis(rows, top.token_ids[1:], axis=-1)
    np.testing.assert_allclose(listed, top.logprobs[1:], atol=tolerance)
    is_clear = np.abs(rows.max(axis=-1) - own) > 2 * tolerance
    assert not scores.is_argmax[1:][is_clear].any()
    assert ((top.rank[1:] == 1) >= scores.is_argmax[1:]).all()


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_one_forward_pass_over_the_whole_text(name):
    make, tolerance = MODELS[name]
    model, given = make(), texts()
    options = specjax.LoopOptions(num_logprobs=3, prefill_chunk_size=32)
    scores = specjax.score(model, given, batch_size=4, options=options)
    for text, one in zip(given, scores, strict=True):
        check(model, text, one, tolerance, 3)


def test_chunks_batches_and_padding_change_rounding_alone():
    model, given = decoder(), texts()
    ids = np.full((len(given), 150), 10**6)
    for row, text in zip(ids, given, strict=True):
        row[: len(text)] = text
    whole = specjax.score(model, given, options=specjax.LoopOptions(prefill_chunk_size=160))
    others = [
        specjax.score(model, given, batch_size=batch_size, options=options)
        for batch_size, options in (
            (1, specjax.LoopOptions(prefill_chunk_size=1, max_length=140)),
            (16, specjax.LoopOptions(prefill_chunk_size=7)),
            (3, specjax.LoopOptions(max_length=512)),
        )
    ]
    others.append(specjax.score(model, (ids, [len(text) for text in given])))
    for scores in others:
        for one, other in zip(whole, scores, strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5, rtol=1e-5)
            assert other.top_logprobs is None


def test_greedy_tokens_are_the_argmax_and_ties_go_to_the_lowest_id():
    model = decoder()
    output = specjax.generate(
        model, None, texts((5, 9)), keys=jax.random.key(0), max_new_tokens=40, temperature=0
    )
    for text, length in zip(specjax.unpad(output.token_ids), (5, 9), strict=True):
        scores = specjax.score(model, [text])[0]
        assert scores.is_argmax[length:].all()
        own = output.logprobs[0 if length == 5 else 1, length : len(text)]
        np.testing.assert_allclose(scores.logprobs[length:], own, atol=1e-5)

    # Tokens 1 and 3 are the likeliest after each, and equally likely.
    ties = markov_chain([[0.1, 0.4, 0.1, 0.4]] * 4)
    scores = specjax.score(ties, [[0, 1, 3, 2, 1]], options=specjax.LoopOptions(num_logprobs=2))[0]
    assert scores.is_argmax.tolist() == [False, True, False, False, True]
    assert scores.top_logprobs.token_ids[1:].tolist() == [[1, 3]] * 4
    assert scores.top_logprobs.rank.tolist() == [0, 1, 1, 3, 1]


@pytest.mark.parametrize("chunk_size", [16, 128])
def test_prompts_that_generate_and_init_list_have_their_scores(chunk_size):
    model, prompts = decoder(), texts((37, 1, 2, 50))
    options = specjax.LoopOptions(
        prefill_chunk_size=chunk_size, num_logprobs=3, prompt_logprobs=True, max_length=60
    )
    values = {"keys": jax.random.key(0), "max_new_tokens": 4, "options": options}
    output = specjax.generate(model, specjax.ngram_drafter(), prompts, **values)
    state = specjax.init(model, specjax.ngram_drafter(), prompts, **values)
    for i, scores in enumerate(specjax.score(model, prompts, options=options)):
        for listed in (output.top_logprobs, state.top_logprobs):
            for buffer, expected in zip(listed, scores.top_logprobs, strict=True):
                row = buffer[i, : len(prompts[i])]
                np.testing.assert_allclose(row, expected, atol=1e-5, rtol=1e-5)
        assert (output.logprobs[i, : len(prompts[i])] == 0).all()
    values["options"] = dataclasses.replace(options, prompt_logprobs=False)
    plain = specjax.generate(model, specjax.ngram_drafter(), prompts, **values)
    np.testing.assert_array_equal(output.token_ids, plain.token_ids)
    after = np.arange(60) >= np.array([[len(prompt)] for prompt in prompts])
    for buffer, expected in zip(output.top_logprobs, plain.top_logprobs, strict=True):
        np.testing.assert_allclose(buffer[after], expected[after], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "num_listed"), [("float32", 3), ("bfloat16", 0)])
def test_a_score_has_the_bits_of_the_text_as_it_was_generated(dtype, num_listed):
    """Of a model whose rows depend on no other row, read alone or together, in any chunks."""
    config = TransformerConfig(V, 64, 96, 1, 4, 2, 32, dtype=dtype)
    model, prompts = build(config, row_invariant=True), texts((5, 33, 2, 17))
    options = specjax.LoopOptions(max_length=64, num_logprobs=num_listed, prompt_logprobs=True)
    output = specjax.generate(
        model,
        specjax.ngram_drafter(),
        prompts,
        keys=jax.random.key(0),
        max_new_tokens=20,
        temperature=np.float32([0, 0.7, 1, 0]),
        options=options,
    )
    listed, whole = jax.device_get(output.top_logprobs), specjax.unpad(output.token_ids)
    for batch_size, chunk_size in ((1, 1), (1, 64), (3, 5)):
        options = specjax.LoopOptions(num_logprobs=num_listed, prefill_chunk_size=chunk_size)
        scores = specjax.score(model, whole, batch_size=batch_size, options=options)
        for i, one in enumerate(scores):
            for found, expected in zip(one.top_logprobs, listed, strict=True):
                np.testing.assert_array_equal(found[1:], expected[i, 1 : len(whole[i])])


def test_impossible_tokens_have_minus_infinity_and_invalid_rows_nan():
    model = markov_chain([[0.0, 1.0, 0.0], [0.5, 0.5, 0.0], [np.nan] * 3])
    (scores,) = specjax.score(model, [[0, 2, 1, 0]])
    np.testing.assert_array_equal(scores.logprobs[:3], np.float32([np.nan, -np.inf, np.nan]))
    assert scores.is_argmax.tolist() == [False, False, False, True]


def test_no_call_holds_more_logits_than_those_of_a_chunk():
    model, shapes = chain(), set()

    def logits(params, hidden):
        shapes.add(hidden.shape[:-1])
        return model.logits(params, hidden)

    counted = specjax.Model(model.params, model.init_cache, model.apply, logits)
    options = specjax.LoopOptions(prefill_chunk_size=16)
    specjax.score(counted, texts((300, 5, 7)), batch_size=2, options=options)
    assert shapes == {(2, 16)}


def test_any_number_of_texts_of_a_given_batch_size_runs_the_same_programs():
    model, traced = chain(), []

    def apply(params, token_ids, positions, cache):
        traced.append(token_ids.shape)
        return model.apply(params, token_ids, positions, cache)

    counted = specjax.Model(model.params, model.init_cache, apply, model.logits)
    specjax.score(counted, texts((9, 3)), batch_size=4)
    before = len(traced)
    specjax.score(counted, texts((100, 2, 3, 4, 5, 6, 7)), batch_size=4)
    assert len(traced) == before


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ([], {}, r"texts is empty; it needs one text or more\."),
        ([[0], []], {}, r"texts\[1\] is empty"),
        ([[0, 1], [2, V]], {}, r"texts\[1\] has 64 as token 1; it needs an id in \[0, 64\)"),
        ([[0, -1]], {}, r"texts\[0\] has -1 as token 1"),
        ("text", {}, r"texts is str; it needs lists of ids"),
        ([[0] * 9], {"max_length": 8}, r"texts has one of 9 tokens, and max_length is 8\."),
        ([[0] * 17], {}, r"texts has one of 17 tokens, and the model takes 16\."),
        ([[0]], {"max_length": 17}, r"max_length is 17, and the model takes texts of at most 16"),
        ([[0]], {"num_logprobs": 65}, r"num_logprobs is 65 for a vocabulary of 64"),
        ([[0]], {"logprobs_mode": "processed"}, r"it needs 'raw'\."),
        ([[0]], {"prefill_chunk_size": 0}, r"prefill_chunk_size is 0"),
    ],
)
def test_a_wrong_argument_is_refused(given, options, words):
    model = chain()
    limited = specjax.Model(model.params, model.init_cache, model.apply, model.logits, 16)
    with pytest.raises(ValueError, match=words):
        specjax.score(limited, given, options=specjax.LoopOptions(**options))


def test_traced_texts_are_refused():
    def of_pair(ids):
        return specjax.score(chain(), (ids, jnp.array([2])))

    with pytest.raises(ValueError, match="texts is traced; the host reads it"):
        jax.jit(of_pair)(jnp.array([[0, 1]]))
