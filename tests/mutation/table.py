"""The table of mutations, and what it says of each."""

import re
from collections.abc import Mapping, Sequence

from .mutation import Mutation
from .run import Outcome

TABLE = "table.md"
_TITLES = "| function | what is wrong then | changed | seen by |"


def counts(mutations: Sequence[Mutation], num_operated: int) -> str:
    """Returns the first sentence of the table: its rows, and the lines of `operated.tsv`."""
    num_equivalent = sum(bool(mutation.equivalent) for mutation in mutations)
    return (
        f"{len(mutations) - num_equivalent} listed mutations that a test sees, {num_equivalent} "
        "that change nothing a test could see, and, as lines of "
        f"[operated.tsv](operated.tsv), {num_operated} that operators make."
    )


def _cell(text: str) -> str:
    """Text in one line of a table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|")


def _code(text: str) -> str:
    text = _cell(text)
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _begin(mutation: Mutation) -> str:
    """A row but for its last cell."""
    name = mutation.function.removeprefix(mutation.module + ".")
    replacement = _code(mutation.replacement) if mutation.replacement else "nothing"
    change = f"{_code(mutation.pattern)} → {replacement}"
    return f"| `{name}` | {_cell(mutation.why)} | {change} |"


def _by_module(mutations: Sequence[Mutation]) -> dict[str, list[Mutation]]:
    """In the order of the table."""
    found: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        found.setdefault(mutation.module, []).append(mutation)
    return found


def written_table(
    mutations: Sequence[Mutation], outcomes: Mapping[Mutation, Outcome], heading: str, before: str
) -> str:
    """The whole table as Markdown, by module; a row that was not run stays as it was `before`."""
    lines = ["# Wrong versions, and the tests that see them", "", heading]
    rows_before = [line for line in before.splitlines() if line.startswith("| `")]
    for module, its in _by_module(mutations).items():
        lines += ["", f"## {module}", "", _TITLES, "|---|---|---|---|"]
        for mutation in its:
            seen = f"no test: {_cell(mutation.equivalent)}"
            if not mutation.equivalent:
                outcome = outcomes.get(mutation, Outcome("not run"))
                seen = _code(outcome.test) if outcome.verdict == "killed" else outcome.verdict
            begin = _begin(mutation)
            row = f"{begin} {seen} |"
            place = next((i for i, old in enumerate(rows_before) if old.startswith(begin)), None)
            if place is not None:  # Mutations that other tests see have equal rows but for that.
                before_row = rows_before.pop(place)
                row = before_row if mutation not in outcomes and not mutation.equivalent else row
            lines.append(row)
    return "\n".join(lines) + "\n"


def read_table(text: str, mutations: Sequence[Mutation]) -> list[tuple[Mutation, str]]:
    """Each mutation and the last cell of its row.

    Raises:
      ValueError: if the rows are not those of the mutations.
    """
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    found = []
    ordered = [mutation for its in _by_module(mutations).values() for mutation in its]
    for mutation, row in zip(ordered, rows, strict=True):
        if not row.startswith(_begin(mutation)):
            raise ValueError(f"{mutation.function}: {mutation.pattern!r} is not {row}")
        found.append((mutation, row.removeprefix(_begin(mutation)).strip(" |").strip("`")))
    return found
