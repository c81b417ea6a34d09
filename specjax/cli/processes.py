"""`--mesh`, `--coordinator` and `--process`: models over devices of one process or of several.

Each process has its own devices:

    options, prompt, seed         equal for all processes; a digest of them is compared once
    folder -> shares              each process reads those of its own devices
    prompt, keys -> devices       each process copies its own, equal to the others'
    a step -> sums over devices   one program on all processes; by gloo on CPUs, NCCL on GPUs
    tokens -> every process       each reads its device's copy, and decides by it whether to go on
    text, report                  written by process 0

All communication is JAX's. The loop on the host reads only tokens, never the clock. If one process
took a step that another does not take, it would wait for it forever. JAX's coordinator, a service
of process 0, receives each process's heartbeats, and ends all processes when one stops sending.
"""

import argparse
import contextlib
import hashlib
import math
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.cli.option_table import Option, flag
from specjax.cli.streams import end_with_error

# JAX's default of 100 s is longer than a person waits for a stuck text.
HEARTBEAT_SECONDS = 20
JOIN_SECONDS = 300
# In place of a SHA-256.
_NO_DIGEST = np.zeros(8, np.uint32)
# Options that may differ between processes. The contents of files that they name are compared.
_LOCAL_OPTIONS = {"target", "draft", "prompt", "prompt_file", "json_schema"}
_LOCAL_OPTIONS |= {"coordinator", "process", "json", "quiet"}

# Flags that run a step's sums by NCCL within one CUDA graph, instead of XLA's own kernels between
# graphs. A plain step of an 8B target over two H200s then takes 3.10 ms instead of 3.41.
_SUMS_IN_GRAPHS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
    "DYNAMIC_SLICE_FUSION,COLLECTIVES",
    "xla_gpu_unsupported_use_all_reduce_one_shot_kernel": "false",
}
# The last JAX whose XLA is known to have these flags. XLA aborts the process for an unknown flag.
_LAST_JAX = (0, 12)
MESH_OPTIONS = {
    "mesh": Option(
        *(int, "N"),
        "split heads, MLPs and vocabulary over N devices; default: one device",
        (1, math.inf),
    ),
    "replicate_draft": flag(
        "with --mesh: every device has the whole draft model, as it has a draft head",
    ),
}


def _parse_process(text: str) -> tuple[int, int]:
    """Returns the process's number and the number of processes."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or int(numbers[1]) >= int(numbers[2]):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no process I/N with 0 <= I < N; the first of two is 0/2"
        )
    return int(numbers[1]), int(numbers[2])


PROCESS_OPTIONS = {
    "coordinator": Option(str, "HOST:PORT", "where process 0 waits for the others, for --process"),
    "process": Option(
        *(_parse_process, "I/N"),
        "this is process I of N, from 0, each started with the same prompt and options; --mesh "
        "counts the devices of all; process 0 writes the text",
    ),
}


def check_mesh_options(options: argparse.Namespace) -> None:
    """Refuses options that need a mesh or cannot have one."""
    if options.mesh is None and options.replicate_draft:
        raise ValueError("--replicate-draft is given without --mesh, which says over how many.")
    if options.mesh is not None and options.row_invariant:
        raise ValueError("--row-invariant is given and --mesh; it needs models on one device.")


def load_options(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of `models.load` for the target, and for the draft.

    Raises:
      ValueError: if JAX sees fewer devices, or those of several processes are more.
    """
    names = ("dtype", "row_invariant")
    common = {name: x for name in names if (x := getattr(options, name))}
    if options.mesh is None:
        return common, common
    _put_sums_in_graphs()
    devices, num_processes = jax.devices(), jax.process_count()
    if len(devices) < options.mesh:
        number = "1 device" if len(devices) == 1 else f"{len(devices)} devices"
        more = f" JAX_NUM_CPU_DEVICES={options.mesh} makes so many of a CPU."
        hint = more if devices[0].platform == "cpu" and num_processes == 1 else ""
        raise ValueError(f"--mesh is {options.mesh}; JAX sees {number} here.{hint}")
    if num_processes > 1 and len(devices) > options.mesh:
        raise ValueError(
            f"--mesh is {options.mesh}; the {num_processes} processes have {len(devices)} devices, "
            "and all of them take part. On GPUs, CUDA_VISIBLE_DEVICES says which a process has."
        )
    target = common | {
        "mesh": jax.make_mesh((options.mesh,), ("model",), devices=devices[: options.mesh])
    }
    return target, target | {"replicate": options.replicate_draft}


def _put_sums_in_graphs() -> None:
    """Sets flags of XLA, which it reads when JAX's first backend starts; keeps flags set before."""
    if jax.__version_info__[:2] > _LAST_JAX:
        return
    flags = os.environ.get("XLA_FLAGS", "")
    more = [f"--{name}={value}" for name, value in _SUMS_IN_GRAPHS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, [flags, *more]))


def check_process_options(options: argparse.Namespace) -> None:
    """Refuses one option without the other or a mesh, and options that need one process."""
    if (options.process is None) != (options.coordinator is None):
        option, partner = ("process", "coordinator")[:: 1 if options.process else -1]
        raise ValueError(f"--{option} is given without --{partner}; several processes need both.")
    if options.process is None:
        return
    port = re.fullmatch(r".+:(\d+)", options.coordinator)
    if port is None or not 0 < int(port[1]) < 2**16:
        raise ValueError(
            f"--coordinator is {options.coordinator!r}; it needs to be the HOST:PORT of process 0."
        )
    if options.mesh is None:
        raise ValueError("--process is given without --mesh, the devices of all processes.")
    if options.input is not None:
        raise ValueError(
            "--process is given and --input; a file of prompts is decoded by one process, whose "
            "engine decides alone what comes next. Give each process a part of the file."
        )


