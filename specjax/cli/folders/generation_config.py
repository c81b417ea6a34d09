"""Sampling defaults of a folder's generation_config.json, for options that are not given."""

import argparse
import json
import os
import pathlib
from typing import Any

from specjax.cli.arguments import SAMPLING_OPTIONS, TEMPERATURE
from specjax.cli.option_table import option_name
from specjax.file_io import quote, read_file

_MAX_BYTES = 2**28
_NAMES = ("top_k", "top_p", "min_p", "repetition_penalty")
_OPTIONS = {"temperature": TEMPERATURE} | {name: SAMPLING_OPTIONS[name] for name in _NAMES}


def take_defaults(options: argparse.Namespace, folder: str | os.PathLike[str]) -> str | None:
    """Sets options that are not given as generation_config.json of a folder has them.

    `do_sample: false` is temperature 0. `options.from_generation_config` then holds what was set.

    Args:
      options: from `parse_options`, of `generate` or `chat`.
      folder: of the target.

    Returns:
      A sentence that names what was set; None if nothing was.

    Raises:
      ValueError: for a value that the option would refuse.
    """
    path = pathlib.Path(folder) / "generation_config.json"
    if options.ignore_generation_config or not path.is_file():
        return None
    # An object: `models.load_config` has read it for the tokens that end a text.
    fields = json.loads(read_file(path, _MAX_BYTES))
    if fields.get("do_sample") is False:
        fields["temperature"] = 0.0
    taken: dict[str, float] = {}
    for name in _OPTIONS:
        is_given = getattr(options, name) is not None and name not in options.default_names
        value = fields.get(name)
        # -1 is vLLM's for no cutoff.
        is_off = value == _OPTIONS[name].off or (name, value) == ("top_k", -1)
        if not (is_given or is_off or value is None):
            taken[name] = _check(path, name, value)
    for name, value in taken.items():
        setattr(options, name, value)
    options.from_generation_config = taken
    if not taken:
        return None
    listed = " ".join(f"{option_name(name)} {value:g}" for name, value in taken.items())
    return f"{listed}, as in generation_config.json; --ignore-generation-config leaves them out"


def _check(path: pathlib.Path, name: str, value: Any) -> float:
    """Returns a number within its option's limits; 50.0 is the integer 50."""
    parse, limits = _OPTIONS[name].parse, _OPTIONS[name].limits
    assert parse
    assert limits
    low, high = limits
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and low <= value <= high and parse(value) == value):
        noun = "an integer" if parse is int else "a number"
        raise ValueError(
            f"{path} has {name} {quote(value)}; it needs {noun} in [{low:g}, {high:g}]. "
            "--ignore-generation-config leaves the file out."
        )
    return parse(value)
