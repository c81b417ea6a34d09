"""A bar for loads that take long, on a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["loading_bar"]

_SECONDS_BEFORE_BAR = 1.0  # Seconds without a bar: what is loaded by then needs none.


@contextlib.contextmanager
def loading_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told the bytes done, and may show a bar on standard error.

    Args:
      description: is loaded, in a few words.
      total: bytes there are.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn())
    console = Console(file=sys.stderr)
    start = time.monotonic()
    progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
    task = progress.add_task(description, total=total)

    def advance(num_bytes: int) -> None:
        progress.advance(task, num_bytes)
        if time.monotonic() - start > _SECONDS_BEFORE_BAR:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()
