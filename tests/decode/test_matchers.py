"""Masks of rows from matchers on the host: what each row allows, and which are refused."""

import automata
import bigrams
import numpy as np
import processed
import pytest

import specjax
from specjax import RowMasks
from specjax.decode.matchers import MatchedText
from specjax.markov_chain import markov_chain
from specjax.types import Draft

pytestmark = pytest.mark.once


def state_of(token_ids, drafted, finish):
    """What `RowMasks` reads of a state."""
    lengths = np.array(list(map(len, token_ids)))
    padded = np.stack([np.pad(row, (0, 9 - len(row)), constant_values=-1) for row in token_ids])
    counts = np.array([np.sum(np.array(row) > -1) for row in drafted])
    empty = dict.fromkeys(specjax.DecodeState._fields)
    draft = Draft(np.array(drafted), num_tokens=counts)
    return specjax.DecodeState(
        **empty | dict(token_ids=padded, lengths=lengths, finish=np.array(finish), draft=draft)
    )


def test_copies_of_the_last_request_have_its_masks_and_others_are_refused():
    def found(texts):
        masks = RowMasks([automata.Matcher(0), automata.Matcher(1)], [1, 1], automata.V)
        return masks.of_rows(state_of(texts, [[1, 4]] * len(texts), [0] * len(texts)))

    first, second = [9, 1], [9, 2]
    two, four = found([first, second]), found([first, second, second, second])
    np.testing.assert_array_equal(four, two[[0, 1, 1, 1]])
    assert (two[0] != two[1]).any()
    # A copy may part from its request at a near-tie; no text but a prompt tells it.
    found([first, second, [9, 3]])
    for texts in ([first], [first, second, [8, 2]], [first, second, second, [8, 2]]):
        with pytest.raises(ValueError, match=f"has {len(texts)} requests, and masks are of 2 mat"):
            found(texts)


def test_each_row_has_the_mask_after_the_tokens_before_it_and_the_matchers_go_back():
    starts = [0, 2, 1, None, 3]
    matchers = [None if start is None else automata.Matcher(start) for start in starts]
    masks = RowMasks(matchers, [1, 2, 1, 1, 1], automata.V)
    first = [automata.allowed_after(-1 if start is None else start, []) for start in starts]
    unmasked = np.uint32(2**32 - 1)
    first = np.where([[x is None] for x in starts], unmasked, processed.pack(np.stack(first)))
    np.testing.assert_array_equal(masks.first(), first[:, None])
    prompts = [[9], [9, 9], [9], [9], [9]]
    # After each prompt: committed tokens in two parts, and drafts that may follow or not.
    steps = [
        ([[1], [4], [2], [4], [3]], [[1, 4, 0], [0, 4, 2], [1, 0, -1], [7, 7, 7], [2, 2, 3]]),
        (
            [[1, 4], [2], [1, 4, 2], [0], [2]],
            [[7, 0, 0], [-1, -1, -1], [3, 0, 1], [1, 1, 1], [3, 3, 3]],
        ),
    ]
    for new, drafted in steps:
        prompts = [text + more for text, more in zip(prompts, new, strict=True)]
        found = masks.of_rows(state_of(prompts, drafted, [0, 0, 0, 0, 1]))
        for b, start in enumerate(starts):
            generated = prompts[b][2 if b == 1 else 1 :]
            for row in range(4):
                tokens = [*generated, *drafted[b][:row]]
                if start is None or b == 4:
                    assert found[b, row] == unmasked
                elif all(
                    token in automata.FOLLOWS[automata.state_after(start, tokens[:i])]
                    for i, token in enumerate(tokens)
                ):
                    allowed = automata.allowed_after(start, tokens)
                    np.testing.assert_array_equal(found[b, row], processed.pack(allowed))
    with pytest.raises(ValueError, match=r"request 1 has token 0, which may not follow"):
        masks.of_rows(
            state_of([*prompts[:1], [*prompts[1], 0], *prompts[2:]], drafted, [1, 0, 1, 1, 1])
        )


class Strict(automata.Matcher):
    """A matcher whose masks have a bit for ids that are no tokens, and that takes none of them."""

    def compute_bitmask(self):
        known = np.uint32(2**automata.V - 1)
        return (np.frombuffer(super().compute_bitmask(), "<u4") | ~known).tobytes()

    def try_consume_tokens(self, tokens):
        assert all(0 <= token < automata.V for token in tokens)
        return super().try_consume_tokens(tokens)


@pytest.mark.parametrize("token", [-2, -1, automata.V, 31, 2**31 - 1])
def test_a_matcher_is_handed_tokens_of_the_vocabulary_alone(token):
    text = MatchedText(Strict(0), automata.V, "request 0")
    rows = np.zeros((4, 1), np.uint32)
    text.fill([1, token, 4], rows)
    known = np.uint32(2**automata.V - 1)
    expected = [processed.pack(automata.allowed_after(0, x)) for x in ([], [1])]
    np.testing.assert_array_equal(rows[:2] & known, expected)
    with pytest.raises(ValueError, match=f"request 0 has token {token}, which may not follow"):
        text.read([1, token])


def test_masks_of_another_form_are_refused():
    model = markov_chain([[0.5, 0.5], [0.5, 0.5]])

    def begin(allowed):
        sampling = specjax.SamplingParams(allowed=allowed)
        return specjax.init(
            model, None, [[0]], keys=bigrams.keys(1), max_new_tokens=3, sampling=sampling
        )

    with pytest.raises(ValueError, match=r"sampling.allowed has shape .* or \[1, 1, V\]"):
        begin(np.ones((1, 2, 2), bool))
    masked = begin(np.array([[[False, True]]]))
    plain = masked._replace(settings=masked.settings._replace(sampling=None))
    assert masked.token_ids[0, 1] == 1
    with pytest.raises(ValueError, match="allowed is None, and the state was begun with masks"):
        specjax.step(model, None, masked)
    rows = np.ones((1, 1, 2), bool)
    with pytest.raises(ValueError, match="allowed is given, and the state was begun without"):
        specjax.step(model, None, plain, allowed=rows)
    with pytest.raises(ValueError, match="a step needs a mask of each of its rows"):
        specjax.step(model, None, masked, allowed=rows[0])
    with pytest.raises(ValueError, match="allowed has shape"):
        specjax.step(model, None, masked, allowed=np.ones((1, 2, 2), bool))
    state, _ = specjax.step(model, None, masked, allowed=np.array([[[True, False]]]))
    assert state.token_ids[0, 2] == 0
    with pytest.raises(ValueError, match="has 1 words; 64 tokens need 2"):
        RowMasks([automata.Matcher(0)], [1], 64).first()
    with pytest.raises(ValueError, match="one for each of 1 matchers"):
        RowMasks([automata.Matcher(0)], [1, 2], 2)
