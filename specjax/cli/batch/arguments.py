"""Options of `specjax generate` for a file of prompts."""

import argparse
from typing import Any

__all__ = ["add_batch_options", "check_batch_options"]

_MAX_SLOTS = 4096


def add_batch_options(group: Any) -> None:
    """Adds the options of a file of prompts to a group of `generate`."""
    group.add_argument(
        "--input",
        metavar="FILE",
        help="JSON lines, each an object with a prompt, prompt_token_ids or messages, and perhaps "
        "an id, a seed, stop strings and options of its own; needs --output",
    )
    group.add_argument(
        "--output",
        metavar="FILE",
        help="JSON lines, one as each request ends; those that the file has already are not "
        "decoded again",
    )
    group.add_argument(
        "--num-slots",
        type=int,
        metavar="B",
        help="requests of --input that are decoded at once; default: 16",
    )
    group.add_argument(
        "--skip-malformed",
        action="store_true",
        help="name malformed lines of --input on standard error and leave them out; without it "
        "nothing is decoded",
    )


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
    if not 1 <= options.num_slots <= _MAX_SLOTS:
        raise ValueError(
            f"--num-slots is {options.num_slots}; it needs to be in [1, {_MAX_SLOTS}]."
        )
