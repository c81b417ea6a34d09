"""Requests of an engine on a Markov chain: what each got, and why it ended."""

import jax
import numpy as np
import pytest

import specjax
from specjax import FinishReason
from specjax.markov_chain import markov_chain

pytestmark = pytest.mark.once


def test_requests_end_as_asked_with_greedy_texts_of_the_target():
    """More of them than slots: the last one waits."""
    # The token after 0 to 3 is 1, 2, 3 and 0.
    chain = markov_chain(np.eye(4)[[1, 2, 3, 0]] * 0.9 + 0.025)
    options = specjax.LoopOptions(max_length=16, prefill_chunk_size=4)
    config = specjax.SpeculativeConfig(num_speculative_tokens=2)
    greedy = {"key": jax.random.key(0), "temperature": 0.0}
    with specjax.Engine(
        chain, specjax.ngram_drafter(), num_slots=2, options=options, config=config
    ) as engine:
        requests = [
            engine.submit([3, 1], max_new_tokens=6, **greedy),
            engine.submit([2], eos_token_ids=1, **greedy),
            engine.submit([0], max_new_tokens=2, **greedy),
        ]
        engine.run()
    assert all(isinstance(request, specjax.Request) for request in requests)
    assert [request.token_ids for request in requests] == [[2, 3, 0, 1, 2, 3], [3, 0, 1], [1, 2]]
    assert [request.finish_reason for request in requests] == [
        FinishReason.LENGTH,
        FinishReason.END_OF_SEQUENCE,
        FinishReason.LENGTH,
    ]


@pytest.mark.lenient
def test_a_thread_serves_an_engine_and_counts_in_the_words_of_openai():
    # The token after 0 is 1, and the other way round.
    chain = markov_chain(np.array([[0.1, 0.9], [0.9, 0.1]]))
    options = specjax.LoopOptions(max_length=8, prefill_chunk_size=4)
    with specjax.AsyncEngine(specjax.Engine(chain, None, num_slots=1, options=options)) as server:
        stream = server.submit([0], seed=0, temperature=0, eos_token_ids=1)
        assert isinstance(stream, specjax.RequestStream)
        chunks = list(stream)
    assert [chunk.token_ids for chunk in chunks] == [[1]]
    assert specjax.openai_finish_reason(chunks[-1].finish_reason) == "stop"
    assert chunks[-1].usage == specjax.Usage(prompt_tokens=1, completion_tokens=1)
