"""Reads files up to a size limit, quotes what they hold, writes them completely or not at all."""

import contextlib
import os
import pathlib
import reprlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO, TypeAlias

# What a JSON object is in Python: fields of a config.json, a report, a line of --input.
JsonObject: TypeAlias = dict[str, Any]

# Most characters of a text inside a sentence.
_MAX_SHOWN = 160
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = _MAX_SHOWN
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 16
_REPR.maxlevel = 3


def shorten(text: object, most: int = _MAX_SHOWN) -> str:
    """Returns the `str` of a value, without its middle if it has more than `most` characters.

    Args:
      text: such as a name in a file, or what a library says of one.
      most: >= 8.

    Example:
      >>> shorten("abcdefghijkl", 9)
      'abc...jkl'
    """
    text, half = str(text), (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def quote(value: Any) -> str:
    """Returns the `repr` of a value for a sentence, of at most 160 characters.

    Args:
      value: from a file: of any size, and nested as deeply as JSON can be.

    Example:
      >>> quote({"a": ["b", 1.5]})
      "{'a': ['b', 1.5]}"
    """
    return shorten(_REPR.repr(value))


def read_file(path: str | os.PathLike[str], limit: int) -> bytes:
    """Reads a file of at most `limit` bytes.

    Args:
      path: of a file, a device or a pipe; the last two have no size and may have no end.
      limit: >= 0.

    Returns:
      The content.

    Raises:
      ValueError: if the file is larger; at most `limit + 1` bytes are read.
      OSError: if the file cannot be read; its `filename` is the path.

    Example:
      >>> path = pathlib.Path(tempfile.mkdtemp(), "prompt.txt")
      >>> _ = path.write_bytes(b"def f(")
      >>> read_file(path, 6)
      b'def f('
    """
    with pathlib.Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise ValueError(f"{path} has {size} bytes; it needs to have at most {limit}.")
        return read_stream(file, os.fspath(path), limit)


def read_stream(stream: BinaryIO, name: str, limit: int) -> bytes:
    """Reads a stream of at most `limit` bytes to its end.

    Args:
      stream: open for reading.
      name: of the stream, for an error.
      limit: >= 0.

    Returns:
      The content.

    Raises:
      ValueError: if the stream is larger; at most `limit + 1` bytes are read.
      OSError: if the stream cannot be read; its `filename` is `name`.

    Example:
      >>> import io
      >>> read_stream(io.BytesIO(b"abc"), "standard input", 2)
      Traceback (most recent call last):
        ...
      ValueError: standard input has more than 2 bytes; it needs to have at most 2.
    """
    try:
        data = stream.read(limit + 1)
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None
    if len(data) > limit:
        raise ValueError(f"{name} has more than {limit} bytes; it needs to have at most {limit}.")
    return data


@contextlib.contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """Yields the path of a new file, which replaces `path` if the context ends without an error.

    If writing fails, for example on a full disk, `path` stays as it was. The new file is written
    in the folder of `path`, which has to be writable.

    Args:
      path: of the file, which need not exist. A link stays a link. A device or a pipe cannot be
        replaced; its path itself is yielded.

    Raises:
      OSError: if no file can be created in the folder; its `filename` is the folder.

    Example:
      >>> path = pathlib.Path(tempfile.mkdtemp(), "a.txt")
      >>> with replace_file(path) as temporary:
      ...     _ = temporary.write_text("whole")
      >>> path.read_text()
      'whole'
    """
    destination = pathlib.Path(path).resolve()
    if destination.exists() and not destination.is_file():
        yield destination
        return
    # In a temporary folder the new file can already have its name and mode.
    try:
        spare = tempfile.TemporaryDirectory(dir=destination.parent, prefix=".")
    except OSError as error:
        # The error names the temporary folder, which does not exist.
        raise OSError(error.errno, error.strerror, str(destination.parent)) from None
    with spare as folder:
        temporary = pathlib.Path(folder, destination.name)
        yield temporary
        if destination.exists():
            shutil.copymode(destination, temporary)
        os.replace(temporary, destination)
