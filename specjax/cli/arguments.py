"""What the command can be asked, and what of it is refused before anything is read."""

import argparse
import dataclasses
import importlib.metadata
import math
import re
from typing import Any, NoReturn

import numpy as np

from specjax.cli.sweep_arguments import add_sweep_command, parse_sweep_options
from specjax.config import SpeculativeConfig
from specjax.processing.sampling_params import SamplingParams

__all__ = ["parse_options", "parse_sampling_options"]

_CONFIG_FIELDS = dataclasses.fields(SpeculativeConfig)
_MAX_TEMPERATURE = float(np.finfo(np.float32).max)
# Of each number of a request: its type, letter, least and largest value, and what it does.
_SAMPLING_OPTIONS: dict[str, tuple[type, str, float, float, str]] = {
    "top_k": (int, "K", 0, 2**31 - 1, "sample of the K likeliest tokens; off: 0"),
    "top_p": (float, "P", 0, 1, "sample of the likeliest tokens that make up P together; off: 1"),
    "min_p": (float, "P", 0, 1, "sample of tokens at least P times as likely as the first; off: 0"),
    "repetition_penalty": (float, "R", 1e-6, 1e6, "> 1 is against what was said, or asked; off: 1"),
    "frequency_penalty": (float, "F", -1e6, 1e6, "off a logit each time it was generated; off: 0"),
    "presence_penalty": (float, "F", -1e6, 1e6, "off a logit once it was generated; off: 0"),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the options.")


def _parse_numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} came; it needs numbers with commas between, like 0.8,0.6,0.4"
        ) from None


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specjax", description="Speculative decoding in JAX.", allow_abbrev=False)
    installed = importlib.metadata.distributions(name="specjax")
    version = next((one.version for one in installed), "(not installed)")
    parser.add_argument("--version", action="version", version=f"specjax {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser(
        "generate",
        help="continue a prompt, and say what speculation gained",
        description="Continues a prompt with a draft model and a target model, streaming, and "
        "measures it against plain decoding. Compilations are kept in $XDG_CACHE_HOME/specjax "
        "(~/.cache/specjax), unless JAX_ENABLE_COMPILATION_CACHE=0.",
        allow_abbrev=False,
    )
    _add_model_options(command.add_argument_group("prompt and models"))
    _add_decoding_options(command.add_argument_group("decoding"))
    _add_speculation_options(command.add_argument_group("speculation"))
    add_sweep_command(commands)
    return parser


def _add_model_options(group: Any) -> None:
    group.add_argument("prompt", nargs="?", help="text to continue; - or nothing: standard input")
    group.add_argument(
        "--prompt-file", metavar="FILE", help="read the prompt from a file of 16 MiB at most"
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="the prompt is a message: it is put into the chat template of the target's folder",
    )
    group.add_argument(
        "--target",
        metavar="DIR",
        help="Hugging Face folder of a Llama, Mistral, Qwen or Gemma; default: the embedded one",
    )
    group.add_argument(
        "--draft",
        metavar="DIR|head|ngram|none",
        help="a folder with the target's tokenizer, or of the target's head, the embedded head, "
        "prompt lookup, or plain decoding; default: the embedded draft, which fits the embedded "
        "target only, as its head does, and ngram with --target",
    )


def _add_decoding_options(group: Any) -> None:
    group.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    group.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy; default: 0.8"
    )
    for name, (parse, letter, _, _, text) in _SAMPLING_OPTIONS.items():
        group.add_argument("--" + name.replace("_", "-"), type=parse, metavar=letter, help=text)
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="show each token's log-probability, and N more"
    )
    group.add_argument("--seed", type=int, default=0, help="in [0, 2**32); default: 0")
    group.add_argument("--json", action="store_true", help="print one JSON object, and no stream")
    group.add_argument(
        "--no-baseline", action="store_true", help="do not measure plain decoding beside it"
    )


def _add_speculation_options(group: Any) -> None:
    option_texts = {
        "num_speculative_tokens": (int, "K", "draft tokens per step, 1 to 32"),
        "rejection_sample_method": (str, "METHOD", "standard or synthetic"),
        "draft_sample_method": (str, "METHOD", "probabilistic or greedy"),
        "synthetic_acceptance_rate": (float, "R", "mean of the rates, in [0, 1]"),
        "synthetic_acceptance_rates": (_parse_numbers, "R,R,...", "rates per position, K of them"),
        "synthetic_acceptance_length": (float, "L", "mean tokens per step, in [1, K + 1]"),
    }
    for field in _CONFIG_FIELDS:
        option = "--" + field.name.replace("_", "-")
        if field.name in option_texts:
            parse, metavar, text = option_texts[field.name]
            if field.default is not None:
                text += f"; default: {field.default}"
            group.add_argument(
                option, type=parse, default=field.default, metavar=metavar, help=text
            )
        else:
            group.add_argument(option, action="store_true", help="noise in float64")


def _make_config(options: argparse.Namespace) -> SpeculativeConfig:
    fields = {field.name: getattr(options, field.name) for field in _CONFIG_FIELDS}
    try:
        return SpeculativeConfig(**fields)
    except ValueError as error:
        names = rf"\b(?:{'|'.join(fields)})\b"
        message = re.sub(names, lambda name: "--" + name[0].replace("_", "-"), str(error))
        raise ValueError(message) from None


def parse_sampling_options(options: argparse.Namespace) -> SamplingParams | None:
    """What is asked besides a temperature, or None; a `ValueError` outside its range."""
    given = {name: getattr(options, name) for name in _SAMPLING_OPTIONS}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        low, high = _SAMPLING_OPTIONS[name][2:4]
        if not low <= value <= high or math.isnan(value):
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}; it needs to be in [{low}, {high}]."
            )
    return SamplingParams(**given) if given else None


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, SpeculativeConfig]:
    """Reads and checks the arguments of the command.

    Args:
      argv: arguments; None is those of the process.

    Returns:
      The options, and the config that some of them make.

    Raises:
      ValueError: in a sentence that names the option.
    """
    options, unknown = _make_parser().parse_known_args(argv)
    if unknown:
        raise ValueError(
            f"unrecognized arguments: {' '.join(unknown)}; `specjax {options.command} --help` "
            "lists the options."
        )
    if not 0 <= options.temperature <= _MAX_TEMPERATURE:
        raise ValueError(
            f"--temperature is {options.temperature}; it needs to be >= 0, and finite in float32."
        )
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {options.max_new_tokens}; it needs to be >= 1.")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed is {options.seed}; it needs to be in [0, 2**32).")
    if options.command == "sweep":
        return options, parse_sweep_options(options)
    if options.logprobs is not None and options.logprobs < 0:
        raise ValueError(f"--logprobs is {options.logprobs}; it needs to be >= 0.")
    parse_sampling_options(options)
    if options.draft == "none" and options.rejection_sample_method == "synthetic":
        raise ValueError(
            "--draft is none and --rejection-sample-method synthetic; there is nothing to accept "
            "without drafts."
        )
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("a prompt and --prompt-file came; it needs to be one of them.")
    return options, _make_config(options)
