"""Folders of EAGLE-3 heads: one head in every format, and what is refused."""

import dataclasses
import json

import eagle3_heads as heads
import jax
import numpy as np
import pytest

from specjax.models import build
from specjax.models.decoder.config import TransformerConfig
from specjax.models.heads.drafters import eagle3_drafter
from specjax.models.heads.head_folder import open_head
from specjax.models.heads.head_formats import EAGLE3, load_eagle3, save_eagle3
from specjax.models.load_drafter import load_drafter

pytestmark = pytest.mark.once

IDS = "eagle_aux_hidden_state_layer_ids"


def read(folder, **options):
    options = {"num_target_layers": heads.TARGET_LAYERS} | options
    return load_eagle3(folder, "float32", **options)


def in_speculators(fields):
    """The config.json of `speculators` that says the same."""
    names = ("draft_vocab_size", "norm_output", "fc_norm", "target_hidden_size", "norm_before_fc")
    names += ("norm_before_residual",)
    outer = {name: fields[name] for name in names if name in fields}
    layer = {name: fields[name] for name in fields if name not in names}
    layer.pop("eagle_config"), layer.pop("architectures")
    taps = [i + 1 for i in fields["eagle_config"][IDS]]
    return outer | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "norm_before_residual": fields.get("norm_before_residual", False),
        "transformer_layer_config": layer,
        IDS: taps,
    }


@pytest.mark.parametrize("name", ["llama", "qwen3", "fc_norm", "some tokens"])
def test_a_head_is_the_same_in_every_format(tmp_path, name):
    fields, owned = heads.variant(name)
    tensors = heads.random_tensors(fields, owned)
    params, config = read(heads.write_head(tmp_path / "plain", fields, tensors))
    assert config.taps == (1, 2, 4)

    def old_names(name):
        for n, level in enumerate(("low", "mid", "high")):
            name = name.replace(f"fc_norm.{n}.", f"aux_norm_{level}.")
        return "model." + name.replace("layers.0.", "midlayer.")

    old = heads.write_head(tmp_path / "old", fields, tensors, old_names)
    fields = {n: x for n, x in fields.items() if n != "logit_scale"}
    other = heads.write_head(tmp_path / "other", in_speculators(fields), tensors)
    for folder in (old, other):
        again, found = read(folder)
        jax.tree.map(np.testing.assert_array_equal, again, params)
        assert dataclasses.replace(found, logit_scale=config.logit_scale) == config


@pytest.mark.parametrize("name", ["qwen3", "norm_before_fc", "other size", "some tokens"])
def test_a_saved_head_is_read_back(tmp_path, name):
    fields, owned = heads.variant(name)
    fields = {n: x for n, x in fields.items() if n != "bias"}
    tensors = heads.random_tensors(fields, owned)
    params, config = read(heads.write_head(tmp_path / "given", fields, tensors))
    config = dataclasses.replace(config, num_speculative_tokens=5)
    save_eagle3(tmp_path / "saved", params, config, "float32", verifier="meta/Llama")
    again, found = read(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert found == config
    _, head, _ = open_head(EAGLE3, tmp_path / "saved", num_target_layers=heads.TARGET_LAYERS)
    assert head.verifier == "meta/Llama"
    save_eagle3(tmp_path / "short", params, config)
    assert open_head(EAGLE3, tmp_path / "short", num_target_layers=4)[0].layer.dtype == "bfloat16"
    with pytest.raises(ValueError, match="the format of speculators has neither"):
        save_eagle3(tmp_path, params, dataclasses.replace(config, logit_scale=2.0))


def test_without_taps_in_config_json_they_follow_from_the_target(tmp_path):
    fields, owned = heads.variant("llama")
    del fields["eagle_config"]
    folder = heads.write_head(tmp_path, fields, heads.random_tensors(fields, owned))
    config, head, _ = open_head(EAGLE3, folder, num_target_layers=36)
    assert (config.taps, head.taps) == ((2, 18, 33), None)
    assert read(folder, num_target_layers=8)[1].taps == (2, 4, 5)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2; an EAGLE-3 head of 1 layer"),
        ({"fc_norm": True, "norm_before_fc": True}, "contradicts itself: fc_norm and norm_before"),
        ({"target_hidden_size": 36}, "of another size than the target needs embeddings"),
        ({"norm_output": 1}, "has norm_output 1; it needs to be true or false"),
        ({"num_target_layers": 32}, "num_target_layers 32 and the target has 4 layers; use a head"),
        ({"model_type": "gemma2"}, "has model_type 'gemma2'; the layers of an EAGLE-3 head are"),
        ({"logit_scale": 0}, "has logit_scale 0; it needs to be a positive number"),
        ({"attention_bias": True}, r"has no tensor layers\.0\.self_attn\.q_proj\.bias"),
        ({"draft_vocab_size": 40}, "lm_head.weight with shape|has no tensor d2t"),
        (
            {"architectures": ["LlamaForCausalLM"], "eagle_config": None},
            "holds a model; load_eagle3 reads",
        ),
    ],
)
def test_a_folder_that_is_not_supported_is_refused_in_a_sentence(tmp_path, change, sentence):
    fields, owned = heads.variant("llama")
    tensors = heads.random_tensors(fields, owned)
    folder = heads.write_head(tmp_path, fields, tensors)
    if change.get("draft_vocab_size"):
        (folder / "config.json").write_text(json.dumps(fields | change))
    else:
        heads.write_head(tmp_path, fields | change, tensors)
    with pytest.raises(ValueError, match=sentence):
        read(folder)


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        ("", "parallel_drafting", True),
        ("", "use_moe", 1),
        ("", "is_neox_style", False),
        ("", "use_last_layernorm", False),
        ("", "text_config", {"hidden_size": 24}),
        ("eagle_config.", "use_aux_hidden_state", False),
        ("eagle_config.", "use_mtp_layernorm", True),
        ("eagle_config.", "parallel_draft_step", 4),
        ("eagle_config.", "norm_before_residual", True),
        ("rope_scaling.", "mrope_section", [16, 24, 24]),
        ("transformer_layer_config.", "sinks", True),
        ("speculators_config.", "tree", {"depth": 2}),
    ],
)
def test_a_field_that_changes_what_is_drafted_is_refused_by_name(tmp_path, place, name, value):
    fields, owned = heads.variant("llama")
    tensors = heads.random_tensors(fields, owned)
    form = in_speculators if place.startswith(("transf", "specul")) else lambda fields: fields
    rope = {"rope_scaling": {"rope_type": "default"}}
    read(heads.write_head(tmp_path / "read", form(fields | rope), tensors))
    changed = form(fields | rope) | ({} if place else {name: value})
    if place:
        key = place.removesuffix(".")
        changed[key] = changed.get(key, {}) | {name: value}
    with pytest.raises(ValueError, match=rf"has {place}{name} .*EAGLE-3 head.* or absent\.$"):
        read(heads.write_head(tmp_path / "refused", changed, tensors))


