"""The `sweep` command: a pair is read and measured, and what was found is shown."""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import shlex
import sys
from typing import Any

import jax

from specjax import models
from specjax.cli.model_pair import check_draft, encode, load_pair, read_pair
from specjax.cli.sweep_choice import choose, predicted_lengths, standard_errors
from specjax.cli.sweep_measure import Workload, measure_acceptance, measure_steps, num_stages, room
from specjax.cli.sweep_report import plot, tables, to_object, verdict

__all__ = ["read_workload", "sweep"]


def read_workload(
    options: argparse.Namespace, texts: list[str], terminal: Any
) -> tuple[str, Workload]:
    """Reads what the options name.

    Args:
      options: checked.
      texts: the prompts.
      terminal: the command's.

    Returns:
      The pair's name, and the workload.

    Raises:
      ValueError: in a sentence, before weights are read.
    """
    largest = options.max_speculative_tokens
    with terminal.working("reading the folders"):
        pair = read_pair(options)
        longest = pair.made.max_position_embeddings
        needed = options.context + room(largest, options.steps)
        if needed > longest:
            raise ValueError(
                f"--context is {options.context}, and --steps {options.steps} of "
                f"--max-speculative-tokens {largest} need {needed - options.context} tokens "
                f"behind it; the target has room for {longest} together."
            )
        if options.chat:
            said = [[{"role": "user", "content": text}] for text in texts]
            texts = [models.chat_prompt(pair.folder, messages) for messages in said]
        # The last step of a text may go beyond it by a whole draft.
        asked = {"room": options.max_new_tokens + largest + 1, "asked": "--max-new-tokens + K + 1"}
        prompts = [encode(pair, text, chat=options.chat, **asked) for text in texts]
        check_draft(pair)
    target, drafter = load_pair(pair)
    assert drafter is not None  # The options refuse a sweep without drafts.
    return pair.name, Workload(
        target,
        drafter,
        prompts,
        max_speculative_tokens=largest,
        batch_size=options.batch_size,
        context=options.context,
        temperature=options.temperature,
        key=jax.random.key(options.seed),
        eos_token_ids=pair.made.eos_token_ids,
        max_new_tokens=options.max_new_tokens,
        draft_sample_method=options.draft_sample_method,
        num_steps=options.steps,
        num_rounds=options.rounds,
    )


def sweep(
    options: argparse.Namespace, job: tuple[str, Workload], terminal: Any, argv: list[str] | None
) -> None:
    """Measures, prints, draws.

    Args:
      options: checked.
      job: of `read_workload`.
      terminal: the command's.
      argv: arguments, for the record; None is those of the process.

    Raises:
      FloatingPointError: if the target's logits turn invalid.
      ValueError: if the prompts ended before any draft was verified, or the plot cannot be
        written after all.
    """
    name, work = job
    found = _birthplace(name, sys.argv[1:] if argv is None else argv)
    largest = work.max_speculative_tokens
    with terminal.stages(num_stages(work) + len(work.prompts)) as stage:
        acceptance = measure_acceptance(work, largest, stage)
        if not acceptance.steps:
            raise ValueError(
                "every prompt ended with its first token, so that nothing was drafted; other "
                "prompts or more --max-new-tokens are needed."
            )
        times = measure_steps(work, stage)
        best = choose(acceptance, [one.step_seconds for one in times], work.batch_size)
        found = to_object(work, found, acceptance, times, best)
        if 0 < best.K < largest:
            decoded = measure_acceptance(work, best.K, stage)
            found["best"]["decoded_acceptance_length"] = predicted_lengths(decoded.rates)[-1]
            found["best"]["decoded_standard_error"] = standard_errors(decoded)[-1]
    if options.out is not None:
        found["plot"] = options.out
    if options.json:
        print(json.dumps(found), flush=True)
    else:
        terminal.found(f"{name} · {_where(found)}", tables(found), verdict(found))
    # Last: a plot that cannot be written takes no measurement with it.
    if options.out is not None:
        _draw(found, options.out)
        if not options.json:
            terminal.note(f"drawn in {options.out}")


def _draw(found: dict[str, Any], out: str) -> None:
    try:
        plot(found, pathlib.Path(out))
    except OSError as error:
        # Not as an OSError: those of the command are of its standard output.
        raise ValueError(f"--out {out} cannot be written: {error.strerror or error}.") from None


def _birthplace(name: str, argv: list[str]) -> dict[str, Any]:
    versions = importlib.metadata.distributions(name="specjax")
    return {
        "pair": name,
        "device": jax.devices()[0].device_kind,
        "jax_version": jax.__version__,
        "specjax_version": next((one.version for one in versions), None),
        "python_version": sys.version.split()[0],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["specjax", *argv]),
    }


def _where(found: dict[str, Any]) -> str:
    return (
        f"B = {found['batch_size']}, context {found['context']}, temperature "
        f"{found['temperature']:g} · {found['device']}, jax {found['jax_version']}, "
        f"{found['date'][:10]}"
    )
