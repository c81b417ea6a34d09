"""The `specjax` command, through `main` and once as a process."""

import argparse
import dataclasses
import errno
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import tomllib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import specjax
from specjax.cli import generate, main, streams
from specjax.cli.arguments import parse_options
from specjax.cli.generate import GenerateJob, GenerateResult, Timings
from specjax.cli.json_report import is_exact, metrics_json
from specjax.cli.model_pair import ModelPair, read_pair
from specjax.cli.processes import load_options
from specjax.cli.run_generate import read_jobs
from specjax.cli.stream_programs import StreamPrograms
from specjax.cli.sweep.run_sweep import read_workload
from specjax.cli.terminal import Terminal
from specjax.config import SpeculativeConfig
from specjax.core import rules
from specjax.decode.drafters import ngram_drafter
from specjax.decode.logprobs import TopLogprobs
from specjax.decode.metrics import Metrics
from specjax.engine.stop_strings import TextStream
from specjax.implementation import NEWEST_TESTED_JAX
from specjax.models import TransformerConfig, build, pretrained_folder, save

pytestmark = pytest.mark.lenient

ROOT = pathlib.Path(__file__).parents[2]
TARGET = TransformerConfig(
    vocab_size=260,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    eos_token_ids=(0,),
)
PROMPT = "a bé🙂 ab ab"
EMBEDDED = str(pretrained_folder("draft"))
SHORT = ["--max-new-tokens", "20", "--num-speculative-tokens", "2"]
PLAIN = ["--max-new-tokens", "20"]


