"""What the command shows: coloured text and a summary on a terminal, plain text elsewhere."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specjax.cli.generate import Job, Run, Timings, metrics_of
from specjax.cli.token_text import list_logprobs
from specjax.typing import Origin

__all__ = ["Terminal"]

_PROMPT = 0
_NAMES = {
    _PROMPT: ("prompt", Style(dim=True)),
    Origin.ACCEPTED: ("accepted draft", Style(color="green")),
    Origin.RECOVERED: ("recovered after a rejection", Style(color="yellow")),
    Origin.BONUS: ("bonus", Style(color="cyan", bold=True)),
}
_BAR = 24
_BLOCKS, _ASCII = "█░", "#."
# A model may write what a terminal would obey.
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}


def _styled(file: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not plain


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        # rich's own ends the process, with a code of an error.
        raise BrokenPipeError


def _console(file: TextIO) -> Console:
    width = None if file.isatty() else 100
    return _Console(file=file, force_terminal=_styled(file), highlight=False, width=width)


class Terminal:
    """Standard output and standard error of the command.

    The text goes to standard output, alone unless that is a terminal; the summary goes with
    it on a terminal and to standard error elsewhere.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self._out, self._notes = _console(sys.stdout), _console(sys.stderr)
        self._shown = sys.stdout.isatty()
        self._line_ended = True

    def working(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """A spinner for as long as the context lasts."""
        if _styled(sys.stderr):
            return self._notes.status(f"{what} ...", spinner_style="cyan")
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def stages(self, total: int) -> Iterator[Callable[[str], None]]:
        """Gives a function that is told what begins, `total` times at most, and moves a bar."""
        if not _styled(sys.stderr):
            yield lambda _: None
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn())
        with Progress(
            *columns, MofNCompleteColumn(), TimeElapsedColumn(), console=self._notes, transient=True
        ) as progress:
            task = progress.add_task("", total=total)
            begun = iter(range(total + 1))
            yield lambda what: progress.update(task, description=what, completed=next(begun))

    def found(self, heading: str, tables: list[tuple[str, Table]], sentences: list[str]) -> None:
        """Tables below their heading, and what follows from them."""
        # As Text: a folder's name may look like markup.
        self._out.print(Text(heading, "dim"))
        for title, table in tables:
            self._out.print()
            self._out.print(Text(title, "dim"))
            self._out.print(table)
        self._out.print()
        for sentence in sentences:
            self._out.print(Text(sentence))

    def note(self, sentence: str) -> None:
        """A line that is no part of the output."""
        self._notes.print(Text(sentence, "dim"))

    def begin(self, job: Job) -> None:
        """What decodes, the legend, and the prompt; nothing unless on a terminal."""
        if not self._shown:
            return
        # As Text: a folder's name may look like markup.
        self._out.print(Text(_heading(job), "dim"))
        if _styled(sys.stdout):
            kinds = _NAMES if job.drafter is not None else (_PROMPT, Origin.BONUS)
            shown = [Text("■ " + _NAMES[kind][0], _NAMES[kind][1]) for kind in kinds]
            self._out.print(Text("  ").join(shown))
        self._out.print()
        self.show(job.text, _PROMPT)

    def show(self, text: str, origin: int) -> None:
        """Writes a piece of text as it is, in the colour of its origin."""
        if not text:
            return
        self._line_ended = text.endswith("\n")
        if self._shown:
            segment = Segment(text.translate(_CONTROLS), _NAMES[origin][1])
            self._out.print(Segments([segment]), end="", crop=False)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the last line of the text."""
        if not self._line_ended:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def summary(self, job: Job, run: Run, timings: Timings) -> None:
        """Log-probabilities if asked for, speed, compilation, acceptance."""
        console = self._out if self._shown else self._notes
        if run.top_logprobs is not None:
            console.print()
            console.print(_listing(list_logprobs(job.tokenizer, run.token_ids, run.top_logprobs)))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        # In an encoding without blocks they would be written as escapes.
        blocks = _BLOCKS if console.encoding.startswith("utf") else _ASCII
        for name, value in _rows(job, run, timings, blocks):
            table.add_row(name, value)
        console.print()
        console.print(table)


def _listing(tokens: list[dict[str, Any]]) -> Table:
    """A row for each token: its log-probability, its rank, and the likeliest in its place."""

    def quoted(token: dict[str, Any]) -> str:
        return json.dumps(token["token"], ensure_ascii=False).translate(_CONTROLS)

    def number(token: dict[str, Any]) -> str:
        return "none" if token["logprob"] is None else f"{token['logprob']:.2f}"

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("token")
    table.add_column("log p", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("likeliest" if any(token["top"] for token in tokens) else "")
    for token in tokens:
        top = [f"{quoted(other)} {number(other)}" for other in token["top"]]
        # As Text: a token may look like markup.
        cells = (quoted(token), number(token), str(token["rank"]), "  ".join(top))
        table.add_row(*map(Text, cells))
    return table


def _heading(job: Job) -> str:
    drafting = f" · K = {job.config.num_speculative_tokens}" if job.drafter is not None else ""
    device = jax.devices()[0].device_kind
    return (
        f"{job.name}{drafting} · temperature {job.temperature:g} · {device}, jax {jax.__version__}"
    )


def _rows(job: Job, run: Run, timings: Timings, blocks: str) -> list[tuple[str, Text]]:
    reason = run.finish.replace("_", " ")
    kind = "with drafts" if job.drafter is not None else "plain decoding"
    speed = Text.assemble((f"{timings.tokens_per_second:.1f}", "bold"), f" tokens/s {kind}")
    if timings.plain_tokens_per_second is not None:
        speed.append(f", {timings.plain_tokens_per_second:.1f} without")
    if timings.speedup is not None:
        colour = "bold green" if timings.speedup >= 1 else "bold yellow"
        speed.append_text(Text.assemble(": ", (f"{timings.speedup:.2f} times as fast", colour)))
    if timings.loop == "generate":
        how = f"whole loop in one program, prefill included, median of {timings.repeats}"
    else:
        how = "this stream, step by step"
    rows = [
        ("tokens", Text(f"{len(run.token_ids)} from {len(job.prompt_ids)}, ended by {reason}")),
        ("speed", speed),
        ("", Text(how, "dim")),
        ("compilation", Text(f"{timings.compile_seconds:.1f} s, apart from the above")),
    ]
    if job.drafter is None:
        return rows
    numbers = metrics_of(run)
    length, rate = numbers["mean_acceptance_length"], numbers["draft_acceptance_rate"]
    if not numbers["num_drafted"][0]:
        return [*rows, ("acceptance", Text("nothing was drafted"))]
    kept = f" tokens per step, {rate:.0%} of the drafted ones kept"
    rows.append(("acceptance", Text.assemble((f"{length:.2f}", "bold"), kept)))
    for position, part in enumerate(numbers["acceptance_rates"]):
        if not numbers["num_drafted"][position]:
            break
        filled = round(part * _BAR)
        bar = Text.assemble((blocks[0] * filled, "green"), (blocks[1] * (_BAR - filled), "dim"))
        rows.append((f"  position {position + 1}", bar.append(f" {part:.2f}")))
    return rows
