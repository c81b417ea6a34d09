"""The output of a file of prompts: whole lines, of which a later run knows what is done.

A line is appended by one write, so that a process that is ended between two leaves whole lines. The
rest of one that was cut off, by SIGKILL or a full disk, is taken away before the next is appended.
"""

import json
import os
import pathlib
from types import TracebackType
from typing import Any

from specjax.file_io import read_file

__all__ = ["OutputFile"]

_MOST_BYTES = 2**34
# Of every line that is appended.
_BEGINNING = b'{"line": '


class OutputFile:
    r"""Lines of JSON, each with the number of its line of the input, in the order of their ends.

    Args:
      path: of the file, which need not exist.

    Attributes:
      done: by the number of an input's line, the hash of the request that its output is of.

    Raises:
      ValueError: if the path is of no regular file, or the file has a line that this did not write.
      OSError: if it cannot be read.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "out.jsonl")
      >>> with OutputFile(path) as file:
      ...     file.append({"line": 1, "request_hash": "a"})
      >>> _ = path.write_text(path.read_text() + '{"line": 2, "requ')
      >>> with OutputFile(path) as file:
      ...     file.done
      {1: 'a'}
      >>> path.read_text()
      '{"line": 1, "request_hash": "a"}\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)
        exists = os.path.exists(path)
        if exists and not os.path.isfile(path):  # Reading a pipe would wait for its end.
            raise ValueError(
                f"--output is {path}, which is no regular file; it needs to be one, as a later run "
                "reads which lines it has."
            )
        data = read_file(path, _MOST_BYTES) if exists else b""
        self._size = data.rfind(b"\n") + 1
        lines, rest = data[: self._size].splitlines(), data[self._size :]
        self._has_rest = bool(rest)
        self.done: dict[int, str] = {}
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                self.done[int(fields["line"])] = str(fields["request_hash"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                raise ValueError(_foreign_line(path, number)) from None
        if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
            raise ValueError(_foreign_line(path, len(lines) + 1))

    def create(self) -> None:
        """Makes an empty file if there is none; one that is there keeps all that it has.

        Raises:
          ValueError: if it cannot be written.
        """
        os.close(self._open())

    def __enter__(self) -> "OutputFile":
        """Opens the file for lines."""
        self._descriptor = self._open()
        if self._has_rest:
            os.ftruncate(self._descriptor, self._size)
        return self

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise ValueError(_unwritable(self._path, error)) from None

    def append(self, fields: dict[str, Any]) -> None:
        """Appends a line.

        Raises:
          ValueError: if it cannot be written; the file keeps what it had.
        """
        try:
            line = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # An id of half a surrogate pair, which JSON can name.
            line = json.dumps(fields).encode() + b"\n"
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):
                os.ftruncate(self._descriptor, self._size)
                raise OSError(28, "it has no room for a line")
        except OSError as error:
            # The command takes an OSError for one of its standard output.
            raise ValueError(_unwritable(self._path, error)) from None
        self._size += written

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._descriptor)


def _unwritable(path: Any, error: OSError) -> str:
    return f"--output is {path}, which cannot be written: {error.strerror}."


def _foreign_line(path: Any, number: int) -> str:
    return (
        f"{path} has a line {number} that is no output of a file of prompts; name another "
        "--output, or remove it."
    )
