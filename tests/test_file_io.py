"""Quotes of what files hold: `repr` as far as a sentence has room for it."""

from specjax.file_io import quote, shorten


def test_a_short_value_is_quoted_whole():
    for value in (None, True, 1.5, -(10**30), "é'\n", [1, "a", None], {"b": [1.0], "a": {}}):
        expected = value if not isinstance(value, dict) else {"a": {}, "b": [1.0]}
        assert quote(value) == repr(expected)
    assert quote(list(range(16))) == str(list(range(16)))


def test_a_long_or_deep_value_keeps_its_ends():
    deep = []
    for _ in range(10**5):
        deep = [deep]
    for value in ("a" * 10**7, ["a" * 99] * 99, {"k" * 10**6: 1}, 10**4000, deep):
        assert len(quote(value)) <= 160
    assert shorten("a" * 500 + "end").endswith("aend")
    assert shorten("a" * 160) == "a" * 160
    assert len(shorten("a" * 161)) == 159
