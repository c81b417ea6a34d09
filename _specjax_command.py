"""Entry point of the `specjax` script: handles signals and streams before JAX is imported."""

import gc
import os
import signal
from typing import NoReturn


def _exit_on_interrupt(*_: object) -> NoReturn:
    os._exit(130)


def main() -> int:
    """Runs `specjax.cli.main`; an interruption ends the process with exit code 130, silently.

    Returns:
      The exit code.
    """
    # Not in `specjax/__init__.py`: a library does not change the signals of its program.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit_on_interrupt)
    # Fills closed standard streams, so that no file opened later gets their numbers.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    # Of what importing makes, nothing is garbage.
    gc.disable()
    from specjax.cli import main as run

    gc.enable()

    return run()
