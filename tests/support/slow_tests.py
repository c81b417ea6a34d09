"""Writes `tests/slow_tests.txt`, the tests that `make quick` leaves out, from a JUnit file of CI.

python tests/support/slow_tests.py build/ci/default*.xml
"""

import pathlib
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterable

LIST = pathlib.Path(__file__).parents[1] / "slow_tests.txt"
# A test function of which one case takes longer than this is slow, in seconds.
LIMIT = 0.5


def name_of(node_id: str) -> str:
    """Returns a node id without the parameters of its case."""
    return node_id.partition("[")[0]


def slow_tests(report: str | pathlib.Path) -> list[str]:
    """Returns the names of the slow test functions and docstrings of a JUnit file, sorted."""
    cases = xml.parse(report).getroot().iter("testcase")
    slow = (case for case in cases if float(case.get("time", 0)) > LIMIT)
    return sorted({name_of(name_of_case(case)) for case in slow})


def name_of_case(case: xml.Element) -> str:
    """Returns the node id of a case of a JUnit file."""
    path = case.get("classname", "").replace(".", "/")
    return f"{path}.py::{case.get('name')}"


def read_list() -> frozenset[str]:
    """Returns the names that the list holds."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def main(reports: Iterable[str]) -> None:
    names = sorted({name for report in reports for name in slow_tests(report)})
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(names)} tests have a case of more than {LIMIT} s.")


if __name__ == "__main__":
    main(sys.argv[1:])
