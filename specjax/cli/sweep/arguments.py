"""Options of `specjax sweep`, checked before any file is read."""

import argparse
import importlib.util
import math
import os
import pathlib
import tempfile

from specjax.cli.option_table import Option, check_limits, flag
from specjax.cli.speculation_arguments import make_config_of
from specjax.config import SpeculativeConfig

__all__ = ["SWEEP_OPTIONS", "parse_sweep_options"]

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
SWEEP_OPTIONS = {
    "max_speculative_tokens": Option(
        int, "K", "largest number of drafted tokens per step", (1, 32), 8
    ),
    "batch_size": Option(int, "B", "requests per step of the timed runs", (1, 4096), 1),
    "context": Option(int, "N", "tokens in the cache before the timed steps", (1, math.inf), 256),
    "steps": Option(int, "N", "decode steps per timed run", (1, math.inf), 16),
    "rounds": Option(int, "N", "timed runs for each K and acceptance length", (2, math.inf), 5),
    "out": Option(
        *(str, "FILE"),
        "plot tokens per second against acceptance length into a .png, .svg or .pdf file",
    ),
    "json": flag("print one JSON object instead of tables"),
}


def parse_sweep_options(options: argparse.Namespace) -> SpeculativeConfig:
    """Returns the `SpeculativeConfig` of the options; refuses a wrong one by its name."""
    check_limits(options, SWEEP_OPTIONS)
    if options.draft == "none":
        raise ValueError(
            "--draft is none; a sweep needs a draft (it times plain decoding as K = 0)."
        )
    if options.out is not None:
        _check_plot_path(pathlib.Path(options.out))
    return make_config_of(
        num_speculative_tokens=options.max_speculative_tokens,
        draft_sample_method=options.draft_sample_method,
    )


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
