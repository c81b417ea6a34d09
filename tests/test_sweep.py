"""`specjax sweep`: what it predicts, what it chooses, and the command on a random pair."""

import itertools
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_cli import TARGET, write

from specjax.cli import main
from specjax.schedules import conditional_rates, expected_acceptance_length
from specjax.sweep_choice import choose, predicted_lengths, synthetic_lengths

pytestmark = [pytest.mark.lenient, pytest.mark.once]

SMALL = ["--max-speculative-tokens", "2", "--context", "16", "--max-new-tokens", "12"]
SMALL += ["--steps", "3", "--rounds", "2"]
SMALLER = [*SMALL, "--max-speculative-tokens", "1"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return [
        "--target",
        write(folder / "target", TARGET, 0),
        "--draft",
        write(folder / "d", TARGET, 1),
    ]


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))


# What is predicted and chosen --------------------------------------------------------------------


def test_predicted_lengths_are_those_of_all_outcomes_enumerated():
    conditional = [0.9, 0.5, 0.75]
    rates = np.cumprod(conditional)
    for K, found in enumerate(predicted_lengths(rates.tolist())):
        total = 0.0
        for coins in itertools.product([True, False], repeat=K):
            pairs = zip(coins, conditional, strict=False)
            probability = np.prod([c if coin else 1 - c for coin, c in pairs])
            run = next((n for n, coin in enumerate(coins) if not coin), K)
            total += probability * (run + 1)
        assert found == pytest.approx(total)
        if K:
            closed = expected_acceptance_length(conditional_rates(jnp.array(rates))[:K])
            assert found == pytest.approx(float(closed), rel=1e-6)


def test_the_best_number_of_drafts_is_that_of_the_most_tokens_per_second():
    lengths = predicted_lengths([0.8, 0.6, 0.1])
    steps = [[0.99, 1.0, 1.01], [1.19, 1.2, 1.21], [1.39, 1.4, 1.41], [1.59, 1.6, 1.61]]
    best = choose(lengths, steps, batch_size=10)
    assert best.K == 2
    assert best.tokens_per_second == pytest.approx([10, 15, 10 * 2.4 / 1.4, 10 * 2.5 / 1.6])
    assert best.gains[2] == pytest.approx(2.4 / 1.4)
    assert best.ties == []
    for K, (low, high) in enumerate(best.quartiles):
        assert low < best.tokens_per_second[K] < high


def test_drafts_that_never_pay_leave_plain_decoding_best_and_ties_are_named():
    assert choose([1.0, 1.1, 1.1], [[1.0], [1.5], [2.0]], 1).K == 0
    wide = choose([1.0, 1.9, 2.0], [[1.0], [1.0, 1.2, 1.4], [1.0, 1.2, 1.4]], 1)
    assert (wide.K, wide.ties) == (2, [1])


def test_synthetic_lengths_reach_from_no_draft_kept_to_all():
    for K in range(33):
        lengths = synthetic_lengths(K)
        assert (lengths[0], lengths[-1]) == (1, K + 1)
        assert len(set(lengths)) == len(lengths) <= 4


# The command -------------------------------------------------------------------------------------


def test_json_holds_numbers_that_agree(capsys, pair, tmp_path):
    out = tmp_path / "sweep.png"
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a b ab")
    options = [*pair, *SMALL, "--batch-size", "2", "--prompt-file", str(prompt), "--json"]
    assert main(["sweep", "ab ac ab", *options, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    found = json.loads(captured.out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert found["device"] == jax.devices()[0].device_kind
    assert found["command"].startswith("specjax sweep 'ab ac ab'")
    seen, rows = found["acceptance"], found["sweep"]
    assert seen["num_prompts"] == 2
    assert seen["acceptance_length"] == pytest.approx(seen["num_emitted"] / seen["num_steps"])
    assert [row["K"] for row in rows] == [0, 1, 2]
    assert [row["acceptance_length"] for row in rows] == pytest.approx(
        predicted_lengths(seen["rates"])
    )
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(
            2 * row["acceptance_length"] / row["step_ms"]["median"] * 1e3
        )
        # The rates of these lengths are ones and zeros: what was asked for is what comes.
        for point in row["synthetic"]:
            assert point["length"] == pytest.approx(point["asked_length"])
            assert point["closed_form"] * row["step_ms"]["median"] == pytest.approx(
                2e3 * point["asked_length"]
            )
    best = max(rows, key=lambda row: row["tokens_per_second"])
    assert found["best"]["K"] == best["K"]
    assert found["best"]["gain"] == pytest.approx(
        best["tokens_per_second"] / rows[0]["tokens_per_second"]
    )


def test_a_target_that_drafts_for_itself_keeps_every_draft(capsys, pair):
    options = ["--target", pair[1], "--draft", pair[1], *SMALL, "--json", "--temperature", "0"]
    # As above, and so compiled already.
    options += ["--batch-size", "2"]
    assert main(["sweep", "ab", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["acceptance"]["rates"] == [1.0, 1.0]
    assert [row["acceptance_length"] for row in found["sweep"]] == [1.0, 2.0, 3.0]


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--max-speculative-tokens", "0"], r"--max-speculative-tokens is 0; .*in \[1, 32\]"),
        (["--batch-size", "0"], "--batch-size is 0"),
        (["--rounds", "1"], "--rounds is 1; it needs to be >= 2"),
        (["--context", "0"], "--context is 0"),
        (["--context", "1000"], "--context is 1000, and --steps 16 .* room for 1024 together"),
        (["--draft", "none"], "--draft is none; a sweep needs drafts"),
        (["--temperature", "-1"], "--temperature is -1"),
        (["--draft-sample-method", "best"], "--draft-sample-method is 'best'"),
        (["--out", "sweep.jpeg"], "--out is sweep.jpeg; it needs to end in .png"),
        (["--out", "/no/such/sweep.png"], "there is no folder /no/such"),
        (["--max-new-tokens", "2000"], r"--max-new-tokens \+ K \+ 1 is 2009"),
        (["--prompt-file", "/no/such/file"], "/no/such/file cannot be read"),
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
    assert "--out draws with matplotlib, which is missing" in capsys.readouterr().err


def test_logits_that_turn_invalid_are_a_sentence(capsys, tmp_path):
    broken = write(tmp_path / "broken", TARGET, 0, scale=float("nan"))
    assert main(["sweep", "ab", "--target", broken, *SMALLER]) == 1
    assert capsys.readouterr() == ("", "specjax: the target's logits turned invalid.\n")
