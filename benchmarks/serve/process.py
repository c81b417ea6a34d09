"""`specjax serve` as a process of its own."""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

PROGRAM = "import sys; from specjax.cli import main; sys.exit(main())"


@contextlib.contextmanager
def server(folder: pathlib.Path, *options: str) -> Iterator[tuple[int, int]]:
    """Serves the target of a folder by the command; gives its port and its process."""
    command = [sys.executable, "-c", PROGRAM, "serve", "--target", str(folder), "--port", "0"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        if " at http" not in line:
            sys.exit(f"the server did not start: {line}{process.stderr.read()}")
        yield int(line.rpartition(":")[2].partition("/")[0]), process.pid
    finally:
        process.terminate()
        process.wait()
