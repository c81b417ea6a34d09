"""`--draft FOLDER` tells by config.json what the folder is, and takes K from a head's."""

import dataclasses
import json
import os
import shutil
import types

import jax.numpy as jnp
import pytest
from checkpoints import HEAD as EAGLE3
from checkpoints import write_checkpoints

from specjax import SpeculativeConfig, StepCosts
from specjax.cli import main
from specjax.cli.arguments import parse_options
from specjax.cli.model_pair import (
    describe_configs,
    load_pair,
    pair_shapes,
    read_pair,
    with_trained_k,
)
from specjax.config import DEFAULT_STEP_COSTS
from specjax.decode.adaptive_k import KPolicy, init_history, k_by_rate
from specjax.models import DFlashConfig, build_dflash, pretrained_folder, save_dflash

pytestmark = [pytest.mark.lenient, pytest.mark.once]

TARGET, HEAD = "path/to/Qwen2.5-7B-Instruct", "path/to/EAGLE3-Qwen2.5-7B-Instruct"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("drafts")
    write_checkpoints(path)
    return path


@pytest.fixture(autouse=True)
def _run_in_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))


def read(**options):
    given = {"target": None, "draft": HEAD, "mesh": None, "logprobs": None}
    given |= {"dtype": None, "ignore_eos": False, "row_invariant": False} | options
    return read_pair(types.SimpleNamespace(**given), SpeculativeConfig())


def test_head_and_model_name_the_embedded_drafts_of_the_embedded_target():
    for draft, role in ((None, "eagle3"), ("head", "eagle3"), ("model", "draft")):
        assert read(draft=draft).draft_spec == pretrained_folder(role)
    for draft in ("head", "model"):
        with pytest.raises(ValueError, match=f"the folder of a draft {draft} for that target"):
            read(target=TARGET, draft=draft)
    target, drafter = load_pair(read(draft="head"))
    assert drafter.taps == (2, 4, 5)
    assert drafter.params["target"] is target.params


def test_target_and_draft_are_row_invariant_by_one_option_and_their_programs_are_others():
    usual, pair = (read(draft="model", row_invariant=x) for x in (False, True))
    assert pair.load_target == pair.load_draft == {"row_invariant": True}
    assert load_pair(pair)[0].row_invariant
    assert pair_shapes(pair)[0].row_invariant
    assert not load_pair(usual)[0].row_invariant
    assert describe_configs(usual) != describe_configs(pair)
    with pytest.raises(ValueError, match="--row-invariant is given and --mesh; it needs"):
        parse_options(["serve", "--mesh", "2", "--row-invariant"])


def test_a_head_says_how_many_tokens_it_drafts_and_for_which_target(folder):
    pair = read(target=TARGET)
    assert (pair.draft.num_speculative_tokens, pair.warning) == (3, None)
    shutil.copytree(folder / TARGET, folder / "another")
    pair = read(target="another")
    assert pair.draft.num_speculative_tokens == 3
    assert "was trained for Qwen/Qwen2.5-7B-Instruct, and the target is another" in pair.warning
    model = read(target=TARGET, draft="path/to/Qwen2.5-0.5B-Instruct")
    assert (model.draft[2:], model.warning) == ((None,) * 5, None)


def test_a_table_by_batch_size_is_one_of_an_option_or_next_to_a_head(folder, tmp_path):
    table, head = StepCosts((1, 9), ((1, 1.5), (2, 4))), tmp_path / "head"
    shutil.copytree(folder / HEAD, head)
    table.save(head / "step_costs.json")
    assert read(target=TARGET, draft=str(head)).draft.step_costs == table
    _, config = parse_options(["generate", "a", "--step-costs", str(head / "step_costs.json")])
    assert config.step_costs == table


