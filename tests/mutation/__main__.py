"""Runs the mutations of some names, or all, and writes the table of all."""

import argparse
import datetime
import json
import pathlib
import platform
import sys
import time
import traceback

import jax

from .listed import MUTATIONS
from .mutation import ROOT, digest
from .operated import read_seen, run_operators
from .run import Outcome, copied_tree, passing_tests, run_mutation
from .table import TABLE, counts, written_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("names", nargs="*", help="dotted names that mutations begin with")
    parser.add_argument(
        "--operators",
        action="store_true",
        help="wrong versions that operators make of functions, instead of those listed",
    )
    parser.add_argument("--again", action="store_true", help="also what has been run before")
    parser.add_argument("--seconds", type=float, default=300, help="time for one mutation")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "build" / "mutations.json")
    options = parser.parse_args()
    if options.operators:
        return run_operators(options.names, options.seconds)
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    keys = {m: digest(ROOT, m) for m in MUTATIONS if not m.equivalent}
    unknown = [n for n in options.names if not any(m.function.startswith(n) for m in keys)]
    if unknown:
        parser.error(f"no mutation's name begins with {' or '.join(unknown)}")
    asked = [m for m in keys if not options.names or m.function.startswith(tuple(options.names))]
    due = [m for m in asked if options.again or results.get(keys[m], ["none"])[0] != "killed"]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with copied_tree() as root:
        if due:
            passing_tests(root, sorted({test for m in due for test in m.killed_by}))
        for number, mutation in enumerate(due, start=1):
            begin = time.monotonic()
            try:
                outcome = run_mutation(root, mutation, options.seconds)
            except Exception:
                outcome = Outcome("broken", message=traceback.format_exc(limit=1))
            results[keys[mutation]] = outcome
            options.results.write_text(json.dumps(results, indent=1))
            took = f"{number}/{len(due)} {time.monotonic() - begin:.0f} s"
            print(took, outcome.verdict, mutation.function, repr(mutation.pattern), flush=True)
            print("    ", outcome.test, outcome.message, flush=True)
    known = {m: Outcome(*results[keys[m]]) for m in keys if keys[m] in results}
    heading = (
        f"{counts(MUTATIONS, len(read_seen()))} Written {datetime.date.today().isoformat()} "
        f"by `python -m tests.mutation` on Python {platform.python_version()} and "
        f"jax {jax.__version__}, on a CPU; what was not run then says what an earlier run saw."
    )
    table = pathlib.Path(__file__).with_name(TABLE)
    table.write_text(written_table(MUTATIONS, known, heading, table.read_text()))
    left = [m for m in asked if known.get(m, Outcome("not run")).verdict != "killed"]
    for mutation in left:
        verdict = known.get(mutation, Outcome("not run")).verdict
        print(f"{verdict}: {mutation.function}: {mutation.why}")
    print(f"{len(asked) - len(left)} of {len(asked)} killed")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
