"""Says which frozen cases moved: `PYTHONPATH=tests python -m frozen`; `--write` records them."""

import argparse
import json
import pathlib

import jax

from frozen.cases import cases, context
from frozen.digest import digest
from frozen.golden import golden

RECORD = pathlib.Path(__file__).with_name("frozen.json")


def hash_case(case):
    with context(case):
        return digest(case.function, *case.shapes)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    found = {
        "jax": jax.__version__,
        "hashes": {name: hash_case(case) for name, case in cases()},
        "tokens": dict(golden()),
    }
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {"hashes": {}, "tokens": {}}
    for kind in ("hashes", "tokens"):
        for name in {**record[kind], **found[kind]}:
            before, after = record[kind].get(name), found[kind].get(name)
            if before != after:
                print(f"{kind}: {name}: {_change(before, after)}")
    if write:
        lines = json.dumps(found, indent=1)
        RECORD.write_text(lines + "\n")


def _change(before, after):
    if before is None:
        return "new"
    return "gone" if after is None else "moved"


if __name__ == "__main__":
    main()
