"""Files of measurements: what each says of its origin, and the arguments of GPU benchmarks.

gpu_parser -> parse_on_gpu -> environment -> save

Programs that measure other libraries may have no JAX: two functions import it.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any


def gpu_parser(doc: str) -> argparse.ArgumentParser:
    """Returns a parser of `--out` and `--smoke`; the first line of `doc` describes the program."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON; other sections there are kept")
    parser.add_argument("--smoke", action="store_true", help="rehearse: tiny, on a CPU, no file")
    return parser


def parse_on_gpu(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the arguments, and ends the process without a GPU; a rehearsal has no file."""
    import jax

    args = parser.parse_args()
    if args.smoke:
        args.out = None
    elif jax.default_backend() != "gpu":
        sys.exit("JAX sees no GPU here; --smoke rehearses on a CPU.")
    return args


def command() -> str:
    """Returns the command of this process."""
    spec = sys.modules["__main__"].__spec__
    name = "" if spec is None else spec.name.removesuffix(".__main__")
    return shlex.join(["python", "-m", name, *sys.argv[1:]])


def environment() -> dict[str, Any]:
    """Returns where, when, by which command and with which versions a section was measured."""
    import jax
    import numpy as np

    if jax.default_backend() == "cpu":
        affinity = getattr(os, "sched_getaffinity", None)
        device = {"device": cpu_name(), "cores": len(affinity(0)) if affinity else os.cpu_count()}
    else:
        device = {"device": jax.devices()[0].device_kind, "driver": driver()}
    return device | {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "numpy": np.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(),
    }


def cpu_name() -> str:
    """Returns the processor's name, as the system gives it."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def driver() -> str:
    """Returns the driver's version, empty where nvidia-smi does not say."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def save(out: pathlib.Path | None, sections: dict[str, Any]) -> None:
    """Puts sections into a JSON file, next to those that are there; None is no file."""
    if out is None:
        return
    there = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(there | sections, indent=1) + "\n", encoding="utf-8")
