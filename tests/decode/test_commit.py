"""`commit` against a plain loop over the tokens, and the edges where a request ends."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specjax
from specjax import Finish, Verification

MAX_LENGTH, WIDTH = 8, 4
GOES_ON = 0


def emit(*rows):
    """A step that emitted these tokens, all but the last of each row accepted drafts."""
    token_ids = np.full((len(rows), max(1, *map(len, rows))), -1, np.int32)
    for row, ids in zip(token_ids, rows, strict=True):
        row[: len(ids)] = ids
    counts = jnp.array([len(row) for row in rows], jnp.int32)
    zeros = jnp.zeros(token_ids.shape, jnp.float32)
    return Verification(jnp.asarray(token_ids), jnp.maximum(counts - 1, 0), counts, zeros)


def buffer(*rows, max_length=MAX_LENGTH):
    """Committed tokens, then distinct rubbish."""
    rubbish = -100 - np.arange(len(rows) * max_length, dtype=np.int32).reshape(
        len(rows), max_length
    )
    for row, ids in zip(rubbish, rows, strict=True):
        row[: len(ids)] = ids
    return jnp.asarray(rubbish), jnp.array([len(row) for row in rows], jnp.int32)


def plain_commit(rows, emitted, accepted, eos, limits):
    """The same, one token after the other."""
    rows, finish = [list(row) for row in rows], []
    for row, new, kept, limit in zip(rows, emitted, accepted, limits, strict=True):
        why = GOES_ON
        if len(new) == kept:
            why = Finish.INVALID
        if len(row) >= limit:
            why = Finish.LENGTH
            new = []
        for token in new:
            row.append(token)
            if token in eos:
                why = Finish.END_OF_SEQUENCE
                break
            if len(row) >= limit:
                why = Finish.LENGTH
                break
        finish.append(why)
    return rows, finish


def check(rows, verification, expected, finish, **options):
    """Rows and reasons are the expected ones, and the buffer after them is unchanged."""
    max_length = options.pop("max_length", MAX_LENGTH)
    before, lengths = buffer(*rows, max_length=max_length)
    after, new_lengths, why = specjax.commit(before, lengths, verification, **options)
    assert new_lengths.tolist() == [len(row) for row in expected]
    assert [row[:n].tolist() for row, n in zip(after, new_lengths, strict=True)] == expected
    unused = np.arange(max_length)[None] >= np.asarray(new_lengths)[:, None]
    np.testing.assert_array_equal(np.asarray(after)[unused], np.asarray(before)[unused])
    assert why.tolist() == finish
    assert (new_lengths.dtype, why.dtype, after.dtype) == (jnp.int32, jnp.int8, before.dtype)


def test_emitted_tokens_are_appended_to_ragged_rows_and_nothing_else_is_touched():
    rows, expected = [[5], [6, 7, 8], []], [[5, 1, 2, 3], [6, 7, 8, 4], [9, 9]]
    check(rows, emit([1, 2, 3], [4], [9, 9]), expected, [GOES_ON] * 3)


@pytest.mark.parametrize(
    ("emitted", "committed"),
    [
        ([2, 3, 4], [2]),
        ([3, 2, 4], [3, 2]),
        ([3, 4, 2], [3, 4, 2]),
        ([2], [2]),
        ([3, 7, 2], [3, 7]),
        ([7, 2, 7], [7]),
        ([2, 2, 2], [2]),
    ],
    ids=str,
)
def test_the_first_of_several_ends_is_committed_and_what_follows_it_is_not(emitted, committed):
    ended = [Finish.END_OF_SEQUENCE]
    check([[2]], emit(emitted), [[2, *committed]], ended, eos_token_ids=(2, 7))
    check([[2]], emit(emitted), [[2, *committed]], ended, eos_token_ids=jnp.array([7, 2]))


def test_one_end_may_be_given_as_a_number():
    check([[5]], emit([3, 2, 4]), [[5, 3, 2]], [Finish.END_OF_SEQUENCE], eos_token_ids=2)


def test_the_padding_of_a_step_ends_nothing():
    check([[5], [5]], emit([3], [3, 4]), [[5, 3], [5, 3, 4]], [GOES_ON] * 2, eos_token_ids=(-1,))


@pytest.mark.parametrize(
    ("length", "finish"),
    [
        (MAX_LENGTH - 3, GOES_ON),
        (MAX_LENGTH - 2, Finish.END_OF_SEQUENCE),
        (MAX_LENGTH - 1, Finish.LENGTH),
        (MAX_LENGTH, Finish.LENGTH),
    ],
)
def test_an_end_past_the_limit_is_not_the_reason(length, finish):
    row = [5] * length
    emitted = [3, 4] if finish == GOES_ON else [3, 2]
    check([row], emit(emitted), [(row + emitted)[:MAX_LENGTH]], [finish], eos_token_ids=(2,))


def test_the_last_slot_of_the_buffer_is_filled_and_ends_the_request():
    rows = [[5] * (MAX_LENGTH - 2)] * 3
    expected = [[*rows[0], 3], [*rows[0], 3, 4], [*rows[0], 3, 4]]
    check(rows, emit([3], [3, 4], [3, 4, 6]), expected, [GOES_ON, Finish.LENGTH, Finish.LENGTH])


def test_each_request_has_a_limit_of_its_own():
    rows = [[5, 5]] * 5
    expected = [[5, 5], [5, 5], [5, 5, 3], [5, 5, 3, 2], [5, 5, 3, 2]]
    length, end = Finish.LENGTH, Finish.END_OF_SEQUENCE
    limits = jnp.array([1, 2, 3, 4, 8], jnp.int32)
    step = emit(*[[3, 2, 4]] * 5)
    finish = [length, length, length, end, end]
    check(rows, step, expected, finish, eos_token_ids=(2,), max_lengths=limits)


def test_a_step_that_stopped_at_an_invalid_row_commits_what_came_before_it():
    nothing, partly = emit([], [3, 4]), emit([3, 4])
    invalid = [Finish.INVALID]
    check([[5], [5]], nothing, [[5], [5, 3, 4]], [*invalid, GOES_ON])
    partly = partly._replace(num_accepted=jnp.array([2], jnp.int32))
    check([[5]], partly, [[5, 3, 4]], invalid)
    check([[5]], partly, [[5, 3, 4]], [Finish.END_OF_SEQUENCE], eos_token_ids=(4,))
    check([[5] * 6], partly, [[5] * 6 + [3, 4]], [Finish.LENGTH])


@st.composite
def steps(draw):
    size = 4
    tokens = st.integers(0, 3)
    rows = [draw(st.lists(tokens, max_size=MAX_LENGTH)) for _ in range(size)]
    emitted = [draw(st.lists(tokens, max_size=WIDTH)) for _ in range(size)]
    # All of an emission is accepted where its row of logits was invalid.
    accepted = [len(new) - draw(st.integers(0, min(1, len(new)))) for new in emitted]
    limits = [draw(st.integers(0, MAX_LENGTH)) for _ in range(size)]
    eos = draw(st.lists(tokens, min_size=2, max_size=2))
    return rows, emitted, accepted, eos, limits


@pytest.mark.once
def test_any_step_is_committed_as_token_by_token():
    jitted = jax.jit(specjax.commit)

    @settings(max_examples=200, deadline=None, database=None)
    @given(steps())
    def holds(step):
        rows, emitted, accepted, eos, limits = step
        verification = emit(*emitted, [0] * WIDTH)
        verification = jax.tree.map(lambda array: array[:-1], verification)
        verification = verification._replace(num_accepted=jnp.array(accepted, jnp.int32))
        before, lengths = buffer(*rows)
        expected, finish = plain_commit(rows, emitted, accepted, eos, limits)
        after, new_lengths, why = jitted(
            before,
            lengths,
            verification,
            eos_token_ids=jnp.array(eos, jnp.int32),
            max_lengths=jnp.array(limits, jnp.int32),
        )
        assert new_lengths.tolist() == [len(row) for row in expected]
        assert why.tolist() == finish
        wanted = np.asarray(before).copy()
        for row, ids in zip(wanted, expected, strict=True):
            row[: len(ids)] = ids
        np.testing.assert_array_equal(after, wanted)

    holds()
    assert jitted._cache_size() == 1


def test_lengths_of_another_batch_are_refused():
    before, _ = buffer([5], [6])
    with pytest.raises(ValueError, match="lengths has shape"):
        specjax.commit(before, jnp.array([1], jnp.int32), emit([3], [4]))


@pytest.mark.once
def test_unpad_drops_all_padding_and_ids_past_the_vocabulary():
    token_ids = jnp.array([[3, -1, 0, 9], [-1, -1, -5, -1], [8, 7, 2**31 - 1, 1]])
    assert specjax.unpad(token_ids) == [[3, 0, 9], [], [8, 7, 2**31 - 1, 1]]
    assert specjax.unpad(token_ids, vocab_size=8) == [[3, 0], [], [7, 1]]
    assert specjax.unpad(np.zeros((2, 0), np.int32), vocab_size=8) == [[], []]
    assert type(specjax.unpad(token_ids)[0][0]) is int
