"""Keeps compiled programs on disk for the next command, which then traces nothing.

JAX's own cache is asked with a program that was traced and lowered. Here a name says what a program
would be traced from: this package's source, JAX and its settings, the device, the models'
configurations, and the shapes and options of a call.
"""

import hashlib
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import jax

from specjax.decode.compile.saved_programs import describe_process, load_program, serialize_programs
from specjax.file_io import replace_file

__all__ = ["ProgramStore"]

_ROOT = pathlib.Path(__file__).parents[1]
_DIGEST_BYTES = 32
_PLAIN = (str, int, float, type(None))
# Variables that change what XLA compiles; JAX's are among its settings.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class ProgramStore:
    """Programs of one kind, each under a name.

    What is read is unpickled, and it is code that runs: others must not be able to write to the
    folder.

    Args:
      folder: of the files, created when one is written.
      kind: what the programs are traced from, besides what `_describe_tracing` lists.
    """

    def __init__(self, folder: pathlib.Path, kind: str) -> None:
        self._folder = folder
        self._prefix = hashlib.sha256((_describe_tracing() + kind).encode()).hexdigest()

    def _path(self, name: str) -> pathlib.Path:
        return self._folder / f"{self._prefix}-{name}"

    def __contains__(self, name: str) -> bool:
        return self._path(name).is_file()

    def load(self, name: str) -> Callable[..., Any] | None:
        """Returns a program, a function of its arrays; None if it cannot be read."""
        try:
            data = self._path(name).read_bytes()
            digest, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
            if hashlib.sha256(data).digest() != digest:
                return None
            saved, structure = pickle.loads(data)
            return load_program(saved, jax.tree.unflatten(structure, [0] * saved.num_results))
        except (OSError, jax.errors.JaxRuntimeError):
            return None

    def save(self, name: str, program: jax.stages.Compiled) -> None:
        """Writes a program that was compiled here; a folder that cannot be written is left."""
        (saved,) = serialize_programs((), [program], may_be_cached=False)
        data = pickle.dumps((saved, jax.tree.structure(program.out_info)))
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with replace_file(self._path(name)) as temporary:
                temporary.write_bytes(hashlib.sha256(data).digest() + data)
        except OSError:
            return


def _describe_tracing() -> str:
    """Returns what programs of any kind are traced and compiled by."""
    root = _ROOT
    source = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        source.update(str(path.relative_to(root)).encode() + path.read_bytes())
    # Under `jax.enable_x64` the setting is another than that of the process.
    settings: list[tuple[str, Any]] = [("x64", jax.dtypes.canonicalize_dtype(float))]
    settings += sorted((k, v) for k, v in jax.config.values.items() if isinstance(v, _PLAIN))
    settings += [(name, os.environ.get(name)) for name in _VARIABLES]
    return repr((source.hexdigest(), describe_process(), settings))
