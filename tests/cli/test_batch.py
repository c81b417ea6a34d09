"""`specjax generate --input --output`: a file of prompts, whole lines, and runs that go on."""

import argparse
import contextlib
import datetime
import errno
import json
import os
import pathlib
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import pytest
from test_command import PROMPT, SHORT, TARGET, byte_tokenizer, write_model
from test_files import limit_file_size

from specjax.cli import main
from specjax.cli.arguments import SAMPLING_OPTIONS, parse_options
from specjax.cli.batch import output_file, run_batch
from specjax.cli.batch.output_file import OutputFile
from specjax.cli.batch.read_lines import _NUMBERS, PromptLine, read_lines
from specjax.cli.model_pair import ModelPair, read_grammar, read_pair
from specjax.config import SpeculativeConfig
from specjax.engine.submission import _check_key

pytestmark = pytest.mark.lenient

DATETIME = datetime.datetime
ROOT = pathlib.Path(__file__).parents[2]
LINES = [
    {"prompt": PROMPT, "seed": 5, "id": "a"},
    {"prompt": "ab", "temperature": 0, "max_new_tokens": 9},
    {"prompt": "bé", "top_p": 0.7, "id": 7},
    {"prompt_token_ids": [1, 2, 3], "max_new_tokens": 3, "top_p": 0.9},
    {"prompt_token_ids": [260]},
    {"messages": [{"role": "user", "content": "ab"}], "seed": 1},
    {"prompt": PROMPT, "max_new_tokens": 500},
    {"prompt": "acab"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = write_model(folder / "target", TARGET, 0)
    (folder / "target" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    return target, write_model(folder / "draft", TARGET, 1)


@pytest.fixture
def generate(folders, tmp_path, monkeypatch):
    """Runs the command on lines, which may be text; returns its code and its lines by number."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    target, draft = folders

    def run(lines, *options, output="out.jsonl"):
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "in.jsonl").write_text("\n".join(text))
        path = tmp_path / output
        files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(path), "--num-slots", "3"]
        files += ["--logprobs", "2"]
        code = main(["generate", "--target", target, "--draft", draft, *files, *SHORT, *options])
        if code:
            return code, {}
        found = map(json.loads, path.read_text().splitlines())
        return code, {line["line"]: line for line in found}

    return run


def test_the_queue_has_room_for_all_that_is_submitted_at_once(monkeypatch):
    monkeypatch.setattr(run_batch, "Engine", lambda *models, **options: options["max_waiting"])
    fields = dict.fromkeys(("logprobs", *SAMPLING_OPTIONS)) | {"num_slots": 4096}
    config = types.SimpleNamespace(max_position_embeddings=512)
    options = argparse.Namespace(**fields)
    pair = ModelPair(options, None, "", "", "", config, None)
    job = run_batch.BatchJob(pair, None, None, [], None, {})
    assert run_batch._make_engine(job) == 2 * 4096


def test_lines_of_the_most_new_tokens_are_decoded_first(monkeypatch):
    """A line without a number has the option's; several answers count together."""
    decoded = []
    monkeypatch.setattr(run_batch, "_make_engine", lambda job: None)
    monkeypatch.setattr(run_batch, "_decode", lambda job, engine, lines, *_: decoded.extend(lines))
    fields = [{"max_new_tokens": 3}, {}, {"max_new_tokens": 90}, {"max_new_tokens": 3}, {}]
    lines = [PromptLine(i, None, [1], None, values) for i, values in enumerate(fields, start=1)]
    lines += [lines[1]._replace(number=6, later_turns=("a", "b"))]
    pair = ModelPair(argparse.Namespace(max_new_tokens=20), None, "", "", "", TARGET, None)
    job = run_batch.BatchJob(pair, None, None, lines, types.SimpleNamespace(done={5: "a"}), {})
    nothing = contextlib.nullcontext()
    terminal = types.SimpleNamespace(spinner=lambda _: nothing, progress_bar=lambda _: nothing)
    run_batch.run_batch(job, terminal)
    assert [line.number for line in decoded] == [3, 6, 2, 1, 4]


def test_a_refused_length_names_the_targets_limit_and_not_that_of_the_other_lines():
    error = "what the engine says; its max_length is 128."
    values = {"token_ids": [], "text": "", "metrics": None, "error": error}
    request = types.SimpleNamespace(finish_reason="refused", **values)
    config = types.SimpleNamespace(max_position_embeddings=500)
    options = argparse.Namespace(max_new_tokens=20, temperature=1.0, logprobs=None)
    pair = ModelPair(options, SpeculativeConfig(), "", "", "", config, None)
    job = run_batch.BatchJob(pair, None, None, [], None, {1: "a"})
    long = (
        "the prompt has 2 tokens and may get 499 new ones; together they may be at most 500, the "
        "target's max_position_embeddings."
    )
    for num_new, sentence in ((499, long), (498, error)):
        line = PromptLine(1, None, [1, 2], None, {"max_new_tokens": num_new})
        assert run_batch._output_of(job, line, request)["error"] == sentence


def test_keys_of_lines_do_not_depend_on_what_jax_makes_by_default():
    def submit(ids, key, seed, **options):
        return _check_key(key, seed)

    engine = types.SimpleNamespace(submit=submit)
    options = argparse.Namespace(max_new_tokens=20, temperature=1.0, stop=(), seed=3)
    pair = ModelPair(options, None, "", "", "", TARGET, None)
    job = run_batch.BatchJob(pair, None, None, [], None, {})

    def key_of(values):
        return run_batch._submit(job, engine, PromptLine(2, None, [1], None, values))

    high = jax.random.wrap_key_data(jnp.array([2**32 - 1, 7], jnp.uint32))
    wanted = jax.random.key(5), high, jax.random.fold_in(jax.random.key(3), 2)
    with jax.default_prng_impl("rbg"):
        keys = key_of({"seed": 5}), key_of({"seed": 7 - 2**32}), key_of({})
    assert all(map(jnp.array_equal, keys, wanted))


def test_a_lines_seed_may_have_64_bits_with_a_sign():
    seeds = [-(2**63), -1, 2**32, 2**53 + 1, 2**63 - 1]
    data = "\n".join(json.dumps({"prompt": "a", "seed": seed}) for seed in seeds)
    lines, problems = read_lines(data.encode(), lambda _: [1])
    assert not problems
    assert [line.values["seed"] for line in lines] == seeds


@pytest.mark.once
def test_a_file_gives_the_texts_of_its_lines_and_goes_on_wherever_it_was_cut(
    generate, folders, tmp_path, capsys
):
    code, whole = generate(LINES)
    assert code == 0
    assert sorted(whole) == list(range(1, 9))
    assert "tokens per step" in capsys.readouterr().err
    assert [whole[n]["id"] for n in (1, 2, 3)] == ["a", None, 7]
    assert [len(whole[n]["token_ids"]) for n in (1, 2, 4)] == [20, 9, 3]
    assert {n: whole[n]["finish_reason"] for n in (1, 5, 7)} == {
        1: "length",
        5: "refused",
        7: "refused",
    }
    assert "token 260" in whole[5]["error"]
    assert "500 new ones; together they may be at most 128" in whole[7]["error"]
    # The line's own seed is that of the command.
    alone = ["generate", PROMPT, "--target", folders[0], "--draft", folders[1], *SHORT]
    assert main([*alone, "--seed", "5", "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert (same["text"], same["token_ids"]) == (whole[1]["text"], whole[1]["token_ids"])
    # A file that was cut anywhere, as by SIGKILL, goes on to the same lines.
    path = tmp_path / "out.jsonl"
    data = path.read_bytes()
    for size in (0, 1, len(data) // 3, len(data) - 1, len(data)):
        path.write_bytes(data[:size])
        assert generate(LINES) == (0, whole)
    assert "has every line already" in capsys.readouterr().err
    # Keys are by line: the last prompt's text does not depend on what is above it. It sets its own
    # stop strings, none, and another line has those of the options.
    text = whole[1]["text"]
    lines = ["", *LINES[1:7], LINES[7] | {"stop": []}, LINES[0]]
    found = generate(lines, "--stop", text[5:7], output="b.jsonl")[1]
    assert found[8] == whole[8]
    assert found[9]["text"] == text[: text.index(text[5:7])]
    assert found[9]["finish_reason"] == "stop_string"
    for change in ([{"prompt": "other"}, *LINES[1:]], LINES):
        options = ["--seed", "1"] if change is LINES else []
        assert generate(change, *options)[0] == 2
        assert "line 1 of another prompt or with other options" in capsys.readouterr().err
    assert path.read_bytes() == data


@pytest.mark.once
def test_malformed_lines_are_named_by_number_and_refused_or_left_out(generate, capsys, tmp_path):
    lines = [LINES[3], "{", '{"prompt": ""}', *["[]"] * 4, LINES[3]]
    assert generate(lines) == (2, {})
    words = capsys.readouterr().err
    assert "in.jsonl: line 2: it is no JSON. line 3: prompt is ''" in words
    assert "line 6: it is no JSON object. And 1 more. --skip-malformed leaves" in words
    code, found = generate(lines, "--skip-malformed")
    assert (code, sorted(found)) == (0, [1, 8])
    assert [len(token["top"]) for token in found[1]["logprobs"]] == [2, 2, 2]
    assert "6 left out. line 2" in capsys.readouterr().err
    for report in ("a report\n", "a report"):
        (tmp_path / "out.jsonl").write_text(report)
        assert generate(lines[:1])[0] == 2
        assert "line 1 that is no output" in capsys.readouterr().err
        assert (tmp_path / "out.jsonl").read_text() == report


def test_prompts_that_begin_as_the_tokenizer_would_begin_them_give_one_warning(
    tmp_path, monkeypatch
):
    warned = []
    monkeypatch.setattr(run_batch, "encode_text", lambda *text, chat: ([1], f"{text[1]} begins"))
    monkeypatch.setattr(run_batch, "load_pair", lambda pair: (None, None))
    monkeypatch.setattr(run_batch, "_hash", lambda *what: "")
    (tmp_path / "in").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    files = {"input": str(tmp_path / "in"), "output": str(tmp_path / "out")}
    absent = dict.fromkeys(("json_schema", "min_tokens", "fields", "num_slots"))
    for name in ("_capacity", "report_memory"):
        monkeypatch.setattr(run_batch, name, lambda *what, **size: 0)
    options = argparse.Namespace(chat=False, **absent, **files)
    pair = ModelPair(options, None, "", "", "", None, None)
    terminal = types.SimpleNamespace(print_warning=warned.append)
    with contextlib.ExitStack() as stack:
        job = run_batch.read_batch(pair, terminal, stack)
    assert [line.token_ids for line in job.lines] == [[1], [1]]
    assert warned == [f"{tmp_path / 'in'}, 2 of its lines: a begins"]


def test_the_lines_that_the_documentation_shows_are_read():
    section = (ROOT / "docs" / "command.md").read_text().split("## Files of prompts")[1]
    lines, problems = read_lines(section.split("```json\n")[1].split("```")[0].encode(), str)
    assert problems == []
    assert [line.number for line in lines] == [1, 2, 3]
    assert lines[0].stop == ("\n\n",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "it has no prompt; it needs one of"),
        ('{"prompt": "a", "messages": []}', "it has prompt and messages"),
        ('{"prompt": "a", "topk": 1}', "topk is no field"),
        ('{"prompt": "a", "top_k": 1.5}', "top_k is 1.5; it needs an integer"),
        ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is True"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is nan; it needs a number"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "a", "temperature": 1e400}', "temperature is inf; it needs a number"),
        ('{"prompt": "a", "seed": 9223372036854775808}', "seed is 9223372036854775808"),
        ('{"prompt": "a", "seed": -9223372036854775809}', "seed is -9223372036854775809"),
        *((f'{{"prompt": "a", "{name}": {10**401}}}', f"{name} is 1000") for name in _NUMBERS),
        ('{"prompt": "a", "stop": ["b", ""]}', "stop is"),
        ('{"prompt": "a", "id": [1]}', "id is"),
        ('{"prompt_token_ids": [1, true]}', "no list of integers"),
        ('{"prompt_token_ids": [2147483648]}', "beyond 32 bits"),
        ('{"messages": {}}', "messages is no list"),
        (b"\xff", "no JSON"),
        (json.dumps({"prompt": "a", "a" * 10**6: 1}), "aaa is no field"),
        (json.dumps({"prompt": "a", "id": ["a" * 10**6] * 9}), "id is ['aaa"),
        (json.dumps({"prompt": "a", "seed": "1" * 10**6}), "seed is '111"),
        (json.dumps({"prompt": ["a" * 10**6]}), "prompt is ['aaa"),
        (json.dumps({"prompt": "a", "stop": {"a" * 10**6: 1}}), "stop is {'aaa"),
        ("[" * 200_000, "it is nested too deeply"),
    ],
)
def test_a_malformed_line_is_a_sentence(line, words):
    data = line if isinstance(line, bytes) else line.encode()
    lines, problems = read_lines(data + b'\n{"prompt": "a"}', list)
    assert [line.number for line in lines] == [2]
    assert len(problems) == 1
    assert problems[0].startswith("line 1: ")
    assert words in problems[0]
    assert len(problems[0]) < 400


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "[]", "[" * 200_000])
def test_an_output_whose_line_has_no_number_is_refused(tmp_path, number):
    path = tmp_path / "out.jsonl"
    path.write_text(
        f'{{"line": 1, "request_hash": "a"}}\n{{"line": {number}, "request_hash": "b"}}\n'
    )
    with pytest.raises(ValueError, match="has a line 2 that is no output"):
        OutputFile(path)


def test_a_schema_that_is_nested_too_deeply_or_has_too_long_an_integer_is_refused(tmp_path):
    tokenizer, path = byte_tokenizer(), tmp_path / "schema.json"
    options = argparse.Namespace(json_schema=str(path))
    pair = ModelPair(options, None, "", "f", "", TARGET, tokenizer)
    deep = '{"type": "array", "items": ' * 300 + '{"const": 1}' + "}" * 300
    for text in ("[" * 200_000, deep):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"nested .*; it needs fewer levels"):
            read_grammar(pair)
    path.write_text('{"const": 1' + "0" * 5000 + "}")
    with pytest.raises(ValueError, match=r"^--json-schema .*schema.json is not JSON: Exceeds"):
        read_grammar(pair)


