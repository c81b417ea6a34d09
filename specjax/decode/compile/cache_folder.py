"""The folder in which compiled programs are kept for the next process."""

import hashlib
import numbers
import os
import pathlib
import platform

import jax
from jax.experimental.compilation_cache import compilation_cache


def enable_compilation_cache(
    folder: str | os.PathLike[str] | None = None, *, min_compile_seconds: float = 0.2
) -> pathlib.Path | None:
    """Keeps compiled programs in a folder, which this and later processes read.

    Reading saves compilation, not tracing and lowering. `compile_generate` reads and writes the
    cache, too; what its `save` keeps is not even traced. JAX runs programs from the folder: others
    must not be able to write there. `JAX_ENABLE_COMPILATION_CACHE=0` turns every cache off.

    Args:
      folder: created if it is absent. None is JAX's own folder, named by
        `JAX_COMPILATION_CACHE_DIR`. Without one it is the folder of the `specjax` command:
        `$XDG_CACHE_HOME/specjax/HOST`, by default `~/.cache/specjax/HOST`. HOST names the host and
        its processor, because programs compiled for another processor may crash.
      min_compile_seconds: programs that compile in less are not kept, a float >= 0. A folder that
        JAX already uses keeps its own.

    Returns:
      The folder in use; None if the cache is off, or if `folder` is None and the command's folder
      cannot be written.

    Raises:
      ValueError: if `min_compile_seconds` is not a number >= 0.
      OSError: if `folder` is given and cannot be written.

    Example:
      >>> folder = specjax.enable_compilation_cache()
      >>> folder is None or folder.is_dir()
      True
    """
    is_number = isinstance(min_compile_seconds, numbers.Real)
    if not is_number or not min_compile_seconds >= 0:
        raise ValueError(
            f"min_compile_seconds is {min_compile_seconds!r}; it needs to be a number >= 0."
        )
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"]:
        return None
    in_use = os.environ.get("JAX_COMPILATION_CACHE_DIR") or settings["jax_compilation_cache_dir"]
    path = command_folder() if folder is None else pathlib.Path(folder)
    if path is None:
        return pathlib.Path(in_use) if in_use else None
    _make_writable(path)
    if in_use:
        # JAX opens its folder once, and would go on with the one before.
        compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float(min_compile_seconds))
    return path


def command_folder() -> pathlib.Path | None:
    """Returns the command's folder; None if JAX is to use another or none, or it is not writable.

    Example:
      >>> folder = command_folder()
      >>> folder is None or folder.is_dir()
      True
    """
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"]:
        return None
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") or settings["jax_compilation_cache_dir"]:
        return None
    root = os.environ.get("XDG_CACHE_HOME", "")
    try:
        # A relative path is to be ignored, says the XDG Base Directory Specification.
        cache = pathlib.Path(root) if os.path.isabs(root) else pathlib.Path.home() / ".cache"
        # Code that is compiled for one processor may crash on another.
        path = cache / "specjax" / f"{platform.node()}-{processor_id()}"
        _make_writable(path)
    except (OSError, RuntimeError):  # Without a home, pathlib raises the second.
        return None
    return path


def _make_writable(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written.")


def processor_id() -> str:
    """Returns an id of the processor: its name and its instructions."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    relevant_lines = sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    digest = hashlib.sha256("\n".join(relevant_lines or lines).encode()).hexdigest()
    return digest[:12]


def is_cache_in_use() -> bool:
    """Returns whether JAX reads compiled programs from a folder."""
    settings = jax.config.values
    return bool(settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"])
