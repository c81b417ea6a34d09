"""Checks the file of a sweep's plot, before the measurement, which takes minutes."""

import importlib.util
import os
import pathlib
import tempfile

_PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot_path(path: pathlib.Path) -> None:
    """Refuses a path that cannot be written, or is no plot; creates and changes nothing."""
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
