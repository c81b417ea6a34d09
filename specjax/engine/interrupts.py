"""An interrupt that waits until what it would leave half done is whole."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["delayed_interrupts"]


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delays an interrupt (SIGINT) until the block has ended, in Python's main thread.

    No other thread is interrupted. The block should not wait for long.

    Example:
      >>> import signal
      >>> before, done = signal.signal(signal.SIGINT, signal.default_int_handler), []
      >>> try:
      ...     with delayed_interrupts():
      ...         signal.raise_signal(signal.SIGINT)
      ...         done.append("all of it")
      ... except KeyboardInterrupt:
      ...     done.append("interrupted")
      >>> _ = signal.signal(signal.SIGINT, before)
      >>> done
      ['all of it', 'interrupted']
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    received: list[tuple[Any, ...]] = []
    signal.signal(signal.SIGINT, lambda *given: received.append(given))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[0])
