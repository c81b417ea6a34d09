"""Signals whose handlers wait until what they would leave half done is whole."""

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["delayed_interrupts"]

# Those of `signal` make an enum of each answer, and take ten times as long for all signals.
_signal = importlib.import_module("_signal")
_SIGNALS = tuple(map(int, signal.valid_signals()))


@contextlib.contextmanager
def delayed_interrupts() -> Iterator[None]:
    """Delays signals that have a handler in Python until the block has ended, in the main thread.

    Python runs handlers in no other thread. The block should not wait for long.

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
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers, received, is_over = dict[int, Any](), dict[int, Any](), False

    def delay(number: int, frame: Any) -> None:
        if is_over:  # Another handler raised before this signal had its own back.
            handlers[number](number, frame)
        else:
            received[number] = frame

    try:
        for number in _SIGNALS:
            if callable(handler := _signal.getsignal(number)):
                handlers[number] = handler
                _signal.signal(number, delay)
        yield
    finally:
        is_over = True
        # Calls each handler, whatever another one raises.
        with contextlib.ExitStack() as calls:
            for number, frame in received.items():
                calls.callback(handlers[number], number, frame)
            for number, handler in handlers.items():
                _signal.signal(number, handler)