def is_rank_zero(options: argparse.Namespace) -> bool:
    """Returns whether this process writes the text: it is the only one, or process 0."""
    return options.process is None or options.process[0] == 0


def join_processes(
    options: argparse.Namespace, *, spinner: Callable[[str], Any] = contextlib.nullcontext
) -> None:
    """Waits until all processes have joined; does nothing without `--process` or if they have.

    Ends this process with code 2 and a sentence if some have not joined after `JOIN_SECONDS`.

    Args:
      options: from `parse_options`.
      spinner: returns a context that shows what this process waits for.

    Raises:
      ValueError: if the coordinator's port is in use, or JAX has computed something before.
    """
    if options.process is None or jax.distributed.is_initialized():
        return
    index, count = options.process
    if count == 1:
        return
    if index == 0:
        _check_port(options.coordinator)
    timeout_error = ValueError(
        f"the {count} processes were not all at {options.coordinator} in {JOIN_SECONDS} s; each "
        "needs the same --coordinator, on which process 0 listens, and a number of its own; or one "
        "of them has ended, and has said why."
    )
    # At its own timeout JAX would crash.
    timer = threading.Timer(JOIN_SECONDS, end_with_error, (timeout_error, 2))
    timer.daemon = True
    timer.start()
    try:
        # This thread waits in Python, which answers an interrupt.
        with spinner(f"waiting for all {count} processes"), futures.ThreadPoolExecutor(1) as pool:
            pool.submit(
                jax.distributed.initialize,
                options.coordinator,
                num_processes=count,
                process_id=index,
                # JAX would take a Slurm or MPI rank for the number of this process's one GPU,
                # which CUDA_VISIBLE_DEVICES has renumbered.
                cluster_detection_method="deactivate",
                initialization_timeout=2 * JOIN_SECONDS,
                heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
                shutdown_timeout_seconds=HEARTBEAT_SECONDS,
            ).result()
    except RuntimeError as error:
        raise ValueError(
            f"process {index} of {count} cannot join the others at {options.coordinator} "
            f"({str(error).splitlines()[0]})."
        ) from None
    finally:
        timer.cancel()


def _check_port(coordinator: str) -> None:
    """Refuses a port on which another program listens, where JAX would crash."""
    port = int(coordinator.rpartition(":")[2])
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    try:
        socket.create_server(("", port), family=family, dualstack_ipv6=is_dual).close()
    except OSError as error:
        raise ValueError(
            f"--coordinator is {coordinator!r}; process 0 cannot listen on that port of this host "
            f"({error.strerror})."
        ) from None


@contextlib.contextmanager
def collective_errors(options: argparse.Namespace) -> Iterator[None]:
    """Makes `check_same_inputs` fail on every process if this one refuses its inputs."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, MemoryError):
        if options.process is not None:
            _gather(_NO_DIGEST)
        raise


def check_same_inputs(options: argparse.Namespace, job: Mapping[str, Any]) -> None:
    """Refuses processes with different inputs; does nothing without `--process`.

    Weights are not compared.

    Args:
      options: from `parse_options`.
      job: fields of the options' `GenerateJob`, without its models.

    Raises:
      ValueError: on every process, with the numbers of those that differ from process 0, or that
        refused their inputs.
    """
    if options.process is None:
        return
    digests = _gather(np.frombuffer(_digest(options, job), np.uint32))
    names = _name_processes((digests == _NO_DIGEST).all(axis=-1))
    if names:
        raise ValueError(f"{names} refused what was given there, and said why.")
    names = _name_processes((digests != digests[0]).any(axis=-1))
    if names:
        raise ValueError(
            f"{names} and process 0 were given different prompts, options, models, tokenizers or "
            "versions of JAX; every process needs the same."
        )


def _name_processes(marked: np.ndarray) -> str:
    """Returns the names of the marked devices' processes for a sentence; "" for none."""
    devices = jax.devices()
    numbers = sorted({devices[i].process_index for i in np.flatnonzero(marked)})
    return f"process {' and '.join(map(str, numbers))}" if numbers else ""


def _gather(row: np.ndarray) -> np.ndarray:
    """Returns [D, ...], the row of each device's process, from all D devices at once."""
    devices = jax.devices()
    mesh = Mesh(np.asarray(devices), ("device",))
    split, whole = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec("device"), PartitionSpec())
    )
    shape = (len(devices), *row.shape)
    rows = jax.make_array_from_callback(shape, split, lambda _: row[None])
    # A collective of all devices, like those of the models: gloo connects devices only once.
    with _closed_output():
        return np.asarray(jax.jit(lambda x: x, out_shardings=whole)(rows))


@contextlib.contextmanager
def _closed_output() -> Iterator[None]:
    """Discards standard output inside the context: gloo reports its connections there."""
    sys.stdout.flush()
    kept, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(null)


def _digest(options: argparse.Namespace, job: Mapping[str, Any]) -> bytes:
    """Returns the SHA-256 of everything that decides a process's results, except weights."""
    values = {name: x for name, x in sorted(vars(options).items()) if name not in _LOCAL_OPTIONS}
    config = job["config"].num_speculative_tokens, job["config"].step_costs
    inputs = (values, config, job["prompt_ids"], job["models"], jax.__version__)
    # The tokenizer decides where a text has a stop string, after which a process takes no step.
    digest = hashlib.sha256(repr(inputs).encode() + job["tokenizer"].to_str().encode())
    for leaf in map(np.asarray, jax.tree.leaves(job["sampling"])):
        digest.update(f"{leaf.dtype}{leaf.shape}".encode() + leaf.tobytes())
    return digest.digest()
