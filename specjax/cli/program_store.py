"""Keeps compiled programs on disk for the next command, which then traces nothing.

JAX's own cache is asked with a program that was traced and lowered. Here a name says what a program
would be traced from: this package's source, JAX and its settings, the device, the models'
configurations, and the shapes and options of a call.
"""

import contextlib
import functools
import hashlib
import os
import pathlib
import pickle
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax

from specjax.decode.compile.saved_programs import (
    SavedProgram,
    describe_process,
    load_program,
    serialize_programs,
)
from specjax.file_io import replace_file

_ROOT = pathlib.Path(__file__).parents[1]
_DIGEST_BYTES = 32
_PLAIN = (str, int, float, type(None))
# Variables that change what XLA compiles; JAX's are among its settings.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Programs as bytes, by their names, with the structures of their results.
_Kept: TypeAlias = dict[str, tuple[SavedProgram, jax.tree_util.PyTreeDef]]


def program_path(folder: pathlib.Path, kind: str) -> pathlib.Path:
    """Returns the file of programs of one kind.

    Args:
      folder: of the files. What is read is unpickled, and it is code that runs: others must not be
        able to write to it.
      kind: what the programs are traced from, besides what `_describe_tracing` lists.
    """
    return folder / hashlib.sha256((_describe_tracing() + kind).encode()).hexdigest()


def read_programs(path: pathlib.Path) -> dict[str, Callable[[], Callable[..., Any] | None]]:
    """Returns functions that load the programs of a file; none if it is absent, cut or changed.

    Where a program cannot be loaded, its function removes the file and returns None. The next
    command then compiles all programs and writes them.
    """
    try:
        data = path.read_bytes()
    except OSError:
        return {}
    digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    kept: _Kept = pickle.loads(data) if hashlib.sha256(data).digest() == digest else {}
    return {name: functools.partial(_load, path, *program) for name, program in kept.items()}


def _load(
    path: pathlib.Path, saved: SavedProgram, structure: jax.tree_util.PyTreeDef
) -> Callable[..., Any] | None:
    try:
        return load_program(saved, jax.tree.unflatten(structure, [0] * saved.num_results))
    except jax.errors.JaxRuntimeError:
        with contextlib.suppress(OSError):
            path.unlink()
        return None


def write_programs(path: pathlib.Path, programs: Mapping[str, Any]) -> None:
    """Writes programs that were compiled here; a folder that cannot be written is left."""
    saved = serialize_programs((), list(programs.values()), may_be_cached=False)
    structures = [jax.tree.structure(program.out_info) for program in programs.values()]
    kept: _Kept = dict(zip(programs, zip(saved, structures, strict=True), strict=True))
    data = pickle.dumps(kept)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(path) as temporary:
            temporary.write_bytes(hashlib.sha256(data).digest() + data)


def _describe_tracing() -> str:
    """Returns the key of all that programs of any kind are traced and compiled from."""
    source = hashlib.sha256()
    for path in sorted(_ROOT.rglob("*.py")):
        source.update(str(path.relative_to(_ROOT)).encode() + path.read_bytes())
    # Under `jax.enable_x64` the setting is another than that of the process.
    settings: list[tuple[str, Any]] = [("x64", jax.dtypes.canonicalize_dtype(float))]
    settings += sorted((k, v) for k, v in jax.config.values.items() if isinstance(v, _PLAIN))
    settings += [(name, os.environ.get(name)) for name in _VARIABLES]
    return repr((source.hexdigest(), describe_process(), settings))
