"""Runs `specjax sweep`: loads a pair, measures it, reports the best K."""

import datetime
import json
import pathlib
import shlex
import sys
from typing import Any

import jax

from specjax import models
from specjax.cli.model_pair import ModelPair, check_k, encode_prompt, load_pair
from specjax.cli.sweep.choice import choose_best, standard_errors
from specjax.cli.sweep.measure import (
    Workload,
    measure_acceptance,
    measure_adaptive_costs,
    measure_steps,
)
from specjax.cli.sweep.report import conclusion, conditions, report_tables, to_json, write_plot
from specjax.decode.step_times import buffer_tokens
from specjax.file_io import JsonObject
from specjax.version import __version__


def read_workload(pair: ModelPair, texts: list[str], terminal: Any) -> Workload:
    """Reads prompts and models into a `Workload`.

    Args:
      pair: of models, with the options.
      texts: the prompts.
      terminal: of the command.

    Raises:
      ValueError: if a prompt, a folder or a length is wrong; before weights are read.
    """
    options, max_drafts = pair.options, pair.options.max_speculative_tokens
    max_length = pair.target_config.max_position_embeddings
    num_new_tokens = buffer_tokens(options.steps, options.max_speculative_tokens)
    if options.context + num_new_tokens > max_length:
        raise ValueError(
            f"--context is {options.context}, and --steps {options.steps} of "
            f"--max-speculative-tokens {max_drafts} need {num_new_tokens} tokens after it; "
            f"together they may be at most {max_length}, the target's longest sequence."
        )
    if options.chat:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = [models.chat_prompt(pair.folder, messages) for messages in chats]
    # The last step may emit K + 1 tokens beyond --max-new-tokens.
    room: Any = {"num_new_tokens": options.max_new_tokens + max_drafts + 1}
    room |= {"option": "--max-new-tokens + K + 1", "chat": options.chat}
    encoded = [encode_prompt(pair, text, **room) for text in texts]
    check_k(pair, max_drafts, "--max-speculative-tokens")
    terminal.print_warning(next((warning for _, warning in encoded if warning), None))
    target, drafter = load_pair(pair)
    assert drafter is not None  # The options refuse a sweep without drafts.
    return Workload(pair, target, drafter, [ids for ids, _ in encoded])


def run_sweep(workload: Workload, terminal: Any, argv: list[str] | None) -> None:
    """Measures every K, then prints the report and writes the plot.

    Args:
      workload: from `read_workload`.
      terminal: of the command.
      argv: arguments, for the report; None takes those of the process.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
      ValueError: if every prompt ended before a draft was verified, or the plot cannot be
        written.
    """
    options, max_drafts = workload.options, workload.options.max_speculative_tokens
    report = _provenance(workload.pair.name, sys.argv[1:] if argv is None else argv)
    # Rounds of each K and of adaptive K, the first of which compile; prompts at up to two Ks.
    num_stages = (options.rounds + 1) * 2 * (max_drafts + 1) + 2 * len(workload.prompts)
    with terminal.progress_bar(num_stages) as on_stage:
        acceptance = measure_acceptance(workload, max_drafts, on_stage)
        if not acceptance.step_counts:
            raise ValueError(
                "every prompt ended with its first token, so nothing was drafted; give other "
                "prompts or more --max-new-tokens."
            )
        times = measure_steps(workload, on_stage)
        best = choose_best(acceptance, [one.step_seconds for one in times], options.batch_size)
        report = to_json(workload, report, acceptance, times, best)
        report["step_costs"] = measure_adaptive_costs(workload, on_stage)
        if 0 < best.K < max_drafts:
            decoded = measure_acceptance(workload, best.K, on_stage)
            report["best"]["decoded_acceptance_length"] = decoded.lengths[-1]
            report["best"]["decoded_standard_error"] = standard_errors(decoded)[-1]
    if options.out is not None:
        report["plot"] = options.out
    if options.json:
        print(json.dumps(report), flush=True)
    else:
        heading = f"{workload.pair.name} · {conditions(report)}"
        terminal.print_tables(heading, report_tables(report), conclusion(report))
    # Written last: an error here does not lose the measurement.
    if options.out is not None:
        try:
            write_plot(report, pathlib.Path(options.out))
        except OSError as error:
            # The command takes an OSError for one of its standard output.
            reason = error.strerror or error
            raise ValueError(f"--out {options.out} cannot be written: {reason}.") from None
        if not options.json:
            terminal.print_note(f"plotted in {options.out}")


def _provenance(name: str, argv: list[str]) -> JsonObject:
    return {
        "pair": name,
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
        "specjax_version": __version__,
        "python_version": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["specjax", *argv]),
    }
