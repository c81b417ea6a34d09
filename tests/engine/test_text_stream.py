"""Text of tokens, one by one, is that of all of them at once, of every kind of tokenizer."""

import hypothesis.strategies as st
import pytest
import small_tokenizers
from hypothesis import example, given, settings

from specjax.contrib.grammars import token_bytes
from specjax.engine.stop_strings import StoppedText, TextStream


class Counting:
    """A tokenizer that counts the tokens which it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.num_decoded = 0
        self.id_to_token = tokenizer.id_to_token

    def decode(self, ids, skip_special_tokens):
        self.num_decoded += len(ids)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def ids_of(tokenizer, *names):
    return [tokenizer.token_to_id(name) for name in names]


def tail(tokenizer, prompt, ids):
    """What the text of both together has after what it has in common with that of the prompt."""
    before, text = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    return text[max(n for n in range(len(before) + 1) if text.startswith(before[:n])) :]


def sequences(tokenizer, max_size):
    last = tokenizer.get_vocab_size() - 1
    one = st.lists(st.integers(0, last), max_size=max_size)
    # Long runs of few tokens, too.
    few = st.tuples(st.lists(st.integers(0, last), min_size=1, max_size=4), st.integers(1, 12))
    return one | few.map(lambda pair: pair[0] * pair[1])


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_pieces_are_the_end_of_the_whole_text(kind):
    tokenizer = small_tokenizers.make(kind)

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(sequences(tokenizer, 14), sequences(tokenizer, 40))
    @example([2] + [0] * 9, [3, 4])
    # A run that one byte makes no text, longer than what is decoded again, and U+FFFD after it.
    @example([2, 2, 13], [2, 2, 3, *[2] * 9, 3, 2, 19, 2, 2])
    @example([3] * 20, [2, 3, 4])
    def check(prompt, ids):
        stream, shown = TextStream(tokenizer, prompt), ""
        wanted = tail(tokenizer, prompt, ids)
        for token_id in ids:
            shown += stream.feed(token_id)
            assert wanted.startswith(shown)
        assert shown + stream.flush() == wanted
        assert stream.flush() == ""

    check()


def test_spaces_that_transformers_would_clean_up_are_kept():
    class Transformers:
        convert_ids_to_tokens = ["A", " do", " n", "'t", " ."].__getitem__

        def decode(self, ids, skip_special_tokens, clean_up_tokenization_spaces=True):
            text = "".join(map(self.convert_ids_to_tokens, ids))
            is_clean = clean_up_tokenization_spaces
            return text.replace(" n't", "n't").replace(" .", ".") if is_clean else text

    stream = TextStream(Transformers(), [0])
    assert [stream.feed(token_id) for token_id in range(1, 5)] == [" do", " n", "'t", " ."]
    assert stream.flush() == ""


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_the_bytes_of_tokens_are_the_end_of_the_whole_text(kind):
    tokenizer = small_tokenizers.make(kind)
    table = token_bytes(tokenizer)
    texts = [tokenizer.token_to_id(name) for name in ("<think>", "東", "A")]
    prompts = [[index] for index in texts if index is not None]

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(st.sampled_from(prompts), sequences(tokenizer, 9))
    def check(prompt, ids):
        text = tail(tokenizer, prompt, ids)
        written = b"".join(table[token_id] for token_id in ids)
        assert written.decode(errors="replace").count("\ufffd") == 0 or "\ufffd" in text
        if "\ufffd" not in text or kind == "byte-level":
            assert written.decode(errors="replace") == text

    check()
    assert table[:2] == [b"", b""]


def test_what_is_shown_of_a_run_of_bytes_is_whole_without_names_of_tokens():
    class Nameless:
        def decode(self, ids, skip_special_tokens):
            return small_tokenizers.make("llama").decode(ids)

    text = "A東é🙂\n語" * 3
    names = [f"<0x{byte:02X}>" for byte in text.replace("語", "").encode()]
    ids = ids_of(small_tokenizers.make("llama"), *names, "語", *names)
    stream = TextStream(Nameless(), [])
    pieces = [stream.feed(token_id) for token_id in ids]
    assert "".join(pieces) == small_tokenizers.make("llama").decode(ids)
    assert pieces[:4] == ["A", "", "", "東"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("byte-level", "ÿ"),
        ("byte-level", "æ"),
        ("byte-level", "ï¿½"),
        ("byte-level", "</s>"),
        ("llama", "<0xFF>"),
        ("llama", "<0x0A>"),
        ("llama", "\ufffd"),
        ("metaspace", "\ufffd"),
        ("wordpiece", "##s"),
    ],
)
def test_a_token_costs_alike_however_many_came_before(kind, name):
    [token_id] = ids_of(small_tokenizers.make(kind), name)
    tokenizer = Counting(small_tokenizers.make(kind))
    stream = TextStream(tokenizer, [0] * 50)
    shown = "".join(stream.feed(token_id) for _ in range(500))
    # A run of bytes is decoded at its end.
    assert tokenizer.num_decoded < 25 * 500
    is_run = name.startswith("<0x")
    wanted = tokenizer.decode([token_id] * 500, skip_special_tokens=True)
    assert len(shown) >= (0 if is_run else len(wanted) - 3)
    assert shown + stream.flush() == wanted


@pytest.mark.parametrize("name", ["<0x0A>", "</s>", "b"])
def test_a_prompt_is_decoded_once_and_before_the_first_token(name):
    [token_id] = ids_of(small_tokenizers.make("llama"), name)
    tokenizer = Counting(small_tokenizers.make("llama"))
    text = StoppedText(tokenizer, [token_id] * 5000, ())
    text.read_context()
    assert tokenizer.num_decoded < 5000 + 20
    tokenizer.num_decoded = 0
    text.feed(3)
    assert tokenizer.num_decoded < 20


def test_ordinary_text_is_decoded_twice_a_token():
    [token_id] = ids_of(small_tokenizers.make("byte-level"), "ĠA")
    tokenizer = Counting(small_tokenizers.make("byte-level"))
    stream = TextStream(tokenizer, [token_id])
    stream.feed(token_id)
    tokenizer.num_decoded = 0
    assert [stream.feed(token_id) for _ in range(100)] == [" A"] * 100
    assert tokenizer.num_decoded == 300


@pytest.mark.parametrize(
    ("names", "num_fed", "text"),
    [
        (["b", "<0x0A>", "b"], 2, "b"),  # whatever follows
        (["b", "<0x0A>", "</s>", "<0x0A>", "b"], 2, "b"),
        (["b", "<0xFF>", *["<0x0A>"] * 4, "b"], 7, "b" + "\ufffd" * 5 + "b"),  # the run is no text
        (["<0xE6>", "<0x9D>", "<0xB1>", "<0x0A>"], 4, "東"),
        (["\ufffd", "<0x0A>"], 2, "\ufffd"),
        (["<0x41>", "b", "b"], 2, ""),  # across the end of a run
        (["b", "<0x41>", "<0x41>", "b"], 4, "bA"),
        (["b", "▁", "<0xC3>", "<0xA9>", "b"], 4, "b"),  # across its beginning
    ],
)
def test_a_stop_string_ends_a_text_with_the_token_that_completed_it(names, num_fed, text):
    tokenizer = small_tokenizers.make("llama")
    stopped = StoppedText(tokenizer, [], ("\n", "Ab", " é"))
    ids, fed = ids_of(tokenizer, *names), 0
    while fed < len(ids) and not stopped.stopped:
        stopped.feed(ids[fed])
        fed += 1
    stopped.flush()
    assert (fed, stopped.text) == (num_fed, text)
