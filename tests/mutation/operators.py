"""Wrong versions of a function that operators on its syntax tree make, one change each."""

import ast
import copy
import itertools
import pathlib
import textwrap
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .mutation import ROOT, Mutation, mutated_file, source_of

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_PAIRS = (
    ("min", "max"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("cummin", "cummax"),
    ("any", "all"),
    ("floor", "ceil"),
    ("zeros", "ones"),
)
_NAMES = {one: other for pair in _PAIRS for one, other in (pair, pair[::-1])}
# One operand instead of a call of both; the condition of `where` comes first.
_BINARY = ("minimum", "maximum", "min", "max", "logical_and", "logical_or", "logaddexp")


class Change(NamedTuple):
    """One expression of a function, replaced.

    Attributes:
      function: dotted name, as in `Mutation`.
      line: where the expression begins in its file.
      before: the expression's source.
      after: what stands there instead.
      text: the whole file with it.
    """

    function: str
    line: int
    before: str
    after: str
    text: str


def _with(node: ast.expr, **fields: object) -> ast.expr:
    """A copy of a node, some of its fields replaced."""
    copied = copy.copy(node)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _of_call(node: ast.Call) -> Iterator[ast.expr]:
    name, arguments = _called(node), node.args
    if name in _NAMES:
        field = "attr" if isinstance(node.func, ast.Attribute) else "id"
        yield _with(node, func=_with(node.func, **{field: _NAMES[name]}))
    if name == "where" and len(arguments) == 3:
        condition, one, other = arguments
        yield from (one, other, _with(node, args=[condition, other, one]))
    if name in _BINARY and len(arguments) == 2:
        yield from arguments
    for i in range(len(node.keywords)):
        yield _with(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])


def _of_constant(node: ast.Constant) -> Iterator[ast.expr]:
    if isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        values = {0, 1, node.value + 1, node.value - 1} - {node.value}
        yield from (ast.Constant(type(node.value)(value)) for value in sorted(values))


def _replacements(node: ast.expr) -> Iterator[ast.expr]:
    """What one node may be replaced by, each wrong by one operator."""
    match node:
        case ast.Compare(ops=[operator]):
            for other in _COMPARISONS[type(operator)]:
                yield _with(node, ops=[other()])
        case ast.BinOp(left=left, op=operator, right=right):
            if type(operator) in _ARITHMETIC:
                yield _with(node, op=_ARITHMETIC[type(operator)]())
            yield from (left, right)
        case ast.BoolOp(op=operator, values=values):
            yield _with(node, op=ast.Or() if isinstance(operator, ast.And) else ast.And())
            for i in range(len(values)):
                kept = values[:i] + values[i + 1 :]
                yield kept[0] if len(kept) == 1 else _with(node, values=kept)
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.Call():
            yield from _of_call(node)
        case ast.Constant():
            yield from _of_constant(node)


def _in_code(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a definition, without annotations, docstrings and f-strings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.JoinedStr) or not isinstance(child, ast.AST):
                continue
            if isinstance(child, ast.expr):
                yield child
            yield from _in_code(child)


def changes(root: pathlib.Path, name: str) -> Iterator[Change]:
    """Makes each wrong version of one function or class, in the order of its source."""
    path, first, last = source_of(root, name)
    source = path.read_bytes()
    lines = source.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    for node in _in_code(_definition(source.decode(), first + 1, last)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        for other in _replacements(node):
            after = ast.unparse(other)
            text = b"".join([source[:begin], f"({after})".encode(), source[end:]])
            before = source[begin:end].decode()
            yield Change(name, node.lineno, before, after, text.decode())


def _definition(source: str, first: int, last: int) -> ast.stmt:
    """The statement from one line, or decorator, to another."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.stmt) and node.end_lineno == last:
            decorators = getattr(node, "decorator_list", [])
            if min([node.lineno, *(x.lineno for x in decorators)]) == first:
                return node
    raise LookupError(f"No statement goes from line {first} to {last}.")


def equal_to_listed(mutations: Iterable[Mutation]) -> dict[Mutation, Change]:
    """The listed mutations that make the syntax tree of a generated version, and that version."""
    by_function: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        by_function.setdefault(mutation.function, []).append(mutation)
    equal = {}
    for function, listed in by_function.items():
        path, first, last = source_of(ROOT, function)
        num_lines = len(path.read_text(encoding="utf-8").splitlines())

        def tree(text: str, first: int = first, tail: int = num_lines - last) -> str:
            """Of the definition alone: a mutation changes nothing else."""
            lines = text.splitlines(keepends=True)
            return ast.dump(ast.parse(textwrap.dedent("".join(lines[first : len(lines) - tail]))))

        generated = {tree(change.text): change for change in changes(ROOT, function)}
        for mutation in listed:
            change = generated.get(tree(mutated_file(ROOT, mutation)[1]))
            if change is not None:
                equal[mutation] = change
    return equal
