"""The draft head: decoding drafts as training unrolls, and the text is the target's."""

import dataclasses
import importlib
import json
import pathlib
import sysconfig
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import write_shallow
from safetensors.flax import load_file, save_file
from scripts import run_process, run_script

import specjax
from specjax.cli.model_pair import check_draft, load_pair, read_pair
from specjax.models import (
    Eagle3Config,
    HeadConfig,
    TransformerConfig,
    build,
    build_eagle3,
    build_head,
    causal_hidden,
    head_drafter,
    is_head,
    load,
    load_eagle3,
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


def scale_weights(params, factor):
    """Larger weights than at the start of a training, so that attention is not uniform."""
    return jax.tree.map(lambda a: a * factor, params)


@pytest.fixture(scope="module")
def target():
    model = build(TARGET, seed=3)
    return dataclasses.replace(model, params=scale_weights(model.params, 8))


@pytest.fixture(scope="module")
def head():
    return scale_weights(build_head(HEAD, 1), 6)


@pytest.fixture(scope="module")
def drafter(target, head):
    return head_drafter(target, HEAD, head)


# At every place two tokens are left, by which the logits stay what they are.
FEW = specjax.SamplingParams(top_k=2)


def init_state(target, drafter, **options):
    options = {"keys": jax.random.key(1), "max_new_tokens": 24, "config": SETTINGS} | options
    return specjax.init(target, drafter, PROMPT, LENGTHS, **options)


unrolled = jax.jit(unrolled_hidden, static_argnums=(0, 4))


@jax.jit
def uncached_logits(target, head, state):
    """Logits of each pending proposal, of a whole forward without any cache."""

    def write(row, length, drafted):
        return jax.lax.dynamic_update_slice(jnp.maximum(row, 0), drafted, (length,))

    ids = jax.vmap(write)(state.token_ids, state.lengths, state.draft.token_ids)
    hidden = causal_hidden(TARGET, target.params, ids)
    output = unrolled_hidden(HEAD, head, target.params["embedding"][ids], hidden, K)
    last = output[:, jnp.arange(len(ids)), state.lengths - 1]
    return target.logits(target.params, last.swapaxes(0, 1))


@pytest.mark.parametrize("num_accepted", [0, 1, K])
def test_what_decoding_drafts_from_is_what_training_unrolls(target, head, drafter, num_accepted):
    # However many drafts of the steps before are in the text now.
    config = specjax.SpeculativeConfig(
        num_speculative_tokens=K,
        rejection_sample_method="synthetic",
        synthetic_acceptance_rates=[1.0] * num_accepted + [0.0] * (K - num_accepted),
    )
    state = init_state(target, drafter, config=config, sampling=FEW)
    for _ in range(4):
        assert state.draft.num_tokens.tolist() == [K] * 3
        expected = uncached_logits(target, head, state)
        np.testing.assert_allclose(state.draft.logits, expected, rtol=1e-4, atol=1e-4)
        # Sampling parameters reach the drafts.
        above_cutoff = np.asarray(state.draft.logits) >= np.asarray(state.draft.cutoff)[..., None]
        assert above_cutoff.sum(-1).tolist() == [[2] * K] * 3
        state, info = specjax.step(target, drafter, state, config=config)
        assert info.verification.num_accepted.tolist() == [num_accepted] * 3


def test_a_request_drafts_the_same_in_any_place_and_beside_one_that_ended(target, drafter):
    keys = jax.random.split(jax.random.key(9), 3)

    def generate(order, end):
        order = jnp.array(order)
        output = specjax.generate(
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
        return specjax.unpad(output.token_ids)

    texts = generate([2, 0, 1], TARGET.vocab_size)
    # The first token that the second request wrote ends it at once now, and maybe the others later.
    end = texts[2][3]
    whole = [texts[1], texts[2], texts[0]]
    for ended, text, length in zip(generate([0, 1, 2], end), whole, LENGTHS.tolist(), strict=True):
        written = text[length:]
        assert ended == text[:length] + written[: [*written, end].index(end) + 1]


def test_the_head_attends_to_its_window_and_no_further(target, head):
    ids = jax.random.randint(jax.random.key(2), (1, 20), 0, TARGET.vocab_size, jnp.int32)
    table = target.params["embedding"]
    hidden = causal_hidden(TARGET, target.params, ids)

    def last(ids, config=HEAD):
        return unrolled(config, head, table[ids % TARGET.vocab_size], hidden, 2)[:, 0, 15]

    # At the last place that it sees the head reads also the token before.
    token_in_window, token_outside_window = (
        ids.at[0, 15 - HEAD.window - back].add(1) for back in (0, 1)
    )
    np.testing.assert_array_equal(last(ids), last(token_outside_window))
    assert jnp.abs(last(ids)[0] - last(token_in_window)[0]).max() > 1e-4
    wide = dataclasses.replace(HEAD, window=None)
    assert jnp.abs(last(ids, wide) - last(token_outside_window, wide)).max() > 1e-4


def test_the_first_draft_reads_the_target_and_later_ones_the_head(target, head):
    ids = jax.random.randint(jax.random.key(3), (1, 12), 0, TARGET.vocab_size, jnp.int32)
    hidden = jax.random.normal(jax.random.key(4), (1, 12, 24))
    tokens = target.params["embedding"][ids]
    output = unrolled(HEAD, head, tokens, hidden, 3)
    changed_output = unrolled(HEAD, head, tokens, hidden.at[0, 7].add(1.0), 3)
    is_changed = jnp.abs(output - changed_output)[:, 0].max(-1) > 1e-5
    # The state behind token 7 decided token 8: it reaches the proposal that begins there alone.
    assert is_changed.tolist() == [[position == 8 for position in range(12)]] * 3
    assert jnp.abs(output[1, 0, 4] - output[0, 0, 5]).max() > 1e-4


def test_a_head_of_another_dtype_leaves_the_target_s_logits_in_its_own(head):
    low_precision = build(dataclasses.replace(TARGET, dtype="bfloat16"), seed=3)
    with jax.numpy_dtype_promotion("strict"):
        drafter = head_drafter(low_precision, HEAD, head)
        state = jax.eval_shape(lambda: init_state(low_precision, drafter))
    assert state.draft.logits.dtype == jnp.bfloat16


def test_a_saved_head_is_read_back_bit_for_bit(tmp_path, head):
    assert not is_head(tmp_path)
    save_head(tmp_path, head, HEAD, dtype="float32")
    assert is_head(tmp_path)
    again, config = load_head(tmp_path, "float32")
    assert config == HEAD
    jax.tree.map(np.testing.assert_array_equal, again, head)
    for asked_dtype in ("bfloat16", jnp.bfloat16):
        low_precision, config = load_head(tmp_path, asked_dtype)
        assert config.dtype == "bfloat16"
        jax.tree.map(
            lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), low_precision, head
        )
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
    for change, sentence in (
        ({"head_dim": None}, "has no head_dim"),
        ({"head_dim": 5}, "needs to be even"),
        ({"hidden_size": -1}, "an integer from 1 to"),
        ({"intermediate_size": 31}, "by config.json it needs to be"),
        (
            {"attention_bias": True, "hidden_act": "silu"},
            "has attention_bias, hidden_act; a draft head",
        ),
    ):
        path.write_text(json.dumps(fields | change), encoding="utf-8")
        with pytest.raises(ValueError, match=sentence):
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


def read_embedded_pair(**options):
    return read_pair(
        types.SimpleNamespace(**({"target": None, "draft": "head", "mesh": None} | options))
    )


def test_the_command_finds_the_embedded_head_and_refuses_one_of_another_size(tmp_path, head):
    pair = read_embedded_pair()
    check_draft(pair)
    assert pair.draft_spec == pretrained_folder("eagle3")
    assert isinstance(load_pair(pair)[1], specjax.Drafter)
    assert read_embedded_pair(draft=None).draft_spec == pretrained_folder("eagle3")
    assert read_embedded_pair(draft="model").draft_spec == pretrained_folder("draft")
    for draft, kind in (("head", "head"), ("model", "model")):
        with pytest.raises(ValueError, match=f"the folder of a draft {kind} for that target"):
            read_embedded_pair(target=str(pretrained_folder("target")), draft=draft)
    save_head(tmp_path, head, HEAD)
    with pytest.raises(ValueError, match="of size 24 and the target's have 256"):
        check_draft(read_embedded_pair(draft=str(tmp_path)))
    with pytest.raises(ValueError, match="of size 24 and the target's have 256"):
        head_drafter(load(pretrained_folder("target"))[0], HEAD, head)


def logits_of_rows(model, ids):
    """Logits after each token of whole rows."""
    places = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    hidden, _ = model.apply(model.params, ids, places, model.init_cache(*ids.shape))
    return model.logits(model.params, hidden)


def test_the_embedded_head_is_accepted_and_a_greedy_text_stays_the_target_s():
    target, _ = load(pretrained_folder("target"))
    params, config = load_head(pretrained_folder("head"))
    assert (pretrained_folder("head") / "model.safetensors").stat().st_size < 3_000_000
    prompts = np.random.default_rng(0).integers(300, 3000, (8, 9)).astype(np.int32)
    temperature = np.array([0.0] * 4 + [0.8] * 4, np.float32)

    lengths = np.arange(2, 10, dtype=np.int32)
    drafted = specjax.generate(
        target,
        head_drafter(target, config, params),
        prompts,
        lengths,
        keys=jax.random.key(0),
        config=specjax.SpeculativeConfig(num_speculative_tokens=2),
        max_new_tokens=32,
        temperature=temperature,
    )
    # Each token of a greedy text is the likeliest after those before it, which one forward says.
    ids = np.maximum(drafted.token_ids[:4], 0)
    logits = np.asarray(jax.jit(logits_of_rows)(target, ids), np.float32)
    for row, text, length in zip(logits, ids, lengths, strict=False):
        written = np.arange(length, length + 32)
        # Another shape of a forward rounds bfloat16 otherwise.
        assert (row[written - 1, text[written]] > row[written - 1].max(-1) - 0.1).all()
    metrics = drafted.metrics
    assert metrics.num_accepted[:4].sum() > 40
    # One that was fed the wrong states is accepted half as often.
    assert metrics.num_accepted[:, 0].sum() / metrics.num_drafted[:, 0].sum() > 0.3


@pytest.fixture
def import_pair(monkeypatch):
    """Gives a module of the training by its name."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return lambda name: importlib.import_module(f"pair.{name}")


def write_corpus(corpus, path):
    """An archive of two files of Python's library, one of them held out."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    texts = {name: (library / name).read_bytes() for name in ("csv.py", "bisect.py")}
    sides = [("csv.py", "train"), ("bisect.py", "heldout")]
    record = {"packages": [], "files": [{"path": path, "split": side} for path, side in sides]}
    corpus.write_archive(path, (texts, record))


@pytest.fixture(scope="module")
def shallow_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shallow_target")
    return write_shallow(folder, "target", 2, "float32")


@pytest.mark.parametrize("kind", ["eagle3", "last-state"])
def test_training_brings_a_head_near_to_the_target(
    tmp_path, monkeypatch, capsys, import_pair, shallow_target, kind
):
    archive, out = tmp_path / "corpus.tar.xz", tmp_path / "out"
    write_corpus(import_pair("corpus"), archive)
    target = ("--target", shallow_target, "--taps", 0, 2)
    sizes = ("--tiny", "--steps", 10, "--proposal", 2, "--dtype", "float32")
    options = (*target, *sizes, "--kind", kind, "--from-archive", archive, "--out", out)
    script = EXAMPLES / "train_head.py"
    # One of the two as it is called, the other in this process, which has imported its modules.
    if kind == "eagle3":
        text = run_process(script, *options, cwd=tmp_path)
    else:
        run_script(monkeypatch, script, *options, cwd=tmp_path)
        text = capsys.readouterr().out
    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    losses = [loss for _, loss in report["head"]["curve"]]
    assert losses[-1] < losses[0]
    for rate in report["heldout"]["acceptance"]:
        assert 0 < rate < 1
        assert f"{rate:.4f}" in text
    if kind == "eagle3":
        assert load_eagle3(out, num_target_layers=2)[1].taps == (0, 2)
    else:
        assert load_head(out)[1].window == 64


def test_a_training_begins_with_what_a_plain_layer_has_of_any_target(import_pair):
    heads = import_pair("heads")
    config = dataclasses.replace(TARGET, qkv_bias=True, qk_norm=True, norm_offset=1.0)
    params = build(config).params
    last = params["layers"][1]
    for head in (heads.last_state_head(config, 6), heads.eagle3_head(config, (1, 2))):
        output = head.begin(params, 0)
        random = build_eagle3 if isinstance(head.config, Eagle3Config) else build_head
        wanted = jax.tree.map(jnp.shape, random(head.config))
        assert jax.tree.map(jnp.shape, output) == wanted
        np.testing.assert_array_equal(output["layer"]["mlp"]["down"], last["mlp"]["down"])
        weight = last["mlp_norm"]["weight"] + 1.0
        np.testing.assert_array_equal(output["layer"]["mlp_norm"]["weight"], weight)
    np.testing.assert_array_equal(output["head"], params["embedding"])


def test_the_loss_is_the_divergence_of_each_step_by_its_weight(import_pair, target, head):
    heads, losses, training = map(import_pair, ("heads", "losses", "training"))
    recipe = training.Recipe(1, 0.0, 1, 9, 1e-3, 1, 0, "xla", "float32")
    ids = jax.random.randint(jax.random.key(6), (2, 10), 0, TARGET.vocab_size, jnp.int32)

    def probabilities(logits):
        return np.asarray(jax.nn.softmax(logits), np.float64)

    hidden = causal_hidden(TARGET, target.params, ids[:, :-1])
    p = probabilities(target.logits(target.params, hidden))
    tokens = target.params["embedding"][ids[:, :-1]]
    output = unrolled(HEAD, head, tokens, hidden, 2)
    divergences = []
    for step in range(2):
        q = probabilities(target.logits(target.params, output[step]))[:, 1 : 9 - step]
        p_step = p[:, 1 + step :]
        divergences.append((p_step * (np.log(p_step) - np.log(q))).sum(-1).mean())
    kind = heads.last_state_head(TARGET, HEAD.window)
    kind = kind._replace(unroll=lambda params, *rows: unrolled_hidden(HEAD, params, *rows))
    loss = jax.jit(losses.unrolled_distillation(kind, recipe, TARGET, 2, decay=0.5))
    value = loss(head, ids, jnp.float32(0.0), target.params)
    np.testing.assert_allclose(value, (divergences[0] + 0.5 * divergences[1]) / 1.5, rtol=1e-4)
