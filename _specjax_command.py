"""The `specjax` script: what it does before JAX is imported, which any import from specjax does."""

import os
import signal
from typing import NoReturn

__all__ = ["main"]


def _quit(*_: object) -> NoReturn:
    os._exit(130)


def main() -> int:
    """Runs `specjax.cli.main`; from here on an interruption ends the process with 130 in silence.

    Returns:
      Its exit code.
    """
    # Not in `specjax/__init__.py`: a library leaves signals to the program that imports it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _quit)
    # Closed standard streams: no file that is opened later may be taken for one of them.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    from specjax.cli import main as run

    return run()
