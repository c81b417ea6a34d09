"""Adds slow tests of JUnit files to `tests/slow_tests.txt`, which `make quick` leaves out.

python tests/support/slow_tests.py build/ci/default*.xml

A name stays until it is taken out by hand: a test that is quick where another one compiled its
programs is not quick without that.
"""

import pathlib
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterable

LIST = pathlib.Path(__file__).parents[1] / "slow_tests.txt"
# A test function of which one case takes longer than this is slow, in seconds of a processor.
LIMIT = 0.5
# `make quick` runs these whole: each public call that no cheaper test makes, on a Markov chain.
KEPT_QUICK = ("tests/decode/test_drafters.py", "tests/engine/test_request.py")


def name_of(node_id: str) -> str:
    """Returns a node id without the parameters of its case."""
    return node_id.partition("[")[0]


def slow_tests(report: str | pathlib.Path) -> list[str]:
    """Returns the names of the slow test functions and docstrings of a JUnit file, sorted."""
    cases = xml.parse(report).getroot().iter("testcase")
    slow = {name_of(name_of_case(case)) for case in cases if seconds_of_case(case) > LIMIT}
    return sorted(name for name in slow if not name.startswith(KEPT_QUICK))


def seconds_of_case(case: xml.Element) -> float:
    """Returns the seconds of a processor that `conftest.py` recorded for a case."""
    values = [p.get("value") for p in case.iter("property") if p.get("name") == "cpu_seconds"]
    return float(values[0]) if values else 0.0


def name_of_case(case: xml.Element) -> str:
    """Returns the node id of a case of a JUnit file."""
    path = case.get("classname", "").replace(".", "/")
    return f"{path}.py::{case.get('name')}"


def read_list() -> frozenset[str]:
    """Returns the names that the list holds."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def main(reports: Iterable[str]) -> None:
    names = sorted(read_list().union(*map(slow_tests, reports)))
    LIST.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
    print(f"{len(names)} tests have a case of more than {LIMIT} s.")


if __name__ == "__main__":
    main(sys.argv[1:])
