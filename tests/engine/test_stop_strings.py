"""Stop strings: whatever tokens spell a text, it ends before the first, and no piece shows one."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from specjax.engine import stop_strings
from specjax.engine.stop_strings import StoppedText

TEXT = "ab abc ababd. é🙂abcabd end"


class Pieces:
    """Token i is the i-th piece of some bytes."""

    def __init__(self, pieces):
        self._pieces = pieces

    def decode(self, ids, skip_special_tokens):
        return b"".join(self._pieces[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize(
    "stop",
    [
        ("abd",),
        ("🙂", "ababd"),
        ("c", "abc"),
        ("b", "ab"),
        ("ababd", "ba"),
        ("ababe", "end"),
        ("no such", "ends"),
        (" e",),
    ],
)
def test_a_text_ends_before_its_first_stop_string_however_it_is_cut(stop):
    # The first that is complete, of several the longest.
    ends = [(TEXT.find(each) + len(each), TEXT.find(each)) for each in stop if each in TEXT]
    expected = TEXT[: min(ends)[1]] if ends else TEXT
    data = TEXT.encode()
    rng = np.random.default_rng(0)
    for _ in range(40):
        cuts = np.flatnonzero(rng.random(len(data)) < rng.random())
        pieces = [bytes(piece) for piece in np.split(np.frombuffer(data, np.uint8), cuts)]
        text = StoppedText(Pieces(pieces), [], stop)
        shown = ""
        for token in range(len(pieces)):
            shown += text.feed(token)
            assert expected.startswith(shown)
            assert text.text == shown
        shown += text.flush()
        assert (shown, text.text) == (expected, expected)
        assert text.stopped == bool(ends)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=6), st.text("abc"))
def test_any_strings_end_a_text_where_the_first_is_complete_and_no_more_is_held_than_needed(
    stop, text
):
    ends = [(text.find(each) + len(each), text.find(each)) for each in stop if each in text]
    stopped = StoppedText(Pieces([letter.encode() for letter in text]), [], tuple(stop))
    for i in range(len(text)):
        stopped.feed(i)
        if ends and i + 1 >= min(ends)[0]:
            assert stopped.stopped
            assert stopped.text == text[: min(ends)[1]]
            continue
        read = text[: i + 1]
        begun = [n for each in stop for n in range(len(each)) if read.endswith(each[:n])]
        assert stopped.text == read[: len(read) - max(begun)]
        assert not stopped.stopped


def test_ten_thousand_strings_are_looked_for_in_one_pass(monkeypatch):
    looked_up = []
    next_node = stop_strings._StopAutomaton.next_node
    stop = tuple(f"é{number}" for number in range(10_000))
    text = StoppedText(Pieces([b"\xc3\xa9", *(b"%d" % digit for digit in range(10))]), [], stop)

    def count(self, node, character):
        looked_up.append(character)
        return next_node(self, node, character)

    monkeypatch.setattr(stop_strings._StopAutomaton, "next_node", count)
    for token in (3, 3, 0, 9, 9, 9, 9, 0):
        text.feed(token)
    assert (text.text, text.stopped) == ("22", True)
    assert len(looked_up) == 4


def test_stop_strings_have_a_most_number_of_characters():
    strings = ["a" * 100] * (stop_strings.MAX_STOP_CHARACTERS // 100)
    assert len(stop_strings.check_stop(strings)) == 163
    with pytest.raises(ValueError, match="stop has 16400 characters in 164 strings; it takes at "):
        stop_strings.check_stop([*strings, "a" * 100])
    with pytest.raises(ValueError, match=r"stop is \(\{.*\},\); it needs strings"):
        stop_strings.check_stop([{"a" * 10**6: 1}])
