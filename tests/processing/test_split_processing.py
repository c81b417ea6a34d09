"""Rules, cutoffs and listed tokens of logits that lie over devices are those of whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from over_devices import WHOLE, mesh_of, most_numbers, over_devices, pad, split
from process_rules import process_rules

import specjax

pytestmark = pytest.mark.once

BATCH, ROWS, VOCAB = 4, 2, 50257
DRAFTED = jnp.array([[5], [40000], [50256], [-1]])
LAST = jnp.array([[12565, 50256, 1], [12566, -1, 2], [30000, 30000, 3], [50257, 0, 4]])


def arrays_of(rng):
    """Logits in halves, so that edges have ties, and a bias, a mask and counts of each token."""
    logits = np.round(4 * rng.normal(size=(BATCH, ROWS, VOCAB))) / 2
    generated = np.zeros((BATCH, VOCAB), np.int32)
    generated[:, np.argmax(logits[:, 0], axis=-1)] = 2
    return dict(
        logits=jnp.asarray(logits, jnp.float32),
        bias=jnp.asarray(rng.normal(size=VOCAB), jnp.float32),
        allowed=jnp.asarray(rng.random((BATCH, VOCAB)) < 0.9),
        generated=jnp.asarray(generated),
        prompt=jnp.asarray(rng.random((BATCH, VOCAB)) < 0.1),
    )


def process(logits, bias, allowed, generated, prompt, **axis):
    """Processed logits, the cutoff of each row, and the likeliest tokens."""
    counts = specjax.TokenCounts(generated, prompt)
    # Inside shard_map a caller subtracts a device's first token from the ids.
    if "axis_name" not in axis:
        counts = specjax.update_counts(counts, LAST, jnp.full(BATCH, 2))
    history = specjax.History(jnp.array([[7, 3]] * BATCH), jnp.full(BATCH, 2), counts)
    processed = process_rules(
        logits,
        bias=bias,
        allowed=allowed,
        repetition_penalty=1.3,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        bad_words=jnp.array([[40000, -1], [3, 12345], [5, 50256]]),
        history=history,
        drafted_token_ids=DRAFTED,
        axis_name=axis.get("axis_name"),
    )
    temperature = jnp.array([1.0, 0.7, 1.0, 0.0])
    cutoff = specjax.logit_cutoff(
        processed,
        temperature=temperature,
        top_k=jnp.array([50, 0, 4000, 3]),
        top_p=jnp.array([1.0, 0.8, 0.9, 0.5]),
        min_p=jnp.array([0.0, 0.0, 0.001, 0.0]),
        **axis,
    )
    tokens = jnp.array([[50256, 0], [12565, -1], [7, 50257], [30000, 1]])
    listed = specjax.top_logprobs(
        processed, tokens, 6, temperature=temperature, cutoff=cutoff, **axis
    )
    return processed, cutoff, listed


def parts_of(arrays):
    """Arrays as four devices have them, and how they lie."""
    parts = {name: pad(array, fill=1) for name, array in arrays.items()}
    parts["logits"] = pad(arrays["logits"])
    return parts, {name: split(array) for name, array in parts.items()}


def test_results_are_the_same_on_every_device_of_an_axis_by_name():
    """Others would be refused; nothing is compiled."""
    parts, specs = parts_of(arrays_of(np.random.default_rng(2)))

    def call(arrays):
        return process(**arrays, axis_name="model", vocab_size=VOCAB)

    out_specs = (specs["logits"], WHOLE, WHOLE)
    mapped = jax.shard_map(call, mesh=mesh_of(), in_specs=(specs,), out_specs=out_specs)
    processed, cutoff, listed = jax.eval_shape(mapped, parts)
    assert processed.shape == parts["logits"].shape
    assert cutoff.shape == listed.rank.shape == (BATCH, ROWS)


def test_what_is_processed_cut_and_listed_is_that_of_whole_rows_and_no_row_travels():
    """The arrays say by their types how they lie."""
    arrays = arrays_of(np.random.default_rng(2))
    parts, specs = parts_of(arrays)
    mesh = mesh_of(kind=AxisType.Explicit)
    parts = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in parts.items()}

    def call(arrays):
        return process(**arrays, vocab_size=VOCAB)

    program = jax.jit(call).lower(parts).compile()
    kinds, most = most_numbers(program)
    assert kinds == {"all-gather", "all-reduce", "collective-permute"}
    assert most <= BATCH * ROWS * (VOCAB / 128 + 4096) < parts["logits"].size / 4
    processed, cutoff, listed = program(parts)
    whole = jax.jit(lambda arrays: process(**arrays))(arrays)
    np.testing.assert_array_equal(np.asarray(processed)[..., :VOCAB], whole[0])
    assert np.isneginf(whole[0]).any(axis=(0, 1))[[40000, 12345, 50256]].all()
    np.testing.assert_array_equal(cutoff, whole[1])
    np.testing.assert_array_equal(listed.token_ids, whole[2].token_ids)
    np.testing.assert_array_equal(listed.rank, whole[2].rank)
    np.testing.assert_allclose(listed.logprobs, whole[2].logprobs, atol=2e-6, rtol=1e-6)
    np.testing.assert_allclose(listed.logprob, whole[2].logprob, atol=2e-6, rtol=1e-6)


def test_a_mask_in_words_that_lie_on_two_devices_is_refused_by_name_and_read_whole_otherwise():
    arrays = (jnp.zeros((1, 4 * 144)), jnp.zeros((4 * 5,), jnp.uint32))

    def call(logits, allowed):
        return process_rules(logits, allowed=allowed, axis_name="model")

    with pytest.raises(ValueError, match="a multiple of 32"):
        over_devices(call, arrays, tuple(map(split, arrays)), out_specs=split(arrays[0]))
    logits = jax.device_put(arrays[0], NamedSharding(mesh_of(), split(arrays[0])))
    whole = jnp.full((18,), -1, jnp.int32)
    np.testing.assert_array_equal(process_rules(logits, allowed=whole), arrays[0])


def test_a_grammar_of_whole_rows_is_refused_as_one():
    tables = (np.zeros((1, 1), np.int32), np.zeros(512, np.int32), np.zeros((1, 16), np.uint32))
    logits = jnp.zeros((1, 512))

    def call(logits):
        grammar = specjax.Grammar(*tables)
        return process_rules(logits, grammar=grammar, axis_name="model")

    with pytest.raises(ValueError, match="grammar is given with axis_name"):
        over_devices(call, (logits,), (split(logits),), out_specs=split(logits))
