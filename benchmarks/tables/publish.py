"""Makes a table of cells, and puts it into a document between two markers.

It also tells which measurements may stand together.
"""

import argparse
import datetime
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

# Figures of two programs are put side by side if they were measured that soon after one another.
SESSION = datetime.timedelta(hours=1)


def is_one_session(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether two environments are those of one session on the same kind of device."""
    dates = [datetime.datetime.fromisoformat(each["date"]) for each in (ours, theirs)]
    return ours["device"] == theirs["device"] and abs(dates[0] - dates[1]) <= SESSION


def table(head: str, rows: Iterable[Iterable[object]]) -> list[str]:
    """The lines of a table, whose head is as in `| a | b |`, and whose rows are cells."""
    rule = "|---" * (head.count("|") - 1) + "|"
    return [head, rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def origin(where: dict[str, Any]) -> str:
    """Where, when and by which command something was measured, of an environment of JAX."""
    device = where["device"] + (f", {where['cores']} cores" if "cores" in where else "")
    return f"{device}, jax {where['jax']}, {where['date'][:10]}: `{where['command']}`"


def put_between_markers(text: str, table: str, begin: str, end: str) -> str:
    """`text` with what stands between two markers replaced by the table.

    Raises:
      ValueError: if the two markers are not there, once each and in order.
    """
    between = re.compile(f"({re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if len(between.findall(text)) != 1:
        raise ValueError(f"The document needs the lines {begin} and {end}, once each, in order.")
    return between.sub(lambda match: f"{match[1]}{table}\n", text)


def publish(table: str, document: pathlib.Path | None, begin: str, end: str) -> None:
    """Prints a table, or puts it into a document between two markers."""
    if document is None:
        print(table)
        return
    text = document.read_text(encoding="utf-8")
    document.write_text(put_between_markers(text, table, begin, end), encoding="utf-8")


Make = Callable[[dict[str, Any]], str]


def table_parser(description: str) -> argparse.ArgumentParser:
    """A parser of a JSON of measurements, and of a document."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("--readme", type=pathlib.Path, help="the document to put the table into")
    return parser


def publish_from_json(
    description: str, make: Make, begin: str, end: str, brief: Make | None = None
) -> None:
    """The command of a program that makes one table of one JSON, and maybe a brief one."""
    parser = table_parser(description)
    if brief is not None:
        parser.add_argument("--brief", action="store_true", help="the brief table instead")
    args = parser.parse_args()
    if brief is not None and args.brief:
        make = brief
    publish(make(json.loads(args.json.read_text(encoding="utf-8"))), args.readme, begin, end)
