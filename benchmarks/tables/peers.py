"""Makes the tables of what specjax and its peers emit from the JSON of `benchmarks.peers`.

python -m benchmarks.tables.peers benchmarks/results/peers.json --readme docs/peers.md
"""

from typing import Any

from benchmarks.tables.publish import publish_from_json, table

BEGIN, END = "<!-- peers-table -->", "<!-- /peers-table -->"

# Of an enumeration, what float32 leaves of 0.
ROUNDING = 1e-5
# Samples count as different from the target if their total variation is this many times chance's.
TIMES_CHANCE = 4
MISTAKE = "mistake: "
COLUMNS = ("sampled drafts", "argmax drafts", "greedy", "top-p", "mixed batch")


def column_of(case: str) -> str:
    """The column of the first table that a case belongs to."""
    if "mixed batch" in case or "batch of two" in case:
        return "mixed batch"
    if "top-p" in case:
        return "top-p"
    if case.startswith("greedy"):
        return "greedy"
    return "sampled drafts" if case.startswith("sampled") else "argmax drafts"


def is_exact(case: dict[str, Any], what: str = "first_token") -> bool:
    """Whether a total variation is that of rounding, or of chance."""
    chance = case.get(f"{what}_by_chance")
    return case[what] < (ROUNDING if chance is None else max(TIMES_CHANCE * chance, ROUNDING))


def variation(case: dict[str, Any], what: str) -> str:
    """A cell: 0 of an enumeration, else the figure, with what chance alone makes of samples."""
    chance = case.get(f"{what}_by_chance")
    if chance is None or not is_exact(case, what):
        return "0" if is_exact(case, what) else f"{case[what]:.3f}"
    return f"0 ({case[what]:.4f}; chance {chance:.4f})" if chance else "0"


def summary(result: dict[str, Any]) -> list[str]:
    """A line per peer: the largest total variation of a first token in each column."""
    rows = []
    for peer, section in result.items():
        found: dict[str, list[float]] = {}
        for case in section["cases"]:
            if case["rows"] == "usual" and MISTAKE not in case["case"].replace(
                f"{MISTAKE}none", ""
            ):
                worst = 0.0 if is_exact(case) else case["first_token"]
                found.setdefault(column_of(case["case"]), []).append(worst)
        rows.append((peer, *(largest(found.get(column)) for column in COLUMNS)))
    return table(f"| | {' | '.join(COLUMNS)} |", rows)


def largest(values: list[float] | None) -> str:
    """A cell of the first table; where cases of a column differ, the least and the most."""
    if values is None:
        return "–"
    least, most = (f"{x:.3f}" if x else "0" for x in (min(values), max(values)))
    return least if least == most else f"{least} to {most}"


def smallest(case: dict[str, Any] | None) -> str:
    """What the first token's probabilities are at V = 2, and what they should be."""
    if case is None or is_exact(case):
        return ""
    return f"{case['emitted'][0]:.3f} for {case['target'][0]:.3f}"


def title(case: dict[str, Any]) -> str:
    """The case, with the rule of its call where that is not the standard one, and its note."""
    rule = case["call"].partition(", ")[2]
    more = [text for text in (rule, case.get("note")) if text and text != "standard"]
    return case["case"] + (f" ({'; '.join(more)})" if more else "")


def peer_table(peer: str, section: dict[str, Any]) -> list[str]:
    """The cases of a peer, and where they were measured."""
    cases = section["cases"]
    at_two = {case["case"]: case for case in cases if case["rows"] == "smallest"}
    head = "| drafts and request | TV, first token | TV, step | tokens per step | V = 2: P(0) |"
    rows = []
    for case in cases:
        if case["rows"] == "smallest":
            continue
        tokens = f"{case['tokens_per_step']:.2f}" if "tokens_per_step" in case else ""
        cells = [title(case), variation(case, "first_token"), variation(case, "step"), tokens]
        rows.append((*cells, smallest(at_two.get(case["case"]))))
    counts = sorted({case["samples"] for case in cases if "samples" in case})
    how = "enumerated" if not counts else f"{min(counts):,} samples of a case or more"
    calls = ", ".join(dict.fromkeys(f"`{case['call']}`" for case in cases))
    where = f"{section['device']}, {section['date']}: `{section['command']}`"
    lines = [f"**{peer}**: {section['version']}", "", *table(head, rows)]
    return [*lines, "", f"{calls}; {how}. {where}"]


def peers_table(result: dict[str, Any]) -> str:
    """Everything, as markdown."""
    lines = summary(result)
    for peer, section in result.items():
        lines += ["", *peer_table(peer, section)]
    return "\n".join(lines)


if __name__ == "__main__":
    publish_from_json(__doc__, peers_table, BEGIN, END)