def test_auto_goes_by_the_step_costs_next_to_a_head_unless_an_option_gives_some():
    def costs(*arguments):
        pair = read_pair(*parse_options(["generate", "a", *arguments]))
        return with_trained_k(pair).config.step_costs

    own = costs()
    assert own == costs("--num-speculative-tokens", "auto")
    assert own[0] == 1
    assert all(x < y for x, y in zip(own[1:], DEFAULT_STEP_COSTS[1:], strict=True))
    assert costs("--draft", "model") == DEFAULT_STEP_COSTS
    assert costs("--step-costs", "1,1.2") == (1, 1.2)
    assert costs("--num-speculative-tokens", "3") is None
    # After one step whose drafts were all rejected, a text of that head still drafts.
    config = SpeculativeConfig("auto", step_costs=own)
    own_table, table = (jnp.asarray(k_by_rate(x)) for x in (config, SpeculativeConfig("auto")))
    first = KPolicy(own_table, init_history(own_table, jnp.ones(1, jnp.int32)))
    history = first.update(*jnp.array([[4], [0], [9]], jnp.int32))
    most, is_active = jnp.full(1, 4, jnp.int32), jnp.ones(1, bool)
    assert KPolicy(own_table, history).budget(most, is_active)[0] > 0
    assert KPolicy(table, history).budget(most, is_active)[0] == 0


def test_the_usual_rate_next_to_a_head_is_that_of_files_unless_an_option_gives_one(
    folder, tmp_path
):
    head = tmp_path / "head"
    shutil.copytree(folder / HEAD, head)
    text = json.dumps({"step_costs": [1, 1.5], "usual_acceptance_rate": 0.7})
    (head / "step_costs.json").write_text(text)

    def rate(*arguments):
        files = ["--input", "a", "--output", "b", "--target", TARGET, "--draft", str(head)]
        pair = read_pair(*parse_options(["generate", *files, *arguments]))
        return with_trained_k(pair).config.usual_acceptance_rate

    auto = "--num-speculative-tokens", "auto"
    assert rate(*auto) == 0.7
    assert rate(*auto, "--usual-acceptance-rate", "0.5") == 0.5
    # A rate asks for a choice, as costs do; the head's own K is none.
    assert rate("--usual-acceptance-rate", "0.5") == 0.5
    assert rate() is None


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        '{"step_costs": [1]}',
        '{"step_costs": [1, 2], "usual_acceptance_rate": 2}',
        "no JSON",
    ],
)
def test_step_costs_that_are_none_are_refused(folder, tmp_path, text):
    head = tmp_path / "head"
    shutil.copytree(folder / HEAD, head)
    (head / "step_costs.json").write_text(text)
    with pytest.raises(ValueError, match=r"step_costs\.json is no file of step costs"):
        read(target=TARGET, draft=str(head))


def test_a_head_of_another_target_is_refused_before_weights_are_read(capsys):
    assert main(["generate", "a", "--draft", HEAD]) == 2
    message = capsys.readouterr().err
    assert "reads hidden states of size 32 and the target's have 256; use a head that" in message


def test_a_head_of_blocks_drafts_a_whole_block_and_no_more(capsys, folder):
    layer = dataclasses.replace(EAGLE3.layer, qk_norm=True)
    config = DFlashConfig(layer, layer.vocab_size, taps=(0, 1), block_size=6, mask_token_id=4159)
    save_dflash("blocks", build_dflash(config), config)
    draft = read(target=TARGET, draft="blocks").draft
    assert (draft.num_speculative_tokens, draft.max_speculative_tokens) == (5, 5)
    command = ["--target", TARGET, "--draft", "blocks"]
    for given in (
        ["generate", "a", "--num-speculative-tokens", "6"],
        ["sweep", "--max-speculative-tokens", "6"],
    ):
        assert main([*given, *command]) == 2
        assert f"{given[-2]} is 6; the draft head drafts at most 5" in capsys.readouterr().err


def test_a_greedy_text_of_a_head_is_the_target_s_and_an_option_gives_another_k(capsys, folder):
    """Also of a target over two devices, each of which has the whole head."""
    shared = ["--target", TARGET, "--temperature", "0", "--max-new-tokens", "16", "--json"]
    reports = []
    other = ["--num-speculative-tokens", "1", "--mesh", "2"]
    for draft in (["none"], [HEAD], [HEAD, *other]):
        assert main(["generate", "def f(n):", *shared, "--draft", *draft]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert len({tuple(report["token_ids"]) for report in reports}) == 1
    assert [len(report["metrics"]["num_drafted"]) for report in reports] == [0, 3, 1]
