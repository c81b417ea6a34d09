"""What `specjax sweep` can be asked, and what of it is refused before anything is read."""

import argparse
import importlib.util
import os
import pathlib
import tempfile
from typing import Any

from specjax.config import SpeculativeConfig

__all__ = ["add_sweep_command", "parse_sweep_options"]

_MAX_BATCH_SIZE = 4096
_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
# Of each number: its letter, its default, its least and largest value, and what it is.
_NUMBER_OPTIONS: dict[str, tuple[str, int, int, float, str]] = {
    "max_speculative_tokens": ("K", 8, 1, 32, "largest number of drafts per step"),
    "batch_size": ("B", 1, 1, _MAX_BATCH_SIZE, "requests per step of the timed runs"),
    "context": ("N", 256, 1, float("inf"), "tokens that stand before the timed steps"),
    "steps": ("N", 16, 1, float("inf"), "steps of a timed run, in one program"),
    "rounds": ("N", 5, 2, float("inf"), "timed runs per K and acceptance length"),
}


def add_sweep_command(commands: Any) -> None:
    """Adds the command to the parser's."""
    command = commands.add_parser(
        "sweep",
        help="time a pair for every number of drafts, and say which is best",
        description="Times decode steps of a pair with K = 0, 1, ... drafts on this machine, "
        "under synthetic acceptance; decodes prompts at the largest K for the acceptance that "
        "the pair really has; and says which K gives the most tokens per second there.",
        allow_abbrev=False,
    )
    models = command.add_argument_group("prompts and models")
    models.add_argument("prompt", nargs="*", help="texts to continue; default: built-in ones")
    models.add_argument(
        "--prompt-file", metavar="FILE", nargs="+", action="extend", help="read prompts from files"
    )
    models.add_argument(
        "--chat", action="store_true", help="prompts are messages, for the target's chat template"
    )
    models.add_argument(
        "--target", metavar="DIR", help="Hugging Face folder; default: the embedded one"
    )
    models.add_argument(
        "--draft",
        metavar="DIR|head|ngram",
        help="a folder with the target's tokenizer, or of the target's head, the embedded head, "
        "or prompt lookup; default: the embedded draft, and ngram with --target",
    )
    decoding = command.add_argument_group("decoding of the prompts")
    decoding.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="of each; default: 128"
    )
    decoding.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 is greedy; default: 0.8"
    )
    decoding.add_argument("--seed", type=int, default=0, help="in [0, 2**32); default: 0")
    decoding.add_argument(
        "--draft-sample-method",
        default="probabilistic",
        metavar="METHOD",
        help="probabilistic or greedy; default: probabilistic",
    )
    sweep = command.add_argument_group("sweep")
    for name, (letter, default, _, _, text) in _NUMBER_OPTIONS.items():
        option = "--" + name.replace("_", "-")
        help_text = f"{text}; default: {default}"
        sweep.add_argument(option, type=int, default=default, metavar=letter, help=help_text)
    sweep.add_argument(
        "--out",
        metavar="FILE",
        help="draw tokens per second against acceptance length: .png, .svg or .pdf",
    )
    sweep.add_argument("--json", action="store_true", help="print one JSON object, and no table")


def parse_sweep_options(options: argparse.Namespace) -> SpeculativeConfig:
    """Refuses what cannot be done, in a sentence that names the option; the config of the rest."""
    for name, (_, _, low, high, _) in _NUMBER_OPTIONS.items():
        value = getattr(options, name)
        if not low <= value <= high:
            requirement = f"in [{low}, {high}]" if high < float("inf") else f">= {low}"
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}; it needs to be {requirement}."
            )
    if options.draft == "none":
        raise ValueError(
            "--draft is none; a sweep needs drafts, and times plain decoding beside them as K = 0."
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
    # Before the measurement, not after it.
    if path.name.lower() in _PLOT_SUFFIXES:
        raise ValueError(
            f"--out is {path}; it needs a name before its ending, as sweep{path.name}."
        )
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
            "--out draws with matplotlib, which is missing; pip install 'specjax[examples]', or "
            "leave --out away for the table alone."
        )


def _check_writable(path: pathlib.Path) -> None:
    """Raises what writing would, and leaves the file, or its absence, as it was."""
    if path.exists():
        path.open("ab").close()
    if path.is_file() or not path.exists():
        # The new one is written beside it.
        tempfile.TemporaryFile(dir=path.parent).close()
