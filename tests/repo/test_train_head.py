"""The training of an EAGLE-3 head: what it begins with, what it minimises, that it gets near."""

import dataclasses
import importlib
import json
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import write_shallow
from scripts import run_process

from specjax.models import (
    TransformerConfig,
    build,
    build_eagle3,
    causal_taps,
    load_eagle3,
    unrolled_eagle3,
)

pytestmark = [pytest.mark.lenient, pytest.mark.once]

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
TARGET = TransformerConfig(48, 24, 40, 2, 4, 2, 6)


def scale_weights(params, factor):
    """Larger weights than at the start of a training, so that attention is not uniform."""
    return jax.tree.map(lambda a: a * factor, params)


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


def test_training_brings_a_head_near_to_the_target(tmp_path, import_pair):
    archive, out = tmp_path / "corpus.tar.xz", tmp_path / "out"
    write_corpus(import_pair("corpus"), archive)
    target = write_shallow(tmp_path / "shallow_target", "target", 2, "float32")
    sizes = ("--tiny", "--steps", 10, "--proposal", 2, "--dtype", "float32")
    options = ("--target", target, "--taps", 0, 2, *sizes, "--from-archive", archive, "--out", out)
    text = run_process(EXAMPLES / "train_head.py", *options, cwd=tmp_path)
    report = json.loads((out / "training.json").read_text(encoding="utf-8"))
    losses = [loss for _, loss in report["head"]["curve"]]
    assert losses[-1] < losses[0]
    for rate in report["heldout"]["acceptance"]:
        assert 0 < rate < 1
        assert f"{rate:.4f}" in text
    assert load_eagle3(out, num_target_layers=2)[1].taps == (0, 2)


def test_a_training_begins_with_what_a_plain_layer_has_of_any_target(import_pair):
    heads = import_pair("heads")
    config = dataclasses.replace(TARGET, qkv_bias=True, qk_norm=True, norm_offset=1.0)
    params = build(config).params
    last, head = params["layers"][1], heads.head_config(config, (1, 2))
    output = heads.first_params(head, config, params, 0)
    assert jax.tree.map(jnp.shape, output) == jax.tree.map(jnp.shape, build_eagle3(head))
    np.testing.assert_array_equal(output["layer"]["mlp"]["down"], last["mlp"]["down"])
    weight = last["mlp_norm"]["weight"] + 1.0
    np.testing.assert_array_equal(output["layer"]["mlp_norm"]["weight"], weight)
    np.testing.assert_array_equal(output["head"], params["embedding"])


def test_the_loss_is_the_divergence_of_each_step_by_its_weight(import_pair):
    heads, losses, training = map(import_pair, ("heads", "losses", "training"))
    recipe = training.Recipe(1, 0.0, 1, 9, 1e-3, 1, 0, "xla", "float32")
    params = scale_weights(build(TARGET, seed=3).params, 8)
    config = heads.head_config(TARGET, (1, 2))
    head = scale_weights(build_eagle3(config, 1), 6)
    ids = jax.random.randint(jax.random.key(6), (2, 10), 0, TARGET.vocab_size, jnp.int32)

    def probabilities(logits):
        return np.asarray(jax.nn.softmax(logits), np.float64)

    hidden, taps = causal_taps(TARGET, params, ids[:, :-1], (1, 2))
    p = probabilities(hidden @ params["embedding"].T)
    states = unrolled_eagle3(config, head, params["embedding"][ids[:, :-1]], taps, 2)
    divergences = []
    for step in range(2):
        q = probabilities(states[step] @ head["head"].T)[:, 1 : 9 - step]
        p_step = p[:, 1 + step :]
        divergences.append((p_step * (np.log(p_step) - np.log(q))).sum(-1).mean())
    loss = jax.jit(losses.unrolled_distillation(config, recipe, TARGET, 2, decay=0.5))
    value = loss(head, ids, jnp.float32(0.0), params)
    np.testing.assert_allclose(value, (divergences[0] + 0.5 * divergences[1]) / 1.5, rtol=1e-4)
