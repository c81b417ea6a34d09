"""Stop strings: whatever tokens spell a text, it ends before the first, and no piece shows one."""

import numpy as np
import pytest

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
