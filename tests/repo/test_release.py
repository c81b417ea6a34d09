"""A release says what changed, what replaces a name that went, and whom to tell of a fault."""

import functools
import pathlib
import re

import pytest

import specjax

pytestmark = pytest.mark.once

ROOT = pathlib.Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
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
    assert len(replaced) > 15
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
