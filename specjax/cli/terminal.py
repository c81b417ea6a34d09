"""Output of the command: coloured text and a summary on a terminal, plain text elsewhere."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

import jax
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specjax.cli.generate import GenerateJob, GenerateResult, Timings
from specjax.cli.json_report import is_exact, list_logprobs, metrics_json
from specjax.decode.commit import Origin
from specjax.file_io import JsonObject

_PROMPT = 0
_ORIGIN_STYLES = {
    _PROMPT: ("prompt", Style(dim=True)),
    Origin.ACCEPTED: ("accepted draft", Style(color="green")),
    Origin.RECOVERED: ("recovered after a rejection", Style(color="yellow")),
    Origin.BONUS: ("bonus", Style(color="cyan", bold=True)),
}
_BAR_WIDTH = 24
_BAR_BLOCKS, _BAR_ASCII = "█░", "#."
# Control characters, which a terminal would obey if a model wrote them.
_REPLACED_CONTROLS = {
    code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"
}


def _supports_style(file: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return file.isatty() and not plain


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        # The method of rich ends the process with an error code.
        raise BrokenPipeError


def _make_console(file: TextIO) -> Console:
    width = None if file.isatty() else 100
    return _Console(file=file, force_terminal=_supports_style(file), highlight=False, width=width)


class Terminal:
    """Standard output and standard error of the command.

    Generated text goes to standard output. The report follows it if that is a terminal, and goes to
    standard error otherwise. A spinner is shown if standard error is a terminal.

    Args:
      quiet: whether only the text is printed.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        self._stdout, self._stderr = _make_console(sys.stdout), _make_console(sys.stderr)
        self._is_terminal = sys.stdout.isatty()
        self._line_ended = True

    def spinner(self, text: str) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that shows a spinner with a text and the seconds since it began."""
        if self._quiet or not _supports_style(sys.stderr):
            return contextlib.nullcontext()
        seconds = TextColumn("{task.description} ... {task.elapsed:.0f} s", markup=False)
        columns = (SpinnerColumn(style="cyan"), seconds)
        progress = Progress(*columns, console=self._stderr, transient=True)
        progress.add_task(text, total=None)
        return progress

    @contextlib.contextmanager
    def progress_bar(self, total: int) -> Iterator[Callable[[str], None]]:
        """Yields a function that advances a bar; call it `total` times with the next stage."""
        if not _supports_style(sys.stderr):
            yield lambda _: None
            return
        columns = (TextColumn("{task.description}", markup=False), BarColumn())
        with Progress(
            *columns,
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._stderr,
            transient=True,
        ) as progress:
            task = progress.add_task("", total=total)
            numbers = iter(range(total + 1))
            yield lambda text: progress.update(task, description=text, completed=next(numbers))

    def print_warning(self, sentence: str | None) -> None:
        """Prints a sentence to standard error; nothing for None, or if quiet."""
        if sentence is not None and not self._quiet:
            self._stderr.print(Text(f"specjax: warning: {sentence}"), soft_wrap=True)

    def print_tables(
        self, heading: str, tables: list[tuple[str, Table]], sentences: list[str]
    ) -> None:
        """Prints a heading, titled tables and sentences."""
        # As Text: a folder's name may look like markup.
        self._stdout.print(Text(heading, "dim"))
        for title, table in tables:
            self._stdout.print()
            self._stdout.print(Text(title, "dim"))
            _print_table(self._stdout, table)
        self._stdout.print()
        for sentence in sentences:
            self._stdout.print(Text(sentence))

    def print_note(self, sentence: str) -> None:
        """Prints a line to standard error, unbroken if it is wider than the terminal."""
        self._stderr.print(Text(sentence, "dim"), soft_wrap=True)

    def print_prompt(self, job: GenerateJob) -> None:
        """Prints heading, legend and prompt if standard output is a terminal and not quiet."""
        if self._quiet or not self._is_terminal:
            return
        self.print_heading(job)
        self._stdout.print()
        self.print_text(job.text, _PROMPT)

    def print_heading(self, job: GenerateJob) -> None:
        """Prints heading and legend if standard output is a terminal and not quiet."""
        if self._quiet or not self._is_terminal:
            return
        # As Text: a folder's name may look like markup.
        self._stdout.print(Text(_heading(job), "dim"))
        if _supports_style(sys.stdout):
            origins = _ORIGIN_STYLES if job.drafter is not None else (_PROMPT, Origin.BONUS)
            styles = [_ORIGIN_STYLES[origin] for origin in origins]
            legend = [Text("■ " + name, style) for name, style in styles]
            self._stdout.print(Text("  ").join(legend))

    def print_report(self, sentence: str) -> None:
        """Prints a line after a text, where a report goes; nothing if quiet."""
        if not self._quiet:
            console = self._stdout if self._is_terminal else self._stderr
            console.print(Text(sentence, "dim"), soft_wrap=True)

    def print_text(self, text: str, origin: int) -> None:
        """Writes a piece of text, in the colour of its origin unless quiet."""
        if not text:
            return
        self._line_ended = text.endswith("\n")
        if self._is_terminal:
            style = None if self._quiet else _ORIGIN_STYLES[origin][1]
            segment = Segment(text.translate(_REPLACED_CONTROLS), style)
            self._stdout.print(Segments([segment]), end="", crop=False)
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """Ends the last line of the text."""
        if not self._line_ended:
            sys.stdout.write("\n")
        sys.stdout.flush()

    def print_summary(self, job: GenerateJob, result: GenerateResult, timings: Timings) -> None:
        """Prints log-probabilities if there are any, then speed, compilation and acceptance."""
        if self._quiet:
            return
        console = self._stdout if self._is_terminal else self._stderr
        if result.top_logprobs is not None:
            console.print()
            tokens = list_logprobs(job.pair.tokenizer, result.token_ids, result.top_logprobs)
            _print_table(console, _logprobs_table(tokens))
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
        # An encoding without block characters would write them as escapes.
        blocks = _BAR_BLOCKS if console.encoding.startswith("utf") else _BAR_ASCII
        for name, value in _summary_rows(job, result, timings, blocks):
            table.add_row(name, value)
        console.print()
        _print_table(console, table)


def _print_table(console: Console, table: Table) -> None:
    """Prints a table; without the blanks that fill its last column if it is for no terminal."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as lines:
        console.print(table)
    console.file.writelines(line.rstrip() + "\n" for line in lines.get().splitlines())
    console.file.flush()


