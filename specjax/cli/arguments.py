"""Options of the command's parts, checked before any file is read."""

import argparse
import math
import pathlib
import re
from typing import Any, NoReturn

import numpy as np

from specjax.cli.option_table import (
    Command,
    Option,
    add_command,
    check_limits,
    flag,
    option_name,
    parse_fields,
    parse_template_arg,
    suggest,
    without,
)
from specjax.cli.processes import (
    MESH_OPTIONS,
    PROCESS_OPTIONS,
    check_mesh_options,
    check_process_options,
)
from specjax.cli.serve.serve_arguments import check_serve_options, serve_command
from specjax.cli.speculation_arguments import SPECULATION_OPTIONS, make_config, make_config_of
from specjax.cli.sweep.plot_path import check_plot_path
from specjax.config import SpeculativeConfig
from specjax.engine.stop_strings import check_stop
from specjax.implementation import NEWEST_TESTED_JAX
from specjax.processing.sampling_params import SamplingParams
from specjax.version import __version__

MAX_TEMPERATURE = float(np.finfo(np.float32).max)
_DTYPES = ("float32", "bfloat16", "float16")
_PAIR_OPTIONS = {
    "chat": flag("treat a prompt as a user's message and apply the target's chat template"),
    "target": Option(
        *(str, "DIR"),
        "Hugging Face folder of a Llama, Mistral, Qwen or Gemma model, or its name on the hub if "
        "it was downloaded before; default: the target that ships with specjax",
    ),
    "draft": Option(
        *(str, "DIR|head|model|ngram"),
        "DIR: folder of a draft model with the target's tokenizer, or of a draft head (a small "
        "network on the target's hidden states) trained for it, such as EAGLE-3; head, model: the "
        "draft head and the draft model that ship with specjax, for the default target; ngram: "
        "prompt lookup, which copies earlier text. Default: head, or ngram if --target is given",
    ),
    "dtype": Option(
        *(str, "DTYPE"),
        "of weights, activations and caches: float32, bfloat16 or float16; default: float32 on a "
        "CPU, the folder's elsewhere",
    ),
    "row_invariant": flag(
        "a token's logits depend on its text alone, bit for bit: on no other request, draft or "
        "length of a chunk; steps are a little slower on a GPU, and slower on a CPU",
    ),
}
_TEMPLATE_OPTIONS = {
    "system": Option(str, "TEXT", "the system message, before the user's"),
    "template_arg": Option(
        *(parse_template_arg, "NAME=VALUE"),
        "a variable of the chat template, such as enable_thinking=false; may be given several "
        "times",
        is_list=True,
    ),
}
_DRAFT = _PAIR_OPTIONS["draft"]
_DRAFT_OR_NONE = _DRAFT._replace(
    letter=f"{_DRAFT.letter}|none", text=f"{_DRAFT.text}. none: plain decoding, without a draft"
)
TEMPERATURE = Option(
    *(float, "T", "sampling temperature, 0 is greedy", (0, MAX_TEMPERATURE), 0.8),
    needs=">= 0, and finite in float32",
    aliases=("--temp",),
)
_TEXT_OPTIONS = {
    "max_new_tokens": Option(
        *(int, "N", "tokens to generate for a prompt", (1, math.inf), 128),
        aliases=("--max-tokens", "-n"),
    ),
    "temperature": TEMPERATURE,
    "seed": Option(
        *(int, "SEED", "random seed in [0, 2**32)", (0, 2**32 - 1), 0), needs="in [0, 2**32)"
    ),
}
# When a text ends.
END_OPTIONS = {
    "stop": Option(
        *(str, "TEXT", "the text ends before the first TEXT in it; may be given several times"),
        is_list=True,
    ),
    "min_tokens": Option(
        *(int, "N", "tokens before the first that may end the text", (0, 2**16 - 1))
    ),
    "ignore_eos": flag("go on after a token that ends a text, up to --max-new-tokens"),
}
# Of `generate` and `chat`, which read a folder's defaults.
_DEFAULT_TEMPERATURE = TEMPERATURE.default
_TEXT_OPTIONS_OF_FOLDER = _TEXT_OPTIONS | {
    "temperature": TEMPERATURE._replace(
        text=f"{TEMPERATURE.text}; default: that of generation_config.json, or "
        f"{_DEFAULT_TEMPERATURE}",
        default=None,
    ),
    "ignore_generation_config": flag(
        "leave the sampling parameters of the target's generation_config.json out"
    ),
}
_CHAT_OPTIONS = _TEXT_OPTIONS_OF_FOLDER | {
    "max_new_tokens": _TEXT_OPTIONS["max_new_tokens"]._replace(
        text="most tokens of an answer", default=1024
    ),
    "quiet": flag("print the answers alone"),
}
SAMPLING_OPTIONS = {
    "top_k": Option(int, "K", "keep the K most probable tokens", (0, 2**31 - 1), off=0),
    "top_p": Option(float, "P", "keep the most probable tokens that sum to P", (0, 1), off=1.0),
    "min_p": Option(
        *(float, "P", "keep tokens >= P times as probable as the top one", (0, 1)), off=0.0
    ),
    "repetition_penalty": Option(
        *(float, "R", "> 1 discourages tokens of the prompt and the output", (1e-6, 1e6)), off=1.0
    ),
    "frequency_penalty": Option(
        *(float, "F", "subtracted from a token's logit per occurrence in the output", (-1e6, 1e6)),
        off=0.0,
    ),
    "presence_penalty": Option(
        *(float, "F", "subtracted from the logit of every token in the output", (-1e6, 1e6)),
        off=0.0,
    ),
}
_OUTPUT_OPTIONS = {
    "logprobs": Option(
        *(int, "N"),
        "list each token's log-probability and those of the N most probable tokens",
        (0, math.inf),
    ),
    "json_schema": Option(
        *(str, "FILE"),
        "texts are JSON that the schema in FILE accepts; --max-new-tokens may cut one off",
    ),
}
_REPORT_OPTIONS = {
    "compare": flag(
        "then decode without drafts, too, and report how many times as fast drafts were",
    ),
    "quiet": flag("print the text alone, no report"),
    "json": flag("print one JSON object instead of the stream"),
}
_BATCH_OPTIONS = {
    "input": Option(
        *(str, "FILE"),
        "JSON lines, each an object with a prompt, prompt_token_ids or messages, and perhaps an "
        "id, a seed, stop strings and options of its own; or lines of OpenAI's batch format; needs "
        "--output",
    ),
    "fields": Option(
        *(parse_fields, "NAME=PLACE,..."),
        "where other lines have the prompt, the id and so on, such as id=task_id,prompt=prompt or "
        "id=question_id,turns=turns; the rest of a line is not read",
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

_SWEEP_OPTIONS = {
    "max_speculative_tokens": Option(
        int, "K", "largest number of drafted tokens per step", (1, 32), 8
    ),
    "batch_size": Option(int, "B", "requests per step of the timed runs", (1, 4096), 1),
    "context": Option(int, "N", "tokens in the cache before the timed steps", (1, math.inf), 256),
    "steps": Option(int, "N", "decode steps per timed run", (1, math.inf), 16),
    "rounds": Option(int, "N", "timed runs for each K", (2, math.inf), 5),
    "out": Option(
        *(str, "FILE"),
        "plot tokens per second against acceptance length into a .png, .svg or .pdf file",
    ),
    "json": flag("print one JSON object instead of tables"),
}


_PAIR_OR_PLAIN = _PAIR_OPTIONS | {"draft": _DRAFT_OR_NONE}
_COMMANDS = {
    "generate": Command(
        "continue a prompt by speculative decoding",
        "Continues a prompt by speculative decoding: a draft proposes tokens, the target verifies "
        "them. The text streams to standard output, and a report of speed and acceptance follows "
        "it, on standard error if the output is no terminal. Compiled programs are cached in "
        "$XDG_CACHE_HOME/specjax (~/.cache/specjax); JAX_ENABLE_COMPILATION_CACHE=0 turns the "
        "cache off.",
        {
            "prompt and models": _PAIR_OR_PLAIN
            | _TEMPLATE_OPTIONS
            | MESH_OPTIONS
            | PROCESS_OPTIONS,
            "a file of prompts": _BATCH_OPTIONS,
            "decoding": _TEXT_OPTIONS_OF_FOLDER | SAMPLING_OPTIONS | END_OPTIONS | _OUTPUT_OPTIONS,
            "speculation": SPECULATION_OPTIONS,
            "report": _REPORT_OPTIONS,
        },
        prompt="texts to continue; without one, or for -, standard input is read",
        file_group="a file of prompts",
    ),
    "chat": Command(
        "hold a conversation",
        "Answers messages, lines of standard input, by the target's chat template. The models read "
        "only the tokens of a turn that the turns before have not left in their caches. /help "
        "lists the commands of a conversation.",
        {
            "models": without(_PAIR_OR_PLAIN, "chat") | _TEMPLATE_OPTIONS | MESH_OPTIONS,
            "answers": _CHAT_OPTIONS | SAMPLING_OPTIONS | END_OPTIONS,
            "speculation": without(SPECULATION_OPTIONS, "usual_acceptance_rate"),
        },
    ),
    "sweep": Command(
        "find the number of drafted tokens per step that is fastest for a pair",
        "Finds the number K of drafted tokens per step that gives the most tokens per second. Step "
        "times are measured on this machine for K = 0, 1, ... under synthetic acceptance (drafted "
        "tokens are accepted at given rates). The pair's real acceptance is measured by decoding "
        "the prompts at the largest K. K = 0 is plain decoding.",
        {
            "prompts and models": _PAIR_OPTIONS | MESH_OPTIONS,
            "decoding of the prompts": _TEXT_OPTIONS
            | {"draft_sample_method": SPECULATION_OPTIONS["draft_sample_method"]},
            "sweep": _SWEEP_OPTIONS,
        },
        prompt="texts to continue; default: four built-in ones",
    ),
    "serve": serve_command(without(_PAIR_OR_PLAIN, "chat")),
}
# Values of options that a command does not have: code that commands share asks for them.
_ABSENT: dict[str, Any] = dict.fromkeys(
    ("logprobs", "json_schema", "input", "process", "coordinator", "usual_acceptance_rate")
) | {"chat": True, "quiet": False, "json": False, "ignore_eos": False, "use_fp64_gumbel": False}


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
        choice = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        hint = "" if choice is None else suggest(choice[1], re.findall(r"\w+", choice[2]))
        raise ValueError(f"{message}; `{self.prog} --help` lists the options.{hint}")


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="specjax", description="Speculative decoding in JAX.", allow_abbrev=False)
    version = f"specjax {__version__}, tested with jax up to {NEWEST_TESTED_JAX}"
    parser.add_argument("--version", action="version", version=version)
    parser.set_defaults(**_ABSENT)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        how: Any = {"help": command.help, "description": command.description}
        add_command(commands.add_parser(name, **how, allow_abbrev=False), command)
    return parser


def parse_sampling_options(options: argparse.Namespace) -> SamplingParams | None:
    """Returns the sampling options, or None without any."""
    values = {name: getattr(options, name) for name in SAMPLING_OPTIONS}
    values = {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**values) if values else None


def parse_options(argv: list[str] | None) -> tuple[argparse.Namespace, SpeculativeConfig]:
    """Parses and checks the arguments of the command.

    Args:
      argv: arguments; None takes those of the process.

    Returns:
      The options, and the `SpeculativeConfig` that they describe.

    Raises:
      ValueError: if an option is wrong; the sentence names it.
    """
    parser = _make_parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        # The parser has given each value that follows such an option, too.
        names = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        hint = suggest(names[0], _option_names(parser, options.command)) if names else ""
        raise ValueError(
            f"unrecognized arguments: {' '.join(unknown)}; `specjax {options.command} --help` "
            f"lists the options.{hint}"
        )
    if options.dtype not in (None, *_DTYPES):
        hint = suggest(options.dtype, _DTYPES)
        raise ValueError(
            f"--dtype is {options.dtype}; it needs to be {' or '.join(_DTYPES)}.{hint}"
        )
    command = _COMMANDS[options.command]
    for heading, table in command.groups.items():
        if heading != command.file_group:
            check_limits(options, table)
    check_mesh_options(options)
    if options.command == "sweep":
        return options, _parse_sweep_options(options)
    if options.command == "serve":
        check_serve_options(options)
    else:
        _check_text_options(options)
        if options.command == "generate":
            _check_generate_options(options)
        _check_draft_options(options)
    return options, make_config(options)


def _check_text_options(options: argparse.Namespace) -> None:
    """Sets defaults of `generate` and `chat`, and refuses options that contradict one another."""
    options.from_generation_config, options.default_names = {}, []
    if options.temperature is None:
        options.temperature, options.default_names = _DEFAULT_TEMPERATURE, ["temperature"]
    options.stop = check_stop(options.stop, "--stop")
    given = _list_options(options, "min_tokens", "ignore_eos")
    if options.json_schema is not None and given:
        raise ValueError(
            f"--json-schema is given and {given[0]}; the schema alone says where a text may end."
        )
    if (options.min_tokens or 0) > options.max_new_tokens:
        raise ValueError(
            f"--min-tokens is {options.min_tokens} and --max-new-tokens {options.max_new_tokens}; "
            "it needs to be at most that."
        )
    names = _list_options(options, "system", "template_arg")
    if names and not options.chat and (options.command, options.input) == ("generate", None):
        raise ValueError(f"{names[0]} is given without --chat; the chat template alone has it.")


def _check_draft_options(options: argparse.Namespace) -> None:
    """Refuses options of drafts without a draft."""
    names = ("num_speculative_tokens", "step_costs", "usual_acceptance_rate", "rule")
    methods = {"rejection_sample_method": "synthetic", "draft_sample_method": "greedy"}
    drafting = _list_options(options, *names)
    drafting += [f"{option_name(x)} {y}" for x, y in methods.items() if getattr(options, x) == y]
    if options.draft == "none" and drafting:
        raise ValueError(f"--draft is none, so nothing is drafted; {drafting[0]} needs a draft.")


def _option_names(parser: argparse.ArgumentParser, command: str) -> list[str]:
    """Returns the names of a command's options."""
    actions = (x for x in parser._actions if isinstance(x, argparse._SubParsersAction))
    return list(next(actions).choices[command]._option_string_actions)


def _list_options(options: argparse.Namespace, *names: str) -> list[str]:
    """Returns the options of these names that are given."""
    values = {name: getattr(options, name) for name in names}
    return [
        option_name(name)
        for name, x in values.items()
        if x is not None and x is not False and x != []
    ]


def _check_generate_options(options: argparse.Namespace) -> None:
    """Raises `ValueError` for options of `generate` that do not fit together."""
    if options.quiet and not options.json and (options.compare or options.logprobs is not None):
        option = "--compare" if options.compare else "--logprobs"
        raise ValueError(f"--quiet prints the text alone, and {option} asks for more; give one.")
    check_process_options(options)
    if (options.input is None) != (options.output is None):
        option, partner = ("input", "output") if options.output is None else ("output", "input")
        raise ValueError(f"--{option} is given without --{partner}; a file of prompts needs both.")
    if options.input is None:
        names = _list_options(
            options, "num_slots", "skip_malformed", "usual_acceptance_rate", "fields"
        )
        if names:
            raise ValueError(f"{names[0]} is given without --input, a file of prompts.")
        if options.prompt and options.prompt_file is not None:
            raise ValueError("a prompt and --prompt-file are given; give one of them.")
        return
    inputs = ["a prompt"] if options.prompt else []
    inputs += _list_options(options, "prompt_file", "compare", "json")
    if inputs:
        raise ValueError(f"--input is given and {inputs[0]}; give one of them.")
    options.num_slots = 16 if options.num_slots is None else options.num_slots
    check_limits(options, _BATCH_OPTIONS)


def _parse_sweep_options(options: argparse.Namespace) -> SpeculativeConfig:
    """Returns the `SpeculativeConfig` of the options; refuses a wrong one by its name."""
    if options.draft == "none":
        raise ValueError(
            "--draft is none; a sweep needs a draft (it times plain decoding as K = 0)."
        )
    if options.out is not None:
        check_plot_path(pathlib.Path(options.out))
    return make_config_of(
        num_speculative_tokens=options.max_speculative_tokens,
        draft_sample_method=options.draft_sample_method,
    )
