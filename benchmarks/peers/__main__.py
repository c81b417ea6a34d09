"""Runs the peers and writes what each emits: python -m benchmarks.peers --out FILE."""

import argparse
import datetime
import importlib
import json
import os
import pathlib
import platform
import shlex
import sys
from typing import Any

# Names of peers, and the modules that run them.
PEERS = {
    "transformers": "hugging_face",
    "keras-hub": "keras_sampler",
    "tpu-inference": "tpu_sampler",
    "obvious JAX": "obvious",
    "specjax": "own",
}
# Keras reads it as it is imported, and reads a folder of its own settings first.
os.environ.setdefault("KERAS_BACKEND", "jax")


def processor() -> str:
    lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def run(name: str) -> dict[str, Any]:
    """A section of the JSON: versions, device, date, command, cases."""
    module = importlib.import_module(f"benchmarks.peers.{PEERS[name]}")
    section = {
        "peer": name,
        "version": module.version(),
        "device": processor(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        "cases": [],
    }
    if name == "specjax":
        import jax

        if jax.default_backend() == "gpu":
            section |= {"peer": "specjax on a GPU", "device": jax.devices()[0].device_kind}
    for case in module.cases():
        section["cases"].append(case)
        print(
            f"{name}, {case['rows']} rows, {case['case']}: total variation "
            f"{case['first_token']:.6f} of the first token, {case['step']:.6f} of a step",
            file=sys.stderr,
            flush=True,
        )
    return section


def add(path: pathlib.Path, section: dict[str, Any]) -> None:
    """Puts a section into a JSON in the place of an earlier one of its peer."""
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    there[section.pop("peer")] = section
    path.write_text(json.dumps(there, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="the JSON; None prints a line for a peer")
    parser.add_argument("--only", nargs="+", choices=PEERS, help="these peers alone")
    parser.add_argument(
        "--add", type=pathlib.Path, help="a file of lines, into the JSON; runs none"
    )
    args = parser.parse_args()
    if args.add is not None:
        lines = args.add.read_text(encoding="utf-8").splitlines()
        for line in lines:
            if line.startswith('{"peer"'):
                add(args.out, json.loads(line))
        return
    for name in args.only or PEERS:
        section = run(name)
        if args.out is None:
            print(json.dumps(section), flush=True)
        else:
            add(args.out, section)


if __name__ == "__main__":
    main()
