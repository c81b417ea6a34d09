"""The table of `docs/kernels.md` is of the kernels that the code launches."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def names_in(node):
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def launched_kernels():
    """Names of the kernels that functions with a launch name, by file."""
    for path in sorted(ROOT.glob("specjax/**/pallas/**/*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
            callees = {getattr(each.func, "attr", getattr(each.func, "id", "")) for each in calls}
            if callees & {"launch", "launch_draw"}:
                names = [name for name in names_in(function) if name.endswith("_kernel")]
                yield from ((path.name, name) for name in names)


def test_the_table_lists_the_kernels_that_are_launched():
    page = (ROOT / "docs" / "kernels.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")]
    listed = {name for row in rows for name in re.findall(r"^ `(\w+_kernel)` $", row[2])}
    assert listed == {name for _, name in launched_kernels()}


def test_a_launch_name_is_of_one_kernel():
    files = {}
    for file, name in launched_kernels():
        assert files.setdefault(name, file) == file


def kernels_that_call(function):
    """Names of the kernels in whose body, or a function inside it, `function` is called."""
    return {
        kernel.name
        for path in sorted(ROOT.glob("specjax/**/pallas/**/*.py"))
        for kernel in ast.walk(ast.parse(path.read_text()))
        if isinstance(kernel, ast.FunctionDef) and kernel.name.endswith("_kernel")
        for each in ast.walk(kernel)
        if isinstance(each, ast.Call) and getattr(each.func, "id", "") == function
    }


@pytest.mark.parametrize(
    ("begin", "end", "function"),
    [
        ("Five kernels trigger:", "**The others do not trigger.**", "launch_dependents"),
        ("and the kernel's output takes its memory.", "end this way", "is_last_arrival"),
    ],
)
def test_the_page_names_the_kernels_that_trigger_and_those_of_a_last_program(begin, end, function):
    page = " ".join((ROOT / "docs" / "kernels.md").read_text().split())
    words = set(re.findall(r"\w+", page.partition(begin)[2].partition(end)[0]))
    assert words & {name for _, name in launched_kernels()} == kernels_that_call(function)