def _logprobs_table(tokens: list[JsonObject]) -> Table:
    """Returns a table with a row per token: log-probability, rank, most probable tokens."""

    def quote_token(token: JsonObject) -> str:
        return json.dumps(token["token"], ensure_ascii=False).translate(_REPLACED_CONTROLS)

    def format_logprob(token: JsonObject) -> str:
        return "none" if token["logprob"] is None else f"{token['logprob']:.2f}"

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("token")
    table.add_column("log p", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("most probable" if any(token["top"] for token in tokens) else "")
    for token in tokens:
        top = [f"{quote_token(other)} {format_logprob(other)}" for other in token["top"]]
        # As Text: a token may look like markup.
        cells = (quote_token(token), format_logprob(token), str(token["rank"]), "  ".join(top))
        table.add_row(*map(Text, cells))
    return table


def _heading(job: GenerateJob) -> str:
    k = f"K = {job.pair.config.num_speculative_tokens}"
    if job.pair.config.adaptive_k:
        k = f"K = auto, at most {job.pair.config.num_speculative_tokens}"
    drafting = f" · {k}" if job.drafter is not None else ""
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    return f"{job.pair.name}{drafting} · temperature {job.options.temperature:g} · {device}"


def _summary_rows(
    job: GenerateJob, result: GenerateResult, timings: Timings, blocks: str
) -> list[tuple[str, Text]]:
    tokens = f"{len(result.token_ids)} after a prompt of {len(job.prompt_ids)}"
    reason = result.finish.replace("_", " ")
    mode = "with drafts" if job.drafter is not None else "plain decoding"
    if timings.tokens_per_second is None:
        speed = Text("no step came after the first token")
    else:
        speed = Text.assemble((f"{timings.tokens_per_second:.1f}", "bold"), f" tokens/s {mode}")
    if timings.plain_tokens_per_second is not None:
        speed.append(f", {timings.plain_tokens_per_second:.1f} without")
    if timings.speedup is not None:
        colour = "bold green" if timings.speedup >= 1 else "bold yellow"
        speed.append_text(Text.assemble(": ", (f"{timings.speedup:.2f} times as fast", colour)))
    method = "steps after the first token, one program per step"
    rows = [
        ("tokens", Text(f"{tokens}, ended by {reason}")),
        ("speed", speed),
        ("", Text(method, "dim")),
        ("compilation", Text(f"{timings.compile_seconds:.1f} s, not included above")),
    ]
    if job.drafter is None:
        return rows
    verification = job.options.rule or job.pair.config.rejection_sample_method
    if not is_exact(job.drafter, job.pair.config, job.options.temperature):
        verification += ", not exact: the text does not follow the target's distribution"
    rows.append(("verification", Text(verification)))
    numbers = metrics_json(result)
    length, rate = numbers["mean_acceptance_length"], numbers["draft_acceptance_rate"]
    if not numbers["num_drafted"][0]:
        return [*rows, ("acceptance", Text("no tokens were drafted"))]
    accepted = f" tokens per step, {rate:.0%} of drafted tokens accepted"
    rows.append(("acceptance", Text.assemble((f"{length:.2f}", "bold"), accepted)))
    for position, position_rate in enumerate(numbers["acceptance_rates"]):
        if not numbers["num_drafted"][position]:
            break
        filled = round(position_rate * _BAR_WIDTH)
        bar = Text.assemble(
            (blocks[0] * filled, "green"), (blocks[1] * (_BAR_WIDTH - filled), "dim")
        )
        rows.append((f"  position {position + 1}", bar.append(f" {position_rate:.2f}")))
    return rows
