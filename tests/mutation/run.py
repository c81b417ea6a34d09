"""Copies of the tree, a wrong version in each, and the tests that ought to see it."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .mutation import ROOT, Mutation, mutated_file

_COPIED = ("specjax", "tests", "examples", "benchmarks", "docs")
_COPIED += ("conftest.py", "pyproject.toml", "README.md")
_LARGE = 200_000
_PASSED = ("call", "passed")
_NO_PROGRAM = ("NameError", "ImportError", "SyntaxError", "UnboundLocalError")
_OPTIONS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "mutation.outcomes", "--hypothesis-seed=0")


class Outcome(NamedTuple):
    """What a run says of a wrong version.

    Attributes:
      verdict: "killed", "survived", "broken" or "too long".
      test: node id of the test that failed; "" where none did.
      message: how it failed, or what is broken.
    """

    verdict: str
    test: str = ""
    message: str = ""


@contextlib.contextmanager
def copied_tree() -> Iterator[pathlib.Path]:
    """A copy of what is tested, large files linked, in a temporary folder."""

    def copy(source: str, target: str) -> None:
        if os.path.getsize(source) > _LARGE:
            os.symlink(os.path.realpath(source), target)
        else:
            shutil.copyfile(source, target)

    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", ".*")
                shutil.copytree(source, root / name, copy_function=copy, ignore=ignore)
            else:
                copy(str(source), str(root / name))
        yield root


def _pytest(root: pathlib.Path, tests: Sequence[str], seconds: float | None) -> Any:
    """What `mutation.outcomes` wrote of tests in a copy, and the end of what pytest printed."""
    told = root / "outcomes.json"
    told.unlink(missing_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "tests")]),
        # A file that is written twice in a second may keep the bytecode of the first.
        "PYTHONDONTWRITEBYTECODE": "1",
        "SPECJAX_MUTATION_OUTCOMES": str(told),
    }
    # Most of what a wrong version runs is compiled as it was for the right one.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "compilations"))
    command = [sys.executable, "-m", "pytest", *_OPTIONS, *tests]
    done = subprocess.run(
        command,
        cwd=root,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    if not told.exists():
        return {"exit_status": done.returncode, "reports": [], "output": done.stdout[-2000:]}
    return json.loads(told.read_text()) | {"output": done.stdout[-2000:]}


def verdict(told: Any, tests: Sequence[str]) -> Outcome:
    """What the outcomes of the named tests say.

    A test that fails where it is called kills; an error before that, as of an import or of a
    fixture, or a name that is not there, says that the wrong version is none.
    """
    failed = [report for report in told["reports"] if report[2] == "failed"]
    if failed:
        test, when, _, message = failed[0]
        is_kill = when == "call" and not message.startswith(_NO_PROGRAM)
        return Outcome("killed" if is_kill else "broken", test, message)
    passed = {test for test, when, outcome, _ in told["reports"] if (when, outcome) == _PASSED}
    unseen = [test for test in tests if not any(_is_of(one, test) for one in passed)]
    if told["exit_status"] or unseen:
        message = f"exit status {told['exit_status']}, not passed: {unseen}\n{told['output']}"
        return Outcome("broken", message=message)
    return Outcome("survived")


def _is_of(node_id: str, named: str) -> bool:
    """Whether a test is the one that is named, or one of its cases."""
    return node_id == named or node_id.startswith(f"{named}[")


def passing_tests(root: pathlib.Path, tests: Sequence[str]) -> None:
    """Runs tests on the right version.

    Raises:
      RuntimeError: if one fails, is skipped or does not exist.
    """
    outcome = verdict(_pytest(root, tests, None), tests)
    if outcome.verdict != "survived":
        raise RuntimeError(
            f"The right version fails {outcome.test or 'before any test'}: {outcome.message}"
        )


def run_mutation(root: pathlib.Path, mutation: Mutation, seconds: float) -> Outcome:
    """Applies a mutation to a copy of the tree, runs its tests, and takes it back."""
    path, text = mutated_file(root, mutation)
    return run_text(root, path, text, mutation.killed_by, seconds)


def run_text(
    root: pathlib.Path, path: pathlib.Path, text: str, tests: Sequence[str], seconds: float
) -> Outcome:
    """Runs tests while a file of a copy of the tree holds another text."""
    right = path.read_text()
    try:
        path.write_text(text)
        return verdict(_pytest(root, tests, seconds), tests)
    except subprocess.TimeoutExpired:
        return Outcome("too long", message=f"more than {seconds} s")
    finally:
        path.write_text(right)
