"""Options of `specjax generate`, checked before any file is read."""

import argparse
import math
from typing import Any, NoReturn

import numpy as np

from specjax.cli.batch.arguments import BATCH_OPTIONS, check_batch_options
from specjax.cli.mesh_arguments import MESH_OPTIONS, check_mesh_options
from specjax.cli.option_table import Option, add_options, check_limits, flag, option_name
from specjax.cli.processes import PROCESS_OPTIONS, check_process_options
from specjax.cli.speculation_arguments import SPECULATION_OPTIONS, make_config
from specjax.cli.sweep.arguments import SWEEP_OPTIONS, parse_sweep_options
from specjax.config import SpeculativeConfig
from specjax.decode.compile.saved_programs import installed_version
from specjax.engine.stop_strings import check_stop
from specjax.implementation import NEWEST_TESTED_JAX
from specjax.processing.sampling_params import SamplingParams

__all__ = [
    "MAX_TEMPERATURE",
    "OutputError",
    "SAMPLING_OPTIONS",
    "parse_options",
    "parse_sampling_options",
]

MAX_TEMPERATURE = float(np.finfo(np.float32).max)
_PAIR_OPTIONS = {
    "chat": flag("treat a prompt as a user's message and apply the target's chat template"),
    "target": Option(
        *(str, "DIR"),
        "Hugging Face folder of a Llama, Mistral, Qwen or Gemma model; default: the target that "
        "ships with specjax",
    ),
    "draft": Option(
        *(str, "DIR|head|model|ngram|none"),
        "DIR: folder of a draft model with the target's tokenizer, or of a draft head (a small "
        "network on the target's hidden states) trained for it, such as EAGLE-3; head, model: the "
        "draft head and the draft model that ship with specjax, for the default target; ngram: "
        "prompt lookup, which copies earlier text; none: plain decoding, for `generate` alone. "
        "Default: head, or ngram if --target is given",
    ),
}
_TEXT_OPTIONS = {
    "max_new_tokens": Option(int, "N", "tokens to generate for a prompt", (1, math.inf), 128),
    "temperature": Option(
        *(float, "T", "sampling temperature, 0 is greedy", (0, MAX_TEMPERATURE), 0.8),
        needs=">= 0, and finite in float32",
    ),
    "seed": Option(
        *(int, "SEED", "random seed in [0, 2**32)", (0, 2**32 - 1), 0), needs="in [0, 2**32)"
    ),
}
SAMPLING_OPTIONS = {
    "top_k": Option(int, "K", "keep the K most probable tokens; 0 disables", (0, 2**31 - 1)),
    "top_p": Option(float, "P", "keep the most probable tokens that sum to P; 1 disables", (0, 1)),
    "min_p": Option(
        float, "P", "keep tokens >= P times as probable as the top one; 0 disables", (0, 1)
    ),
    "repetition_penalty": Option(
        *(float, "R", "> 1 discourages tokens of the prompt and the output; 1 disables"),
        (1e-6, 1e6),
    ),
    "frequency_penalty": Option(
        *(float, "F", "subtracted from a token's logit per occurrence in the output; 0 disables"),
        (-1e6, 1e6),
    ),
    "presence_penalty": Option(
        *(float, "F", "subtracted from the logit of every token in the output; 0 disables"),
        (-1e6, 1e6),
    ),
}
_LOGPROBS_OPTION = {
    "logprobs": Option(
        *(int, "N"),
        "list each token's log-probability and those of the N most probable tokens",
        (0, math.inf),
    )
}
_REPORT_OPTIONS = {
    "compare": flag(
        "then decode without drafts, too, and report how many times as fast drafts were",
    ),
    "quiet": flag("print the text alone, no report"),
    "json": flag("print one JSON object instead of the stream"),
}


