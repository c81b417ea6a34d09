"""Notebooks of pages of docs/: their text and their Python, said once.

python examples/notebooks/build.py
"""

import json
import pathlib
import re

HERE = pathlib.Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PAGES = ("drafter_and_k.md", "one_step.md", "rollouts.md", "your_model.md")


def cells_of(page: str) -> list[dict]:
    """Cells of a page: Python blocks are code, everything between them is Markdown."""
    cells = []
    for number, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.M | re.S)):
        if part.strip():
            kind = ("markdown", "code")[number % 2]
            cell = {"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}}
            cell["source"] = part.strip().splitlines(keepends=True)
            cells.append(cell | ({"execution_count": None, "outputs": []} if number % 2 else {}))
    return cells


def notebook_of(path: pathlib.Path) -> str:
    """Returns the notebook of a page, as its file's text; links are those from this folder."""
    page = re.sub(r"(\]\()(?!https?://|#)", r"\1../../docs/", path.read_text(encoding="utf-8"))
    note = f"*Built from docs/{path.name}. It needs* `pip install 'specjax[flax]'`.\n\n"
    page = note + page.replace("../../docs/../", "../../")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {
        "cells": cells_of(page),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for name in PAGES:
        path = (HERE / name).with_suffix(".ipynb")
        path.write_text(notebook_of(DOCS / name), encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
