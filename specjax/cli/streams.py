"""Standard streams of the command, its error line, and exits by a signal."""

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TextIO

import jax

from specjax.file_io import shorten

# A library may quote a whole file.
_MAX_CHARACTERS = 4000


def print_error(error: Exception, code: int) -> int:
    """Prints an error in a line on standard error, and returns the exit code."""
    message = str(error)
    is_mapped = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or is_mapped:
        if not message.endswith("."):  # Of Python or a library, not a sentence of this package.
            reason = f" ({message})" if message else ""
            message = f"there is not enough memory{reason}; take a smaller model, file or batch."
    elif isinstance(error, RecursionError):
        message = "a file is nested too deeply; it needs fewer levels."
    elif isinstance(error, OSError) and error.filename is not None:
        message = f"{error.filename} cannot be read: {error.strerror}."
    elif isinstance(error, RuntimeError):
        # The first line of a JAX error says what happened; pages follow.
        message = message.split("\n")[0]
        if jax.distributed.is_initialized():
            message = f"another process of the run may be lost: {message}"
    # Standard error itself may be broken; the exit code remains.
    with contextlib.suppress(OSError):
        sentence = shorten(" ".join(message.split()), _MAX_CHARACTERS)
        print("specjax:", sentence, file=sys.stderr)
    return code


def end_with_error(error: Exception, code: int) -> NoReturn:
    """Ends the process from any thread with a sentence, even if other threads wait."""
    _end_spinner()
    os._exit(print_error(error, code))


def exit_on_interrupt(*_: Any) -> NoReturn:
    """Ends the process, as a handler of SIGINT."""
    # Not by an exception, which can crash the process if it passes through a compilation.
    _end_spinner()
    os._exit(130)


@contextlib.contextmanager
def catch_interrupt() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT has come; a second SIGINT ends the process."""
    is_interrupted = False

    def note(*_: Any) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            exit_on_interrupt()
        is_interrupted = True

    with _handle_interrupt(note):
        yield lambda: is_interrupted


def raise_on_interrupt() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which SIGINT raises `KeyboardInterrupt`."""
    return _handle_interrupt(signal.default_int_handler)


@contextlib.contextmanager
def _handle_interrupt(handler: Callable[..., Any]) -> Iterator[None]:
    """Handles SIGINT in the context, unless the process ignores it."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end_spinner() -> None:
    """Shows the cursor, which a spinner hides, on a new line."""
    if sys.stderr.isatty():
        os.write(2, b"\x1b[?25h\n")


def exit_on_terminate(*_: Any) -> NoReturn:
    """Ends the process, as a handler of SIGTERM."""
    os._exit(143)


def open_missing_streams() -> None:
    """Opens the null device for standard input or error of a process started without them."""
    for name, mode in (("stdin", "r"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def flush_or_discard(stream: TextIO) -> None:
    """Flushes a stream; drops unwritable text, which would fail again when Python exits."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
