"""The head: what it drafts is what it was trained to draft, and the text is the target's."""

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

import specjax
from specjax.cli.model_pair import check_draft, load_pair, read_pair
from specjax.models import (
    HeadConfig,
    TransformerConfig,
    build,
    build_head,
    causal_hidden,
    head_drafter,
    is_head,
    load,
    load_head,
    load_head_config,
    pretrained_folder,
    save_head,
    unrolled_hidden,
)

pytestmark = pytest.mark.once

EXAMPLES = pathlib.Path(__file__).parent.parent.parent / "examples"
TARGET = TransformerConfig(48, 24, 40, 2, 4, 2, 6)
HEAD = HeadConfig(24, 32, 4, 2, 6, window=6)
K = 3
SETTINGS = specjax.SpeculativeConfig(num_speculative_tokens=K)
PROMPT = jax.random.randint(jax.random.key(0), (3, 7), 0, TARGET.vocab_size, jnp.int32)
LENGTHS = jnp.array([7, 3, 1], jnp.int32)


def larger(params, factor):
    """Larger weights than at the start of a training, so that attention is not uniform."""
    return jax.tree.map(lambda a: a * factor, params)


@pytest.fixture(scope="module")
def target():
    made = build(TARGET, seed=3)
    return dataclasses.replace(made, params=larger(made.params, 8))


@pytest.fixture(scope="module")
def head():
    return larger(build_head(HEAD, 1), 6)


@pytest.fixture(scope="module")
def drafter(target, head):
    return head_drafter(target, HEAD, head)


def start(target, drafter, **options):
    options = {"keys": jax.random.key(1), "max_new_tokens": 24, "config": SETTINGS} | options
    return specjax.init(target, drafter, PROMPT, LENGTHS, **options)


unrolled = jax.jit(unrolled_hidden, static_argnums=(0, 4))


@jax.jit
def whole_logits(target, head, state):
    """Logits of each pending proposal, of a whole forward without any cache."""

    def write(row, length, drafted):
        return jax.lax.dynamic_update_slice(jnp.maximum(row, 0), drafted, (length,))

    ids = jax.vmap(write)(state.token_ids, state.lengths, state.draft.token_ids)
    hidden = causal_hidden(TARGET, target.params, ids)
    found = unrolled_hidden(HEAD, head, target.params["embedding"][ids], hidden, K)
    last = found[:, jnp.arange(len(ids)), state.lengths - 1]
    return target.logits(target.params, last.swapaxes(0, 1))


@pytest.mark.parametrize("kept", [0, 1, K])
def test_what_decoding_drafts_from_is_what_training_unrolls(target, head, drafter, kept):
    # However many drafts of the steps before are in the text now.
    config = specjax.SpeculativeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[1.0] * kept + [0.0] * (K - kept),
    )
    state = start(target, drafter, config=config)
    for _ in range(4):
        assert state.draft.num_tokens.tolist() == [K] * 3
        expected = whole_logits(target, head, state)
        np.testing.assert_allclose(state.draft.logits, expected, rtol=1e-4, atol=1e-4)
        state, info = specjax.step(target, drafter, state, config=config)
        assert info.verification.num_accepted.tolist() == [kept] * 3


def test_a_request_drafts_the_same_in_any_place_and_beside_one_that_ended(target, drafter):
    keys = jax.random.split(jax.random.key(9), 3)

    def generate(order, end):
        order = jnp.array(order)
        found = specjax.generate(
            target,
            drafter,
            PROMPT[order],
            LENGTHS[order],
            keys=keys[order],
            config=SETTINGS,
            max_new_tokens=16,
            temperature=0.7,
            eos_token_ids=[end],
        )
        return specjax.unpad(found.token_ids)

    texts = generate([2, 0, 1], TARGET.vocab_size)
    # The first token that the second request wrote ends it at once now, and maybe the others later.
    end = texts[2][3]
    whole = [texts[1], texts[2], texts[0]]
    for ended, text, length in zip(generate([0, 1, 2], end), whole, LENGTHS.tolist(), strict=True):
        written = text[length:]
        assert ended == text[:length] + written[: [*written, end].index(end) + 1]


def test_the_head_sees_its_window_and_no_further(target, head):
    ids = jax.random.randint(jax.random.key(2), (1, 20), 0, TARGET.vocab_size, jnp.int32)
    table = target.params["embedding"]
    hidden = causal_hidden(TARGET, target.params, ids)

    def last(ids, config=HEAD):
        return unrolled(config, head, table[ids % TARGET.vocab_size], hidden, 2)[:, 0, 15]

    # At the last place that it sees the head reads also the token before.
    near, far = (ids.at[0, 15 - HEAD.window - back].add(1) for back in (0, 1))
    np.testing.assert_array_equal(last(ids), last(far))
    assert jnp.abs(last(ids)[0] - last(near)[0]).max() > 1e-4
    wide = dataclasses.replace(HEAD, window=None)
    assert jnp.abs(last(ids, wide) - last(far, wide)).max() > 1e-4


