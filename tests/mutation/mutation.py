"""One mutation, and where in the tree the source stands that it changes."""

import ast
import functools
import hashlib
import pathlib
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Mutation(NamedTuple):
    """A wrong version of one function, class or module constant.

    Attributes:
      function: dotted name; functions inside functions and methods go on with their names.
      pattern: occurs exactly once in its source.
      replacement: what stands there instead.
      killed_by: node ids of tests, any of which is to fail.
      why: what is wrong then.
      equivalent: why no test can see it, instead of `killed_by`; such a one is not counted.
    """

    function: str
    pattern: str
    replacement: str
    killed_by: tuple[str, ...] = ()
    why: str = ""
    equivalent: str = ""

    @property
    def module(self) -> str:
        """The dotted name of the module that holds it."""
        return ".".join(_split(ROOT, self.function)[0])


def _split(root: pathlib.Path, name: str) -> tuple[list[str], list[str]]:
    """A dotted name as that of a module and what follows it."""
    parts = name.split(".")
    for n in range(len(parts) - 1, 0, -1):
        if (root.joinpath(*parts[:n]).with_suffix(".py")).exists():
            return parts[:n], parts[n:]
    raise LookupError(f"{name}: no module of the tree begins so.")


@functools.cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _named(body: list[ast.stmt], name: str) -> list[ast.stmt]:
    """Definitions and assignments of a name among statements, however deep in `if` and `with`."""
    found = []
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name == name:
                found.append(node)
            continue
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found.append(node)
        for field in ("body", "orelse", "finalbody"):
            found += _named(getattr(node, field, []), name)
    return found


def source_of(root: pathlib.Path, name: str) -> tuple[pathlib.Path, int, int]:
    """The file that defines a dotted name, and the first and last line of the definition."""
    module, rest = _split(root, name)
    path = root.joinpath(*module).with_suffix(".py")
    body = _parsed(path.read_text()).body
    for part in rest:
        found = _named(body, part)
        if len(found) != 1:
            raise LookupError(f"{name}: {part} is defined {len(found)} times in {path}.")
        [node] = found
        body = getattr(node, "body", [])
    first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
    return path, first - 1, node.end_lineno


def _segment(root: pathlib.Path, name: str) -> tuple[pathlib.Path, list[str], str, list[str]]:
    path, first, last = source_of(root, name)
    lines = path.read_text().splitlines(keepends=True)
    return path, lines[:first], "".join(lines[first:last]), lines[last:]


def mutated_file(root: pathlib.Path, mutation: Mutation) -> tuple[pathlib.Path, str]:
    """The file that a mutation changes, and its whole text then.

    Raises:
      LookupError: if the function is not there, or the pattern not exactly once in it.
    """
    path, before, source, after = _segment(root, mutation.function)
    count = source.count(mutation.pattern)
    if count != 1:
        raise LookupError(f"{mutation.function}: {mutation.pattern!r} occurs {count} times in it.")
    changed = source.replace(mutation.pattern, mutation.replacement)
    if changed == source:
        raise LookupError(f"{mutation.function}: {mutation.pattern!r} is replaced by itself.")
    return path, "".join([*before, changed, *after])


def find_test(root: pathlib.Path, node_id: str) -> str:
    """The source of the test that a node id names.

    Raises:
      LookupError: if there is none.
    """
    path, *names = node_id.partition("[")[0].split("::")
    source = (root / path).read_text()
    body = _parsed(source).body
    for name in names:
        found = _named(body, name)
        if len(found) != 1:
            raise LookupError(f"{node_id}: {name} is defined {len(found)} times in {path}.")
        [node] = found
        body = node.body
    return "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])


def digest(root: pathlib.Path, mutation: Mutation) -> str:
    """Tells whether a result is still of this mutation, function and tests."""
    tests = [find_test(root, test) for test in mutation.killed_by]
    source = _segment(root, mutation.function)[2]
    told = repr((mutation._replace(why=""), source, tests))
    return hashlib.sha256(told.encode()).hexdigest()[:16]
