"""The `specjax` command: parses, runs one of its parts, turns errors into exit codes."""

import atexit
import contextlib
import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Callable

import jax

from specjax.cli.arguments import OutputError, parse_options
from specjax.cli.processes import collective_errors, is_rank_zero, join_processes
from specjax.cli.prompts import read_prompts, read_prompts_of_generate
from specjax.cli.streams import (
    exit_on_interrupt,
    exit_on_terminate,
    flush_or_discard,
    open_missing_streams,
    print_error,
)
from specjax.decode.compile.cache_folder import command_folder, enable_compilation_cache
from specjax.engine.request import PROGRAM_EXITS, describe

_REQUIRED_PACKAGES = ("flax", "safetensors", "tokenizers", "rich", "jinja2")


def _read_command(argv: list[str] | None, exit_stack: contextlib.ExitStack) -> Callable[[], None]:
    """Returns a function that runs the command, after all checks."""
    options, config = parse_options(argv)
    is_sweep, is_chat = options.command == "sweep", options.command == "chat"
    is_file = options.command == "generate" and options.input is not None
    is_text = options.command == "generate" and not is_file
    texts = read_prompts(options) if is_sweep else []
    texts = read_prompts_of_generate(options) if is_text else texts
    missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} is missing; pip install 'specjax[flax]'.")
    from specjax.cli.terminal import Terminal

    terminal = Terminal(quiet=options.quiet or not is_rank_zero(options))
    join_processes(options, spinner=terminal.spinner)
    if options.use_fp64_gumbel:
        exit_stack.enter_context(jax.enable_x64(True))
    # What a model over devices runs is compiled at its calls, and kept by JAX. Several processes
    # keep nothing: one might find what another compiles.
    keeps_programs = options.mesh is None or jax.distributed.is_initialized()
    folder = command_folder() if (is_text or is_chat) and keeps_programs else None
    if folder is None:
        enable_compilation_cache()
    with collective_errors(options), terminal.spinner("reading the folders"):
        from specjax.cli.folders.generation_config import take_defaults
        from specjax.cli.model_pair import read_pair

        pair = read_pair(options, config)
        has_defaults = options.command in ("generate", "chat")
        defaults = take_defaults(options, pair.folder) if has_defaults else None
    terminal.print_warning(pair.warning)
    if defaults is not None and not (options.quiet or options.json):
        terminal.print_note(defaults)
    if is_sweep:
        from specjax.cli.sweep.run_sweep import read_workload, run_sweep

        workload = read_workload(pair, texts, terminal)
        return lambda: run_sweep(workload, terminal, argv)
    if is_chat:
        from specjax.cli.chat.run_chat import read_chat, run_chat

        chat = read_chat(pair, terminal, folder)
        return lambda: run_chat(chat, terminal)
    if options.command == "serve":
        from specjax.cli.serve.run_serve import read_service

        return read_service(pair, terminal)
    if is_file:
        from specjax.cli.batch.run_batch import read_batch, run_batch

        batch = read_batch(pair, terminal, exit_stack)
        return lambda: run_batch(batch, terminal)
    from specjax.cli.run_generate import read_jobs, run_jobs

    jobs = read_jobs(pair, texts, terminal, folder)
    return lambda: run_jobs(jobs, terminal)


def _run_command(argv: list[str] | None) -> int:
    with contextlib.ExitStack() as exit_stack:
        try:
            run = _read_command(argv, exit_stack)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            return print_error(error, 2)
        try:
            run()
        except (jax.errors.JaxRuntimeError, MemoryError, ArithmeticError, ValueError) as error:
            return print_error(error, 1)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs the command.

    Args:
      argv: arguments; None takes those of the process.

    Returns:
      The exit code.

      0: done.
      1: the target's logits turned invalid, another process of the run was lost, or the output
        could not be written.
      2: arguments or files were refused; a sentence on standard error says why.
      130: interrupted.
      141: the reader closed the output.
      143: terminated.
    """
    open_missing_streams()
    if argv is None:
        if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
            signal.signal(signal.SIGINT, exit_on_interrupt)
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            # Between two instructions of Python: a line that is being written becomes whole.
            signal.signal(signal.SIGTERM, exit_on_terminate)
        # A trace makes a million objects that live on. Python would search them for cycles again
        # and again, a tenth of the time to a short text's end, and once more when it ends: frozen
        # ones are not searched. What has to be flushed or removed waits for no search.
        gc.set_threshold(200_000, 20, 100)
        atexit.register(gc.freeze)
    if sys.stdout is None:
        # Refused before minutes of work whose result would be lost.
        return print_error(
            ValueError("standard output is closed; the output cannot be written."), 1
        )
    code = _run_and_flush(argv)
    if code and argv is None and jax.distributed.is_initialized():
        # In order, JAX would wait for the other processes, which may wait for this one.
        os._exit(code)
    return code


def _run_and_flush(argv: list[str] | None) -> int:
    """Returns the exit code of the command, whose output is written or cannot be."""
    try:
        try:
            return _run_command(argv)
        except OutputError as error:
            raise error.args[0] from None
        finally:
            # A failure here is still handled below; when Python exits it would not be.
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except OSError as error:
        return print_error(ValueError(f"the output cannot be written: {error.strerror}."), 1)
    except BaseException as error:
        # A panic of Rust, in which tokenizers are written, is no Exception.
        if isinstance(error, (Exception, *PROGRAM_EXITS)):
            raise
        return print_error(RuntimeError(describe(error)), 1)
    finally:
        flush_or_discard(sys.stdout)
        flush_or_discard(sys.stderr)
