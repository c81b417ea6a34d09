"""A release says what changed, what replaces a name that went, and whom to tell of a fault."""

import functools
import pathlib
import re
import tomllib

import pytest
import yaml

import specjax

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
REPOSITORY = "https://github.com/specjax/specjax"
# Methods of values, and what no package of ours defines.
OF_VALUES = {"draft.replace", "submit"}


def rows_of_tables():
    """What went and what replaces it: the two cells of each row of the changelog's tables."""
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", CHANGELOG, re.MULTILINE)
    return [row for row in rows if "`" in row[0]]


def has(path):
    """Whether a dotted name leads somewhere from `specjax`."""
    names = path.removeprefix("specjax.").split(".")
    try:
        functools.reduce(getattr, names, specjax)
    except AttributeError:
        return False
    return True


def test_the_changelog_begins_with_this_version_and_is_short():
    versions = re.findall(r"^## \[(.*)\]$", CHANGELOG, re.MULTILINE)
    assert versions in (
        [specjax.__version__, *versions[1:]],
        ["Unreleased", specjax.__version__, *versions[2:]],
    )
    assert versions[-1] == "0.1.0"
    assert len(CHANGELOG.splitlines()) <= 120


def test_what_replaces_a_name_that_went_is_there():
    called = re.compile(r"(?<![\w.])([A-Za-z_][\w.]*)\(")
    rows = rows_of_tables()
    replaced = {name for _, after in rows for name in called.findall(after)} - OF_VALUES
    assert len(replaced) > 5
    assert not [name for name in sorted(replaced) if not has(name)]


def test_a_public_name_of_the_release_before_is_there_or_has_a_row():
    before = (
        "DecodeState Draft Drafter Finish Generation Metrics Model Origin Sample Settings "
        "SpeculativeConfig StepInfo Stream Verification commit conditional_rates draft_from_probs "
        "expected_acceptance_length gather_drafts generate geometric_rates gumbel_sample init "
        "init_metrics model_drafter ngram_drafter propose rates_for_length rejection_sample "
        "rejection_sample_ragged step unpad update_metrics models.Transformer "
        "models.TransformerConfig models.build models.causal_hidden models.functions models.load "
        "models.load_config models.load_tokenizer models.pretrained_folder models.save"
    )
    gone = [name for name in before.split() if not has(name)]
    went = " ".join(left for left, _ in rows_of_tables())
    assert gone == ["rejection_sample_ragged"]
    assert all(f"`{name}" in went for name in gone)


def included_in_the_sdist(path):
    """Whether the patterns of pyproject.toml, or what every sdist has, name a path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    always = ["/pyproject.toml", "/README.md", "/LICENSE", "/.gitignore"]
    tops = {pattern.strip("/") for pattern in [*patterns, *always]}
    assert not [top for top in tops if "*" in top]
    assert not [top for top in tops if not (ROOT / top).exists()]
    return path.relative_to(ROOT).parts[0] in tops


def links_of(document):
    """Files that a document links to, by relative links or by those of the repository's pages."""
    text = re.sub(r"`[^`\n]*`", "", document.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^()\s#]+)", text):
        page = re.match(rf"{REPOSITORY}/(?:blob|tree|raw)/[^/]+/(.*)", link)
        if page:
            yield (ROOT / page[1]).resolve()
        elif not re.match(r"https?://|mailto:", link):
            yield (document.parent / link).resolve()


DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_sdist_has_what_a_document_of_it_links_to(document):
    assert included_in_the_sdist(document)
    missing = [path for path in links_of(document) if not included_in_the_sdist(path)]
    assert not missing


def test_the_project_and_the_citation_name_the_repository():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"]["Source"] == REPOSITORY
    assert all(url.startswith(REPOSITORY) for url in project["urls"].values())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == REPOSITORY
    assert citation["license"] == project["license"]
    # The version stands in one place, which is not this file.
    assert "version" not in citation


def test_an_issue_asks_for_the_smallest_input_versions_and_the_card():
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yml")}
    assert set(forms) == {"bug", "config", "question", "wrong_distribution"}
    for name in ("bug", "wrong_distribution"):
        fields = {field["id"]: field for field in forms[name]["body"]}
        assert {"input", "selftest", "card"} <= set(fields)
        assert all(fields[one]["validations"]["required"] for one in ("input", "selftest", "card"))
    security = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert all(link["url"] in security for link in forms["config"]["contact_links"])
