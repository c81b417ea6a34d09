"""The pages of docs/models run where their library is installed, and are Python everywhere."""

import ast
import importlib.util
import os
import pathlib
import subprocess
import sys

import pages
import pytest

pytestmark = [pytest.mark.lenient, pytest.mark.once]

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((pages.DOCS / "models").glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_shows_an_adapter_and_checks_its_greedy_text(path):
    tree = ast.parse(pages.read_code(path))
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    # tunix's adapter is a part of specjax.
    assert "specjax.generate" in calls
    assert calls & {"specjax.Model", "tunix_model"}
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    assert f"python tests/support/pages.py docs/models/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_runs_where_its_library_is_installed(path):
    nodes = list(ast.walk(ast.parse(pages.read_code(path))))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    packages = {name.split(".")[0] for name in names}
    missing = sorted(name for name in packages if importlib.util.find_spec(name) is None)
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed")
    # A process of its own: a library may choose its backend when it is imported.
    subprocess.run(
        [sys.executable, ROOT / "tests" / "support" / "pages.py", path],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        check=True,
    )
