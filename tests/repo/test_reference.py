"""Every public name has a page in the reference, and pages lead to one another in the site."""

import importlib
import pathlib
import re

import public_names
import pytest

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def reference(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("reference_pages")


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("site_text")


def as_in_the_reference(name):
    return name.removeprefix("core.")


def test_every_public_name_has_one_page(reference):
    public = [as_in_the_reference(name) for name in public_names.signatures()]
    assert sorted(reference.NAMES) == sorted(public), "see PAGES of docs/reference_pages.py"


def test_a_page_shows_the_signature_and_every_argument(reference):
    for name, signature in public_names.signatures().items():
        page = reference.page(as_in_the_reference(name))
        assert f"\n# {as_in_the_reference(name)}\n" in page
        first = re.match(r"\((\*, )?\w+", signature)
        assert not first or first[0] in page, name
        docstring = reference.find(as_in_the_reference(name)).__doc__
        own, *_ = page.split("\n````{")  # Without the methods of a class.
        for section in ("Args", "Returns", "Raises", "Example", "References"):
            assert (f"\n    {section}:\n" in docstring) == (f"\n**{section}**\n" in own), name


def test_pages_are_written_once_and_old_ones_removed(reference, tmp_path):
    (tmp_path / "gone.md").write_text("a name of last year")
    reference.write(tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert "gone.md" not in first
    assert len(first) == len(reference.NAMES) + len(reference.PAGES) + 1
    reference.write(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == first


def test_a_docstring_becomes_markdown(reference):
    text = """Returns a.

Follows :math:`p * q` and `generate`, not 2 * 3 < 7:

.. math:: a = b

and

    c = d

Args:
  x, y: two
    numbers.
  z: `Draft`.

Example:
  >>> 1
  1

  Then

  >>> 2
  2

References:
  arXiv:2211.17192.
"""
    page = reference._docstring(text, "unpad")
    assert "Follows $p * q$ and [`generate`](generate.md), not 2 \\* 3 \\< 7:" in page
    assert "$$\na = b\n$$" in page
    assert "\n    c = d\n" in page
    assert "- `x`, `y`: two numbers.\n- `z`: [`Draft`](Draft.md)." in page
    assert "```pycon\n>>> 1\n1\n```\n\nThen\n\n\n```pycon\n>>> 2\n2\n```" in page
    assert "[arXiv:2211.17192](https://arxiv.org/abs/2211.17192)." in page


def test_links_of_a_page_are_those_of_the_site(site):
    there = "https://github.com/specjax/specjax/blob/main"
    raw = "https://raw.githubusercontent.com/specjax/specjax/main"
    for depth, page, adapted in (
        (0, "[a](b.md#c)", "[a](b.md#c)"),
        (0, "[a](../MODEL_CARD.md#c)", f"[a]({there}/MODEL_CARD.md#c)"),
        (1, "[a](../b.md)", "[a](../b.md)"),
        (1, "[a](../../examples/a.py)", f"[a]({there}/examples/a.py)"),
        (0, "![a](../benchmarks/a.png)", "![a](../benchmarks/a.png)"),
        (0, f"[a]({there}/docs/b.md#c)", "[a](b.md#c)"),
        (1, f"[a]({there}/docs/b.md)", "[a](../b.md)"),
        (0, f"![a]({raw}/docs/a.svg)", "![a](a.svg)"),
        (0, f"[a]: {there}/docs/b.md\n", "[a]: b.md\n"),
        (0, f"[a]: {there}/CHANGELOG.md\n", f"[a]: {there}/CHANGELOG.md\n"),
    ):
        assert site.adapt(page, depth) == adapted


def test_the_first_mention_of_a_name_leads_to_its_page(site):
    page = (
        "# `unpad`\n\n`unpad(ids)` and `specjax.unpad`, [`commit`](a.md), `theory.best_k`, `x`.\n"
    )
    assert site.adapt(page, 1) == (
        "# `unpad`\n\n[`unpad(ids)`](../reference/unpad.md) and `specjax.unpad`, [`commit`](a.md), "
        "[`theory.best_k`](../reference/theory.best_k.md), `x`.\n"
    )
    block = "```python\n# `unpad`\n```\n"
    assert site.adapt(block, 0) == block


def test_a_mark_is_replaced_by_a_file_or_its_section(site):
    whole = site.adapt("# A\n\n<!-- README.md stands here -->\n", 0)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert whole.startswith("# A\n\n\nVerification for speculative decoding")
    assert len(whole.splitlines()) == len(readme.splitlines()) + 2
    section = site.adapt("<!-- MODEL_CARD.md, Training stands here -->", 0)
    assert "examples/train_pair.py" in section
    assert "#" not in section
