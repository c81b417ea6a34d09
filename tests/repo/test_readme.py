"""README's figures are those of the tables; commands of docs/checkpoints.md run on folders."""

import json
import os
import pathlib
import re
import shlex

import pytest
from checkpoints import write_checkpoints

from specjax.cli import main
from specjax.implementation import NEWEST_TESTED_JAX
from specjax.models import chat_prompt, load_tokenizer, pretrained_folder

pytestmark = [pytest.mark.lenient, pytest.mark.once]

ROOT = pathlib.Path(__file__).parents[2]


def read_section(document, title):
    text = (ROOT / document).read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {title}\n(.*?)^## ", text, re.MULTILINE | re.DOTALL)
    return section


SECTION = read_section("docs/checkpoints.md", "Bring your checkpoint")
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ specjax (.*)$", SECTION, re.MULTILINE)]
HEAD = "path/to/EAGLE3-Qwen2.5-7B-Instruct"
GENERATE = [command for command in COMMANDS if command[0] == "generate"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("readme")
    write_checkpoints(path)
    return path


@pytest.fixture(autouse=True)
def _run_in_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    # The cache of the tests, or one that is empty: never the user's.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))


def test_the_readme_fits_two_screens_and_its_times_are_those_of_the_table():
    times = re.findall(r"([\d.]+) us", read_section("README.md", "Speed"))
    table = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    rows = [row for row in table.splitlines() if re.match(r"\| `(rejection|gumbel)_sample`", row)]
    assert len(times) == 4
    assert all(any(f" {time} (" in row or f"({time}:" in row for row in rows) for time in times)
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 120


def test_whole_steps_and_what_they_cost_in_plain_steps_are_measured():
    result = json.loads((ROOT / "benchmarks" / "results" / "h100_batches.json").read_text())
    ours, vllm = (
        {(x["case"], x.get("B")): x.get("median_ms") for x in result[who]["cases"]}
        for who in ("specjax", "vllm")
    )
    head, readme = "EAGLE-3, K = 3", (ROOT / "README.md").read_text(encoding="utf-8").split()
    ratio = vllm[head, 64] / ours[head, 64]
    assert f"64 requests on an H100, a whole step is {ratio:.2f} times" in " ".join(readme)
    page = (ROOT / "docs" / "drafter_and_k.md").read_text(encoding="utf-8")
    rows = page.partition("| EAGLE-3 head, K = 3, H100 ")[2]
    for size in (1, 8, 32, 64, 128):
        assert f"| {size} | {ours[head, size] / ours['plain', size]:.2f} |" in rows


def test_the_page_of_versions_names_the_newest_jax_that_was_tested():
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert f"| JAX | 0.10.2 | {NEWEST_TESTED_JAX} |" in page


def test_the_section_shows_a_draft_of_each_kind_a_chat_and_a_sweep():
    drafts = [command[command.index("--draft") + 1] for command in COMMANDS]
    assert {"ngram", "path/to/Qwen2.5-0.5B-Instruct", HEAD} == set(drafts)
    assert sum("--chat" in command for command in GENERATE) == 1
    assert len(COMMANDS) - len(GENERATE) == 1


@pytest.mark.parametrize("command", GENERATE, ids=["model", "chat", "head", "ngram"])
def test_a_checkpoint_writes_and_its_sibling_drafts(capsys, command):
    assert main(command) == 0
    text, summary = capsys.readouterr()
    num_tokens, num_prompt_tokens = map(
        int, re.findall(r"^tokens +(\d+) after a prompt of (\d+),", summary, re.MULTILINE)[0]
    )
    prompt = next(word for word in command if " " in word)
    if "--chat" in command:
        message = {"role": "user", "content": prompt}
        prompt = chat_prompt(command[command.index("--target") + 1], [message])
    # An untrained model writes words without sense.
    assert num_tokens == 128
    assert len(set(text)) > 40
    assert num_prompt_tokens == len(load_tokenizer(pretrained_folder("target")).encode(prompt).ids)
    ((length, acceptance_percent),) = re.findall(
        r"^acceptance +([\d.]+) .* (\d+)% of", summary, re.MULTILINE
    )
    if HEAD in command:
        # The head drafts a part of the tokens, and as many in a step as its folder says.
        assert "position 3" in summary
        assert "position 4" not in summary
        assert float(length) > 1.1
    elif "ngram" not in command:
        assert float(length) > 1.5
        assert int(acceptance_percent) > 20


def test_a_sweep_of_a_checkpoint_prints_its_table_and_draws_it(capsys, folder):
    (command,) = (command for command in COMMANDS if command[0] == "sweep")
    # Each number of drafts is programs of its own: of one there are enough for a table.
    max_drafts = 1
    assert int(command[command.index("--max-speculative-tokens") + 1]) > max_drafts
    shorter = ["--max-speculative-tokens", f"{max_drafts}", "--steps", "4", "--rounds", "2"]
    assert main([*command, *shorter]) == 0
    summary = capsys.readouterr().out
    row = r"^(\d) +[\d.]+ +[\d.]+ - [\d.]+ +[\d.]+ +([\d.]+) +[\d.]+ +[\d.]+ *$"
    rows = re.findall(row, summary, re.MULTILINE)[: max_drafts + 1]
    assert [int(K) for K, _ in rows] == list(range(max_drafts + 1))
    lengths = [float(length) for _, length in rows]
    assert lengths[0] == 1
    assert lengths == sorted(set(lengths))
    assert re.search(rf"^K = [0-{max_drafts}] is best: ", summary, re.MULTILINE)
    assert "draft path/to/" in summary
    plot = folder / command[command.index("--out") + 1]
    assert plot.read_bytes().startswith(b"\x89PNG")
