"""Options of `specjax generate` by their names elsewhere, several prompts, ends and templates."""

import dataclasses
import io
import json
import re
import shutil

import jax
import numpy as np
import pytest
from test_command import PROMPT, TARGET, write_model

import specjax
from specjax.cli import generate, main
from specjax.cli.arguments import parse_options
from specjax.cli.folders import pair_memory
from specjax.cli.folders.generation_config import take_defaults
from specjax.cli.folders.hub_cache import model_name
from specjax.cli.model_pair import read_pair, render_chat
from specjax.contrib.grammars import min_tokens_grammar
from specjax.markov_chain import markov_chain
from specjax.models import load

pytestmark = pytest.mark.lenient

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ mood }}{{ think }}"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    # About one token in 17 ends a text.
    config = dataclasses.replace(TARGET, eos_token_ids=tuple(range(0, 260, 17)))
    folder = tmp_path_factory.mktemp("target")
    write_model(folder, config, 0, scale=3.0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def run(target, capsys, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")

    def run(*arguments):
        common = ["--target", str(target), "--draft", "none", "--json", "--temperature", "1"]
        assert main(["generate", *arguments, *common]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@pytest.mark.once
def test_several_prompts_give_the_texts_that_each_gives_alone(run, tmp_path, monkeypatch):
    prompts = [PROMPT, "ab" * 30, "c"]
    for prompt in prompts:
        (tmp_path / prompt[:3]).write_text(prompt)
    made, begin = [], generate.StreamPrograms
    monkeypatch.setattr(generate, "StreamPrograms", lambda *x: made.append(1) or begin(*x))
    alone = [run(prompt, "-n", "20")[0] for prompt in prompts]
    together = run(*prompts, "--max-tokens", "20")
    files = run("--prompt-file", *(str(tmp_path / p[:3]) for p in prompts), "--max-tokens", "20")
    monkeypatch.setattr("sys.stdin", type("", (), {"buffer": io.BytesIO(prompts[1].encode())}))
    read = run(prompts[0], "-", "--max-new-tokens", "20")
    for reports in (together, files):
        assert [x["token_ids"] for x in reports] == [x["token_ids"] for x in alone]
        assert [x["text"] for x in reports] == [x["text"] for x in alone]
    assert [x["token_ids"] for x in read] == [x["token_ids"] for x in alone[:2]]
    # The programs of the first prompt are those of the others, which wait for none.
    assert made == [1] * (3 + 1 + 1 + 1)
    assert max(x["timings"]["compile_seconds"] for x in together[1:]) < 0.2


@pytest.mark.once
def test_a_text_ends_at_an_end_token_unless_it_is_ignored_or_comes_too_early(run):
    (usual,) = run(PROMPT, "--max-tokens", "60")
    (ignored,) = run(PROMPT, "--max-tokens", "60", "--ignore-eos")
    (late,) = run(PROMPT, "--max-tokens", "60", "--min-tokens", "40")
    assert usual["finish"] == "end_of_sequence"
    length = len(usual["token_ids"])
    assert length < 40
    assert ignored["token_ids"][:length] == usual["token_ids"]
    assert len(ignored["token_ids"]) == 60
    ends = set(range(0, 260, 17))
    # Up to the end the text is the same: noise is by position.
    assert late["token_ids"][: length - 1] == usual["token_ids"][:-1]
    assert not ends & set(late["token_ids"][:40])
    assert len(late["token_ids"]) >= 40


@pytest.mark.once
def test_lines_of_a_file_have_least_lengths_of_their_own(target, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    source, output = tmp_path / "in", tmp_path / "out"
    least = (0, 50, 20, None)
    lines = [{"prompt": PROMPT, "seed": i} | {"min_tokens": n} for i, n in enumerate(least)]
    lines[-1].pop("min_tokens")
    source.write_text("\n".join(map(json.dumps, lines)))
    files = ["--input", str(source), "--output", str(output), "--num-slots", "2"]
    options = ["--target", str(target), "--draft", "none", "--max-tokens", "60", "--temp", "1"]
    assert main(["generate", *files, *options, "--min-tokens", "30"]) == 0
    texts = {x["line"]: x["token_ids"] for x in map(json.loads, output.read_text().splitlines())}
    lengths = [len(texts[i + 1]) for i in range(4)]
    assert [a >= b for a, b in zip(lengths, (1, 50, 20, 30), strict=True)] == [True] * 4
    assert lengths[0] < 30
    assert any(texts[i][-1] % 17 == 0 for i in texts)


@pytest.mark.parametrize("least", [0, 1, 3])
def test_a_grammar_of_least_lengths_changes_no_other_token(least):
    """Ended texts are those of the model from which the end is taken away up to that length."""
    model = markov_chain(np.array([[0.5, 0.3, 0.2]] * 3))
    grammar = min_tokens_grammar(3, 3, [1])
    keys, common = jax.random.split(jax.random.key(0), 64), {"max_new_tokens": 8}
    output = specjax.generate(
        *(model, specjax.ngram_drafter(), [[0]] * 64),
        **{"keys": keys, "eos_token_ids": [1], **common},
        sampling=specjax.SamplingParams(grammar=grammar, grammar_state=3 - least),
    )
    texts = [ids[1:] for ids in specjax.unpad(output.token_ids)]
    assert min(map(len, texts)) == max(least + 1, 1)
    assert all(1 not in ids[:least] for ids in texts)


@pytest.mark.once
def test_a_system_message_and_variables_reach_the_template(target, capsys, monkeypatch):
    seen = []

    def read(pair, texts, terminal, folder):
        seen.append(render_chat(pair, [{"role": "user", "content": texts[0]}]))
        raise ValueError("seen.")

    monkeypatch.setattr("specjax.cli.run_generate.read_jobs", read)
    options = ["--system", "be kind", "--template-arg", "think=false", "--template-arg", "mood=x"]
    common = ["generate", "ab", "--target", str(target), "--draft", "none"]
    assert main([*common, "--chat", *options]) == 2
    assert seen == ["[system]be kind[user]abxFalse"]
    assert main([*common, *options]) == 2
    assert "--system is given without --chat" in capsys.readouterr().err


def test_a_dtype_is_that_of_weights_and_caches(target, run, monkeypatch):
    seen, begin = [], generate.StreamPrograms
    monkeypatch.setattr(
        generate,
        "StreamPrograms",
        lambda target, *rest: seen.append(target.params["embedding"].dtype) or begin(target, *rest),
    )
    run("ab", "-n", "2", "--dtype", "bfloat16")
    assert [str(dtype) for dtype in seen] == ["bfloat16"]


def test_parameters_that_are_not_given_are_those_of_the_generation_config(tmp_path, capsys):
    def read(fields, *arguments):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        options, _ = parse_options(["generate", "x", *arguments])
        sentence = take_defaults(options, tmp_path)
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return sentence, {name: getattr(options, name) for name in names}

    fields = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0}
    sentence, values = read(fields | {"do_sample": True, "eos_token_id": 3, "min_p": None})
    rest = {"min_p": None, "repetition_penalty": None}
    assert values == {"temperature": 0.6, "top_k": 20, "top_p": 0.95} | rest
    assert sentence.startswith("--temperature 0.6 --top-k 20 --top-p 0.95, as in generation_config")
    sentence, values = read(fields, "--temp", "0.8", "--top-k", "0")
    assert values == {"temperature": 0.8, "top_k": 0, "top_p": 0.95} | rest
    assert "--temperature" not in sentence
    nothing = {"temperature": 0.8, "top_k": None, "top_p": None} | rest
    assert read(fields, "--ignore-generation-config") == (None, nothing)
    assert read({"top_k": -1, "top_p": 1}) == (None, nothing)
    assert read({"do_sample": False})[1]["temperature"] == 0
    assert repr(read({"top_k": 50.0, "top_p": 0.5})[1]["top_k"]) == "50"
    with pytest.raises(ValueError, match=r"has top_k 50.5; it needs an integer in \[0, "):
        read({"top_k": 50.5})
    with pytest.raises(ValueError, match=r"generation_config.json has top_p 2; it needs a number"):
        read({"top_p": 2})


@pytest.mark.once
def test_the_command_shows_what_it_takes_of_the_generation_config(target, tmp_path, capsys, run):
    folder = shutil.copytree(target, tmp_path / "target")
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "eos_token_id": 0}')
    common = ["generate", "ab", "--target", str(folder), "--draft", "none", "-n", "3"]
    assert main(common) == 0
    shown, _ = capsys.readouterr().err.split("\n", 1)
    assert shown.startswith("--temperature 0.5, as in generation_config.json; ")
    assert main([*common, "--json"]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    taken = json.loads(captured.out)
    assert taken["generation_config"] == {"temperature": 0.5}
    assert main([*common, "--json", "--temp", "0.5"]) == 0
    given = json.loads(capsys.readouterr().out)
    assert given["generation_config"] == {}
    assert given["token_ids"] == taken["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temprature", "1"], "--temprature 1; `.*Did you mean --temperature"),
        (["generate", "x", "--max-new-token=1"], "Did you mean --max-new-tokens"),
        (["sweep", "--temprature", "1"], "Did you mean --temperature"),
        (["generat", "x"], "invalid choice: 'generat'.*Did you mean generate"),
        (["generate", "x", "--rejection-sample-method", "blok"], "'blok'; .*Did you mean block"),
        (["generate", "x", "--draft-sample-method", "greed"], "'greed'.*Did you mean greedy"),
        (["generate", "x", "--rule", "relax:1,2"], "'relax:1,2'.*Did you mean relaxed"),
        (["generate", "x", "--rule", "standrad"], "mean --rejection-sample-method standard"),
        (["generate", "x", "--dtype", "bfloat61"], "is bfloat61; .*Did you mean bfloat16"),
        (["generate", "x", "--draft", "ngrm"], "ngrm, which is not a folder. Did you mean ngram"),
    ],
)
def test_a_misspelt_option_or_choice_names_the_closest(capsys, arguments, words):
    assert main(arguments) == 2
    assert re.search(words, capsys.readouterr().err)


