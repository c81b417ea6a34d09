"""`--mesh` and `--replicate-draft`: the devices over which a command's models lie."""

import argparse
import math
import os
from typing import Any

import jax

from specjax.cli.option_table import Option, check_limits, flag

__all__ = ["MESH_OPTIONS", "check_mesh_options", "load_options"]

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


def check_mesh_options(options: argparse.Namespace) -> None:
    """Refuses a number of devices below 1, and `--replicate-draft` without a mesh."""
    check_limits(options, MESH_OPTIONS)
    if options.mesh is None and options.replicate_draft:
        raise ValueError("--replicate-draft is given without --mesh, which says over how many.")


def load_options(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the options of `models.load` for the target, and for the draft.

    Raises:
      ValueError: if JAX sees fewer devices, or those of several processes are more.
    """
    if options.mesh is None:
        return {}, {}
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
    given = {"mesh": jax.make_mesh((options.mesh,), ("model",), devices=devices[: options.mesh])}
    return given, given | {"replicate": options.replicate_draft}


def _put_sums_in_graphs() -> None:
    """Sets flags of XLA, which it reads when JAX's first backend starts; keeps flags set before."""
    if jax.__version_info__[:2] > _LAST_JAX:
        return
    given = os.environ.get("XLA_FLAGS", "")
    more = [f"--{name}={value}" for name, value in _SUMS_IN_GRAPHS.items() if name not in given]
    os.environ["XLA_FLAGS"] = " ".join(filter(None, [given, *more]))
