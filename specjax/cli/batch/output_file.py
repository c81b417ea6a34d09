"""The output of a file of prompts: whole lines, by which a later run knows the finished requests.

A line is appended by one write, so a process that ends between two writes leaves whole lines. A
line cut off by SIGKILL or a full disk is removed before the next append. The file is locked before
it is read, so that no other run can write to it.
"""

import contextlib
import datetime
import io
import json
import os
import pathlib
import sys
from typing import Any

from specjax.file_io import JsonObject, read_stream

if sys.platform != "win32":
    import fcntl

_MAX_BYTES = 2**34
# Fields of every appended line.
_BEGINNING = b'{"line": '


class OutputFile(contextlib.AbstractContextManager["OutputFile"]):
    r"""Lines of JSON with the numbers of their input lines, in the order in which requests end.

    Args:
      path: of the file, which need not exist.

    Attributes:
      done: hashes of the finished requests, by the number of their input line.
      date: that the first run's chat templates wrote, or None.
      is_locked: False if an existing file cannot be locked: on Windows, and on file systems without
        locks.

    Raises:
      ValueError: if the path is not a regular file, another run writes to the file, or it has a
        line of another program.
      OSError: if it cannot be read.

    Example:
      >>> import tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp(), "out.jsonl")
      >>> with OutputFile(path) as file:
      ...     file.prepare()
      ...     file.append({"line": 1, "request_hash": "a"})
      >>> _ = path.write_text(path.read_text() + '{"line": 2, "requ')
      >>> with OutputFile(path) as file:
      ...     file.prepare()
      ...     file.done
      {1: 'a'}
      >>> path.read_text()
      '{"line": 1, "request_hash": "a"}\n'
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = pathlib.Path(path)
        self._size = 0
        self._num_read = 0
        self._file: io.FileIO | None = None
        self.done: dict[int, str] = {}
        self.date: datetime.datetime | None = None
        self.is_locked = True
        if not os.path.exists(path):
            return
        if not os.path.isfile(path):  # Reading a pipe would wait for its end.
            raise ValueError(
                f"--output is {path}, which is no regular file; it needs to be one, as a later run "
                "reads which lines it has."
            )
        with contextlib.ExitStack() as if_refused:
            if_refused.callback(self.close)
            try:
                file = self._open()
            except OSError:  # A file with every line may be read-only.
                file = self._file = io.FileIO(self._path)
            self._read(file)
            if_refused.pop_all()

    def _open(self) -> io.FileIO:
        """Opens or makes the file, and locks it until it is closed."""
        file = self._file = io.FileIO(self._path, "ab+")
        self.is_locked = sys.platform != "win32" and _lock(file, self._path)
        return file

    def _read(self, file: io.FileIO) -> None:
        with open(file.fileno(), "rb", closefd=False) as reader:
            reader.seek(0)
            data = read_stream(reader, str(self._path), _MAX_BYTES)
        self._num_read, self._size = len(data), data.rfind(b"\n") + 1
        lines, last_bytes = data[: self._size].splitlines(), data[self._size :]
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                self.done[int(fields["line"])] = str(fields["request_hash"])
                if self.date is None and fields.get("date") is not None:
                    self.date = datetime.datetime.fromisoformat(fields["date"])
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                raise ValueError(_foreign_line(self._path, number)) from None
        if last_bytes[: len(_BEGINNING)] != _BEGINNING[: len(last_bytes)]:
            raise ValueError(_foreign_line(self._path, len(lines) + 1))

    def prepare(self) -> None:
        """Makes the file if it is missing, and removes a line that was cut off.

        Raises:
          ValueError: if it cannot be written, or another run has written to it meanwhile.
        """
        try:
            file = self._file or self._open()
            if not file.writable():
                # Raises the error of opening it for lines.
                io.FileIO(self._path, "ab").close()
            if os.fstat(file.fileno()).st_size > self._num_read:
                raise ValueError(_written_by_another(self._path))
            file.truncate(self._size)
        except OSError as error:
            raise ValueError(_unwritable(self._path, error)) from None

    def append(self, fields: JsonObject) -> None:
        """Appends a line to a prepared file.

        Raises:
          ValueError: if it cannot be written; the file is then unchanged.
        """
        assert self._file is not None
        try:
            line = json.dumps(fields, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError:  # An id of half a surrogate pair, which JSON can name.
            line = json.dumps(fields).encode() + b"\n"
        try:
            written = self._file.write(line)
            if written < len(line):
                self._file.truncate(self._size)
                raise OSError(28, "it has no room for a line")
        except OSError as error:
            # The command takes an OSError for one of its standard output.
            raise ValueError(_unwritable(self._path, error)) from None
        self._size += written

    def close(self) -> None:
        """Closes the file, which unlocks it."""
        if self._file is not None:
            self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _lock(file: io.FileIO, path: Any) -> bool:
    """Returns whether a file could be locked; refuses one that another run has locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(_written_by_another(path)) from None
    except OSError:  # A file system without locks.
        return False
    return True


def _written_by_another(path: Any) -> str:
    return f"--output is {path}, to which another run writes; wait for its end, or name another."


def _unwritable(path: Any, error: OSError) -> str:
    return f"--output is {path}, which cannot be written: {error.strerror}."


def _foreign_line(path: Any, number: int) -> str:
    return (
        f"{path} has a line {number} that is no output of a file of prompts; name another "
        "--output, or remove it."
    )