def test_the_first_draft_reads_the_target_and_later_ones_the_head(target, head):
    ids = jax.random.randint(jax.random.key(3), (1, 12), 0, TARGET.vocab_size, jnp.int32)
    hidden = jax.random.normal(jax.random.key(4), (1, 12, 24))
    tokens = target.params["embedding"][ids]
    found = unrolled(HEAD, head, tokens, hidden, 3)
    other = unrolled(HEAD, head, tokens, hidden.at[0, 7].add(1.0), 3)
    changed = jnp.abs(found - other)[:, 0].max(-1) > 1e-5
    # The state behind token 7 decided token 8: it reaches the proposal that begins there alone.
    assert changed.tolist() == [[place == 8 for place in range(12)]] * 3
    assert jnp.abs(found[1, 0, 4] - found[0, 0, 5]).max() > 1e-4


def test_sampling_parameters_reach_the_drafts(target, drafter):
    state = start(target, drafter, sampling=specjax.SamplingParams(top_k=2))
    kept = state.draft.logits >= state.draft.cutoff[..., None]
    assert kept.sum(-1).tolist() == [[2] * K] * 3


def test_a_head_of_another_dtype_leaves_the_target_s_logits_in_its_own(head):
    short = build(dataclasses.replace(TARGET, dtype="bfloat16"), seed=3)
    with jax.numpy_dtype_promotion("strict"):
        state = start(short, head_drafter(short, HEAD, head))
    assert state.draft.logits.dtype == jnp.bfloat16


def test_a_saved_head_is_read_back_bit_for_bit(tmp_path, head):
    assert not is_head(tmp_path)
    save_head(tmp_path, head, HEAD, dtype="float32")
    assert is_head(tmp_path)
    again, config = load_head(tmp_path, "float32")
    assert config == HEAD
    jax.tree.map(np.testing.assert_array_equal, again, head)
    for asked_dtype in ("bfloat16", jnp.bfloat16):
        short, config = load_head(tmp_path, asked_dtype)
        assert config.dtype == "bfloat16"
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), short, head)
    with pytest.raises(ValueError, match="dtype is 'int8'; it needs to be one of"):
        load_head(tmp_path, "int8")


