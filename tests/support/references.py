"""What a function or value of a file leads to, read from the syntax of that file and of others."""

import ast
import functools
import itertools


@functools.cache
def names_of(path):
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


def uses(node):
    """Yields the names and dotted names that a definition reads, and the fixtures of a test.

    Decorators, and what stands in `with pytest.raises`, are not read.
    """
    if dotted := _dotted(node):
        yield from itertools.accumulate(dotted.split("."), "{}.{}".format)
    elif isinstance(node, ast.FunctionDef):
        yield from (argument.arg for argument in node.args.args)
        for child in node.body:
            yield from uses(child)
    elif not (isinstance(node, ast.With) and "raises(" in ast.unparse(node.items[0])):
        for child in ast.iter_child_nodes(node):
            yield from uses(child)


def leads_to(path, name, file_of):
    """Returns the dotted names that a definition leads to, also through definitions of others.

    Args:
      path: of the file.
      name: of the definition there.
      file_of: returns the path of a module whose definitions are followed, or None.
    """
    found, seen, due = set(), set(), [(path, name)]
    while due:
        path, name = place = due.pop()
        imported, defined = names_of(path)
        if place in seen or name not in defined:
            continue
        seen.add(place)
        for use in uses(defined[name]):
            root, _, rest = use.partition(".")
            due.append((path, use))
            if root in imported:
                dotted = f"{imported[root]}.{rest}".strip(".")
                found.add(dotted)
                module, _, last = dotted.rpartition(".")
                if helper := file_of(module):
                    due.append((helper, last))
    return found
