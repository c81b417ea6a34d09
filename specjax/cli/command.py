"""The `specjax` command: parses, runs `generate` or `sweep`, turns errors into exit codes."""

import argparse
import atexit
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import json
import os
import pathlib
import signal
import sys
from concurrent import futures
from typing import Any

import jax

from specjax.cli.arguments import OutputError, parse_options, parse_sampling_options
from specjax.cli.generate import (
    GenerateJob,
    GenerateResult,
    begin_programs,
    compare_with_plain,
    stream_text,
)
from specjax.cli.json_report import json_report
from specjax.cli.processes import check_same_inputs, collective_errors, is_rank_zero, join_processes
from specjax.cli.prompts import read_prompt, read_prompts
from specjax.cli.streams import (
    exit_on_interrupt,
    exit_on_terminate,
    flush_or_discard,
    open_missing_streams,
    print_error,
)
from specjax.config import SpeculativeConfig
from specjax.decode.compile.cache_folder import command_folder, enable_compilation_cache
from specjax.engine.request import PROGRAM_EXITS, describe
from specjax.processing.sampling_params import SamplingParams

__all__ = ["main"]

_REQUIRED_PACKAGES = ("flax", "safetensors", "tokenizers", "rich", "jinja2")


def _read_generate_job(
    options: argparse.Namespace,
    config: SpeculativeConfig,
    text: str,
    terminal: Any,
    folder: pathlib.Path | None,
) -> GenerateJob:
    with collective_errors(options):
        pair, make_job = _check_generate_job(options, config, text, terminal, folder)
    check_same_inputs(options, make_job.keywords)
    from specjax.cli.model_pair import load_pair, pair_shapes

    # Weights are read last, while Python traces the programs, and while XLA compiles them. No
    # spinner: a long load shows a progress bar.
    with futures.ThreadPoolExecutor(1) as pool:
        weights = pool.submit(load_pair, pair)
        shapes = pair_shapes(pair)
        programs = None if shapes is None else begin_programs(make_job(*shapes))
        return make_job(*weights.result(), programs=programs)


def _check_generate_job(
    options: argparse.Namespace,
    config: SpeculativeConfig,
    text: str,
    terminal: Any,
    folder: pathlib.Path | None,
) -> tuple[Any, functools.partial[GenerateJob]]:
    """Returns the pair, and the job without its models, after all checks."""
    with terminal.spinner("reading the folders"):
        from specjax import models
        from specjax.cli.model_pair import (
            check_draft,
            check_logprobs,
            describe_configs,
            encode_prompt,
            read_pair,
        )

        pair = read_pair(options)
        if options.chat:
            text = models.chat_prompt(pair.folder, [{"role": "user", "content": text}])
        check_logprobs(options, pair)
        room: Any = {"num_new_tokens": options.max_new_tokens, "option": "--max-new-tokens"}
        ids, warning = encode_prompt(pair, text, chat=options.chat, **room)
        draft = check_draft(pair)
    terminal.print_warning(warning)
    terminal.print_warning(draft.warning)
    make_job = functools.partial(
        GenerateJob,
        pair.name,
        tokenizer=pair.tokenizer,
        text=text,
        prompt_ids=ids,
        config=_with_trained_k(config, options, draft),
        key=jax.random.key(options.seed, impl="threefry2x32"),
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        eos_token_ids=pair.target_config.eos_token_ids,
        stop=tuple(options.stop),
        sampling=_with_grammar(parse_sampling_options(options), options, pair),
        num_logprobs=options.logprobs,
        folder=None if folder is None else folder / "programs",
        models=describe_configs(pair),
        rule=options.rule,
    )
    return pair, make_job


def _with_grammar(
    sampling: SamplingParams | None, options: argparse.Namespace, pair: Any
) -> SamplingParams | None:
    if options.json_schema is None:
        return sampling
    from specjax.cli.json_schema import read_grammar

    return (sampling or SamplingParams())._replace(grammar=read_grammar(options, pair))


def _read_batch_job(
    options: argparse.Namespace,
    config: SpeculativeConfig,
    terminal: Any,
    exit_stack: contextlib.ExitStack,
) -> Any:
    from specjax.cli.batch.run_batch import read_batch
    from specjax.cli.model_pair import check_draft, check_logprobs, read_pair

    with terminal.spinner("reading the folders"):
        pair = read_pair(options)
        check_logprobs(options, pair)
        draft = check_draft(pair)
    terminal.print_warning(draft.warning)
    config = _with_trained_k(config, options, draft)
    return read_batch(options, pair, config, terminal, exit_stack)


