"""Runs scripts as Python itself does: in a process, or as `__main__` of this one."""

import os
import pathlib
import runpy
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def run_process(*arguments, cwd):
    """Returns the standard output of `python -W error ARGUMENTS`, run in a folder."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{arguments[0]} does not run:\n{done.stdout}{done.stderr}"
    return done.stdout


def run_script(monkeypatch, path, *arguments, cwd):
    """Runs a file as `__main__` in this process, which has imported what a new one would import.

    A process takes two seconds to import JAX, and shares no compiled program.
    """
    with monkeypatch.context() as patch:
        patch.chdir(cwd)
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        patch.syspath_prepend(pathlib.Path(path).parent)
        return runpy.run_path(str(path), run_name="__main__")
