"""Shows a progress bar for long loads on a terminal."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["loading_bar"]

_SECONDS_BEFORE_BAR = 1.0


@contextlib.contextmanager
def loading_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts loaded bytes; after a second a bar appears on standard error.

    With several processes only the first one shows it.

    Args:
      description: stands next to the bar.
      total: bytes to load.
    """
    if sys.stderr is None or not sys.stderr.isatty() or jax.process_index():
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
