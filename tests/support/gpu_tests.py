"""Runs the tests marked `gpu`, several files at once; its arguments are handed to pytest.

A file is the unit, because its tests share compilations. Fails where there is no GPU, where nothing
is marked, and where a file fails.
"""

import concurrent.futures
import os
import re
import subprocess
import sys

# XLA's search for tiles of its own products, which are not tested here, would take the longest.
ENVIRONMENT = {
    "SPECJAX_GPU_TEST": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
}
# Most of a file's time is compilation, on one core.
NUM_PROCESSES = min(12, os.cpu_count() or 1)
# The file that compiles the most programs: the others would wait for it, if it began late.
FIRST = "tests/models/decoder/test_row_groups.py"


def pytest(*flags: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on what is marked `gpu` and returns what it printed."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *flags]
    environment = os.environ | ENVIRONMENT
    return subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def files(listing: str) -> list[str]:
    """Returns the files of pytest's listing that hold a selected test: `FIRST`, then long lists.

    Args:
      listing: what `pytest --collect-only -qq` printed: lines of a file, ": " and a number.
    """
    sizes = {name: int(size) for name, size in re.findall(r"^(\S+\.py): (\d+)$", listing, re.M)}
    return sorted(sizes, key=lambda name: (name != FIRST, -sizes[name]))


def main(flags: list[str]) -> int:
    """Runs the files and returns the exit code."""
    collected = pytest("--collect-only", "-qq", "tests")
    names = files(collected.stdout)
    if collected.returncode or not names:
        print(collected.stdout)
        return 1
    failed = []
    with concurrent.futures.ThreadPoolExecutor(NUM_PROCESSES) as pool:
        options = ["-q", "-rs", "--durations=5", *flags]
        running = {pool.submit(pytest, *options, name): name for name in names}
        for done in concurrent.futures.as_completed(running):
            print(f"\n== {running[done]}\n{done.result().stdout}", flush=True)
            if done.result().returncode:
                failed.append(running[done])
    print(f"{len(names)} files, failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