class OutputError(Exception):
    """Standard output cannot be written; its argument is the OSError."""


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        # argparse ignores the error, and a help text that was not written would look like success.
        try:
            file.write(message)
        except OSError as error:
            raise OutputError(error) from error

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the options.")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specjax", description="Speculative decoding in JAX.", allow_abbrev=False)
    version = f"specjax {installed_version()}, tested with jax up to {NEWEST_TESTED_JAX}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate = commands.add_parser(
        "generate",
        help="continue a prompt by speculative decoding",
        description="Continues a prompt by speculative decoding: a draft proposes tokens, the "
        "target verifies them. The text streams to standard output, and a report of speed and "
        "acceptance follows it, on standard error if the output is no terminal. Compiled programs "
        "are cached in $XDG_CACHE_HOME/specjax "
        "(~/.cache/specjax); JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off.",
        allow_abbrev=False,
    )
    group = generate.add_argument_group("prompt and models")
    group.add_argument(
        "prompt", nargs="?", help="text to continue; without it, or with -, standard input is read"
    )
    group.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from FILE, at most 16 MiB"
    )
    add_options(group, _PAIR_OPTIONS | MESH_OPTIONS | PROCESS_OPTIONS)
    add_options(generate.add_argument_group("a file of prompts"), BATCH_OPTIONS)
    group = generate.add_argument_group("decoding")
    add_options(group, _TEXT_OPTIONS | SAMPLING_OPTIONS | _LOGPROBS_OPTION)
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="the text ends before the first TEXT in it; may be given several times",
    )
    group.add_argument(
        "--json-schema",
        metavar="FILE",
        help="texts are JSON that the schema in FILE accepts; --max-new-tokens may cut one off",
    )
    add_options(generate.add_argument_group("speculation"), SPECULATION_OPTIONS)
    add_options(generate.add_argument_group("report"), _REPORT_OPTIONS)
    sweep = commands.add_parser(
        "sweep",
        help="find the number of drafted tokens per step that is fastest for a pair",
        description="Finds the number K of drafted tokens per step that gives the most tokens per "
        "second. Step times are measured on this machine for K = 0, 1, ... under synthetic "
        "acceptance (drafted tokens are accepted at given rates). The pair's real acceptance is "
        "measured by decoding the prompts at the "
        "largest K. K = 0 is plain decoding.",
        allow_abbrev=False,
    )
    group = sweep.add_argument_group("prompts and models")
    group.add_argument("prompt", nargs="*", help="texts to continue; default: four built-in ones")
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="read a prompt from each FILE",
    )
    add_options(group, _PAIR_OPTIONS | MESH_OPTIONS)
    name = "draft_sample_method"
    group = sweep.add_argument_group("decoding of the prompts")
    add_options(group, _TEXT_OPTIONS | {name: SPECULATION_OPTIONS[name]})
    add_options(sweep.add_argument_group("sweep"), SWEEP_OPTIONS)
    return parser


def parse_sampling_options(options: argparse.Namespace) -> SamplingParams | None:
    """Returns the sampling options, or None without any."""
    given = {name: getattr(options, name) for name in SAMPLING_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**given) if given else None


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, SpeculativeConfig]:
    """Parses and checks the arguments of the command.

    Args:
      argv: arguments; None takes those of the process.

    Returns:
      The options, and the `SpeculativeConfig` that they describe.

    Raises:
      ValueError: if an option is wrong; the sentence names it.
    """
    options, unknown = _make_parser().parse_known_args(argv)
    if unknown:
        raise ValueError(
            f"unrecognized arguments: {' '.join(unknown)}; `specjax {options.command} --help` "
            "lists the options."
        )
    check_limits(options, _TEXT_OPTIONS)
    check_mesh_options(options)
    if options.command == "sweep":
        return options, parse_sweep_options(options)
    check_limits(options, SAMPLING_OPTIONS | _LOGPROBS_OPTION)
    check_stop(options.stop, "--stop")
    if options.quiet and not options.json and (options.compare or options.logprobs is not None):
        asked = "--compare" if options.compare else "--logprobs"
        raise ValueError(f"--quiet prints the text alone, and {asked} asks for more; give one.")
    check_process_options(options)
    check_batch_options(options)
    drafting = ("num_speculative_tokens", "step_costs", "usual_acceptance_rate", "rule")
    given = [option_name(name) for name in drafting if getattr(options, name) is not None]
    methods = {"rejection_sample_method": "synthetic", "draft_sample_method": "greedy"}
    given += [
        f"{option_name(name)} {method}"
        for name, method in methods.items()
        if getattr(options, name) == method
    ]
    if options.draft == "none" and given:
        raise ValueError(f"--draft is none, so nothing is drafted; {given[0]} needs a draft.")
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("a prompt and --prompt-file are given; give one of them.")
    return options, make_config(options)
