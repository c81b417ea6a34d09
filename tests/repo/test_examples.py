"""Every example and the benchmark of acceptance run, and the numbers that it prints are right."""

import html
import importlib.metadata
import json
import pathlib
import re
import sys

import pytest
from checkpoints import DRAFT, write_checkpoint
from scripts import run_process, run_script

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [pytest.mark.lenient, pytest.mark.once]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs an example in a folder that it may write to, and returns its standard output."""

    def run_example(name, *arguments):
        run_script(monkeypatch, ROOT / "examples" / name, *arguments, cwd=tmp_path)
        return capsys.readouterr().out

    return run_example


def rows_of(text, pattern):
    """The numbers of every line that matches, as floats."""
    return [[float(x) for x in groups] for groups in re.findall(pattern, text, re.MULTILINE)]


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.fixture
def benchmark(monkeypatch):
    """A module of benchmarks/ by its name there."""
    monkeypatch.syspath_prepend(ROOT)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def test_one_step_prints_what_decides_and_its_page_and_picture_are_of_these_numbers(run, tmp_path):
    picture, known = tmp_path / "one_step.svg", ROOT / "docs" / "one_step.svg"
    text = run("one_step.py", "--out", picture).removesuffix(f"wrote {picture}\n")
    judged = re.findall(r"= ([\d.]+), uniform ([\d.]+): (accepted|rejected)", text)
    assert len(judged) == 6
    assert {verdict for *_, verdict in judged} == {"accepted", "rejected"}
    for ratio, u, verdict in judged:
        assert (float(u) < float(ratio)) == (verdict == "accepted")
    assert text.count('recovered "') == 2
    assert text.count('bonus "') == 1
    page = (ROOT / "docs" / "one_step.md").read_text(encoding="utf-8")
    assert f"```text\n{text}```" in page
    held = html.unescape(known.read_text(encoding="utf-8"))
    assert f">{text.strip()}<" in held, "run: python examples/one_step.py --out docs/one_step.svg"
    # Other versions of matplotlib draw the same numbers with other strokes.
    if f"Matplotlib v{importlib.metadata.version('matplotlib')}," in held:
        assert picture.read_bytes() == known.read_bytes()


def test_your_own_loop_writes_what_plain_decoding_writes_in_fewer_steps(run):
    text = run("your_own_loop.py")
    ((steps, plain),) = rows_of(text, r"^(\d+) steps instead of (\d+)$")
    assert steps < 0.8 * plain
    assert "the greedy requests wrote what plain greedy decoding writes" in text
    assert "with q as probabilities every request writes the same" in text


def test_acceptance_falls_with_temperature_and_is_that_of_the_distributions(run, tmp_path):
    plot = tmp_path / "plot.png"
    # Of each step the first draft is counted; a second one shows that others are left out.
    sizes = ("--max-new-tokens", 14, "--num-speculative-tokens", 2)
    text = run("acceptance_vs_temperature.py", "--out", plot, *sizes)
    rows = rows_of(text, r"^ +([\d.]+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$")
    assert len(rows) == 6
    for _, drafted, accepted, expected, _ in rows:
        error = (expected * (1 - expected) / drafted) ** 0.5
        # Printed to three digits.
        assert abs(accepted - expected) < 4 * error + 0.001
    # All temperatures together see a tenth.
    gap = sum(n * (accepted - expected) for _, n, accepted, expected, _ in rows)
    total, variance = sum(row[1] for row in rows), sum(n * p * (1 - p) for _, n, _, p, _ in rows)
    assert abs(gap) < 4 * variance**0.5 < 0.13 * total
    assert rows[0][4] > rows[-1][4]
    assert is_png(plot)


def test_the_tail_of_each_noise_has_the_error_that_its_words_allow(tmp_path):
    plot = tmp_path / "plot.png"
    # A process of its own: it computes in float64. More nodes give the digits printed below.
    script = ROOT / "examples" / "gumbel_fp32_vs_fp64.py"
    text = run_process(script, "--out", plot, "--rounds", 1, "--nodes", 512, cwd=tmp_path)
    found = dict(re.findall(r"^(\S.*?) +[\d.]+ +([\d.e+-]+)$", text, re.MULTILINE))
    error = {name: float(value) for name, value in found.items()}
    # 131072 rare tokens lose up to 2^-24 each by default, and 2^-33 at the end of 32 bits.
    assert 1e-3 < error["flat, jax.random.gumbel"] < 131072 * 2.0**-24
    assert 1e-6 < error["flat FP32"] < 131072 * 2.0**-33
    assert error["two-level FP32"] < error["flat FP32"] / 30
    assert error["flat FP64"] < 1e-11
    assert error["two-level FP64"] < error["flat FP64"]
    assert is_png(plot)


def test_synthetic_acceptance_gives_the_length_that_was_asked_for(run):
    sizes = ("--repeats", 1, "--requests", 1000, "--layers", 1, "--max-new-tokens", 48)
    text = run("synthetic_acceptance.py", *sizes)
    lengths = rows_of(text, r"([\d.]+) expected, ([\d.]+) \+- ([\d.]+)")
    assert len(lengths) == 3
    for expected, measured, error in lengths:
        # Printed to three digits.
        assert abs(expected - measured) < 5 * error + 0.001
    rows = rows_of(text, r"^ +([\d.]+) +([\d.]+) +(\d+) +[\d.]+$")
    assert [asked for asked, *_ in rows] == [1, 2, 3, 4, 5]
    for asked, per_step, steps in rows:
        # The last step has less room than the rest.
        assert abs(per_step - asked) <= asked / steps
    assert [steps for *_, steps in rows] == sorted((s for *_, s in rows), reverse=True)


def test_generate_counts_the_acceptance_of_the_distributions_on_held_out_prompts(
    benchmark, tmp_path, monkeypatch, capsys
):
    # The pair that ships is measured above; of one layer each, models compile in a third.
    options = ["--target", write_checkpoint(tmp_path / "target", DRAFT)]
    options += ["--draft", write_checkpoint(tmp_path / "draft", DRAFT, seed=1), "--batch", 16]
    options += [
        "--num-speculative-tokens",
        2,
        "--files",
        16,
        "--context",
        64,
        "--positions",
        32,
        "--temperatures",
        0.7,
        1.0,
    ]
    monkeypatch.setattr(sys, "argv", ["acceptance", "generate", *map(str, options)])
    benchmark("pair.acceptance").main()
    text = capsys.readouterr().out
    rows = rows_of(text, r"^\| [\d.]+ \| \d+ \| ([\d.]+) \| ([\d.]+) \| (\S+) \| (\S+) \|")
    assert len(rows) == 2
    for accepted, expected, difference, error in rows:
        assert abs(accepted - expected - difference) < 0.0015
        assert abs(difference) < 4 * error
        assert accepted > 0.3


def test_windows_judge_every_token_but_the_first_once(benchmark):
    import numpy as np

    rows = [np.arange(1, n + 1) for n in (1, 2, 16, 17, 18, 29, 30, 100)]
    ids, judged = benchmark("pair.bits").windows(rows, 16)
    expected = np.concatenate([row[1:] for row in rows])
    assert ids[:, 1:][judged].tolist() == expected.tolist()


def test_the_table_of_speed_on_a_cpu_is_that_of_the_measurement(benchmark):
    table = benchmark("tables.cpu")
    path = table.RESULTS / "cpu_verify.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    assert all(ratio["holds"] for ratio in result["ratios"])
    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    put = benchmark("tables.publish").put_between_markers
    assert put(text, table.cpu_table(result), table.BEGIN, table.END) == text, (
        "run: python -m benchmarks.tables.cpu --readme docs/speed.md"
    )


def test_a_document_without_markers_is_refused(benchmark):
    put = benchmark("tables.publish").put_between_markers
    with pytest.raises(ValueError, match="once each"):
        put("<!-- b -->\n<!-- a -->\n", "|", "<!-- a -->", "<!-- b -->")
    replaced = put("1\n<!-- a -->\nold\n<!-- b -->\n2\n", "new", "<!-- a -->", "<!-- b -->")
    assert replaced == "1\n<!-- a -->\nnew\n<!-- b -->\n2\n"
