"""Runs the peers and writes what each emits: python -m benchmarks.peers --out FILE."""

import argparse
import datetime
import importlib
import json
import os
import pathlib
import sys
from typing import Any

from benchmarks.record import command, cpu_name, save

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


def run(name: str) -> dict[str, Any]:
    """A section of the JSON: versions, device, date, command, cases."""
    module = importlib.import_module(f"benchmarks.peers.{PEERS[name]}")
    section = {
        "peer": name,
        "version": module.version(),
        "device": cpu_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": command(),
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
                section = json.loads(line)
                save(args.out, {section.pop("peer"): section})
        return
    for name in args.only or PEERS:
        section = run(name)
        if args.out is None:
            print(json.dumps(section), flush=True)
        else:
            save(args.out, {section.pop("peer"): section})


if __name__ == "__main__":
    main()