def test_an_output_that_cannot_be_written_is_refused_by_its_path_before_weights_are_read(
    generate, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("specjax.models.load", None)
    (tmp_path / "file").touch()
    reasons = {"no/a": errno.ENOENT, "file/a": errno.ENOTDIR, "a" * 300: errno.ENAMETOOLONG}
    for name, number in reasons.items():
        assert generate(LINES, output=name)[0] == 2
        path, reason = tmp_path / name, os.strerror(number)
        assert (
            f"--output is {path}, which cannot be written: {reason}.\n" in capsys.readouterr().err
        )
    # What is refused for another reason leaves no file.
    assert generate(["{"])[0] == 2
    assert not (tmp_path / "out.jsonl").exists()


def test_more_logprobs_than_the_target_has_tokens_are_refused_before_weights_are_read(
    generate, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("specjax.models.load", None)
    assert generate(LINES, "--logprobs", "261")[0] == 2
    assert "--logprobs is 261; the target has 260 tokens." in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_has_no_end_or_is_a_folder_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(output_file, "read_stream", None)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, os.devnull):
        with pytest.raises(ValueError, match=f"--output is {path}, which is no regular file"):
            OutputFile(path)


def test_a_line_that_finds_no_room_is_a_sentence_and_leaves_whole_lines(tmp_path):
    path, line = tmp_path / "out.jsonl", {"line": 1, "request_hash": "a"}
    with OutputFile(path) as file:
        file.prepare()
        file.append(line)
        before = path.read_bytes()
        for room in (10, 0):  # A part of the next line, then nothing of it.
            with (
                limit_file_size(len(before) + room),
                pytest.raises(ValueError, match=f"--output is {path}, which cannot be written: "),
            ):
                file.append(line)
            assert path.read_bytes() == before


def test_an_output_to_which_another_run_writes_is_refused_until_that_ends(
    generate, capsys, tmp_path, monkeypatch
):
    path, lines = tmp_path / "out.jsonl", '{"line": 1, "request_hash": "a"}\n'
    path.write_text(lines + '{"line": 2, "requ')
    words = f"--output is {path}, to which another run writes; wait for its end, or name another."
    with OutputFile(path) as first:
        for prepared in (False, True):
            if prepared:
                first.prepare()
                first.append({"line": 2, "request_hash": "b"})
            before = path.read_bytes()
            with pytest.raises(ValueError, match=words):
                OutputFile(path)
            monkeypatch.setattr("specjax.models.load", None)
            assert generate([{"prompt": "ab"}])[0] == 2
            assert capsys.readouterr().err == f"specjax: {words}\n"
            assert path.read_bytes() == before
    with OutputFile(path) as second:
        assert second.done == {1: "a", 2: "b"}


def test_of_two_runs_that_make_one_output_the_later_is_refused(tmp_path):
    """Neither found a file to lock; the first may have ended when the second makes it."""
    path = tmp_path / "out.jsonl"
    with OutputFile(path) as first, OutputFile(path) as second, OutputFile(path) as third:
        first.prepare()
        with pytest.raises(ValueError, match="to which another run writes"):
            second.prepare()
        first.append({"line": 1, "request_hash": "a"})
        first.close()
        with pytest.raises(ValueError, match="to which another run writes"):
            third.prepare()
    assert path.read_text() == '{"line": 1, "request_hash": "a"}\n'


def test_a_run_that_is_refused_frees_its_output(generate, tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"line": 1, "request_hash": "a"}\n')
    assert generate([{"prompt": "ab"}])[0] == 2
    OutputFile(path).close()
    path.write_text("a report\n")
    for _ in range(2):
        with pytest.raises(ValueError, match="line 1 that is no output"):
            OutputFile(path)


def test_where_files_cannot_be_locked_the_output_is_written_with_a_warning(
    generate, capsys, tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(output_file.fcntl, "flock", refuse)
    assert generate([" "]) == (0, {})
    words = f"warning: {tmp_path / 'out.jsonl'} cannot be locked here; start no other run"
    assert words in capsys.readouterr().err


def test_a_file_of_conversations_goes_on_on_another_day_with_the_date_of_the_first_run(
    folders, tmp_path, monkeypatch
):
    days = {1: datetime.datetime(2026, 2, 3, 4, 5, 6, 789), 2: datetime.datetime(2027, 8, 9)}
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_bytes(pathlib.Path(folders[0], name).read_bytes())
    template = "{{ strftime_now('%d %b %Y %H:%M:%S') }} {{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "in").write_text(
        '{"prompt": "ab"}\n{"messages": [{"role": "user", "content": "ac"}]}\n'
    )
    (tmp_path / "plain").write_text('{"prompt": "ab"}\n')
    monkeypatch.setattr(run_batch, "load_pair", lambda pair: (None, None))
    values = {"token_ids": [], "text": "", "metrics": None, "error": None}
    request = types.SimpleNamespace(finish_reason="length", **values)
    texts = []

    def read(day, output, lines="in"):
        now = types.SimpleNamespace(now=lambda: days[day], fromisoformat=DATETIME.fromisoformat)
        monkeypatch.setattr(run_batch, "datetime", types.SimpleNamespace(datetime=now))
        files = ["--input", str(tmp_path / lines), "--output", str(tmp_path / output)]
        pair = read_pair(*parse_options(["generate", "--target", str(tmp_path), *files]))
        with contextlib.ExitStack() as exit_stack:
            job = run_batch.read_batch(pair, None, exit_stack)
            texts.append(pair.tokenizer.decode(job.lines[-1].token_ids))
            if not job.output.done:
                job.output.append(run_batch._output_of(job, job.lines[0], request))
        return job

    first, later, anew = read(1, "a"), read(2, "a"), read(2, "b")
    assert texts == ["03 Feb 2026 04:05:06 ac"] * 2 + ["09 Aug 2027 00:00:00 ac"]
    # Also the line without a conversation, which may be all that was written.
    assert (first.date, later.date, anew.date) == ("2026-02-03T04:05:06",) * 2 + (
        "2027-08-09T00:00:00",
    )
    assert later.hashes == first.hashes != anew.hashes
    # Where no template asks for it there is no date, and a date that is none is no output.
    assert read(1, "c", "plain").date is None
    (tmp_path / "d").write_text('{"line": 1, "request_hash": "a", "date": "yesterday"}\n')
    with pytest.raises(ValueError, match="line 1 that is no output"):
        OutputFile(tmp_path / "d")


def test_an_input_that_has_no_end_is_refused_after_as_much_as_a_stream_may_hold(
    generate, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(run_batch, "_MAX_BYTES_OF_STREAM", 1000)
    assert generate([], "--input", "/dev/zero")[0] == 2
    assert "/dev/zero has more than 1000 bytes" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_an_input_without_a_valid_line_leaves_an_empty_output_and_says_so(
    generate, capsys, tmp_path
):
    for name, lines in (("a", []), ("b", [" ", "{"])):
        assert generate(lines, "--skip-malformed", output=name) == (0, {})
        words = capsys.readouterr().err
        assert f"{tmp_path / 'in.jsonl'} has no line to decode." in words
        assert "has every line" not in words
        assert (tmp_path / name).read_bytes() == b""


RATE = ["--usual-acceptance-rate", "1"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--input", "a"], "--input is given without --output"),
        (["--num-slots", "3", "text"], "--num-slots is given without --input"),
        (["--num-slots", "0", "text"], "--num-slots is given without --input"),
        (["--skip-malformed", "text"], "--skip-malformed is given without --input"),
        ([*RATE, "text"], "-acceptance-rate is given without --input"),
        (["--input", "a", "--output", "b", "--draft", "none", *RATE], "-rate needs a draft"),
        (["--input", "a", "--output", "b", "text"], "--input is given and a prompt"),
        (["--input", "a", "--output", "b", "--json"], "--input is given and --json"),
        (["--input", "a", "--output", "b", "--num-slots", "0"], "--num-slots is 0"),
        (["--input", "a", "--output", "b"], "a cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.once
def test_a_process_that_is_terminated_leaves_whole_lines(folders, tmp_path):
    target, draft = folders
    (tmp_path / "in.jsonl").write_text('{"prompt": "ab", "max_new_tokens": 60}\n' * 2000)
    output = tmp_path / "out.jsonl"
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(output), "--quiet"]
    command = [sys.executable, "-m", "specjax", "generate", "--target", target, "--draft", draft]
    with subprocess.Popen(
        [*command, *files, "--num-speculative-tokens", "1"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        while process.poll() is None and (not output.exists() or output.stat().st_size < 10000):
            time.sleep(0.02)
        process.terminate()
        assert process.wait() == 143
    assert output.read_bytes().endswith(b"\n")
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert 3 < len({line["line"] for line in lines}) == len(lines) < 2000


@pytest.mark.once
def test_texts_are_json_that_a_schema_accepts(generate, folders, tmp_path, capsys):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"enum": [{"ab": True}, [1, 2], "c"]}))
    lines = [{"prompt": "ab"}, {"prompt": "acab", "temperature": 0}, {"prompt": "b"}] * 4
    code, found = generate(lines, "--json-schema", str(schema), "--temperature", "30")
    assert code == 0
    texts = {line["text"] for line in found.values()}
    assert {line["finish_reason"] for line in found.values()} == {"end_of_sequence"}
    assert len(texts) == 3
    assert all(json.loads(text) in ({"ab": True}, [1, 2], "c") for text in texts)
    # Alone, with the key of the first line; from another schema no run goes on.
    alone = ["generate", "ab", "--target", folders[0], "--draft", folders[1], *SHORT, "--json"]
    assert main([*alone, "--json-schema", str(schema)]) == 0
    assert json.loads(json.loads(capsys.readouterr().out)["text"]) in ({"ab": True}, [1, 2], "c")
    schema.write_text('{"const": 7}')
    assert generate(lines, "--json-schema", str(schema), "--temperature", "30")[0] == 2
    for text, sentence in (
        ("{", "is not JSON"),
        ("[]", "no JSON object"),
        ('{"if": 1}', "no type"),
    ):
        schema.write_text(text)
        assert main([*alone, "--json-schema", str(schema)]) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.once
def test_turns_of_a_line_are_answered_one_after_the_other(generate, folders):
    """The second answer is that of the whole conversation as messages."""
    template = pathlib.Path(folders[0], "chat_template.jinja")
    before = template.read_text()
    template.write_text("{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}a")
    try:
        lines = [{"turns": ["ab", "c"], "seed": 4, "max_new_tokens": 5}, {"prompt": "ab"}]
        code, found = generate(lines)
        assert code == 0
        first, second = found[1]["turns"]
        assert (second["text"], second["token_ids"]) == (found[1]["text"], found[1]["token_ids"])
        roles = zip(("user", "assistant", "user"), ("ab", first["text"], "c"), strict=True)
        messages = [{"role": role, "content": text} for role, text in roles]
        alone = [{"messages": messages, "seed": 4, "max_new_tokens": 5}]
        assert generate(alone, output="alone")[1][1]["token_ids"] == second["token_ids"]
        assert "turns" not in found[2]
    finally:
        template.write_text(before)