def byte_tokenizer(vocab_size=260):
    """Every byte is a token of its own, but for a few merges."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["ab ab ac ac"], trainer)
    return tokenizer


def write_model(folder, config, seed, scale=12.0):
    # Larger weights than at the start of a training, so that texts are not one token repeated.
    params = jax.tree.map(
        lambda a: a * jnp.asarray(scale, a.dtype), build(config, seed=seed).params
    )
    save(folder, params, config, byte_tokenizer(config.vocab_size), dtype="float32")
    return str(folder)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    # Of one configuration, so that every drafter that is a model shares its compilations.
    return write_model(folder / "target", TARGET, 0), write_model(folder / "draft", TARGET, 1)


@pytest.fixture(autouse=True)
def _use_own_environment(tmp_path, monkeypatch):
    for name in ("NO_COLOR", "TERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    # The cache of the tests, or one that is empty: never the user's.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))


def run_json(capsys, pair, *options):
    assert run_generate(pair, "--json", *options) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return json.loads(captured.out)


def run_generate(pair, *options):
    target, draft = pair
    drafting = () if "--draft" in options else ("--draft", draft)
    length = PLAIN if "none" in options else SHORT
    return main(["generate", PROMPT, "--target", target, *drafting, *length, *options])


def job_of(name="", tokenizer=None, drafter=None, config=None, rule=None, temperature=1.0):
    """A job of one token and no models."""
    config = config or SpeculativeConfig()
    options = argparse.Namespace(temperature=temperature, rule=rule)
    pair = ModelPair(options, config, name, "", "", None, tokenizer)
    return GenerateJob(pair, "x", [1], drafter=drafter)


class FakeTerminal(io.StringIO):
    def isatty(self):
        return True


# What comes out ----------------------------------------------------------------------------------


@pytest.mark.once
def test_a_greedy_text_does_not_depend_on_what_drafts(capsys, pair):
    options = ("--temperature", "0")
    drafts = ("none", pair[1], pair[0])
    texts = [run_json(capsys, pair, "--draft", draft, *options) for draft in drafts]
    assert len({text["text"] for text in texts}) == 1
    assert len({tuple(text["token_ids"]) for text in texts}) == 1
    assert texts[-1]["metrics"]["draft_acceptance_rate"] == 1.0
    assert texts[0]["metrics"]["mean_acceptance_length"] == 1.0
    assert len(set(texts[0]["token_ids"])) > 3


@pytest.mark.once
def test_json_holds_text_tokens_and_numbers_that_agree(capsys, pair):
    report = run_json(capsys, pair)
    ids, metrics, timings = report["token_ids"], report["metrics"], report["timings"]
    tokenizer = byte_tokenizer()
    prompt = tokenizer.encode(PROMPT).ids
    assert PROMPT + report["text"] == tokenizer.decode(prompt + ids)
    assert report["num_prompt_tokens"] == len(prompt)
    assert report["finish"] == ("end_of_sequence" if ids[-1] == 0 else "length")
    # The first token is sampled from the prompt's logits, in no step that drafted.
    assert metrics["num_emitted"] == len(ids) - 1
    drafted, accepted = metrics["num_drafted"], metrics["num_accepted"]
    assert metrics["num_emitted"] == metrics["num_steps"] + sum(accepted)
    assert metrics["mean_acceptance_length"] == pytest.approx(
        metrics["num_emitted"] / metrics["num_steps"]
    )
    assert metrics["draft_acceptance_rate"] == pytest.approx(sum(accepted) / sum(drafted))
    assert metrics["acceptance_rates"] == pytest.approx(
        [a / d for a, d in zip(accepted, drafted, strict=True)]
    )
    assert timings["tokens_per_second"] * timings["seconds"] == pytest.approx(len(ids) - 1)
    assert timings["compile_seconds"] > 0
    assert all(
        timings[name] is None for name in ("plain_seconds", "plain_tokens_per_second", "speedup")
    )


def test_a_comparison_with_plain_decoding_changes_no_token(capsys, pair):
    report, compared = (run_json(capsys, pair, *options) for options in ([], ["--compare"]))
    assert compared["token_ids"] == report["token_ids"]
    assert compared["metrics"] == report["metrics"]
    timings = compared["timings"]
    assert timings["speedup"] == pytest.approx(
        timings["tokens_per_second"] / timings["plain_tokens_per_second"]
    )
    # Without an end of sequence, plain decoding takes a step for each token after the first.
    plain = run_json(capsys, pair, "--draft", "none", "--compare")
    assert timings["plain_seconds"] * timings["plain_tokens_per_second"] == pytest.approx(
        len(plain["token_ids"]) - 1
    )
    assert plain["timings"]["speedup"] is None


@pytest.mark.once
def test_a_compared_text_begins_before_the_warm_up_whose_seconds_are_of_no_step(
    capsys, pair, monkeypatch
):
    warm_up, texts, clock, times = StreamPrograms.warm_up, [], [0.0], []

    def watch(*operands):
        texts.append(capsys.readouterr().out)
        warm_up(*operands)
        clock[0] += 1000

    fake = types.SimpleNamespace(perf_counter=lambda: time.perf_counter() + clock[0])
    monkeypatch.setattr(generate, "time", fake)
    monkeypatch.setattr(StreamPrograms, "warm_up", watch)
    monkeypatch.setattr(Terminal, "print_summary", lambda *operands: times.append(operands[-1]))
    assert run_generate(pair, "--compare") == 0
    assert texts[0]
    assert texts[1].endswith("\n")
    assert 0 < times[0].seconds + times[0].plain_seconds < 1000


@pytest.mark.once
def test_a_text_of_models_over_devices_is_that_of_one(capsys, pair, monkeypatch):
    """Rows of logits are gathered for penalties and listings."""
    # Each of XLA's flags for sums in graphs is set where it was not given.
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=FUSION")
    options = ["--draft", "none", "--repetition-penalty", "1.2", "--logprobs", "2"]
    # The documented command gives a CPU so many devices.
    pattern = r"JAX_NUM_CPU_DEVICES=(\d) specjax generate .*(--mesh) \1\n"
    number, option = re.search(pattern, (ROOT / "docs" / "scaling.md").read_text()).groups()
    one = run_json(capsys, pair, *options)
    # JAX keeps its programs, where the command kept those of one device.
    kept = []
    monkeypatch.setattr("specjax.cli.command.enable_compilation_cache", lambda: kept.append(1))
    monkeypatch.setattr("specjax.cli.command.command_folder", lambda: pytest.fail("not JAX's"))
    split = run_json(capsys, pair, *options, option, number)
    assert kept
    assert split["token_ids"] == one["token_ids"]
    assert len(split["logprobs"]) == len(one["logprobs"]) == 20
    for ours, theirs in zip(split["logprobs"], one["logprobs"], strict=True):
        assert ours["rank"] == theirs["rank"]
        assert [x["token_id"] for x in ours["top"]] == [x["token_id"] for x in theirs["top"]]
    assert split["timings"]["compile_seconds"] > 0
    given, *more = os.environ["XLA_FLAGS"].split()
    assert given == "--xla_gpu_enable_command_buffer=FUSION"
    assert more == ["--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"]


def test_xla_is_given_no_flag_that_a_later_jax_may_not_know(monkeypatch):
    """XLA ends the process at a flag that it does not know."""
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    load_options(parse_options(["sweep", "--mesh", "2"])[0])
    assert os.environ["XLA_FLAGS"] == ""


def test_a_text_of_one_token_has_no_speed(capsys, pair):
    assert run_generate(pair, "--max-new-tokens", "1") == 0
    assert "no step came after the first token" in capsys.readouterr().err
    report = run_json(capsys, pair, "--max-new-tokens", "1", "--compare")
    assert len(report["token_ids"]) == 1
    assert report["timings"]["tokens_per_second"] is report["timings"]["speedup"] is None


def test_a_seed_reproduces_its_text_and_another_gives_another(capsys, pair):
    first, again, other = (
        run_json(capsys, pair, "--temperature", "1", "--seed", seed)["token_ids"]
        for seed in ("5", "5", "6")
    )
    assert first == again != other


def test_a_key_does_not_depend_on_what_jax_makes_by_default(pair):
    arguments = ["--target", pair[0], "--draft", pair[1], "--seed", "3"]
    wanted = jax.random.key(3)
    with jax.default_prng_impl("rbg"):
        decoded = read_pair(*parse_options(["generate", "ab", *arguments, *SHORT]))
        terminal = Terminal(quiet=True)
        (job,) = read_jobs(decoded, ["ab"], terminal, None)
        sizes = ["--context", "8", "--steps", "4", *PLAIN]
        measured = read_pair(*parse_options(["sweep", "ab", *arguments, *sizes]))
        keys = job.key, read_workload(measured, ["ab"], terminal).key(2)
    assert all(map(jnp.array_equal, keys, (wanted, jax.random.fold_in(wanted, 2))))


@pytest.mark.once
def test_synthetic_acceptance_is_what_was_asked_for(capsys, pair):
    options = ["--rejection-sample-method", "synthetic"]
    for asked in (["--synthetic-acceptance-rates", "1,0"], ["--synthetic-acceptance-length", "2"]):
        report = run_json(capsys, pair, *options, *asked)
        assert report["metrics"]["acceptance_rates"] == [1.0, 0.0]


def test_noise_in_float64_leaves_the_process_as_it_was(capsys, pair):
    report = run_json(capsys, pair, "--use-fp64-gumbel", "--draft", "none")
    assert report["token_ids"]
    assert not jax.config.jax_enable_x64


def test_piped_output_is_the_text_alone(capsys, pair, monkeypatch):
    report = run_json(capsys, pair)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_generate(pair) == 0
    captured = capsys.readouterr()
    assert captured.out == report["text"] + "\n" * (not report["text"].endswith("\n"))
    assert "\x1b" not in captured.out + captured.err
    assert "tokens/s with drafts\n" in captured.err
    assert "times as fast" not in captured.err
    assert "position 2" in captured.err
    assert not re.search(r" $", captured.err, re.MULTILINE)
    assert run_generate(pair, "--compare") == 0
    compared = capsys.readouterr()
    assert compared.out == captured.out
    assert "times as fast" in compared.err
    assert run_generate(pair, "--quiet") == 0
    assert capsys.readouterr() == (captured.out, "")


def test_a_terminal_shows_what_takes_long_and_nothing_of_it_if_quiet(pair, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for options in ([], ["--quiet"]):
        streams = {name: FakeTerminal() for name in ("stdout", "stderr")}
        for name, stream in streams.items():
            monkeypatch.setattr(sys, name, stream)
        assert run_generate(pair, *options) == 0
        text, progress = (stream.getvalue() for stream in streams.values())
        shown = re.findall(r" ([a-z ]+) \.\.\. \d+ s", re.sub(r"\x1b\[[0-9;]*m", "", progress))
        stages = ["reading the folders", "compiling", "reading the prompt"]
        assert list(dict.fromkeys(shown)) == ([] if options else stages)
        assert (PROMPT in text, "\x1b" in text, "tokens/s" in text) == (not options,) * 3
        assert text.strip()


@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_shows_origins_in_colour_unless_told_not_to(pair, monkeypatch, no_color):
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert run_generate(pair) == 0
    output = terminal.getvalue()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert ("\x1b" in output) is not no_color
    assert ("accepted draft" in output) is not no_color
    assert "\x1b" not in plain
    assert PROMPT in plain
    assert "tokens per step" in plain


SAMPLING = ["--top-k", "3", "--top-p", "0.9", "--min-p", "0.01", "--repetition-penalty", "1.2"]
SAMPLING += ["--frequency-penalty", "0.1", "--presence-penalty", "-0.1", "--logprobs", "2"]


@pytest.mark.once
def test_sampling_options_shape_the_text_and_its_logprobs_are_listed(capsys, pair):
    # Prompt lookup compiles fastest. That drafts change nothing is a matter of tests/decode.
    options = (*SAMPLING, "--draft", "ngram")
    report = run_json(capsys, pair, *options)
    tokens = report["logprobs"]
    assert [token["token_id"] for token in tokens] == report["token_ids"]
    assert "".join(token["token"] for token in tokens if token["token"].isascii()) != ""
    for token in tokens:
        top = token["top"]
        assert top[0]["logprob"] >= top[1]["logprob"]
        # Ranks in the model's own distribution: penalties may choose the second, not the third.
        assert (token["rank"] == 1) == (token["logprob"] == top[0]["logprob"])
    # One token left to draw is the greedy choice, whatever the temperature.
    first = run_json(capsys, pair, *options, "--top-k", "1")["token_ids"]
    greedy = run_json(capsys, pair, *options, "--temperature", "0")["token_ids"]
    assert first == greedy != report["token_ids"]
    assert run_json(capsys, pair, "--draft", "none")["logprobs"] is None


@pytest.mark.once
def test_a_text_ends_before_a_stop_string_that_tokens_share_and_shows_no_part_of_it(capsys, pair):
    # Its own draft is accepted: after the first token a step has three.
    options = ("--draft", pair[0], "--temperature", "0")
    whole = run_json(capsys, pair, *options)
    assert whole["metrics"]["draft_acceptance_rate"] == 1.0
    text, tokenizer = whole["text"], byte_tokenizer()
    tokens = [tokenizer.decode([token]) for token in whole["token_ids"]]
    # The end of a token and the beginning of the next, which is not the last of its step.
    joints = ((n, tokens[n][-1:] + tokens[n + 1][:1]) for n in range(len(tokens) - 1) if n % 3 < 2)
    n, stop = next(
        (n, stop) for n, stop in joints if text.find(stop) == len("".join(tokens[: n + 1])) - 1 > 0
    )
    options = (*options, "--stop", "no such text", "--stop", stop)
    cut = run_json(capsys, pair, *options)
    assert (cut["text"], cut["finish"]) == (text[: text.index(stop)], "stop_string")
    assert cut["token_ids"] == whole["token_ids"][: n + 2]
    assert cut["metrics"]["num_steps"] < whole["metrics"]["num_steps"]
    assert run_generate(pair, *options) == 0
    captured = capsys.readouterr()
    assert captured.out == cut["text"] + "\n"
    assert f"{n + 2} after a prompt of {cut['num_prompt_tokens']}, ended by stop string" in (
        captured.err
    )


@pytest.mark.once
def test_a_listing_of_logprobs_stands_below_the_text(capsys, pair):
    assert run_generate(pair, *SAMPLING, "--draft", "ngram") == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("token "))
    assert re.fullmatch(r"token +log p +rank +most probable", lines[start])
    assert re.match(r'".+" +-\d+\.\d\d +\d+ +".+" -\d+\.\d\d  ".+" -\d+\.\d\d', lines[start + 1])
    assert "log p" not in captured.out


def test_tokens_are_listed_by_what_stands_in_them(monkeypatch):
    """A token of no probability, one that a terminal would obey, and one like markup."""
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")

    class Tokenizer:
        def decode(self, ids, skip_special_tokens):
            return ["[b]", "\x1b[2J\x9b", " \n"][ids[0]]

    top = TopLogprobs(
        *(np.array(x) for x in ([[0], [-1]], [[-0.5], [-np.inf]], [2, 1], [-1.0, -np.inf]))
    )
    counts = [jnp.array([n], jnp.int32) for n in (1, 1, [0], [0])]
    job = job_of(tokenizer=Tokenizer())
    run = GenerateResult("", [2, 1], "length", Metrics(*counts), top)
    Terminal().print_summary(job, run, Timings(1.0, 0.01, 1.0))
    lines = [line.split() for line in terminal.getvalue().splitlines()]
    assert ['"', '\\n"', "-1.00", "2", '"[b]"', "-0.50"] in lines
    assert ['"\\u001b[2J\ufffd"', "none", "1"] in lines


def test_the_prompt_comes_from_a_file_or_from_standard_input(capsys, pair, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_bytes(PROMPT.encode())
    options = ["--target", pair[0], "--draft", pair[1], "--json", *SHORT]
    expected = run_json(capsys, pair)["token_ids"]
    for arguments in (["--prompt-file", str(file)], ["-"], []):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
        assert main(["generate", *arguments, *options]) == 0
        assert json.loads(capsys.readouterr().out)["token_ids"] == expected


def summary_text(monkeypatch, num_drafted, num_accepted, **options):
    """What a terminal shows of a run with such counts, without colours."""
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    counts = [
        jnp.array([n], jnp.int32) for n in (3, 3 + sum(num_accepted), num_drafted, num_accepted)
    ]
    timings = Timings(1.0, 0.01, 12345.6, 0.01, 11222.3, 1.1)
    Terminal().print_summary(
        job_of(drafter=ngram_drafter(), **options),
        GenerateResult("", [1] * 999, "end_of_sequence", Metrics(*counts)),
        timings,
    )
    return re.sub(r" *\n", "\n", re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()))


def test_the_summary_fits_a_terminal_of_80_columns(monkeypatch):
    message = summary_text(monkeypatch, [3, 2], [2, 1])
    assert "12345.6 tokens/s with drafts, 11222.3 without: 1.10 times as fast\n" in message
    assert "2.00 tokens per step, 60% of drafted tokens accepted\n" in message
    assert re.search(r"position 2 +█{12}░{12} 0.50\n$", message)


def test_a_rate_of_nothing_is_null():
    def rates(num_steps, num_drafted, num_accepted):
        counts = ([num_steps], [9], [num_drafted], [num_accepted])
        metrics = Metrics(*(np.array(count, np.int32) for count in counts))
        numbers = metrics_json(GenerateResult("", [1], "length", metrics))
        names = ("mean_acceptance_length", "draft_acceptance_rate", "acceptance_rates")
        return json.loads(json.dumps([numbers[name] for name in names], allow_nan=False))

    assert rates(3, [4, 0], [1, 0]) == [3.0, 0.25, [0.25, None]]
    assert rates(3, [4, 2], [0, 0]) == [3.0, 0.0, [0.0, 0.0]]
    assert rates(0, [], []) == [None, None, []]


def test_positions_where_nothing_was_drafted_show_no_rate(monkeypatch):
    message = summary_text(monkeypatch, [3, 0], [2, 0])
    assert "position 1" in message
    assert "position 2" not in message
    assert "no tokens were drafted" in summary_text(monkeypatch, [0, 0], [0, 0])


def test_a_name_is_shown_as_it_is_written(monkeypatch):
    terminal = FakeTerminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    name = "target /tmp/[b]a[/i] · draft :smile:"
    Terminal().print_prompt(job_of(name))
    assert terminal.getvalue().startswith(name)


def test_bars_are_drawn_in_what_the_encoding_has(capsys, pair, monkeypatch):
    encoded = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(encoded, "ascii", write_through=True))
    assert run_generate(pair) == 0
    assert re.search(rb"position 1 +[#.]{24} [01]\.\d\d", encoded.getvalue())


def test_it_runs_as_a_process_within_another_folder(pair, tmp_path):
    # As `-m specjax` does, and says whether Python is spared the search for garbage as it ends.
    code = """if True:
        import atexit, gc, runpy, sys
        atexit.register(lambda: print("frozen:", gc.get_freeze_count() > 99999, file=sys.stderr))
        runpy.run_module("specjax", run_name="__main__", alter_sys=True)
    """
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, "generate", "-", "--target", pair[0]]
        + ["--draft", pair[1], *SHORT],
        input=PROMPT.encode(),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.endswith(b"\n")
    assert b"tokens/s" in run.stderr
    assert run.stderr.endswith(b"frozen: True\n")


# Text from tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["é", "a🙂b", " x  y\n", "ab\ufffdc", "👩‍👩‍👧", "한국"])
def test_a_stream_never_tears_a_character(text):
    tokenizer = byte_tokenizer()
    context = tokenizer.encode("ab ").ids
    reader = TextStream(tokenizer, context)
    pieces = [reader.feed(token) for token in tokenizer.encode(text).ids]
    assert "".join(pieces) + reader.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_are_held_until_it_is_certain(pair):
    tokenizer = byte_tokenizer()
    emoji = tokenizer.encode("🙂").ids
    ids = [*emoji[:2], *tokenizer.encode("ab").ids, *emoji[:3], 0]
    reader = TextStream(tokenizer, [])
    pieces = [reader.feed(token) for token in ids]
    assert pieces[:2] == ["", ""]
    assert "".join(pieces) + reader.flush() == tokenizer.decode(ids)


def test_a_decoder_that_strips_the_first_space_keeps_the_others():
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"▁to": 0, "▁be": 1}, "▁to"))
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    reader = TextStream(tokenizer, [0])
    assert [reader.feed(1), reader.feed(0), reader.feed(1)] == [" be", " to", " be"]


# What is refused ---------------------------------------------------------------------------------


def refusal(capsys, *arguments):
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("specjax: ")
    assert captured.err.count("\n") == 1
    return captured.err


SYNTHETIC = ["--rejection-sample-method", "synthetic"]
BLOCK = ["--rejection-sample-method", "block"]
LENIENT = ["--rule", "lenience:0.5"]
GREEDY = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["x", *SYNTHETIC, "--synthetic-acceptance-rate", "1.5"], "acceptance-rate is 1.5;.*0, 1]"),
        (["x", *SYNTHETIC, "--synthetic-acceptance-rate", "-0.1"], "acceptance-rate is -0.1"),
        (["x", *SYNTHETIC], 'method "synthetic" needs exactly one of --synthetic-acc'),
        (["x", *SYNTHETIC, "--synthetic-acceptance-rates", "1,x"], "is no list of numbers"),
        (["x", "--synthetic-acceptance-rate", "0.5"], "-rate is given, but --rejection-sample-m"),
        (
            ["x", *SYNTHETIC, "--synthetic-acceptance-rate", "1", "--draft", "none"],
            "--draft is none, so nothing is drafted; --rejection-sample-method synthetic needs a d",
        ),
        (["x", "--draft", "none", *SHORT], "--draft is none,.*; --num-speculative-tokens needs a"),
        (["x", "--draft", "none", "--step-costs", "1,2"], "--step-costs needs a draft"),
        (["x", "--draft", "none", "--draft-sample-method", "greedy"], "-method greedy needs a dra"),
        (["x", "--step-costs", "1,-1"], r"--step-costs\[1\] is -1.0; a step's time needs to be"),
        (["x", "--step-costs", ""], "'' is no list of numbers; .* like 1,1.2,1.4; and there is no"),
        (["x", *LENIENT, "--draft", "none"], "none, so nothing is .* --rule needs a draft"),
        (["x", *LENIENT, *BLOCK], "--rule is given, but --rejection-sample-method is 'block'"),
        (["x", "--rule", "strict:1"], "--rule is 'strict:1'; it needs to be like lenience:0.5 or"),
        (["x", "--rule", "typical:0.1"], "is 'typical:0.1'; it needs to be like typical:0.09,0.3"),
        (["x", "--rule", "relaxed:1.5,1"], "it needs to be like relaxed:10,0.6"),
        (["x", "--rule", "ensemble:2"], r"'ensemble:2': weight is 2.0; .* number in \(0, 1\]"),
        (["x", "--num-speculative-tokens", "0"], "--num-speculative-tokens is 0"),
        (["x", "--draft-sample-method", "gumbel"], '"probabilistic"'),
        (["x", "--temperature", "-1"], "--temperature is -1.0"),
        (["x", "--temperature", "nan"], "--temperature is nan"),
        (["x", "--temperature", "inf"], "--temperature is inf"),
        (["x", "--temperature", "1e39"], r"--temperature is 1e\+39.*finite in float32"),
        (["x", "--temperature", "warm"], "invalid float value"),
        (["x", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["x", "--seed", "-1"], "--seed is -1"),
        (["x", "--top-k", "-1"], r"--top-k is -1; it needs to be in \[0, 2147483647\]"),
        (["x", "--top-p", "1.5"], r"--top-p is 1.5; it needs to be in \[0, 1\]"),
        (["x", "--min-p", "nan"], "--min-p is nan"),
        (["x", "--repetition-penalty", "0"], "--repetition-penalty is 0.0"),
        (["x", "--frequency-penalty", "inf"], "--frequency-penalty is inf"),
        (["x", "--logprobs", "-1"], "--logprobs is -1"),
        (
            ["x", "--stop", "a", "--stop", ""],
            "--stop is .'a', ''.; it needs strings that are",
        ),
        (["x", "--quiet", "--compare"], "--quiet prints the text alone, and --compare asks for m"),
        (["x", "--quiet", "--logprobs", "1"], "and --logprobs asks for more; give one"),
        (["x", "--logprobs", "99999"], "--logprobs is 99999; the target has"),
        (["x", "--seed", str(2**32)], "--seed is 4294967296"),
        (["x", "--max-new-tokens", "9" * 30], "at most 1024"),
        (["x", *SYNTHETIC, "--synthetic-acceptance-rate", "nan"], "acceptance-rate is nan"),
        (["x", "--sead", "1"], "unrecognized arguments: --sead"),
        (["x", "--mesh", "0"], "--mesh is 0; it needs to be >= 1"),
        (["x", "--mesh", "9"], r"JAX sees 8 devices here. JAX_NUM_CPU_DEVICES=9 makes so many"),
        (["x", "--replicate-draft"], "--replicate-draft is given without --mesh"),
        (["x", "--prompt-file", "y"], "one of them"),
        (["--prompt-file", "/no/such/file"], "/no/such/file cannot be read: No such file"),
        (["--prompt-file", "/"], "/ cannot be read: Is a directory"),
        (
            ["--prompt-file", "/dev/zero"],
            "/dev/zero has more than 16777216 bytes; it needs to have",
        ),
        (
            ["x", "--step-costs", "/dev/zero"],
            "/dev/zero has more than 16777216 bytes; .* 16777216; ",
        ),
        (["x", "--json-schema", "/dev/zero"], "/dev/zero has more than 16777216 bytes"),
        (["--prompt-file", os.devnull], f"{os.devnull} is empty"),
        (["x", "--target", "/no/such/folder"], "/no/such/folder is not a folder"),
        (["x", "--draft", "/no/such/folder"], "/no/such/folder is not a folder"),
        # As a shell gives a variable that is not set: it must not mean the default.
        (["x", "--target", ""], "the name of the folder is empty; it needs to be that of a"),
        (["x", "--draft", ""], "the name of the folder is empty"),
        ([""], "the prompt is empty"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused_in_a_sentence(capsys, arguments, sentence):
    assert re.search(sentence, refusal(capsys, *arguments))


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "there is not enough memory; take a smaller model, file or batch."),
        (
            MemoryError("Unable to allocate 8 GiB"),
            "there is not enough memory (Unable to allocate 8 GiB); take a smaller model, file or "
            "batch.",
        ),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            "there is not enough memory ([Errno 12] Cannot allocate memory); take a smaller model, "
            "file or batch.",
        ),
        (MemoryError("a slot takes 3 GiB; make fewer."), "a slot takes 3 GiB; make fewer."),
        (RecursionError("in comparison"), "a file is nested too deeply; it needs fewer levels."),
    ],
    ids=repr,
)
def test_memory_or_levels_that_end_while_files_are_read_are_a_sentence(
    error, sentence, capsys, monkeypatch
):
    def fail(*_):
        raise error

    monkeypatch.setattr("specjax.models.load_config", fail)
    assert refusal(capsys, "x") == f"specjax: {sentence}\n"


def test_a_sentence_of_megabytes_loses_its_middle(capsys):
    assert streams.print_error(ValueError("a " * 10**6 + "end."), 2) == 2
    words = capsys.readouterr().err
    assert len(words) < 4100
    assert words.startswith("specjax: a a a a")
    assert words.endswith("a a end.\n")


def test_step_costs_that_are_nested_too_deeply_are_refused(capsys, tmp_path):
    (tmp_path / "costs.json").write_text("[" * 200_000)
    message = refusal(capsys, "x", "--step-costs", str(tmp_path / "costs.json"))
    assert "costs.json is no JSON object with step_costs" in message


def test_a_prompt_that_is_empty_too_long_or_no_text_is_refused(capsys, pair, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert "standard input is empty" in refusal(capsys, "-", "--target", pair[0])
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input is empty" in refusal(capsys, "-", "--target", pair[0])
    sys.stdin.close()
    monkeypatch.setattr(sys, "stdin", FakeTerminal())
    assert "there is no prompt" in refusal(capsys, "--target", pair[0])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(capsys, "--prompt-file", str(tmp_path / "bytes"))
    (tmp_path / "bytes").write_bytes("ab".encode("utf-16-le"))
    assert "bytes holds NUL characters; it" in refusal(capsys, "--prompt-file", f"{tmp_path}/bytes")
    long = refusal(capsys, "x" * 100, "--target", pair[0], "--max-new-tokens", "29")
    assert "has 100 tokens and --max-new-tokens is 29" in long
    assert "at most 128" in long


class EndlessStream(io.RawIOBase):
    """A stream that goes on for longer than any prompt; one that is read without end fails."""

    num_bytes = 0

    def readable(self):
        return True

    def readinto(self, buffer):
        self.num_bytes += len(buffer)
        assert self.num_bytes < 2**26
        buffer[:] = b"a" * len(buffer)
        return len(buffer)


def test_a_prompt_without_end_is_read_up_to_the_limit(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(EndlessStream())))
    assert "standard input has more than 16777216 bytes; it needs to have" in refusal(capsys, "-")
    large = tmp_path / "large"
    large.touch()
    os.truncate(large, 10**12)
    message = f"{large} has 1000000000000 bytes; it needs to have at most 16777216."
    assert message in refusal(capsys, "--prompt-file", str(large))


def test_a_file_too_large_for_what_it_is_called_is_not_read(capsys, tmp_path):
    folder = pathlib.Path(write_model(tmp_path / "model", TARGET, 0))
    (folder / "model.safetensors").unlink()

    def refuse_huge(name):
        (folder / name).touch()
        size = (folder / name).stat().st_size
        os.truncate(folder / name, 10**12)
        sentence = refusal(capsys, "x", "--chat", "--target", str(folder), *SHORT)
        os.truncate(folder / name, size)
        return sentence

    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        assert f"{folder / name} has 1000000000000 bytes; it needs to have" in refuse_huge(name)
        # A template or settings that are empty are none.
        if not (folder / name).stat().st_size:
            (folder / name).unlink()
    (folder / "chat_template.jinja").write_text("x")
    index = "model.safetensors.index.json"
    assert f"{folder / index} has 1000000000000 bytes; it needs to have" in refuse_huge(index)


def test_a_draft_of_another_vocabulary_is_refused(capsys, pair, tmp_path):
    write_model(tmp_path / "larger", dataclasses.replace(TARGET, vocab_size=261), 0)
    other = refusal(capsys, "x", "--target", pair[0], "--draft", str(tmp_path / "larger"), *SHORT)
    assert "different vocabularies (261 and 260 tokens)" in other
    renamed = pathlib.Path(write_model(tmp_path / "renamed", TARGET, 0)) / "tokenizer.json"
    renamed.write_text(renamed.read_text().replace("<|end|>", "<|stop|>"))
    assert "different vocabularies" in refusal(
        capsys, "x", "--target", pair[0], "--draft", str(renamed.parent), *SHORT
    )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [None, b"", b"no such thing", b"{}"])
def test_a_bad_folder_is_refused(capsys, tmp_path, name, content):
    folder = pathlib.Path(write_model(tmp_path / "model", TARGET, 0))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    message = refusal(capsys, "x", "--target", str(folder), "--draft", "none", *PLAIN)
    assert str(folder) in message


def test_a_prompt_that_the_tokenizer_cannot_read_is_refused(capsys, tmp_path):
    folder = pathlib.Path(write_model(tmp_path / "model", TARGET, 0))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "[UNK]"))
    words.save(str(folder / "tokenizer.json"))
    message = refusal(capsys, "x", "--target", str(folder))
    assert "tokenizer cannot read the prompt" in message


# A pattern with so many ways to match that the tokenizer's library gives up, and panics.
PANICS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def test_a_tokenizer_that_panics_is_a_sentence_and_leaves_the_other_lines_alone(capfd, tmp_path):
    folder = pathlib.Path(write_model(tmp_path / "model", TARGET, 0))
    fields = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(fields | {"pre_tokenizer": PANICS}))
    prompt = "a" * 40 + "!"
    assert main(["generate", prompt, "--target", str(folder), "--draft", "none"]) == 2
    assert "the target's tokenizer cannot read the prompt" in capfd.readouterr().err
    lines, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in (prompt, "b")))
    command = ["generate", "--input", str(lines), "--output", str(output), "--skip-malformed"]
    command += ["--num-slots", "1", "--max-new-tokens", "2", "--target", str(folder)]
    assert main([*command, "--draft", "none"]) == 0
    assert (
        "1 left out. line 1: the target's tokenizer cannot read the prompt"
        in capfd.readouterr().err
    )
    assert [json.loads(line)["line"] for line in output.read_text().splitlines()] == [2]


def test_a_panic_anywhere_is_a_sentence(capsys, monkeypatch):
    class Panic(BaseException):
        pass

    def panic(*_):
        raise Panic("index out of bounds")

    monkeypatch.setattr("specjax.models.load_config", panic)
    assert main(["generate", "x"]) == 1
    assert capsys.readouterr().err == "specjax: Panic: index out of bounds\n"


def test_what_can_be_refused_is_refused_before_weights_are_read(capsys, pair, monkeypatch):
    monkeypatch.setattr("specjax.models.load", None)
    assert "at most 128" in refusal(capsys, "x" * 200, "--target", pair[0])
    assert "different vocabularies" in refusal(
        capsys, "x", "--target", pair[0], "--draft", EMBEDDED, *SHORT
    )


def test_without_the_extra_the_sentence_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flax", None)
    assert "flax is missing; pip install 'specjax[flax]'" in refusal(capsys, "x")


def test_invalid_logits_and_an_interruption_have_their_own_codes(capsys, tmp_path, monkeypatch):
    broken = write_model(tmp_path / "broken", TARGET, 0, scale=float("nan"))
    assert main(["generate", "x", "--target", broken, "--draft", "none", "--json", *PLAIN]) == 1
    captured = capsys.readouterr()
    assert json.loads(captured.out)["finish"] == "invalid_logits"
    assert captured.err == "specjax: the target's logits turned invalid.\n"

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("specjax.cli.command._read_command", interrupt)
    assert main(["generate", "x"]) == 130
    assert capsys.readouterr() == ("", "")


class FailingOutput(io.StringIO):
    """Standard output whose reader is gone, or on a full disk."""

    def __init__(self, error, file):
        super().__init__()
        self.error, self.file = error, file

    def fileno(self):
        return self.file.fileno()

    def flush(self):
        if self.getvalue():
            raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (
            OSError(28, "No space left"),
            1,
            "specjax: the output cannot be written: No space left.\n",
        ),
    ],
)
def test_output_that_cannot_be_written_ends_without_a_traceback(
    capsys, pair, tmp_path, monkeypatch, error, code, message
):
    with (tmp_path / "out").open("w") as file:
        for options in (["--json"], []):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", FailingOutput(error, file))
                assert run_generate(pair, *options) == code
            assert capsys.readouterr().err == message


def test_a_closed_standard_error_changes_no_refusal_and_ends_a_text_without_a_traceback(
    capsys, pair, monkeypatch
):
    # The text is written, its summary is not.
    for call, code in [
        (lambda: main(["generate", ""]), 2),
        (lambda: run_generate(pair), 141),
    ]:
        reader, writer = os.pipe()
        os.close(reader)
        with open(writer, "w") as unread, monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", unread)
            assert call() == code
    assert capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["generate", "x"], ["sweep"], ["--help"]], ids=str)
def test_closed_standard_output_is_refused_before_anything_is_read(capsys, monkeypatch, arguments):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        patch.setattr("specjax.cli.command._read_command", None)
        assert main(arguments) == 1
    message = "specjax: standard output is closed; the output cannot be written.\n"
    assert capsys.readouterr() == ("", message)


# What pip makes of the entry point, and before its end a statement of a test.
ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["specjax"]
SCRIPT = "import sys; from {} import {} as main".format(*ENTRY.split(":"))
SCRIPT += "; code = main(); {}; sys.exit(code)"


# A background job of a shell ignores SIGINT, and so do its processes: Python's handler is put back.
HANDLER = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def run_script(program, folder, *, streams="", path=()):
    """Runs `specjax generate` as its script does, in a process that can be interrupted."""
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -c "$1" generate {streams}', sys.executable, HANDLER + program],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )


def test_a_process_without_standard_streams_opens_nothing_in_their_place(tmp_path):
    statement = "import os; same = [os.path.sameopenfile(n, 0) for n in (0, 1)]; assert all(same)"
    run = run_script(SCRIPT.format(statement), tmp_path, streams="<&- >&-")
    assert run.stderr == b"specjax: standard output is closed; the output cannot be written.\n"
    assert run.returncode == 1


def test_an_interruption_ends_the_script_without_a_word_whenever_it_comes(tmp_path):
    # While JAX is imported, and while the command runs.
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "jax.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    )
    during_import = run_script(SCRIPT.format("pass"), tmp_path, path=[tmp_path / "fake"])
    kill = "def kill(*_): import os, signal; os.kill(os.getpid(), signal.SIGINT)"
    during_run = run_script(
        f"{kill}\nfrom specjax.cli import command; command._read_command = kill; "
        + SCRIPT.format("pass"),
        tmp_path,
    )
    for run in (during_import, during_run):
        assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"")


def test_a_backend_that_fails_is_a_sentence(capsys, pair, monkeypatch):
    def fail(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nallocation 1\n")

    monkeypatch.setattr("specjax.cli.run_generate.stream_text", fail)
    assert run_generate(pair, "--json") == 1
    assert capsys.readouterr() == ("", "specjax: RESOURCE_EXHAUSTED: Out of memory.\n")


def test_a_help_text_that_cannot_be_written_is_no_success(capsys, monkeypatch):
    # Unbuffered, the write fails and not the flush.
    with open("/dev/full", "wb", buffering=0) as file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(file, write_through=True))
        for options in (["--version"], ["--help"], ["generate", "--help"]):
            assert main(options) == 1
    assert capsys.readouterr().err.count("the output cannot be written") == 3


def test_version_and_help_are_printed(capsys):
    version = f"specjax {specjax.__version__}, tested with jax up to {NEWEST_TESTED_JAX}\n"
    for option, words in [("--version", version), ("--help", "usage: specjax")]:
        with pytest.raises(SystemExit, match="0"):
            main([option])
        assert capsys.readouterr().out.startswith(words)
    for command, draft in [("generate", "|ngram|none]"), ("sweep", "|ngram]")]:
        with pytest.raises(SystemExit, match="0"):
            main([command, "--help"])
        assert draft in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("lenience:0.5", rules.lenience(0.5)),
        ("typical:0.09,0.3", rules.typical_acceptance(0.09, 0.3)),
        ("relaxed:10,0.6", rules.relaxed(10, 0.6)),
        ("ensemble:0.5", rules.ensemble(0.5)),
    ],
)
def test_the_command_offers_rules_and_says_that_they_are_not_exact(monkeypatch, text, rule):
    options, config = parse_options(["generate", "x", "--rule", text])
    assert config == SpeculativeConfig("auto", rule=rule)
    summary = summary_text(monkeypatch, [3, 2], [2, 1], config=config, rule=options.rule)
    assert f"verification  {text}, not exact: the text does not follow the target's" in summary


@pytest.mark.parametrize(
    ("config", "options", "exact"),
    [
        ({"rejection_sample_method": "block"}, {}, True),
        ({"rejection_sample_method": "coupled"}, {}, True),
        ({"rule": rules.lenience(0.5)}, {}, False),
        ({"rule": rules.lenience(1)}, {}, True),
        ({"rule": rules.lenience(0.5)}, GREEDY, True),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1}, {}, False),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rate": 1}, GREEDY, False),
    ],
)
def test_exact_is_what_follows_the_target(config, options, exact):
    job = job_of(drafter=ngram_drafter(), config=SpeculativeConfig(**config), **options)
    assert is_exact(job.drafter, job.pair.config, job.options.temperature) is exact
    assert is_exact(None, job.pair.config, job.options.temperature)


@pytest.mark.once
def test_each_way_to_verify_is_named_with_whether_it_is_exact(capsys, pair):
    # Colder, the pair agrees on hardly anything.
    hot = ("--temperature", "20")
    plain, coupled, block, lenient = (
        run_json(capsys, pair, *hot, *options)
        for options in (
            ["--draft", "none"],
            ["--rejection-sample-method", "coupled"],
            BLOCK,
            ["--rule", "lenience:0.001"],
        )
    )
    assert coupled["token_ids"] == plain["token_ids"]
    methods = [(x["rejection_sample_method"], x["rule"], x["exact"]) for x in (coupled, block)]
    assert methods == [("coupled", None, True), ("block", None, True)]
    assert (lenient["rule"], lenient["exact"]) == ("lenience:0.001", False)
    rates = [x["metrics"]["draft_acceptance_rate"] for x in (block, lenient)]
    assert rates[1] > rates[0] + 0.2
    assert 0 < coupled["metrics"]["draft_acceptance_rate"] < 1


def test_the_command_offers_coupled_verification():
    _, config = parse_options(["generate", "x", "--rejection-sample-method", "coupled"])
    assert config == SpeculativeConfig("auto", rejection_sample_method="coupled")
