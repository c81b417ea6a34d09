"""Every public name has a page in the reference, and the page has all that its docstring says."""

import importlib.util
import pathlib
import re

import public_names
import pytest

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def reference():
    path = ROOT / "docs" / "reference_pages.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_in_the_reference(name):
    return name.removeprefix("core.")


def test_every_public_name_has_one_page(reference):
    public = [as_in_the_reference(name) for name in public_names.signatures()]
    assert sorted(reference.NAMES) == sorted(public), "see PAGES of docs/reference_pages.py"


def test_a_page_shows_the_signature_and_every_argument(reference):
    for name, signature in public_names.signatures().items():
        page = reference.page(as_in_the_reference(name))
        assert page.startswith(f"# {as_in_the_reference(name)}\n")
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
