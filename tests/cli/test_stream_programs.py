"""A text that is streamed by the parts of a step is that of `init` and `step`."""

import dataclasses

import bigrams
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import SpeculativeConfig
from specjax.cli.stream_programs import StreamPrograms
from specjax.decode.drafters import Models
from specjax.decode.options import LoopOptions
from specjax.decode.prefill import begin_prefill, read_prompt_chunk, run_prefill
from specjax.decode.request_batch import RequestArguments, check_arguments
from specjax.decode.target_step import apply_model, score_hidden, step_inputs

TARGET, DRAFT = bigrams.pair(4, seed=1)
MODEL, DRAFTER = bigrams.model(TARGET), specjax.model_drafter(bigrams.model(DRAFT))
KINDS = {
    "auto": (DRAFTER, SpeculativeConfig("auto", step_costs=(1.0, 1.6, 1.9, 2.2))),
    # Prompt lookup finds nothing in some steps, which compute the rows of three drafts then.
    "three": (specjax.ngram_drafter(), SpeculativeConfig(3)),
}


def checked(model, drafter, prompts, config=None, options=LoopOptions(), **data):
    return check_arguments(model, drafter, RequestArguments(prompts, **data), config, options)


def test_a_device_without_room_names_the_bytes_of_the_cache():
    def init_cache(batch_size, max_length):
        return jnp.zeros((batch_size, max_length, 2**20, 2**20), jnp.int8)

    def apply(params, token_ids, positions, cache):
        return jnp.stack([token_ids, token_ids], axis=-1), cache

    huge = specjax.Model(MODEL.params, init_cache, apply, MODEL.logits)
    options = {"keys": bigrams.keys(1), "max_new_tokens": 9, "options": LoopOptions(max_length=16)}
    programs = StreamPrograms(huge, None, *checked(huge, None, [[1, 2, 3]], **options))
    with pytest.raises(MemoryError, match=r"cache takes 16384.00 GiB .* max_length 16;"):
        programs.read_prompt(huge, None)


@pytest.mark.once
@pytest.mark.parametrize("taps", [(), (3, 1)])
def test_chunks_give_the_row_that_the_last_token_would_give(taps):
    """Both prompts end in their third chunk; the drafter's state is compared, too."""
    drafter = dataclasses.replace(DRAFTER, reads_features=bool(taps), taps=taps)
    prompts = [[1, 2, 3, 0, 2], [0, 1, 3, 3, 2, 1]]
    options = {"keys": bigrams.keys(2), "config": SpeculativeConfig(3), "max_new_tokens": 9}
    options |= {"temperature": 0.7, "options": LoopOptions(prefill_chunk_size=2)}
    requests, static = checked(MODEL, drafter, prompts, **options)
    models = Models(MODEL, drafter)
    before = run_prefill(models, requests, options=static)
    state = begin_prefill(models, requests, options=static.step)
    for done in (0, 2, 4):
        index = np.arange(done, done + 2, dtype=np.int32)
        positions = np.where(index < requests.lengths[:, None], index, -1)
        ids = requests.token_ids[:, done : done + 2]
        state, rows = read_prompt_chunk(models, state, ids, positions, options=static.step)
    first_row = before._replace(draft=before.draft.replace(token_ids=before.draft.token_ids[:, :0]))
    *hidden, cache = apply_model(MODEL, *step_inputs(first_row), before.target_cache, taps)
    expected = score_hidden(MODEL, first_row, None, *hidden)
    assert (rows.features is None) == (not taps)
    jax.tree.map(np.testing.assert_array_equal, rows, expected)
    np.testing.assert_array_equal(state.target_cache, cache)
    without = [x._replace(target_cache=None, settings=None) for x in (state, before)]
    jax.tree.map(np.testing.assert_array_equal, *without)


@pytest.mark.once
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_step_give_what_a_step_gives(kind):
    """Every array of every state, but for drafts of no tokens; the warm-up changes none."""
    drafter, config = KINDS[kind]
    prompts = [[1, 2, 3], [0, 1]]
    options = {
        "keys": bigrams.keys(2),
        "config": config,
        "max_new_tokens": 30,
        "temperature": np.array([0.7, 1.0], np.float32),
        "options": LoopOptions(num_logprobs=2 if kind == "auto" else None),
    }
    state = specjax.init(MODEL, drafter, prompts, **options)
    programs = StreamPrograms(MODEL, drafter, *checked(MODEL, drafter, prompts, **options))
    parts = programs.step(MODEL, drafter, programs.read_prompt(MODEL, drafter))
    programs.warm_up(MODEL, drafter, parts)
    parts = programs.draft(drafter, parts)
    drafted = set()
    while True:
        drafted |= set(np.asarray(state.draft.num_tokens).tolist())
        if np.max(state.draft.num_tokens) > 0:
            jax.tree.map(np.testing.assert_array_equal, state.draft, parts.draft)
        without = [x._replace(draft=x.draft.num_tokens, settings=None) for x in (state, parts)]
        jax.tree.map(np.testing.assert_array_equal, *without)
        if np.all(state.finish):
            break
        state, _ = specjax.step(MODEL, drafter, state, config=config)
        parts = programs.draft(drafter, programs.step(MODEL, drafter, parts))
    assert drafted >= ({0, 3} if kind == "auto" else {0, 1})
    assert programs.seconds_waited > 0
