"""Says which goldens moved, and how.

    PYTHONPATH=.:tests:tests/support python -m frozen.goldens [--write] [--time] [names...]

A name stands for every scenario and refusal that contains it. `--write` records what is found.
Bits of log-probabilities are compared where JAX and the processor are those of the record, and
numbers of compilations where JAX is; token ids and sentences always are.
"""

import argparse
import collections
import json
import os
import pathlib
import platform
import re
import sys
import tempfile
import time

import jax
import numpy as np
from compilations import compilations

from frozen.goldens import calls
from frozen.goldens.refusals import REFUSALS, sentence_of
from frozen.goldens.scenarios import SCENARIOS

RECORD = pathlib.Path(__file__).parents[1] / "goldens.json"
# Fields of a record that hold bits: as many as the processor and XLA round alike.
OF_BITS = ("logprobs", "logprob", "carry", "bits")
OF_JAX = ("compiled",)
DEVICES = 8


def run(name):
    """The record of a scenario, whose programs are compiled anew, and compilations of each call."""
    scenario = SCENARIOS[name]
    with tempfile.TemporaryDirectory() as folder:
        jax.clear_caches()
        call, record = scenario.begin(folder)
        with compilations() as first:
            found = jax.block_until_ready(call(0))
        with compilations() as again:
            jax.block_until_ready(call(1))
        names = (name.removeprefix("jit(").removesuffix(")") for name in first)
        compiled = {"first": collections.Counter(names), "again": len(again)}
        return json.loads(json.dumps(record(found) | {"compiled": compiled}))


def processor():
    """What rounds: the kind of processor, and its widest vectors."""
    info = pathlib.Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search(r"model name\s*: (.*)", text)
    widest = [flag for flag in ("avx512f", "avx2", "avx") if flag in text.split()]
    return " ".join([platform.machine(), *(name.groups() if name else ()), *widest[:1]])


def changes(old, new, left_out, path=()):
    """Yields each field that differs: its path, the old and the new value."""
    if path and path[-1] in left_out:
        return
    if path[-1:] == ("compiled",):
        if old is None or new is None or count(old) != count(new):
            yield path, old, new
    elif isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            yield from changes(old.get(name), new.get(name), left_out, (*path, name))
    elif has_fields(old) and has_fields(new) and len(old) == len(new):
        for i, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changes(before, after, left_out, (*path, str(i)))
    elif old != new:
        yield path, old, new


def has_fields(values):
    """Whether a list holds fields by name, at any depth."""
    is_list = isinstance(values, list)
    return is_list and any(isinstance(value, dict) or has_fields(value) for value in values)


def count(compiled):
    """How many programs the first call and another one compile: their names may change."""
    return sum(compiled["first"].values()), compiled["again"]


def describe(path, old, new):
    """Lines that say how a field moved."""
    yield f"    {'.'.join(path)}:"
    is_bits = path[-1] in OF_BITS and isinstance(old, list) and isinstance(new, list)
    for word, value in (("was", old), ("is", new)):
        yield f"      {word:3} {json.dumps(value)}"
    for b, (before, after) in enumerate(zip(old, new, strict=False)) if is_bits else ():
        before, after = numbers(before), numbers(after)
        if before.shape == after.shape and (before != after).any():
            i = int(np.argmax(before != after))
            yield f"      row {b}, token {i}: {before[i]!s} -> {after[i]!s}"


def numbers(text):
    return np.frombuffer(bytes.fromhex(text), ">f4")


def write(record):
    """A line for every field of every scenario."""
    lines = []
    for kind, entries in record.items():
        if not isinstance(entries, dict):
            lines.append(f" {json.dumps(kind)}: {json.dumps(entries)}")
            continue
        own = []
        for name, entry in entries.items():
            value = json.dumps(entry)
            if isinstance(entry, dict):
                fields = (f"   {json.dumps(x)}: {json.dumps(y)}" for x, y in entry.items())
                value = "{\n" + ",\n".join(fields) + "\n  }"
            own.append(f"  {json.dumps(name)}: {value}")
        lines.append(f" {json.dumps(kind)}: {{\n" + ",\n".join(own) + "\n }")
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read():
    if RECORD.exists():
        return json.loads(RECORD.read_text())
    return {"jax": jax.__version__, "processor": processor(), "scenarios": {}, "sentences": {}}


def left_out(record):
    """Fields that cannot be compared here."""
    if record["jax"] != jax.__version__:
        return OF_BITS + OF_JAX
    return () if record["processor"] == processor() else OF_BITS


def begin():
    """Eight fake devices, few of XLA's optimisations, and a cache of compilations, as in tests."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())


def run_scenarios(names, record):
    """What scenarios give, and how many moved."""
    found, num_moved, skipped = {}, 0, left_out(record)
    for name in names:
        start = time.perf_counter()
        found[name] = run(name)
        seconds, old = time.perf_counter() - start, record["scenarios"].get(name)
        moved = [] if old is None else list(changes(old, found[name], skipped))
        how = "new" if old is None else "moved" if moved else "as it was"
        num_moved += how != "as it was"
        print(f"{how:9} {seconds:5.1f} s  {name}", flush=True)
        for change in moved:
            print(*describe(*change), sep="\n")
    return found, num_moved


def run_refusals(names, record):
    """The sentences of wrong calls, and how many moved."""
    found, num_moved = {}, 0
    for name in names:
        found[name], old = sentence_of(REFUSALS[name]), record["sentences"].get(name)
        if found[name] != old or old is None:
            num_moved += 1
            print(f"{'new' if old is None else 'moved':9} {'':7}  {name}")
            print(f"      was {old}\n      is  {found[name]}")
    return found, num_moved


def show_time():
    """The host's time of an eager verification of few tokens: until the call returns."""
    call, seconds = calls.small_verification(), []
    for _ in range(3000):
        start = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - start)
        jax.block_until_ready(found)
    least, middle = (f"{1e6 * np.quantile(seconds[500:], q):.0f} us" for q in (0.05, 0.5))
    print(f"An eager rejection_sample takes the host {middle}; the quickest 5 %, {least} at most.")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="parts of names; none is all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--time", action="store_true", help="of an eager call, and nothing else")
    arguments = parser.parse_args()
    if arguments.time:
        return show_time()
    begin()
    record = read()
    if left_out(record) and not arguments.write:
        print(f"The record is of jax {record['jax']} on {record['processor']}.")
        print(f"Not compared here: {', '.join(left_out(record))}.")

    def named(every):
        parts = arguments.names
        return [name for name in every if not parts or any(part in name for part in parts)]

    num_moved = 0
    for kind, run_all, every in (
        ("scenarios", run_scenarios, SCENARIOS),
        ("sentences", run_refusals, REFUSALS),
    ):
        names = named(every)
        found, num = run_all(names, record)
        print(f"{num} of {len(names)} {kind} moved.")
        gone = [] if arguments.names else [name for name in record[kind] if name not in every]
        print(*(f"gone: {name}" for name in gone), sep="\n", end="\n" if gone else "")
        num_moved += num + len(gone)
        kept = {name: found.get(name, record[kind].get(name)) for name in every}
        record[kind] = {name: entry for name, entry in kept.items() if entry is not None}
    if arguments.write:
        write(record | {"jax": jax.__version__, "processor": processor()})
    elif num_moved:
        sys.exit(1)


if __name__ == "__main__":
    main()
