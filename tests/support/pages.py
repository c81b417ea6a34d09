"""The Python of a page of the documentation, for tests that ask more of it than that it runs."""

import ast
import pathlib
import re
from typing import Any

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def define(name: str) -> dict[str, Any]:
    """Returns what the code of a page of docs/ imports and defines; its other lines do not run."""
    path = DOCS / name
    code = re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
    tree = ast.parse("\n".join(code))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    names: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), names)
    return names