def _with_trained_k(
    config: SpeculativeConfig, options: argparse.Namespace, draft: Any
) -> SpeculativeConfig:
    """Returns the config with the K that a head was trained for, if no option sets another.

    For K = "auto" the step costs and the usual rate are those of the head's folder, if no option
    sets them.
    """
    k, auto = draft.num_speculative_tokens, (options.step_costs, options.usual_acceptance_rate)
    if config.adaptive_k:
        names = ("step_costs", "usual_acceptance_rate")
        own = {name: getattr(draft, name) for name in names if getattr(options, name) is None}
        config = dataclasses.replace(config, **{x: y for x, y in own.items() if y is not None})
    asked = options.num_speculative_tokens, *auto
    if k is None or asked != (None, None, None) or options.rejection_sample_method == "synthetic":
        draft.check_k(config.num_speculative_tokens, "--num-speculative-tokens")
        return config
    return dataclasses.replace(
        config, num_speculative_tokens=k, step_costs=None, usual_acceptance_rate=None
    )


def _read_command(argv: list[str] | None, exit_stack: contextlib.ExitStack) -> tuple[Any, Any, Any]:
    """Returns options, job and terminal, after all checks."""
    options, config = parse_options(argv)
    is_sweep = options.command == "sweep"
    is_batch = not is_sweep and options.input is not None
    texts = read_prompts(options) if is_sweep else [] if is_batch else [read_prompt(options)]
    missing = [name for name in _REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)} is missing; pip install 'specjax[flax]'.")
    from specjax.cli.terminal import Terminal

    terminal = Terminal(quiet=not is_sweep and (options.quiet or not is_rank_zero(options)))
    if is_sweep:
        from specjax.cli.sweep.run_sweep import read_workload

        enable_compilation_cache()
        return options, read_workload(options, texts, terminal), terminal
    join_processes(options, spinner=terminal.spinner)
    if options.use_fp64_gumbel:
        exit_stack.enter_context(jax.enable_x64(True))
    if is_batch:
        enable_compilation_cache()
        return options, _read_batch_job(options, config, terminal, exit_stack), terminal
    # What a model over devices runs is compiled at its calls, and kept by JAX. Several processes
    # keep nothing: one might find what another compiles.
    folder = command_folder() if options.mesh is None or jax.distributed.is_initialized() else None
    if folder is None:
        enable_compilation_cache()
    return options, _read_generate_job(options, config, texts[0], terminal, folder), terminal


def _run_generate(options: argparse.Namespace, job: GenerateJob, terminal: Any) -> GenerateResult:
    shown: dict[str, Any] = {"begin": terminal.print_prompt, "show": terminal.print_text}
    writes, streams = is_rank_zero(options), is_rank_zero(options) and not options.json
    result, timings = stream_text(
        job,
        spinner=terminal.spinner,
        waits_for_all=options.compare,
        **(shown if streams else {}),
    )
    if streams:
        terminal.end_line()
    if options.compare:
        timings = compare_with_plain(job, timings, spinner=terminal.spinner)
    if not writes:
        return result
    if options.json:
        print(json.dumps(json_report(job, result, timings)))
    else:
        terminal.print_summary(job, result, timings)
    return result


def _run_command(argv: list[str] | None) -> int:
    with contextlib.ExitStack() as exit_stack:
        try:
            options, job, terminal = _read_command(argv, exit_stack)
        except (ValueError, OSError, RuntimeError, MemoryError) as error:
            return print_error(error, 2)
        try:
            if options.command == "sweep":
                from specjax.cli.sweep.run_sweep import run_sweep

                run_sweep(job, terminal, argv)
                return 0
            if options.input is not None:
                from specjax.cli.batch.run_batch import run_batch

                run_batch(job, terminal)
                return 0
            result = _run_generate(options, job, terminal)
        except (jax.errors.JaxRuntimeError, MemoryError, ArithmeticError, ValueError) as error:
            return print_error(error, 1)
    if result.finish == "invalid_logits":
        return print_error(ValueError("the target's logits turned invalid."), 1)
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
