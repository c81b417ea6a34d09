"""Functions that are mutated by operators, the tests that see it, and which versions none sees."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from .listed import MUTATIONS
from .mutation import source_of
from .operators import Change, changes
from .run import copied_tree, passing_tests, run_text

__all__ = ["OPERATED", "Operated", "run_operators"]


class Operated(NamedTuple):
    """What is known of a function's generated versions.

    Attributes:
      tests: node ids, any of which is to fail for each version.
      survivors: "before -> after" of each version that passes them all.
    """

    tests: tuple[str, ...]
    survivors: tuple[str, ...] = ()


OPERATED: dict[str, Operated] = {}


def change_text(change: Change) -> str:
    """Returns an expression and its replacement in one line."""
    before = " ".join(change.before.split())
    return f"{before} -> {change.after}"


def _of_listed() -> dict[str, Operated]:
    """The tests of the listed mutations of each function of the library."""
    found: dict[str, set[str]] = {}
    for mutation in MUTATIONS:
        if mutation.killed_by and mutation.function.startswith("specjax."):
            found.setdefault(mutation.function, set()).update(mutation.killed_by)
    return {name: Operated(tuple(sorted(tests))) for name, tests in found.items()}


def _asked(names: Sequence[str]) -> dict[str, Operated]:
    """The functions whose dotted names begin with one of `names`, or all in the table."""
    if not names:
        return OPERATED
    known = _of_listed() | OPERATED
    return {name: its for name, its in known.items() if name.startswith(tuple(names))}


def run_operators(names: Sequence[str], seconds: float) -> int:
    """Runs each version of the functions named; returns 1 where one survives unexpectedly."""
    asked = _asked(names)
    if not asked:
        print(f"No function with tests begins with {' or '.join(names)}.")
        return 2
    num_killed, unexpected, gone = 0, [], []
    with copied_tree() as root:
        passing_tests(root, sorted({test for its in asked.values() for test in its.tests}))
        for name, its in asked.items():
            path = source_of(root, name)[0]
            survivors = []
            for change in list(changes(root, name)):
                begin = time.monotonic()
                outcome = run_text(root, path, change.text, its.tests, seconds)
                text = change_text(change)
                took = f"{time.monotonic() - begin:.0f} s"
                print(took, outcome.verdict, f"{name}:{change.line}", text, flush=True)
                if outcome.verdict == "survived":
                    survivors.append(text)
                num_killed += outcome.verdict in ("killed", "too long")
            unexpected += [(name, text) for text in survivors if text not in its.survivors]
            gone += [(name, text) for text in its.survivors if text not in survivors]
    for name, text in unexpected:
        print(f"survived: {name}: {text}")
    for name, text in gone:
        print(f"no longer survives: {name}: {text}")
    print(f"{num_killed} seen, {len(unexpected)} survived that are not in the table")
    return 1 if unexpected or gone else 0
