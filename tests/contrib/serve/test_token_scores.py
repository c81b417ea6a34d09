"""Log-probabilities in OpenAI's two forms, their texts, bytes and offsets."""

import math
import types

import numpy as np
import pytest
import small_tokenizers

from specjax.contrib.serve.token_scores import chat_logprobs, completion_logprobs, score_tokens
from specjax.contrib.serve.token_texts import Offsets, TokenTexts


@pytest.fixture(scope="module", params=["byte-level", "gemma"])
def texts(request):
    tokenizer = small_tokenizers.make(request.param)
    return TokenTexts(tokenizer, tokenizer.get_vocab_size() + 2)


def row(token_ids, logprobs):
    return types.SimpleNamespace(token_ids=np.array(token_ids), logprobs=np.array(logprobs))


def test_offsets_count_the_characters_that_begin_before_a_token(texts):
    ids = [i for byte in "A東é".encode() for i in [texts.bytes.index(bytes([byte]))]]
    offsets = Offsets(texts)
    assert offsets.take(ids[:2]) == [0, 1]
    assert offsets.take(ids[2:]) == [1, 1, 2, 2]
    assert b"".join(map(texts.bytes_of, ids)).decode() == "A東é"


def test_a_special_token_has_its_name_and_no_character(texts):
    assert texts.text_of(1) == "</s>"
    assert texts.bytes_of(1) == b"</s>"
    assert Offsets(texts).take([1, 1]) == [0, 0]
    assert texts.text_of(len(texts.bytes) - 1) == ""


def test_a_token_has_the_same_float_in_both_places_and_equal_texts_keep_the_larger(texts):
    own, first, second = (texts.bytes.index(bytes([byte])) for byte in (0x41, 0xE6, 0xB1))
    rows = [row([first, own, second], [-0.5, -1.0 - 1e-9, -2.0]), row([second, -1], [-0.25, 0])]
    scores = score_tokens([own, first], [-1.0, -math.inf], rows, 3)
    written = completion_logprobs(scores, [0, 1], texts)
    assert written == {
        "tokens": ["A", "\ufffd"],
        "token_logprobs": [-1.0, -9999.0],
        "top_logprobs": [{"\ufffd": -0.5, "A": -1.0}, {"\ufffd": -0.25}],
        "text_offset": [0, 1],
    }
    content = chat_logprobs(scores, texts)["content"]
    assert content[0]["bytes"] == [0x41]
    assert [entry["bytes"] for entry in content[0]["top_logprobs"]] == [[0xE6], [0x41], [0xB1]]
    assert content[0]["top_logprobs"][1]["logprob"] == content[0]["logprob"] == -1.0


def test_the_first_token_of_a_prompt_has_null(texts):
    scores = score_tokens([3, 4], [None, -1.0], [None, row([4], [-1.0])], 1)
    written = completion_logprobs(scores, [0, 1], texts)
    assert written["token_logprobs"] == [None, -1.0]
    assert written["top_logprobs"][0] is None
