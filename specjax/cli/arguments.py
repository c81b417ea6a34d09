"""Options of `specjax generate`, checked before any file is read."""

import argparse
import math
from typing import Any, NoReturn

import numpy as np

from specjax.cli.batch.arguments import add_batch_options, check_batch_options
from specjax.cli.mesh_arguments import add_mesh_options, check_mesh_options
from specjax.cli.processes import add_process_options, check_process_options
from specjax.cli.speculation_arguments import add_speculation_options, make_config
from specjax.cli.sweep.arguments import add_sweep_command, parse_sweep_options
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
# Sampling options: type, letter, minimum, maximum, help text.
SAMPLING_OPTIONS: dict[str, tuple[type, str, float, float, str]] = {
    "top_k": (int, "K", 0, 2**31 - 1, "keep the K most probable tokens; 0 disables"),
    "top_p": (float, "P", 0, 1, "keep the most probable tokens that sum to P; 1 disables"),
    "min_p": (float, "P", 0, 1, "keep tokens >= P times as probable as the top one; 0 disables"),
    "repetition_penalty": (
        *(float, "R", 1e-6, 1e6),
        "> 1 discourages tokens of the prompt and the output; 1 disables",
    ),
    "frequency_penalty": (
        *(float, "F", -1e6, 1e6),
        "subtracted from a token's logit per occurrence in the output; 0 disables",
    ),
    "presence_penalty": (
        *(float, "F", -1e6, 1e6),
        "subtracted from the logit of every token in the output; 0 disables",
    ),
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
    command = commands.add_parser(
        "generate",
        help="continue a prompt by speculative decoding",
        description="Continues a prompt by speculative decoding: a draft proposes tokens, the "
        "target verifies them. The text streams to standard output, and a report of speed and "
        "acceptance follows it, on standard error if the output is no terminal. Compiled programs "
        "are cached in $XDG_CACHE_HOME/specjax "
        "(~/.cache/specjax); JAX_ENABLE_COMPILATION_CACHE=0 turns the cache off.",
        allow_abbrev=False,
    )
    _add_model_options(command.add_argument_group("prompt and models"))
    add_batch_options(command.add_argument_group("a file of prompts"))
    _add_decoding_options(command.add_argument_group("decoding"))
    add_speculation_options(command.add_argument_group("speculation"))
    _add_report_options(command.add_argument_group("report"))
    add_sweep_command(commands)
    return parser


def _add_model_options(group: Any) -> None:
    group.add_argument(
        "prompt", nargs="?", help="text to continue; without it, or with -, standard input is read"
    )
    group.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from FILE, at most 16 MiB"
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="treat the prompt as a user's message and apply the target's chat template",
    )
    group.add_argument(
        "--target",
        metavar="DIR",
        help="Hugging Face folder of a Llama, Mistral, Qwen or Gemma model; default: the target "
        "that ships with specjax",
    )
    group.add_argument(
        "--draft",
        metavar="DIR|head|model|ngram|none",
        help="DIR: folder of a draft model with the target's tokenizer, or of a draft head (a "
        "small network on the target's hidden states) trained for it, such as EAGLE-3; "
        "head, model: the draft head and the draft model that ship with specjax, for the default "
        "target; ngram: prompt lookup, which copies earlier text; none: plain decoding. Default: "
        "head, or ngram if --target is given",
    )
    add_mesh_options(group)
    add_process_options(group)


def _add_decoding_options(group: Any) -> None:
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens to generate; default: 128",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="sampling temperature, 0 is greedy; default: 0.8",
    )
    for name, (parse, letter, _, _, text) in SAMPLING_OPTIONS.items():
        group.add_argument("--" + name.replace("_", "-"), type=parse, metavar=letter, help=text)
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
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="N",
        help="list each token's log-probability and those of the N most probable tokens",
    )
    group.add_argument("--seed", type=int, default=0, help="random seed in [0, 2**32); default: 0")


def _add_report_options(group: Any) -> None:
    group.add_argument(
        "--compare",
        action="store_true",
        help="then decode without drafts, too, and report how many times as fast drafts were",
    )
    group.add_argument("--quiet", action="store_true", help="print the text alone, no report")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of the stream"
    )


def parse_sampling_options(options: argparse.Namespace) -> SamplingParams | None:
    """Returns the sampling options, or None without any; refuses one outside its range."""
    given = {name: getattr(options, name) for name in SAMPLING_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        low, high = SAMPLING_OPTIONS[name][2:4]
        if not low <= value <= high or math.isnan(value):
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}; it needs to be in [{low}, {high}]."
            )
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
    if not 0 <= options.temperature <= MAX_TEMPERATURE:
        raise ValueError(
            f"--temperature is {options.temperature}; it needs to be >= 0, and finite in float32."
        )
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; it needs to be >= 1.")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed is {options.seed}; it needs to be in [0, 2**32).")
    check_mesh_options(options)
    if options.command == "sweep":
        return options, parse_sweep_options(options)
    if options.logprobs is not None and options.logprobs < 0:
        raise ValueError(f"--logprobs is {options.logprobs}; it needs to be >= 0.")
    check_stop(options.stop, "--stop")
    if options.quiet and not options.json and (options.compare or options.logprobs is not None):
        asked = "--compare" if options.compare else "--logprobs"
        raise ValueError(f"--quiet prints the text alone, and {asked} asks for more; give one.")
    parse_sampling_options(options)
    check_process_options(options)
    check_batch_options(options)
    drafting = {
        "num-speculative-tokens": options.num_speculative_tokens is not None,
        "step-costs": options.step_costs is not None,
        "usual-acceptance-rate": options.usual_acceptance_rate is not None,
        "rejection-sample-method synthetic": options.rejection_sample_method == "synthetic",
        "draft-sample-method greedy": options.draft_sample_method == "greedy",
        "rule": options.rule is not None,
    }
    given = [option for option, is_given in drafting.items() if is_given]
    if options.draft == "none" and given:
        raise ValueError(f"--draft is none, so nothing is drafted; --{given[0]} needs a draft.")
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("a prompt and --prompt-file are given; give one of them.")
    return options, make_config(options)
