"""Links between documents, and those that name this repository, lead to files and headings."""

import functools
import pathlib
import re

import pytest

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "tests/**/*.md", "specjax/**/*.md")
    for path in ROOT.glob(pattern)
    # Pages that a build of the site writes.
    if path.parent != ROOT / "docs" / "reference"
)
# What a package index and the site show of README leads here.
ABROAD = re.compile(
    "https://(?:github.com/specjax/specjax/blob|raw.githubusercontent.com/specjax/specjax)/main/"
)


def without_blocks(text):
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def without_code(text):
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    )


@functools.cache
def anchors(path):
    """Anchors that GitHub gives the headings of a document; later equal ones are numbered."""
    text = without_blocks(path.read_text(encoding="utf-8"))
    found = set()
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        base = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        numbered = (base if n == 0 else f"{base}-{n}" for n in range(len(found) + 1))
        found.add(next(anchor for anchor in numbered if anchor not in found))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(path):
    text = without_code(path.read_text(encoding="utf-8"))
    inline, defined = r"\]\(([^()\s]+)\)", r"^\[[^\]]+\]: (\S+)$"
    for target in re.findall(inline, text) + re.findall(defined, text, re.MULTILINE):
        here = ROOT if ABROAD.match(target) else path.parent
        target = ABROAD.sub("", target)
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (here / name).resolve() if name else path
        assert file.exists(), f"{target} of {path.name} is not there"
        assert not anchor or anchor in anchors(file), f"{file.name} has no heading {anchor}"


def test_links_of_the_readme_are_absolute_and_each_that_it_names_is_defined():
    """Elsewhere than here, on a package index for one, a relative link leads nowhere."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    defined = re.findall(r"^\[([^\]]+)\]: https://", text, re.MULTILINE)
    assert len(re.findall(r"^\[[^\]]+\]:", text, re.MULTILINE)) == len(defined)
    named = re.findall(r"\[([^\]]+)\]\[([^\]]*)\]", without_code(text))
    assert {(name or title).lower() for title, name in named} == set(defined)
    assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]+)\)", text))


def test_anchors_are_those_of_github(tmp_path):
    document = tmp_path / "a.md"
    document.write_text("# `a` and B: two\n## x\n```\n# code\n```\n## x\n### [Link](b.md), c_d\n")
    assert anchors(document) == {"a-and-b-two", "x", "x-1", "link-c_d"}
