"""Notebooks hold what their pages hold, and their code runs from top to bottom."""

import importlib.util
import json
import pathlib
import re

import pages
import pytest

pytestmark = [pytest.mark.lenient, pytest.mark.once]

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
SPEC = importlib.util.spec_from_file_location("build_notebooks", FOLDER / "build.py")
build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build)


@pytest.mark.parametrize("name", build.PAGES)
def test_a_notebook_is_built_of_its_page(name):
    path = (FOLDER / name).with_suffix(".ipynb")
    text = build.notebook_of(pages.DOCS / name)
    assert path.read_text(encoding="utf-8") == text, "run: python examples/notebooks/build.py"
    cells = json.loads(text)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # The page's code runs in tests/repo/test_house.py, as one program.
    assert "\n".join(code).split() == pages.read_code(pages.DOCS / name).split()
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_every_notebook_has_its_page():
    assert sorted(path.stem for path in FOLDER.glob("*.ipynb")) == sorted(
        pathlib.Path(name).stem for name in build.PAGES
    )


def test_links_of_a_notebook_lead_to_files():
    for path in FOLDER.glob("*.ipynb"):
        links = re.findall(r"\]\(([^()\s#]+)", path.read_text(encoding="utf-8"))
        files = [link for link in links if not link.startswith("http")]
        assert files
        assert all((FOLDER / link).exists() for link in files)
