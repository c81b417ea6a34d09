"""Which public names the tests of `make quick` call, read from their syntax.

A name counts where a test, or a function or value of its file or of tests/support that it leads to,
uses it. It counts neither in `with pytest.raises` nor in a decorator, where calls stand that are to
be refused. A class counts, too, where an annotation of a used function or class names it.
"""

import ast
import functools
import importlib
import inspect
import itertools
import pathlib
import typing

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


@functools.cache
def _names_of(path):
    """Returns what a file imports, as dotted names by the names there, and what it defines."""
    imported, defined = {}, {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                imported[alias.asname or alias.name] = base + alias.name
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign):
            targets = [each for target in node.targets for each in ast.walk(target)]
            defined |= {each.id: node.value for each in targets if isinstance(each, ast.Name)}
    return imported, defined


def _dotted(node):
    """Returns a name with attributes as one dotted name, None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    base = _dotted(node.value) if isinstance(node, ast.Attribute) else None
    return base and f"{base}.{node.attr}"


def _uses(node):
    """Yields the names and dotted names that a definition reads, and the fixtures of a test."""
    if dotted := _dotted(node):
        yield from itertools.accumulate(dotted.split("."), "{}.{}".format)
    elif isinstance(node, ast.FunctionDef):
        yield from (argument.arg for argument in node.args.args)
        for child in node.body:
            yield from _uses(child)
    elif not (isinstance(node, ast.With) and "raises(" in ast.unparse(node.items[0])):
        for child in ast.iter_child_nodes(node):
            yield from _uses(child)


def _used_by(path, name):
    """Returns the dotted names of specjax that a definition of a file leads to."""
    found, seen, due = set(), set(), [(path, name)]
    while due:
        path, name = place = due.pop()
        imported, defined = _names_of(path)
        if place in seen or name not in defined:
            continue
        seen.add(place)
        for use in _uses(defined[name]):
            root, _, rest = use.partition(".")
            due.append((path, use))
            dotted = f"{imported.get(root, '')}.{rest}".strip(".")
            module, _, last = dotted.rpartition(".")
            if module.startswith("specjax") or dotted == "specjax":
                found.add(dotted)
            elif (helper := TESTS / "support" / f"{module}.py").exists():
                due.append((helper, last))
    return found


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
    defined = _names_of(path)[1]
    of_file = [defined["pytestmark"]] if "pytestmark" in defined else []
    for name, node in defined.items():
        if not name.startswith("test_") or f"{path.relative_to(TESTS.parent)}::{name}" in slow:
            continue
        marks = {use for mark in [*of_file, *node.decorator_list] for use in _uses(mark)}
        if not marks & {f"pytest.mark.{mark}" for mark in _LEFT_OUT}:
            yield name


def not_called(paths, slow):
    """Returns the public names that no test which `make quick` runs of these files calls."""
    tests = [(path, name) for path in paths for name in quick_tests(path, slow)]
    used = [_value_of(name) for name in {name for test in tests for name in _used_by(*test)}]
    known = {id(value) for value in used}
    for value in used:
        if inspect.isfunction(value) or isinstance(value, type):
            known |= {id(kind) for kind in _types_in(value)}
    return [name for name, value in public_names().items() if id(value) not in known]
