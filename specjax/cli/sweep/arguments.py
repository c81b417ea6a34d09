"""Options of `specjax sweep`, checked before any file is read."""

import argparse
import importlib.util
import os
import pathlib
import tempfile
from typing import Any

from specjax.cli.mesh_arguments import add_mesh_options
from specjax.config import SpeculativeConfig

__all__ = ["add_sweep_command", "parse_sweep_options"]

_MAX_BATCH_SIZE = 4096
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
# Number options: letter, default, minimum, maximum, help text.
_NUMBER_OPTIONS: dict[str, tuple[str, int, int, float, str]] = {
    "max_speculative_tokens": ("K", 8, 1, 32, "largest number of drafted tokens per step"),
    "batch_size": ("B", 1, 1, _MAX_BATCH_SIZE, "requests per step of the timed runs"),
    "context": ("N", 256, 1, float("inf"), "tokens in the cache before the timed steps"),
    "steps": ("N", 16, 1, float("inf"), "decode steps per timed run"),
    "rounds": ("N", 5, 2, float("inf"), "timed runs for each K and acceptance length"),
}


def add_sweep_command(commands: Any) -> None:
    """Adds `sweep` to the commands of a parser."""
    command = commands.add_parser(
        "sweep",
        help="find the number of drafted tokens per step that is fastest for a pair",
        description="Finds the number K of drafted tokens per step that gives the most tokens per "
        "second. Step times are measured on this machine for K = 0, 1, ... under synthetic "
        "acceptance (drafted tokens are accepted at given rates). The pair's real acceptance is "
        "measured by decoding the prompts at the "
        "largest K. K = 0 is plain decoding.",
        allow_abbrev=False,
    )
    _add_model_options(command.add_argument_group("prompts and models"))
    _add_decoding_options(command.add_argument_group("decoding of the prompts"))
    _add_measurement_options(command.add_argument_group("sweep"))


def _add_model_options(group: Any) -> None:
    group.add_argument("prompt", nargs="*", help="texts to continue; default: four built-in ones")
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        nargs="+",
        action="extend",
        help="read a prompt from each FILE",
    )
    group.add_argument(
        "--chat",
        action="store_true",
        help="treat prompts as users' messages and apply the target's chat template",
    )
    group.add_argument(
        "--target",
        metavar="DIR",
        help="Hugging Face folder; default: the target that ships with specjax",
    )
    group.add_argument(
        "--draft",
        metavar="DIR|head|model|ngram",
        help="DIR: folder of a draft model with the target's tokenizer, or of a draft head (a "
        "small network on the target's hidden states) trained for it; "
        "head, model: the draft head and the draft model that ship with specjax, for the default "
        "target; ngram: prompt lookup, which copies earlier text. Default: head, or ngram if "
        "--target is given",
    )
    add_mesh_options(group)


def _add_decoding_options(group: Any) -> None:
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=128,
        metavar="N",
        help="tokens per prompt; default: 128",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="sampling temperature, 0 is greedy; default: 0.8",
    )
    group.add_argument("--seed", type=int, default=0, help="random seed in [0, 2**32); default: 0")
    group.add_argument(
        "--draft-sample-method",
        default="probabilistic",
        metavar="METHOD",
        help="probabilistic: sample drafted tokens; greedy: draft the most probable; default: "
        "probabilistic",
    )


def _add_measurement_options(group: Any) -> None:
    for name, (letter, default, _, _, text) in _NUMBER_OPTIONS.items():
        option = "--" + name.replace("_", "-")
        help_text = f"{text}; default: {default}"
        group.add_argument(option, type=int, default=default, metavar=letter, help=help_text)
    group.add_argument(
        "--out",
        metavar="FILE",
        help="plot tokens per second against acceptance length into a .png, .svg or .pdf file",
    )
    group.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )


def parse_sweep_options(options: argparse.Namespace) -> SpeculativeConfig:
    """Returns the `SpeculativeConfig` of the options; refuses a wrong one by its name."""
    for name, (_, _, low, high, _) in _NUMBER_OPTIONS.items():
        value = getattr(options, name)
        if not low <= value <= high:
            requirement = f"in [{low}, {high}]" if high < float("inf") else f">= {low}"
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}; it needs to be {requirement}."
            )
    if options.draft == "none":
        raise ValueError(
            "--draft is none; a sweep needs a draft (it times plain decoding as K = 0)."
        )
    if options.out is not None:
        _check_plot_path(pathlib.Path(options.out))
    try:
        return SpeculativeConfig(
            num_speculative_tokens=options.max_speculative_tokens,
            draft_sample_method=options.draft_sample_method,
        )
    except ValueError as error:
        message = str(error).replace("draft_sample_method", "--draft-sample-method")
        raise ValueError(message) from None


def _check_plot_path(path: pathlib.Path) -> None:
    # Checked before the measurement, which takes minutes.
    if path.name.lower() in _PLOT_SUFFIXES:
        raise ValueError(f"--out is {path}; it needs a file name, like sweep{path.name}.")
    if os.path.isdir(path):
        raise ValueError(f"--out is {path}, which is a folder; it needs to be a file.")
    if path.suffix.lower() not in _PLOT_SUFFIXES:
        raise ValueError(f"--out is {path}; it needs to end in {', '.join(_PLOT_SUFFIXES)}.")
    if not os.path.isdir(path.parent):
        raise ValueError(f"--out is {path}; there is no folder {path.parent}.")
    try:
        _check_writable(path.resolve())
    except (OSError, RuntimeError) as error:
        message = getattr(error, "strerror", None) or error
        raise ValueError(f"--out is {path}, which cannot be written: {message}.") from None
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "--out needs matplotlib; pip install 'specjax[examples]', or leave --out away to get "
            "the tables alone."
        )


def _check_writable(path: pathlib.Path) -> None:
    """Raises the error that writing `path` would raise; creates and changes nothing."""
    if path.exists():
        path.open("ab").close()
    if path.is_file() or not path.exists():
        # `replace_file` writes a new file in that folder.
        tempfile.TemporaryFile(dir=path.parent).close()
