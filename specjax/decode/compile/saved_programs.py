"""Compiled programs as bytes, and a file of them.

    file = one line of JSON, the programs' bytes, SHA-256 of both

The line describes the programs, and names the versions and the device that made them. It is read
first. A file of another specjax, jax, jaxlib, device, platform version or processor is refused.
Nothing is unpickled before the digest is compared.

    compile_generate.save   -> serialize_programs, write_programs
    load_compiled           -> read_programs, load_program
"""

import contextlib
import hashlib
import importlib.metadata
import json
import operator
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from specjax.decode.compile.cache_folder import processor_id
from specjax.file_io import JsonObject, quote, replace_file
from specjax.version import __version__

_FORMAT = "specjax.CompiledGenerate 2"
_START = b'{"format": "specjax.CompiledGenerate'
_MAX_HEADER_BYTES = 2**26
_DIGEST_BYTES = 32


def describe_process() -> dict[str, str]:
    """Returns the versions and the device of this process; a program runs on no others."""
    device = jax.devices()[0]
    processor = f", processor {processor_id()}" if device.platform == "cpu" else ""
    return {
        "specjax": __version__,
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


def serialize_programs(
    lowered: Sequence[Any], compiled: Sequence[Any], may_be_cached: bool
) -> list[SavedProgram]:
    """Returns compiled programs as bytes.

    Args:
      lowered: what each was compiled from, `jax.stages.Lowered`.
      compiled: `jax.stages.Compiled`.
      may_be_cached: whether JAX's cache was in use. Then they are compiled anew without it: on a
        CPU, XLA serializes a program from that cache without its machine code.
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
    path: str | os.PathLike[str], description: JsonObject, programs: Sequence[SavedProgram]
) -> None:
    """Writes a file of programs, and its folder; `description` goes into the line of JSON."""
    header = {
        "format": _FORMAT,
        "made_by": describe_process(),
        "description": description,
        "programs": [(len(data), *counts) for data, *counts in programs],
    }
    line = json.dumps(header, default=operator.index).encode() + b"\n"
    content = line + b"".join(program.data for program in programs)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as temporary:
        temporary.write_bytes(content + hashlib.sha256(content).digest())


def read_programs(path: str | os.PathLike[str]) -> tuple[JsonObject, list[SavedProgram]]:
    """Returns the description in a file and its programs, which are not loaded yet.

    Raises:
      ValueError: for a file of another kind, another version or another device, before more than
        its first line is read, and for a file that was cut or changed.
    """
    with pathlib.Path(path).open("rb") as file:
        start = file.read(len(_START))
        if start != _START:
            raise ValueError(f"{path} holds no compiled programs of specjax.")
        line = start + file.readline(_MAX_HEADER_BYTES)
        try:
            header = json.loads(line)
            made_by = {"file format": header["format"], **header["made_by"]}
            description, parts = header["description"], header["programs"]
            num_bytes = sum(size for size, _, _ in parts) + _DIGEST_BYTES
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"{path} has no whole first line; save it again.") from None
        here = {"file format": _FORMAT} | describe_process()
        for name, value in here.items():
            if made_by.get(name) != value:
                raise ValueError(
                    f"{path} was compiled with {name} {quote(made_by.get(name))}, and this is "
                    f"{value!r}; compile and save it here."
                )
        size = os.fstat(file.fileno()).st_size - len(line)  # Negative for a pipe.
        if size != num_bytes:
            raise ValueError(f"{path} has not as many bytes as its first line says; save it again.")
        data = file.read(size)
    data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
    if hashlib.sha256(line + data).digest() != digest:
        raise ValueError(f"{path} holds other bytes than were saved; save it again.")
    programs = []
    for size, *counts in parts:
        programs.append(SavedProgram(data[:size], *counts))
        data = data[size:]
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
