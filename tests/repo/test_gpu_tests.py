"""`make gpu-test`: which files it runs, and when it fails."""

import pathlib
import subprocess

import gpu_tests
import pytest

LISTING = """tests/a/test_few.py: 2
tests/b/test_many.py: 30

32/100 tests collected (68 deselected) in 5.03s
"""


def test_files_of_selected_tests_are_run_the_longest_list_first(monkeypatch):
    assert gpu_tests.files(LISTING) == ["tests/b/test_many.py", "tests/a/test_few.py"]
    monkeypatch.setattr(gpu_tests, "FIRST", "tests/a/test_few.py")
    assert gpu_tests.files(LISTING) == ["tests/a/test_few.py", "tests/b/test_many.py"]


def test_the_first_file_is_there():
    assert (pathlib.Path(__file__).parents[2] / gpu_tests.FIRST).exists()


@pytest.mark.parametrize(
    ("listing", "codes", "expected"),
    [
        (LISTING, [0, 0, 0], 0),
        pytest.param(LISTING, [0, 0, 1], 1, id="a file fails"),
        pytest.param("no tests collected", [0], 1, id="nothing is marked"),
        pytest.param("JAX sees no NVIDIA GPU here", [4], 1, id="no GPU"),
    ],
)
def test_the_command_fails_where_a_file_fails_or_none_runs(monkeypatch, listing, codes, expected):
    codes = iter(codes)

    def ended(*flags):
        return subprocess.CompletedProcess(flags, next(codes), stdout=listing)

    monkeypatch.setattr(gpu_tests, "pytest", ended)
    assert gpu_tests.main([]) == expected
