"""The table of mutations, and what it says of each."""

import re
from collections.abc import Mapping, Sequence

from .mutation import Mutation
from .run import Outcome

__all__ = ["TABLE", "read_rows", "written_table"]

TABLE = "table.md"
_TITLES = "| function | what is wrong then | changed | seen by |"


def _cell(text: str) -> str:
    """Text in one line of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _code(text: str) -> str:
    text = _cell(text)
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _begin(mutation: Mutation) -> str:
    """A row but for its last cell."""
    name = mutation.function.removeprefix(mutation.module + ".")
    change = f"{_code(mutation.pattern)} → {_code(mutation.replacement) if mutation.replacement else 'nothing'}"
    return f"| `{name}` | {_cell(mutation.why)} | {change} |"


def written_table(
    mutations: Sequence[Mutation], outcomes: Mapping[Mutation, Outcome], heading: str
) -> str:
    """The whole table as Markdown, by module."""
    lines = ["# Wrong versions, and the tests that see them", "", heading]
    modules = list(dict.fromkeys(mutation.module for mutation in mutations))
    for module in modules:
        lines += ["", f"## {module}", "", _TITLES, "|---|---|---|---|"]
        for mutation in mutations:
            if mutation.module == module:
                seen = f"no test: {_cell(mutation.equivalent)}"
                if not mutation.equivalent:
                    outcome = outcomes.get(mutation, Outcome("not run"))
                    seen = _code(outcome.test) if outcome.verdict == "killed" else outcome.verdict
                lines.append(f"{_begin(mutation)} {seen} |")
    return "\n".join(lines) + "\n"


def read_rows(text: str, mutations: Sequence[Mutation]) -> dict[Mutation, str]:
    """What a table's last cell says of each mutation; those that it lacks are left out."""
    section, rows = "", {}
    for line in text.splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        for mutation in mutations:
            begin = _begin(mutation)
            if section == mutation.module and line.startswith(begin):
                rows[mutation] = line.removeprefix(begin).strip(" |").strip("`")
    return rows