def test_a_bad_folder_is_refused_in_a_sentence(tmp_path, head, monkeypatch):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_head(tmp_path)
    # Not the current folder's, whatever that holds.
    save_head(tmp_path / "here", head, HEAD)
    monkeypatch.chdir(tmp_path / "here")
    assert is_head(".")
    assert not is_head("")
    with pytest.raises(ValueError, match="the name of the folder is empty"):
        load_head("")
    with pytest.raises(ValueError, match="a draft head has 'specjax_head'"):
        load_head(pretrained_folder("draft"))
    save_head(tmp_path, head, HEAD)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    for change, said in (
        ({"head_dim": None}, "has no head_dim"),
        ({"head_dim": 5}, "needs to be even"),
        ({"hidden_size": -1}, "a positive integer"),
        ({"intermediate_size": 31}, "by config.json it needs to be"),
        (
            {"attention_bias": True, "hidden_act": "silu"},
            "has attention_bias, hidden_act; a draft head",
        ),
    ):
        path.write_text(json.dumps(fields | change), encoding="utf-8")
        with pytest.raises(ValueError, match=said):
            load_head(tmp_path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="no JSON object"):
        load_head_config(tmp_path)
    path.write_text(json.dumps(fields), encoding="utf-8")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.bias"
    save_file(tensors | {name: np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"holds {name}; config.json asks for no such tensor"):
        load_head(tmp_path)
    tensors.pop("model.mix.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"no tensor model\.mix\.weight"):
        load_head(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_head(tmp_path)


def asked(**options):
    return read_pair(types.SimpleNamespace(**({"target": None, "draft": "head"} | options)))


def test_the_command_finds_the_embedded_head_and_refuses_one_of_another_size(tmp_path, head):
    pair = asked()
    check_draft(pair)
    assert pair.draft_spec == pretrained_folder("head")
    assert isinstance(load_pair(pair)[1], specjax.Drafter)
    with pytest.raises(ValueError, match="a head trained for that target"):
        asked(target=str(pretrained_folder("target")))
    save_head(tmp_path, head, HEAD)
    with pytest.raises(ValueError, match="of size 24 and the target's have 256"):
        check_draft(asked(draft=str(tmp_path)))
    with pytest.raises(ValueError, match="of size 24 and the target's have 256"):
        head_drafter(load(pretrained_folder("target"))[0], HEAD, head)


def test_the_embedded_head_is_accepted_and_a_greedy_text_stays_the_target_s():
    target, _ = load(pretrained_folder("target"))
    params, config = load_head(pretrained_folder("head"))
    assert (pretrained_folder("head") / "model.safetensors").stat().st_size < 3_000_000
    prompts = np.random.default_rng(0).integers(300, 3000, (8, 9)).astype(np.int32)
    temperature = np.array([0.0] * 4 + [0.8] * 4, np.float32)

    def generate(drafter):
        return specjax.generate(
            target,
            drafter,
            prompts,
            np.arange(2, 10, dtype=np.int32),
            keys=jax.random.key(0),
            config=specjax.SpeculativeConfig(num_speculative_tokens=2),
            max_new_tokens=32,
            temperature=temperature,
        )

    drafted = generate(head_drafter(target, config, params))
    np.testing.assert_array_equal(drafted.token_ids[:4], generate(None).token_ids[:4])
    metrics = drafted.metrics
    assert metrics.num_accepted[:4].sum() > 40
    # One that was fed the wrong states is accepted half as often.
    assert metrics.num_accepted[:, 0].sum() / metrics.num_drafted[:, 0].sum() > 0.3


def test_the_training_draws_near_to_the_target(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    corpus = importlib.import_module("pair.corpus")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = {name: (library / name).read_bytes() for name in ("csv.py", "bisect.py")}
    sides = [("csv.py", "train"), ("bisect.py", "heldout")]
    record = {"packages": [], "files": [{"path": path, "split": side} for path, side in sides]}
    archive, out = tmp_path / "corpus.tar.xz", tmp_path / "out"
    corpus.write_archive(archive, (texts, record))
    sizes = ("--tiny", "--steps", 10, "--from-archive", archive, "--out", out)
    done = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / "train_head.py", *map(str, sizes)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    losses = [loss for _, loss in report["head"]["curve"]]
    assert losses[-1] < losses[0]
    for rate in report["heldout"]["acceptance"]:
        assert 0 < rate < 1
        assert f"{rate:.4f}" in done.stdout
    _, config = load_head(out)
    assert config.window == 64


def test_a_training_begins_with_what_a_plain_layer_has_of_any_target(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    train_head = importlib.import_module("train_head")
    config = dataclasses.replace(TARGET, qkv_bias=True, qk_norm=True, norm_offset=1.0)
    params = build(config).params
    head = train_head.head_of(config, 6)
    found = train_head.begin(head, (config, params), 0)
    assert jax.tree.structure(found) == jax.tree.structure(build_head(head))
    last = params["layers"][1]
    np.testing.assert_array_equal(found["layer"]["mlp"]["down"], last["mlp"]["down"])
    weight = last["mlp_norm"]["weight"] + 1.0
    np.testing.assert_array_equal(found["layer"]["mlp_norm"]["weight"], weight)


def test_the_loss_is_the_divergence_of_each_step_by_its_weight(monkeypatch, target, head):
    monkeypatch.syspath_prepend(EXAMPLES)
    losses, training = (importlib.import_module(f"pair.{name}") for name in ("losses", "training"))
    recipe = training.Recipe(1, 0.0, 1, 9, 1e-3, 1, 0, "xla", "float32")
    ids = jax.random.randint(jax.random.key(6), (2, 10), 0, TARGET.vocab_size, jnp.int32)

    def law(logits):
        return np.asarray(jax.nn.softmax(logits), np.float64)

    hidden = causal_hidden(TARGET, target.params, ids[:, :-1])
    p = law(target.logits(target.params, hidden))
    tokens = target.params["embedding"][ids[:, :-1]]
    found = unrolled(HEAD, head, tokens, hidden, 2)
    divergences = []
    for step in range(2):
        q = law(target.logits(target.params, found[step]))[:, 1 : 9 - step]
        kept = p[:, 1 + step :]
        divergences.append((kept * (np.log(kept) - np.log(q))).sum(-1).mean())
    loss = jax.jit(losses.unrolled_distillation(HEAD, TARGET, recipe, 2, decay=0.5))
    value = loss(head, ids, jnp.float32(0.0), target.params)
    np.testing.assert_allclose(value, (divergences[0] + 0.5 * divergences[1]) / 1.5, rtol=1e-4)
