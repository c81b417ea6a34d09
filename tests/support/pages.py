"""The Python of a page of the documentation, for tests that ask more of it than that it runs.

python tests/support/pages.py docs/models/keras_hub.md
"""

import ast
import pathlib
import re
import sys
from typing import Any

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def read_code(path: pathlib.Path) -> str:
    """Returns the Python blocks of a page, one after another."""
    text = path.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def define(name: str) -> dict[str, Any]:
    """Returns what the code of a page of docs/ imports and defines; its other lines do not run."""
    path = DOCS / name
    tree = ast.parse(read_code(path))
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    names: dict[str, Any] = {}
    exec(compile(tree, str(path), "exec"), names)
    return names


def run(path: str | pathlib.Path) -> None:
    """Runs all Python of a page in one namespace."""
    code = read_code(pathlib.Path(path))
    exec(compile(code, str(path), "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    run(sys.argv[1])
