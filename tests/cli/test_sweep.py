"""`specjax sweep`: what it predicts, what it chooses, and the command on a random pair."""

import argparse
import contextlib
import errno
import json
import os
import re
import sys
import types

import bigrams
import jax
import numpy as np
import pytest
from test_command import TARGET, write_model
from test_files import limit_file_size

import specjax
from specjax.cli import main
from specjax.cli.arguments import parse_options
from specjax.cli.model_pair import ModelPair, read_pair
from specjax.cli.sweep.choice import Acceptance, choose_best, standard_errors
from specjax.cli.sweep.measure import Workload, measure_acceptance
from specjax.cli.sweep.report import conclusion, report_tables
from specjax.cli.sweep.run_sweep import read_workload
from specjax.cli.terminal import Terminal
from specjax.config import SpeculativeConfig

pytestmark = [pytest.mark.lenient, pytest.mark.once]

# One set of sizes for all: a sweep compiles nine programs.
SMALL = ["--max-speculative-tokens", "2", "--context", "16", "--max-new-tokens", "12"]
SMALL += ["--steps", "3", "--rounds", "2", "--batch-size", "2"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [
        "--target",
        write_model(folder / "target", TARGET, 0),
        "--draft",
        write_model(folder / "d", TARGET, 1),
    ]


@pytest.fixture(autouse=True)
def _use_own_environment(tmp_path, monkeypatch):
    # The cache of the tests, or one that is empty: never the user's.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))


# What is predicted and chosen --------------------------------------------------------------------


def test_predicted_lengths_are_means_of_steps_cut_to_k_drafts():
    acceptance = Acceptance(4, [[0, 3, 1, 4], [2, 2, 0]])
    for K, length in enumerate(acceptance.lengths):
        tokens = [1 + min(n, K) for counts in acceptance.num_accepted for n in counts]
        assert length == pytest.approx(np.mean(tokens), abs=1e-14)


def long_record_of(num_accepted, K):
    """So many steps that their error is next to none."""
    return Acceptance(K, [num_accepted * 1000])


def test_the_best_number_of_drafts_is_that_of_the_most_tokens_per_second():
    # Rates 0.8, 0.6, 0.1.
    acceptance = long_record_of([0, 2, 1, 2, 3, 0, 2, 2, 1, 2], 3)
    steps = [[0.99, 1.0, 1.01], [1.19, 1.2, 1.21], [1.39, 1.4, 1.41], [1.59, 1.6, 1.61]]
    best = choose_best(acceptance, steps, batch_size=10)
    assert best.K == 2
    assert best.tokens_per_second == pytest.approx([10, 15, 10 * 2.4 / 1.4, 10 * 2.5 / 1.6])
    assert best.gains[2] == pytest.approx(2.4 / 1.4)
    assert best.gaps_to_best == pytest.approx([24 / 1.4 - rate for rate in best.tokens_per_second])
    assert best.indistinguishable == []
    for K, (low, high) in enumerate(best.quartiles):
        assert low < best.tokens_per_second[K] < high


def test_drafts_that_never_pay_leave_plain_decoding_best_and_ties_are_named():
    assert choose_best(long_record_of([0] * 9 + [1], 2), [[1.0], [1.5], [2.0]], 1).K == 0
    # At the faster quartile of its steps it would pay: the median decides.
    assert choose_best(long_record_of([0, 1], 1), [[1.0], [1.0, 1.0, 1.6, 1.6, 1.6]], 1).K == 0
    record = long_record_of([0, 2, 1, 1, 1, 1, 1, 1, 1, 1], 2)
    noisy_choice = choose_best(record, [[1.0], [1.0, 1.2, 1.4], [1.0, 1.2, 1.4]], 1)
    assert (noisy_choice.K, noisy_choice.indistinguishable) == (2, [1])


def test_many_steps_decide_what_few_leave_open():
    # Two runs of seven and twelve steps of one pair: alone, each was sure of its own answer.
    seconds = [[2.187e-3], [4.072e-3], [4.772e-3], [4.836e-3], [5.296e-3]]
    for num_accepted, K in [([0, 0, 4, 3, 4, 4, 4], 4), ([2, 1, 3, 1, 0, 0, 0, 0, 1, 2, 0, 1], 0)]:
        short_choice, long_choice = (
            choose_best(x, seconds, 1)
            for x in (Acceptance(4, [num_accepted]), long_record_of(num_accepted, 4))
        )
        assert short_choice.K == long_choice.K == K
        assert {short_choice.K, *short_choice.indistinguishable} >= {0, 4}
        assert long_choice.indistinguishable == []


@pytest.mark.parametrize("alike", [1, 4])
def test_errors_are_those_of_records_drawn_again_however_neighbours_agree(alike):
    generator = np.random.default_rng(0)
    seconds = [[1.0], [1.2], [1.3], [1.4]]
    lengths, errors, rates, choices = [], [], [], []
    for _ in range(400):
        num_accepted = np.repeat(generator.choice(4, 400 // alike, p=[0.3, 0.3, 0.2, 0.2]), alike)
        acceptance = Acceptance(3, [num_accepted[:150].tolist(), num_accepted[150:].tolist()])
        lengths.append(acceptance.lengths)
        errors.append(standard_errors(acceptance))
        best = choose_best(acceptance, seconds, 1)
        rates.append(best.tokens_per_second)
        choices.append((best.K, best.gap_errors))
    # Of 400 records the ratio of two such variances has a standard error of 8 %; the errors of
    # single steps would make it 1/4, and two Ks that share no steps 5 and more.
    assert np.square(errors)[:, 1:].mean(0) / np.var(lengths, axis=0)[1:] == pytest.approx(
        1, abs=0.3
    )
    best_K = max({K for K, _ in choices}, key=[K for K, _ in choices].count)
    gap = np.array(rates)[:, best_K] - np.array(rates)[:, best_K - 1]
    gap_error = [error[best_K - 1] for K, error in choices if best_K == K]
    assert np.mean(np.square(gap_error)) / gap.var() == pytest.approx(1, abs=0.3)


def test_a_few_steps_that_kept_alike_are_no_certainty():
    for num_accepted in (0, 4):
        short_errors, long_errors = (
            standard_errors(Acceptance(4, [[num_accepted] * n])) for n in (3, 3000)
        )
        assert short_errors[0] == long_errors[0] == 0
        assert short_errors[4] > 0.5
        assert long_errors[4] < 0.005


# The command -------------------------------------------------------------------------------------


def test_json_holds_numbers_that_agree(capsys, pair, tmp_path):
    out = tmp_path / "sweep.png"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a b ab")
    options = [*pair, *SMALL, "--prompt-file", str(prompt), "--json"]
    assert main(["sweep", "ab ac ab", *options, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    report = json.loads(captured.out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert report["device"] == jax.devices()[0].device_kind
    assert report["command"].startswith("specjax sweep 'ab ac ab'")
    measured, rows = report["acceptance"], report["sweep"]
    assert measured["num_prompts"] == 2
    assert measured["acceptance_length"] == pytest.approx(
        measured["num_emitted"] / measured["num_steps"]
    )
    acceptance = Acceptance(2, measured["num_kept"])
    assert len(measured["num_kept"]) == 2
    assert len(acceptance.step_counts) == measured["num_steps"] > 2
    assert acceptance.rates == measured["rates"]
    assert [row["standard_error"] for row in rows] == standard_errors(acceptance)
    runs = [row["step_ms"]["runs"] for row in rows]
    assert [len(times) for times in runs] == [2, 2, 2]
    repeated_choice = choose_best(acceptance, runs, 2)
    assert (repeated_choice.K, repeated_choice.indistinguishable) == (
        report["best"]["K"],
        report["best"]["not_told_apart"],
    )
    assert [row["behind_best_error"] for row in rows] == pytest.approx(
        [error * 1e3 for error in repeated_choice.gap_errors]
    )
    assert [row["K"] for row in rows] == [0, 1, 2]
    assert [row["acceptance_length"] for row in rows] == pytest.approx(
        [1 + sum(measured["rates"][:K]) for K in range(3)]
    )
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(
            2 * row["acceptance_length"] / row["step_ms"]["median"] * 1e3
        )
    # Of the tokens that were tested, each after those before it.
    tested = measured["num_steps"] * (1 + measured["rates"][0])
    assert measured["usual_rate"] == pytest.approx(
        measured["num_steps"] * sum(measured["rates"]) / tested
    )
    costs = report["step_costs"]
    assert len(costs) == 3
    assert costs[0] == 1
    assert min(costs) > 0
    # What it writes is what `generate` reads.
    saved = tmp_path / "sweep.json"
    saved.write_text(captured.out)
    _, config = parse_options(["generate", "x", "--step-costs", str(saved)])
    assert config == SpeculativeConfig("auto", step_costs=costs)
    best = max(rows, key=lambda row: row["tokens_per_second"])
    assert report["best"]["K"] == best["K"]
    assert report["best"]["gain"] == pytest.approx(
        best["tokens_per_second"] / rows[0]["tokens_per_second"]
    )


def test_a_target_that_drafts_for_itself_keeps_every_draft(capsys, pair):
    options = ["--target", pair[1], "--draft", pair[1], *SMALL, "--json", "--temperature", "0"]
    assert main(["sweep", "ab", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["acceptance"]["rates"] == [1.0, 1.0]
    assert [row["acceptance_length"] for row in report["sweep"]] == [1.0, 2.0, 3.0]
    # One prompt, and how sure it is of how many steps, whether or not others are told apart.
    measured = f"{report['acceptance']['num_steps']} steps of 1 prompt"
    assert measured in report_tables(report)[1][0]
    for ties, sentence in [([0, 1], "K = 0 and 1 may be as fast"), ([], "Every other K is slower")]:
        sentences = " ".join(
            conclusion(report | {"best": report["best"] | {"not_told_apart": ties}})
        )
        assert sentence in sentences
        assert re.search(rf"measured over {measured}\b", sentences)
        assert "1 prompts" not in sentences


def test_a_target_over_devices_keeps_the_drafts_that_it_keeps_on_one(capsys, pair):
    """By lookup drafts of one token, whose programs are the fewest."""
    command = ["sweep", "ab ab ab", *pair[:2], *SMALL, "--draft", "ngram", "--temperature", "0"]
    command += ["--max-speculative-tokens", "1"]
    pair_of_command = read_pair(*parse_options(command))
    workload = read_workload(pair_of_command, ["ab ab ab"], Terminal(quiet=True))
    one = measure_acceptance(workload, 1, lambda stage: None)
    assert main([*command, "--json", "--mesh", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["acceptance"]["num_kept"] == one.num_accepted
    assert {0, 1} == set(*one.num_accepted)
    assert len(report["sweep"]) == 2
    assert len(report["step_costs"]) == 2


def test_a_step_that_ends_a_text_keeps_the_drafts_up_to_the_end():
    """A model that counts to 5 and drafts for itself: all is accepted, past the 5 as well."""
    table = np.tile(20 * np.roll(np.eye(6), 1, axis=1), (6, 1, 1))
    options = argparse.Namespace(
        temperature=0.0, seed=0, max_new_tokens=8, draft_sample_method="probabilistic"
    )
    config = types.SimpleNamespace(eos_token_ids=(5,))
    workload = Workload(
        pair=ModelPair(options, None, "", "", "", config, None),
        target=bigrams.model(table),
        drafter=specjax.model_drafter(bigrams.model(table)),
        prompts=[[0], [1], [2], [3]],
    )
    acceptance = measure_acceptance(workload, 3, lambda stage: None)
    # One token comes before the first step: 4, 3, 2 and 1 are left.
    assert acceptance.num_accepted == [[3], [2], [1], [0]]


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-speculative-tokens", "0"], r"--max-speculative-tokens is 0; .*in \[1, 32\]"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--rounds", "1"], "--rounds is 1; it needs to be >= 2"),
        (["--context", "0"], "--context is 0"),
        (["--context", "1000"], "--context is 1000, and --steps 16 .* at most 1024"),
        (["--draft", "none"], "--draft is none; a sweep needs a draft"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--draft-sample-method", "best"], "--draft-sample-method is 'best'"),
        (["--out", "sweep.jpeg"], "--out is sweep.jpeg; it needs to end in .png"),
        (["--out", "/no/such/sweep.png"], "there is no folder /no/such"),
        (["--out", ".png"], r"--out is \.png; it needs a file name, like sweep\.png"),
        (["--out", "/"], "--out is /, which is a folder"),
        (["--max-new-tokens", "2000"], r"--max-new-tokens \+ K \+ 1 is 2009"),
        (["--prompt-file", "/no/such/file"], "/no/such/file cannot be read"),
        (
            ["--prompt-file", "/dev/zero"],
            "/dev/zero has more than 16777216 bytes; it needs to have",
        ),
        (["--prompt-file", os.devnull], f"{os.devnull} is empty"),
        (["--sead", "1"], "unrecognized arguments: --sead; `specjax sweep --help`"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused_in_a_sentence(capsys, arguments, sentence):
    assert main(["sweep", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    assert re.search(sentence, captured.err)


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["sweep", "--out", "sweep.png"]) == 2
    assert "--out needs matplotlib" in capsys.readouterr().err


def test_logits_that_turn_invalid_are_a_sentence(capsys, pair, tmp_path):
    broken = write_model(tmp_path / "broken", TARGET, 0, scale=float("nan"))
    assert main(["sweep", "ab", *pair, "--target", broken, *SMALL]) == 1
    assert capsys.readouterr() == ("", "specjax: the target's logits turned invalid.\n")


def refuse_plot(capsys, out):
    """What is said of an --out, on models that are not even there."""
    assert main(["sweep", "--target", "/no/such/folder", "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    return captured.err


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_read(capsys, tmp_path):
    folder = tmp_path / "folder.png"
    folder.mkdir()
    assert f"--out is {folder}, which is a folder" in refuse_plot(capsys, folder)
    dangling = tmp_path / "dangling.svg"
    dangling.symlink_to(tmp_path / "nowhere" / "a.svg")
    assert f"--out is {dangling}, which cannot be written: " in refuse_plot(capsys, dangling)
    long = tmp_path / ("a" * 300 + ".png")
    assert f"--out is {long}, which cannot be written: " in refuse_plot(capsys, long)
    if os.path.isdir("/proc/self"):
        assert "--out is /proc/a.png, which cannot be written: " in refuse_plot(
            capsys, "/proc/a.png"
        )
    if os.getuid():
        (folder / "old.png").write_bytes(b"old")
        folder.chmod(0o500)
        for name in ("a.png", "old.png"):
            assert "which cannot be written: " in refuse_plot(capsys, folder / name)


def test_asking_whether_a_plot_can_be_written_leaves_what_is_there(capsys, tmp_path):
    old, absent = tmp_path / "old.png", tmp_path / "absent.png"
    old.write_bytes(b"old")
    for out in (old, absent):
        assert "/no/such/folder" in refuse_plot(capsys, out)
    assert old.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old.png"]


def test_a_plot_that_fails_takes_neither_the_measurement_nor_the_old_plot(
    capsys, monkeypatch, pair, tmp_path
):
    from matplotlib.figure import Figure

    draw, out = Figure.savefig, tmp_path / "out" / "sweep.png"

    with contextlib.ExitStack() as full:

        def fills(*arguments, **options):
            draw(*arguments, **options)
            full.enter_context(limit_file_size(1000))

        monkeypatch.setattr(Figure, "savefig", fills)
        out.parent.mkdir()
        out.write_bytes(b"old")
        assert main(["sweep", "ab", *pair, *SMALL, "--json", "--out", str(out)]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["best"]
    sentence = f"specjax: --out {out} cannot be written: {os.strerror(errno.EFBIG)}.\n"
    assert captured.err == sentence
    assert out.read_bytes() == b"old"
    assert os.listdir(out.parent) == ["sweep.png"]
