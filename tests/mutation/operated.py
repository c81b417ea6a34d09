"""Runs versions of functions that operators make, and keeps which of them a test has seen."""

import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .listed import MUTATIONS
from .mutation import ROOT, source_of
from .operators import Change, changes
from .run import copied_tree, passing_tests, run_text

TABLE = pathlib.Path(__file__).with_name("operated.tsv")


class Seen(NamedTuple):
    """A version that tests see, by its function and change: a line of the table.

    Attributes:
      function: dotted name, as in `Mutation`.
      change: `change_text` of the version, which no other version of the function has.
      tests: node ids, any of which is to fail.
    """

    function: str
    change: str
    tests: tuple[str, ...]


def change_text(change: Change) -> str:
    """Returns an expression and its replacement in one line."""
    before = " ".join(change.before.split())
    return f"{before} -> {change.after}"


def seen_line(seen: Seen) -> str:
    """Returns a line of the table."""
    return "\t".join([seen.function, seen.change, *seen.tests]) + "\n"


def read_seen() -> tuple[Seen, ...]:
    """Returns the table, by function and change."""
    rows = (line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines())
    return tuple(Seen(function, change, tuple(tests)) for function, change, *tests in rows)


def _asked(names: Sequence[str]) -> Iterator[tuple[Change, tuple[str, ...]]]:
    """The table's versions, or all of functions whose names begin so, and tests of each."""
    recorded = {(seen.function, seen.change): seen.tests for seen in read_seen()}
    of_function: dict[str, set[str]] = {}
    for function, tests in [
        *((function, tests) for (function, _), tests in recorded.items()),
        *((m.function, m.killed_by) for m in MUTATIONS if m.function.startswith("specjax.")),
    ]:
        of_function.setdefault(function, set()).update(tests)
    if names:
        functions = [name for name in of_function if name.startswith(tuple(names))]
    else:
        functions = list(dict.fromkeys(function for function, _ in recorded))
    for function in functions:
        for change in changes(ROOT, function):
            tests = recorded.get((function, change_text(change)))
            if names or tests:
                yield change, tests or tuple(sorted(of_function[function]))


def run_operators(names: Sequence[str], seconds: float) -> int:
    """Runs versions; returns 1 where one of the table survives, and prints each that does."""
    asked = [(change, tests) for change, tests in _asked(names) if tests]
    if not asked:
        print(f"no listed test sees a function whose name begins with {' or '.join(names)}")
        return 2
    recorded = {(seen.function, seen.change) for seen in read_seen()}
    survivors, num_killed = [], 0
    with copied_tree() as root:
        passing_tests(root, sorted({test for _, tests in asked for test in tests}))
        for change, tests in asked:
            begin = time.monotonic()
            path = source_of(root, change.function)[0]
            verdict = run_text(root, path, change.text, tests, seconds).verdict
            num_killed += verdict in ("killed", "too long")
            if verdict == "survived":
                survivors.append(change)
            place = f"{change.function}:{change.line}"
            took = f"{time.monotonic() - begin:.0f} s"
            print(took, verdict, place, change_text(change), flush=True)
    for change in survivors:
        print(f"survived: {change.function}:{change.line} {change_text(change)}")
    print(f"{num_killed} of {len(asked)} killed")
    return int(any((change.function, change_text(change)) in recorded for change in survivors))
