"""Finds models of the Hugging Face hub that were downloaded before; nothing is downloaded here.

Qwen/Qwen3-0.6B -> HUB/models--Qwen--Qwen3-0.6B/refs/main -> .../snapshots/COMMIT
"""

import os
import pathlib
import re

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_model(name: str | os.PathLike[str], option: str) -> str:
    """Returns the folder of a model that an option names; other names are returned as they are.

    Args:
      name: a folder, or a model of the hub, such as Qwen/Qwen3-0.6B.
      option: that names it.

    Raises:
      ValueError: for a name of the hub whose model is not in the local cache.
    """
    name = os.fspath(name)
    if os.path.exists(name) or not _NAME.fullmatch(name):
        return name
    cache = _cache_folder() / f"models--{name.replace('/', '--')}"
    try:
        commit = (cache / "refs" / "main").read_text().strip()
    except OSError:
        commit = ""
    folder = cache / "snapshots" / commit
    if commit and folder.is_dir():
        return str(folder)
    raise ValueError(
        f"{option} is {name}, which is not a folder, and no model of that name is in "
        f"{_cache_folder()}, the local cache of the hub; `hf download {name}` downloads it."
    )


def model_name(folder: str | os.PathLike[str]) -> str:
    """Returns the last part of a model's name: of its folder, or of its name on the hub.

    Example:
      >>> model_name("/hub/models--Qwen--Qwen3-0.6B/snapshots/ab12")
      'Qwen3-0.6B'
    """
    path = pathlib.Path(folder)
    if path.parent.name == "snapshots":
        return path.parent.parent.name.split("--")[-1]
    return path.resolve().name


def _cache_folder() -> pathlib.Path:
    """Returns the folder of the hub's local cache, by the variables that the hub's tools read."""
    names = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    folder = next((os.environ[name] for name in names if os.environ.get(name)), None)
    if folder is not None:
        return pathlib.Path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    home = os.environ.get("HF_HOME") or pathlib.Path(cache) / "huggingface"
    return pathlib.Path(home) / "hub"