def test_a_model_of_the_hub_is_found_in_its_cache_or_the_command_that_downloads_it_is_named(
    target, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--a--Small" / "refs").mkdir(parents=True)
    (tmp_path / "models--a--Small" / "refs" / "main").write_text("12ab\n")
    folder = tmp_path / "models--a--Small" / "snapshots" / "12ab"
    shutil.copytree(target, folder)
    pair = read_pair(*parse_options(["generate", "x", "--target", "a/Small", "--draft", "none"]))
    assert pair.folder == str(folder)
    assert pair.name.startswith("target a/Small ")
    assert model_name(pair.folder) == "Small"
    for option in ("--target", "--draft"):
        assert main(["generate", "x", option, "a/Smaller"]) == 2
        sentence = capsys.readouterr().err
        assert f"{option} is a/Smaller, which is not a folder, and no model of that" in sentence
        assert "`hf download a/Smaller` downloads it." in sentence


def test_a_pair_that_does_not_fit_is_refused_before_its_weights_are_read(target, monkeypatch):
    options, config = parse_options(
        ["generate", "x", "--target", str(target), "--dtype", "float16"]
    )
    pair, size = read_pair(options, config), {"num_requests": 4, "max_length": 128}
    assert pair_memory.describe_memory(pair, **size) is None  # It is small.
    monkeypatch.setattr(pair_memory, "_LEAST_SHOWN", 0)
    model = load(target, "float16")[0]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    needs = specjax.memory_needs(
        *(model, specjax.ngram_drafter()),
        batch_size=4,
        config=config,
        options=specjax.LoopOptions(max_length=128),
    )
    free = weights + needs.of_slots(4)
    monkeypatch.setattr(pair_memory, "free_bytes", lambda devices: free)
    assert pair_memory.describe_memory(pair, **size).endswith("room for 4")
    free -= 1
    with pytest.raises(MemoryError, match="there is no room for this pair: weights take"):
        pair_memory.describe_memory(pair, **size)
