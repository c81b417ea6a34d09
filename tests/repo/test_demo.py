"""The demo's texts, as they were recorded, are code that somebody would read."""

import json
import pathlib

import pytest

from benchmarks.pair.demo import DRAFTS, demo_arguments
from benchmarks.pair.text_quality import LOOP, distinct_share, unfinished_lines

ROOT = pathlib.Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "pair_demo.json"

pytestmark = [pytest.mark.lenient, pytest.mark.once]


def test_the_record_is_of_the_command_that_make_demo_runs():
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    assert record["demo"].split() == [
        "specjax",
        *(argument.replace(f"{ROOT}/", "") for argument in demo_arguments()),
    ]
    assert record["prompt"] == (ROOT / "examples" / "prompt.txt").read_text(encoding="utf-8")


def test_no_text_of_the_demo_loops_and_each_is_python():
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    texts = {(case["draft"], case["seed"]): case["text"] for case in record["cases"]}
    assert set(texts) == {(draft, seed) for draft in DRAFTS for seed in range(8)}
    for case, text in texts.items():
        assert distinct_share(text) > LOOP, case
        assert unfinished_lines(record["prompt"] + text) is not None, case


def test_a_text_that_repeats_a_line_is_a_loop():
    loop = "    def setUp(self):\n        self.resetUp()\n\n" * 15
    assert distinct_share(loop) < LOOP
    assert unfinished_lines("class A:\n" + loop) == 0


def test_what_the_limit_cut_off_is_left_out_and_a_fault_before_it_is_not():
    assert unfinished_lines('x = 1\ndef f():\n    """Returns') == 0
    assert unfinished_lines("x = 1\nx = (") == 1
    assert unfinished_lines("x = = 1\n" + "y = 2\n" * 40) is None
