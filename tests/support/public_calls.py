"""Which public names the tests of `make quick` call, read from their syntax.

A name counts where a test, or a function or value of its file or of tests/support that it leads to,
uses it. It counts neither in `with pytest.raises` nor in a decorator, where calls stand that are to
be refused. A class counts, too, where an annotation of a used function or class names it.
"""

import importlib
import inspect
import pathlib
import typing

from references import leads_to, names_of, uses

import specjax

TESTS = pathlib.Path(__file__).parents[1]
_LEFT_OUT = ("slow", "interpret", "gpu", "checks")


def public_names():
    """Returns each public function and class of specjax and of modules in its `__all__`."""
    values = [getattr(specjax, name) for name in specjax.__all__]
    rooms = [specjax, *filter(inspect.ismodule, values)]
    named = [
        (f"{room.__name__}.{name}", getattr(room, name)) for room in rooms for name in room.__all__
    ]
    return {name: value for name, value in named if callable(value)}


def _helper(module):
    """Returns the file of a module of tests/support, None for any other."""
    path = TESTS / "support" / f"{module}.py"
    return path if path.exists() else None


def _value_of(dotted):
    """Returns what a dotted name of specjax stands for, None if it is a method's or a field's."""
    value = specjax
    for name in dotted.split(".")[1:]:
        if inspect.ismodule(value) and not hasattr(value, name):
            importlib.import_module(f"{value.__name__}.{name}")
        value = getattr(value, name, None)
    return value


def _types_in(value):
    """Yields the types that the annotations of a function, or of a class and its methods, name."""
    members = [value, *vars(value).values()] if isinstance(value, type) else [value]
    due = [
        hint
        for member in members
        if isinstance(member, type) or inspect.isfunction(member)
        for hint in typing.get_type_hints(member).values()
    ]
    while due:
        kind = due.pop()
        due += typing.get_args(kind)
        yield kind


def quick_tests(path, slow):
    """Yields the names of the tests of a file that `make quick` runs."""
    defined = names_of(path)[1]
    of_file = [defined["pytestmark"]] if "pytestmark" in defined else []
    for name, node in defined.items():
        if not name.startswith("test_") or f"{path.relative_to(TESTS.parent)}::{name}" in slow:
            continue
        marks = {use for mark in [*of_file, *node.decorator_list] for use in uses(mark)}
        if not marks & {f"pytest.mark.{mark}" for mark in _LEFT_OUT}:
            yield name


def not_called(paths, slow):
    """Returns the public names that no test which `make quick` runs of these files calls."""
    tests = [(path, name) for path in paths for name in quick_tests(path, slow)]
    names = {name for test in tests for name in leads_to(*test, _helper)}
    used = [_value_of(name) for name in names if name.split(".")[0] == "specjax"]
    known = {id(value) for value in used}
    for value in used:
        if inspect.isfunction(value) or isinstance(value, type):
            known |= {id(kind) for kind in _types_in(value)}
    return [name for name, value in public_names().items() if id(value) not in known]
