"""Where a model's rows differ by batch, chunk or place is found, and nowhere else."""

import bigrams
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.markov_chain import markov_chain
from specjax.models import TransformerConfig, build

pytestmark = pytest.mark.lenient

V = 8
TABLE = jnp.asarray(np.random.default_rng(0).normal(size=(V, V, V)), jnp.float32)
TEXT = np.random.default_rng(1).integers(0, V, 30).tolist()
SIZES = {"batch_sizes": (1, 3, 4), "chunk_sizes": (1, 4, 9)}
PLACES = {1: (0,), 3: (0, 1, 2), 4: (0, 2, 3)}
CASES = [(size, chunk, at) for size in PLACES for chunk in (1, 4, 9) for at in PLACES[size]]


def nowhere(token_ids, positions):
    return jnp.zeros(token_ids.shape, bool)


def model(in_hidden=nowhere, in_tap=nowhere, logits=lambda params, hidden: hidden):
    """A model whose rows are those of a table, but for a last bit where a function says so."""

    def change(rows, where):
        return jnp.where(where[..., None], rows * jnp.float32(1 + 2e-7), rows)

    def apply_with_taps(params, token_ids, positions, cache, taps):
        states, cache = bigrams.apply(params, token_ids, positions, cache)
        rows = params[states[..., 0], states[..., 1]]
        features = [change(rows, in_tap(token_ids, positions) & (tap >= 2)) for tap in taps]
        hidden = change(rows, in_hidden(token_ids, positions))
        return hidden, jnp.concatenate(features or [rows], axis=-1), cache

    def apply(*operands):
        hidden, _, cache = apply_with_taps(*operands, ())
        return hidden, cache

    functions = (bigrams.init_cache, apply, logits)
    return specjax.Model(TABLE, *functions, apply_with_taps=apply_with_taps)


def check(found, cases, position, stage, num_rows):
    """The cases, and no others, differ from a position on."""
    assert [case[:3] for case in found.cases] == CASES
    assert [case[:3] for case in found.cases if case.num_rows] == cases
    assert not found.is_invariant
    assert found.first[:3] == cases[0]
    for case in found.cases:
        differs = case[:3] in cases
        assert case.group == differs
        assert case.position == (position if differs else None)
        assert case.stage == (stage if differs else "")
        assert case.num_rows == (num_rows if differs else 0)
        assert (case.max_difference > 0) == (differs and "tap" not in stage)
        assert case.num_argmax == 0


def test_a_model_whose_rows_do_not_depend_on_others_is_invariant():
    found = specjax.check_row_invariance(model(), **SIZES, taps=(0, 2))
    assert found.is_invariant
    assert found.first is None
    assert found.num_tokens == 64
    assert [tuple(case) for case in found.cases] == [
        (*case, 0, 0, None, "", 0.0, 0) for case in CASES
    ]


def test_cases_are_each_batch_size_with_each_chunk_size_and_place():
    chain = markov_chain([[0.1, 0.9], [0.8, 0.2]])
    found = specjax.check_row_invariance(chain, [0, 1, 1], batch_sizes=(2,), chunk_sizes=(2,))
    cases = [specjax.RowCase(2, 2, place, 0, 0, None, "", 0.0, 0) for place in (0, 1)]
    assert found == specjax.RowInvariance(3, tuple(cases))


def test_rows_that_depend_on_the_chunk_are_found():
    def in_hidden(token_ids, positions):
        return (positions >= 0) & (token_ids.shape[1] > 4)

    found = specjax.check_row_invariance(model(in_hidden), TEXT, **SIZES)
    check(found, [case for case in CASES if case[1] == 9], 0, "hidden", 30)


def test_rows_that_depend_on_the_place_are_found_with_the_first_position():
    def in_hidden(token_ids, positions):
        return (positions >= 20) & (jnp.arange(len(token_ids))[:, None] == 2)

    found = specjax.check_row_invariance(model(in_hidden), TEXT, **SIZES)
    check(found, [case for case in CASES if case[2] == 2], 20, "hidden", 10)


def test_rows_that_depend_on_the_others_tokens_are_found():
    def in_hidden(token_ids, positions):
        return (positions == 7) & (jnp.sum(token_ids, axis=0) > token_ids)

    found = specjax.check_row_invariance(model(in_hidden), [1] * 9, **SIZES)
    assert {case.position for case in found.cases} == {None, 7}
    assert not any(case.num_rows for case in found.cases if case.batch_size == 1)


def test_the_stage_is_the_first_that_differs():
    def by_batch(params, hidden):
        return hidden * jnp.float32(1 + 2e-7 * (len(hidden) == 4))

    found = specjax.check_row_invariance(model(logits=by_batch), TEXT, **SIZES)
    check(found, [case for case in CASES if case[0] == 4], 0, "logits", 30)

    def in_tap(token_ids, positions):
        return positions == (3 if token_ids.shape[1] == 9 else -2)

    found = specjax.check_row_invariance(model(in_tap=in_tap), TEXT, **SIZES, taps=(1, 2, 3))
    check(found, [case for case in CASES if case[1] == 9], 3, "tap 2", 1)


def test_a_sum_in_another_order_is_found():
    weights = jnp.asarray(np.random.default_rng(2).normal(size=(1024, V)), jnp.float32)

    def logits(params, hidden):
        """A product over 1024 numbers, in as many parts as there are texts."""
        rows = jnp.tile(hidden, 128)
        num_parts = 1 if len(hidden) < 4 else 16
        parts = jnp.split(rows, num_parts, axis=-1), jnp.split(weights, num_parts, axis=0)
        return sum(jnp.einsum("...e,ev->...v", *pair) for pair in zip(*parts, strict=True))

    found = specjax.check_row_invariance(model(logits=logits), TEXT, **SIZES)
    others = [case for case in found.cases if case.batch_size == 4]
    assert all(case.stage == "logits" and 0 < case.max_difference < 1e-3 for case in others)
    assert all(case.num_rows > 20 for case in others)


def test_a_decoder_alone_and_a_token_at_a_time_is_its_own_reference():
    decoder = build(TransformerConfig(V, 32, 64, 2, 4, 2, 8, dtype="bfloat16"))
    found = specjax.check_row_invariance(
        decoder, TEXT, batch_sizes=(1, 4), chunk_sizes=(1, 16), taps=(0, 1, 2)
    )
    assert tuple(found.cases[0]) == (1, 1, 0, 0, 0, None, "", 0.0, 0)
    assert all((case.group == 0) == (case.num_rows == 0) for case in found.cases)
    assert all(case.max_difference < 0.1 for case in found.cases)
    header, *lines = str(found).splitlines()
    assert header.startswith("batch  chunk  place")
    assert len(lines) == len(found.cases) == 8


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        ([], {}, r"text\[0\] is empty"),
        ([0, V], {}, r"text has 8 as token 1; it needs an id in \[0, 8\)"),
        ([0] * 17, {}, r"text has 17 tokens, and the model takes 16\."),
        ([0], {"batch_sizes": (1, 0)}, r"batch_sizes is 0"),
        ([0], {"chunk_sizes": (0,)}, r"chunk_sizes is 0"),
        ([0], {"taps": (1,)}, r"taps is \[1\], and the model has no apply_with_taps\."),
    ],
)
def test_a_wrong_argument_is_refused(text, options, words):
    functions = (bigrams.init_cache, bigrams.apply, bigrams.logits)
    limited = specjax.Model(TABLE, *functions, max_length=16)
    with pytest.raises(ValueError, match=words):
        specjax.check_row_invariance(limited, text, **options)
