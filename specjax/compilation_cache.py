"""Compiled programs are kept on disk for the next process: in JAX's cache, or in a file.

A file is one line of JSON, which says what made the programs and what they are, then the programs.
The line is read first, and a file that was made by anything else than this process is refused.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import operator
import os
import pathlib
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from specjax.file_io import replace_file

__all__ = [
    "SavedProgram",
    "command_folder",
    "describe_process",
    "enable_compilation_cache",
    "is_cache_in_use",
    "load_program",
    "read_programs",
    "serialize_programs",
    "write_programs",
]

_FORMAT = "specjax.CompiledGenerate 1"
_START = b'{"format": "specjax.CompiledGenerate'
_MOST_HEADER_BYTES = 2**26


def enable_compilation_cache(
    folder: str | os.PathLike[str] | None = None, *, min_compile_seconds: float = 0.2
) -> pathlib.Path | None:
    """Keeps compiled programs in a folder, which this and later processes read.

    Reading saves compilation, not tracing and lowering. `compile_generate` reads and writes the
    cache, too; what its `save` keeps is not even traced. JAX runs what it reads: others must not be
    able to write to the folder. `JAX_ENABLE_COMPILATION_CACHE=0` turns every cache off.

    Args:
      folder: created if it is absent. None is the folder that JAX already uses, which
        `JAX_COMPILATION_CACHE_DIR` names. Without one it is the folder of the `specjax` command:
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
    if not min_compile_seconds >= 0:
        raise ValueError(f"min_compile_seconds is {min_compile_seconds}; it needs to be >= 0.")
    settings = jax.config.values
    if not settings["jax_enable_compilation_cache"]:
        return None
    in_use = os.environ.get("JAX_COMPILATION_CACHE_DIR") or settings["jax_compilation_cache_dir"]
    if folder is not None:
        path = pathlib.Path(folder)
        _make_writable(path)
    elif in_use:
        return pathlib.Path(in_use)
    elif default := command_folder():
        path = default
    else:
        return None
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
    try:
        path = _default_folder()
        _make_writable(path)
    except (OSError, RuntimeError):
        return None
    return path


def _make_writable(folder: pathlib.Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written.")


def _default_folder() -> pathlib.Path:
    """Returns the folder of this host; a RuntimeError says that there is no home."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the XDG Base Directory Specification.
    cache = pathlib.Path(root) if os.path.isabs(root) else pathlib.Path.home() / ".cache"
    return cache / "specjax" / _host_id()


def _host_id() -> str:
    """Returns an id of host and processor: code compiled for one may crash on another."""
    return f"{platform.node()}-{_processor_id()}"


def _processor_id() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = [platform.processor()]
    relevant_lines = sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))})
    digest = hashlib.sha256("\n".join(relevant_lines or lines).encode()).hexdigest()
    return digest[:12]


def describe_process() -> dict[str, str]:
    """Returns what a program runs on: another version or device cannot take it."""
    device = jax.devices()[0]
    processor = f", processor {_processor_id()}" if device.platform == "cpu" else ""
    installed = importlib.metadata.distributions(name="specjax")
    return {
        "specjax": next((one.version for one in installed), "(not installed)"),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "device": f"{device.device_kind}{processor}",
        "platform": device.client.platform_version,
    }


class SavedProgram(NamedTuple):
    """A compiled program as bytes.

    Attributes:
      data: a pickle, and in it the machine code.
      num_arguments: how many arrays the program takes.
      num_results: how many it returns.
    """

    data: bytes
    num_arguments: int
    num_results: int


def is_cache_in_use() -> bool:
    """Returns whether JAX reads compiled programs from a folder."""
    settings = jax.config.values
    return bool(settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"])


def serialize_programs(
    lowered: Sequence[Any], compiled: Sequence[Any], may_be_cached: bool
) -> list[SavedProgram]:
    """Returns compiled programs as bytes.

    Args:
      lowered: what each was compiled from, `jax.stages.Lowered`.
      compiled: `jax.stages.Compiled`.
      may_be_cached: whether JAX's cache was in use. Then they are compiled anew without it: on a
        CPU, XLA writes a program that it has read without its code.
    """
    if may_be_cached:
        with _cache_turned_off(), futures.ThreadPoolExecutor() as pool:
            # JAX compiles again only with another option: this one names its default.
            option = {"xla_embed_ir_in_executable": False}
            compiled = list(pool.map(lambda one: one.compile(compiler_options=option), lowered))
    return [
        SavedProgram(
            serialize_executable.serialize(one)[0],
            len(jax.tree.leaves(one.args_info)),
            len(jax.tree.leaves(one.out_info)),
        )
        for one in compiled
    ]


def load_program(program: SavedProgram, result: Any = None) -> Callable[..., Any]:
    """Returns a function that runs a saved program: code that was pickled.

    Args:
      program: from `read_programs`.
      result: a pytree like what is to be returned. None is a tuple of the arrays.

    Returns:
      A function of pytrees with the leaves that the program was lowered for.
    """
    result = (0,) * program.num_results if result is None else result
    loaded = serialize_executable.deserialize_and_load(
        program.data,
        jax.tree.structure(((0,) * program.num_arguments, {})),
        jax.tree.structure(result),
        execution_devices=jax.devices()[:1],
    )
    return lambda *trees, **named: loaded(*jax.tree.leaves((trees, named)))


def write_programs(
    path: str | os.PathLike[str], description: dict[str, Any], programs: Sequence[SavedProgram]
) -> None:
    """Writes a file of programs; `description` is what JSON can say of them."""
    header = {
        "format": _FORMAT,
        "made_by": describe_process(),
        "description": description,
        "programs": [(len(data), *counts) for data, *counts in programs],
        "sha256": _digest(programs),
    }
    with replace_file(path) as temporary, temporary.open("wb") as file:
        file.write(json.dumps(header, default=operator.index).encode() + b"\n")
        file.writelines(program.data for program in programs)


def _digest(programs: Sequence[SavedProgram]) -> str:
    return hashlib.sha256(b"".join(program.data for program in programs)).hexdigest()


def read_programs(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[SavedProgram]]:
    """Returns the description in a file and its programs, which are not loaded yet.

    Raises:
      ValueError: for a file of another kind, another version or another device, before more than
        its first line is read, and for a file that was cut or changed.
    """
    with pathlib.Path(path).open("rb") as file:
        start = file.read(len(_START))
        if start != _START:
            raise ValueError(f"{path} holds no compiled programs of specjax.")
        try:
            header = json.loads(start + file.readline(_MOST_HEADER_BYTES))
            made_by = {"file format": header["format"]} | header["made_by"]
            description, sizes = header["description"], [size for size, *_ in header["programs"]]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} has no whole first line; save it again.") from None
        here = {"file format": _FORMAT} | describe_process()
        for name, value in here.items():
            if made_by.get(name) != value:
                raise ValueError(
                    f"{path} was compiled with {name} {made_by.get(name)}, and this is {value}; "
                    "compile and save it here."
                )
        programs = [SavedProgram(file.read(size), *counts) for size, *counts in header["programs"]]
        if [len(program.data) for program in programs] != sizes or file.read(1):
            raise ValueError(f"{path} has not as many bytes as its first line says; save it again.")
    if header.get("sha256") != _digest(programs):
        raise ValueError(f"{path} holds other bytes than were saved; save it again.")
    return description, programs


@contextlib.contextmanager
def _cache_turned_off() -> Iterator[None]:
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    # JAX asks once whether there is a cache, and again after this.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
