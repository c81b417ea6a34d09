"""What stands for prompts: lists of ids, or a tuple of arrays and lengths; nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.decode.request_batch import parse_prompts
from specjax.markov_chain import markov_chain

MODEL = markov_chain([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4], [0.4, 0.5, 0.1]])
IDS, LENGTHS = [[1, 2, 0], [2, 0, 0]], [3, 1]


@pytest.mark.parametrize(
    "prompts",
    [
        [[1, 2, 0], [2]],
        ((1, 2, 0), (2,)),
        (np.array([1, 2, 0]), jnp.array([2])),
        [range(1, 3), [0]],
        [np.array([1, 2], np.uint8)],
        [[2]],
    ],
    ids=str,
)
def test_a_sequence_of_prompts_is_padded(prompts):
    ids, lengths = parse_prompts(prompts)
    assert ids.dtype == lengths.dtype == np.int32
    assert lengths.tolist() == [len(prompt) for prompt in prompts]
    width = max(map(len, prompts))
    assert ids.tolist() == [[*map(int, x), *[0] * (width - len(x))] for x in prompts]


@pytest.mark.parametrize(
    "prompts",
    [
        (IDS, LENGTHS),
        (tuple(map(tuple, IDS)), tuple(LENGTHS)),
        (np.array(IDS), LENGTHS),
        (jnp.array(IDS), jnp.array(LENGTHS)),
        ([np.array(row) for row in IDS], np.array(LENGTHS, np.uint8)),
    ],
    ids=str,
)
def test_a_tuple_whose_first_member_has_two_axes_is_ids_and_lengths(prompts):
    ids, lengths = parse_prompts(prompts)
    assert ids.dtype == lengths.dtype == np.int32
    assert (ids.tolist(), lengths.tolist()) == (IDS, LENGTHS)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "prompts is empty; it needs one prompt or more"),
        ([[1], []], r"prompts\[1\] is empty; an empty prompt gives the model nothing"),
        (([], [1]), r"prompts\[0\] is empty"),
        ([1, 2, 3], r"prompts\[0\] has shape \(\); a prompt is one list of ids"),
        ((1, 2), r"prompts\[0\] has shape \(\)"),
        ([IDS, LENGTHS], r"prompts\[0\] has shape \(2, 3\); .* a tuple \(ids, lengths\)"),
        ([[1], [[2]]], r"prompts\[1\] has shape \(1, 1\)"),
        ([[1, [2]]], r"prompts\[0\] is not an array"),
        ([[0.5]], r"prompts\[0\] has dtype float32; it needs integers"),
        ([[True]], r"prompts\[0\] has dtype bool"),
        ([[2**31]], r"prompts\[0\] holds integers outside the range of int32"),
        (["ab"], r"prompts\[0\] is str"),
        ("ab", r"prompts is str; it needs lists of ids, such as \[\[1, 2, 3\], \[4\]\]"),
        (np.array(IDS), r"prompts is ndarray of shape \(2, 3\); .* or a tuple of arrays"),
        (None, "prompts is NoneType; it needs lists of ids"),
        (iter(IDS), "prompts is list_iterator"),
        ((IDS, [3]), r"prompts\[1\] has shape \(1,\); it needs \(2,\)"),
        ((IDS, 3), r"prompts\[1\] has shape \(\)"),
        ((IDS, [3, 0]), r"prompts\[1\], the lengths, runs from 0 to 3; .* an empty prompt gives"),
        ((IDS, [4, 1]), "runs from 1 to 4; each needs to be between 1 and 3, the width"),
        (([[]], [0]), r"prompts\[0\] has shape \(1, 0\); .* the ids need \[B, L\]"),
        (([IDS], LENGTHS), r"prompts\[0\] has shape \(1, 2, 3\)"),
        ((np.array(IDS, np.float32), LENGTHS), r"prompts\[0\] has dtype float32"),
        (([[1, 2], [3]], LENGTHS), r"prompts\[0\] is not an array"),
    ],
)
def test_other_prompts_are_refused_in_a_sentence(prompts, words):
    with pytest.raises(ValueError, match=words):
        parse_prompts(prompts)


def test_traced_prompts_are_a_tuple():
    def call(ids):
        return specjax.generate(MODEL, None, [ids], keys=jax.random.key(0), max_new_tokens=2)

    with pytest.raises(ValueError, match=r"prompts\[0\] is traced; .* a tuple of arrays"):
        jax.eval_shape(call, jnp.array([1, 2]))


def test_either_form_gives_the_same_texts():
    values = dict(keys=jax.random.key(3), max_new_tokens=5)
    texts = [
        specjax.unpad(specjax.generate(MODEL, None, prompts, **values).token_ids)
        for prompts in ([[1, 2, 0], [2]], (IDS, LENGTHS))
    ]
    assert texts[0] == texts[1]
    assert [text[:length] for text, length in zip(texts[0], LENGTHS, strict=True)] == [
        [1, 2, 0],
        [2],
    ]


def test_options_of_another_type_are_refused():
    with pytest.raises(ValueError, match=r"options is dict; it needs specjax.LoopOptions"):
        specjax.generate(
            MODEL, None, [[1]], keys=jax.random.key(0), max_new_tokens=2, options={"max_length": 9}
        )


def test_options_can_be_a_key():
    options = specjax.LoopOptions(max_length=9, implementation="xla")
    assert hash(options) == hash(specjax.LoopOptions(max_length=9, implementation="xla"))
    assert options != specjax.LoopOptions(max_length=9)