def test_taps_stay_in_the_order_of_the_folder(tmp_path):
    """`fc` reads them next to one another."""
    fields, owned = heads.variant("llama")
    fields = fields | {"eagle_config": {IDS: [3, 0, 1]}}
    heads.write_head(tmp_path, fields, heads.random_tensors(fields, owned))
    target = TransformerConfig(heads.VOCAB, heads.SIZE, 40, heads.TARGET_LAYERS, 4, 2, 6)
    assert load_drafter(tmp_path, build(target)).taps == (4, 1, 2)


def test_a_folder_of_speculators_says_what_the_layer_adds_to(tmp_path):
    fields, owned = heads.variant("llama")
    told = in_speculators(fields) | {"norm_before_residual": None}
    heads.write_head(tmp_path, told, heads.random_tensors(fields, owned))
    with pytest.raises(ValueError, match="of which `speculators` takes false and vLLM true"):
        read(tmp_path)


def test_a_tensor_that_nothing_reads_is_refused(tmp_path):
    fields, owned = heads.variant("llama")
    tensors = heads.random_tensors(fields, owned) | {"mask_hidden": np.zeros((1, 72), np.float32)}
    with pytest.raises(ValueError, match="holds mask_hidden; config"):
        read(heads.write_head(tmp_path, fields, tensors))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 28}, "states of size 24 and the target's have 28"),
        ({"vocab_size": 50}, "is for 48 tokens and the target has 50"),
        ({"num_hidden_layers": 3}, r"after layers \[1, 2, 4\] and the target has 3 layers"),
    ],
)
def test_a_head_of_another_target_is_refused_in_a_sentence(tmp_path, change, sentence):
    fields, owned = heads.variant("llama")
    params, config = read(heads.write_head(tmp_path, fields, heads.random_tensors(fields, owned)))
    target = TransformerConfig(heads.VOCAB, heads.SIZE, 40, heads.TARGET_LAYERS, 4, 2, 6)
    target = build(dataclasses.replace(target, **change))
    with pytest.raises(ValueError, match=sentence + "; use a head that was trained"):
        eagle3_drafter(target, config, params)


def test_a_head_is_loaded_in_the_dtype_of_its_target(tmp_path):
    fields, owned = heads.variant("some tokens")
    heads.write_head(tmp_path, fields, heads.random_tensors(fields, owned))
    target = TransformerConfig(heads.VOCAB, heads.SIZE, 40, heads.TARGET_LAYERS, 4, 2, 6)
    target = build(dataclasses.replace(target, dtype="bfloat16"))
    drafter = load_drafter(tmp_path, target)
    assert (drafter.taps, drafter.params["head"]["fc"].dtype) == ((1, 2, 4), "bfloat16")
    assert drafter.params["token_map"].shape == (30,)
    assert load_drafter(tmp_path, target, "float32").params["head"]["fc"].dtype == "float32"
