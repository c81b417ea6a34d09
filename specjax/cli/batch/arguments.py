"""Options of `specjax generate` for a file of prompts."""

import argparse

from specjax.cli.option_table import Option, check_limits, flag

__all__ = ["BATCH_OPTIONS", "check_batch_options"]

BATCH_OPTIONS = {
    "input": Option(
        *(str, "FILE"),
        "JSON lines, each an object with a prompt, prompt_token_ids or messages, and perhaps an "
        "id, a seed, stop strings and options of its own; needs --output",
    ),
    "output": Option(
        *(str, "FILE"),
        "JSON lines, one as each request ends; those that the file has already are not decoded "
        "again",
    ),
    "num_slots": Option(
        int, "B", "requests of --input that are decoded at once; default: 16", (1, 4096)
    ),
    "skip_malformed": flag(
        "name malformed lines of --input on standard error and leave them out; without it nothing "
        "is decoded",
    ),
}


def check_batch_options(options: argparse.Namespace) -> None:
    """Raises `ValueError` for options that do not fit together."""
    if (options.input is None) != (options.output is None):
        given, missing = ("input", "output") if options.output is None else ("output", "input")
        raise ValueError(f"--{given} is given without --{missing}; a file of prompts needs both.")
    if options.input is None:
        alone = {
            "--num-slots": options.num_slots is not None,
            "--skip-malformed": options.skip_malformed,
            "--usual-acceptance-rate": options.usual_acceptance_rate is not None,
        }
        for name, is_given in alone.items():
            if is_given:
                raise ValueError(f"{name} is given without --input, a file of prompts.")
        return
    others = {
        "a prompt": options.prompt,
        "--prompt-file": options.prompt_file,
        "--compare": options.compare,
        "--json": options.json,
    }
    for name, value in others.items():
        if value:
            raise ValueError(f"--input is given and {name}; give one of them.")
    options.num_slots = 16 if options.num_slots is None else options.num_slots
    check_limits(options, BATCH_OPTIONS)
