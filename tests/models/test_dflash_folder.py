"""Folders of DFlash heads: one head in every format, and what is refused."""

import dataclasses

import dflash_heads as heads
import jax
import numpy as np
import pytest

from specjax.models import (
    TransformerConfig,
    build,
    dflash_drafter,
    load_dflash,
    load_drafter,
    read_draft,
    save_dflash,
)
from specjax.models.heads.head_folder import draft_kind, open_head
from specjax.models.heads.head_formats import DFLASH

pytestmark = pytest.mark.once

TARGET = TransformerConfig(heads.VOCAB, heads.SIZE, 40, heads.TARGET_LAYERS, 4, 2, 6)


def read(folder):
    return load_dflash(folder, "float32", num_target_layers=heads.TARGET_LAYERS)


def write(folder, name, change=(), form=lambda fields: fields):
    fields, owned = heads.variant(name)
    tensors = heads.random_tensors(fields, owned)
    return heads.write_head(folder, form(fields | dict(change)), tensors)


@pytest.mark.parametrize("name", heads.VARIANTS)
def test_a_head_is_the_same_in_every_format(tmp_path, name):
    params, config = read(write(tmp_path / "plain", name))
    assert config.taps == (1, 2, 4)
    assert (config.block_size, config.mask_token_id) == (heads.BLOCK, heads.VOCAB - 2)
    assert config.max_speculative_tokens == heads.BLOCK - (name != "anchor")
    folders = [write(tmp_path / "other", name, form=heads.in_speculators)]
    if name == "anchor":
        # Row 0 drafts in all of DeepSpec's folders.
        folders.append(write(tmp_path / "deep", name, form=heads.in_deep_spec))
    for folder in folders:
        assert draft_kind(folder) == "dflash"
        again, found = read(folder)
        jax.tree.map(np.testing.assert_array_equal, again, params)
        assert found == config


@pytest.mark.parametrize("name", heads.VARIANTS)
def test_a_saved_head_is_read_back(tmp_path, name):
    params, config = read(write(tmp_path / "given", name))
    config = dataclasses.replace(config, num_speculative_tokens=3)
    save_dflash(tmp_path / "saved", params, config, "float32", verifier="meta/Llama")
    again, found = read(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert found == config
    info = read_draft(tmp_path / "saved", TARGET)
    assert info[2:] == (3, "meta/Llama", config.max_speculative_tokens, None, None)
    most = config.max_speculative_tokens
    assert read_draft(tmp_path / "given", TARGET)[2:] == (most, None, most, None, None)


INNER = heads.FIELDS["dflash_config"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"block_size": None}, "has block_size None; it needs to be an integer"),
        ({"block_size": 1}, "contradicts itself: block_size is 1; it needs to be 2 to 256"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id None; it needs to be an"),
        (
            {"dflash_config": INNER | {"mask_token_id": 48}},
            "mask_token_id is 48; it needs to be one",
        ),
        ({"dflash_config": {"mask_token_id": 3}}, "names no target_layer_ids and no aux_hidden"),
        ({"block_size": 10**9}, "contradicts itself: block_size is 1000000000; it needs to be 2"),
        ({"dflash_config": INNER | {"block_size": 6}}, "block_size 5 and in dflash_config 6; loa"),
        ({"final_logit_softcapping": 30.0}, "softcapping 30.0, .* it needs to be null or absent"),
        ({"sample_from_anchor": 1}, "has sample_from_anchor 1; it needs to be true or false"),
        ({"target_hidden_size": 36}, "target_hidden_size 36 and hidden_size 24; a DFlash head"),
        ({"model_type": "qwen2"}, "has model_type 'qwen2'; the layers of a DFlash head are those"),
        (
            {
                "layer_types": ["sliding_attention"] * 2,
                "sliding_window": 8,
                "use_sliding_window": True,
            },
            "need to attend to all tokens",
        ),
        ({"num_target_layers": 36}, "num_target_layers 36 and the target has 4 layers; use a head"),
        (
            {"num_hidden_layers": 3, "layer_types": None},
            r"no tensor layers\.2\.input_layernorm",
        ),
        ({"num_hidden_layers": 1, "layer_types": None}, r"holds layers\.1\.input_layernorm"),
        ({"draft_vocab_size": 40}, "a head without an lm_head has a draft vocabulary of 40 tokens"),
        (
            {"architectures": ["LlamaForCausalLM"], "dflash_config": None},
            "holds a model; load_dflash reads",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_folder_that_is_not_supported_is_refused_in_a_sentence(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(write(tmp_path, "z-lab", change))


UNREAD = {
    # JetSpec's blocks are causal. A head of this kind was once read as a bidirectional one.
    "dflash_config": ("causal", "causal_head", "is_causal"),
    # DSpark, DFlash2, Domino.
    "top": ("markov_rank", "enable_confidence_head", "conv_kernel_size", "emb_dim", "new_field"),
}


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("name", [name for names in UNREAD.values() for name in names])
def test_a_field_that_changes_what_is_drafted_is_refused_by_name(tmp_path, name, is_nested):
    asked = {name: True}
    change = {"dflash_config": INNER | asked} if is_nested else asked
    place = "dflash_config." if is_nested else ""
    with pytest.raises(ValueError, match=rf"has {place}{name} True.*DFlash head.* or absent\.$"):
        read(write(tmp_path / "asked", "z-lab", change))
    for nothing in (None, False, 0):
        change = {"dflash_config": INNER | {name: nothing}} if is_nested else {name: nothing}
        read(write(tmp_path / "nothing", "z-lab", change))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            {"output_multiplier": 0.5},
            "has dflash_config.output_multiplier 0.5; a DFlash head",
        ),
        (
            {"target_hidden_size": 36},
            "target_hidden_size 36 and hidden_size 24; a DFlash head needs its target's size",
        ),
        (
            {"projector_type": "domino"},
            "projector_type 'domino'; the draft heads that are",
        ),
        ({"num_target_layers": 36}, "num_target_layers 4 and in dflash_config 36; loaders differ"),
        ({"sample_from_anchor": 3}, "has sample_from_anchor 3; it needs to be true or false"),
    ],
)
def test_dflash_config_is_read_or_refused(tmp_path, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(write(tmp_path / "refused", "z-lab", {"dflash_config": INNER | change}))
    neutral = {"output_multiplier": 1.0, "target_hidden_size": 24, "projector_type": "dflash"}
    neutral |= {"num_target_layers": 4, "sample_from_anchor": True, "block_size": heads.BLOCK}
    config = read(write(tmp_path / "read", "anchor", {"dflash_config": INNER | neutral}))[1]
    assert config.sample_from_anchor


def test_more_tokens_than_a_block_has_contradict_the_folder(tmp_path):
    fields = heads.in_speculators(heads.FIELDS)
    fields["speculators_config"] = {"proposal_methods": [{"speculative_tokens": 5}]}
    heads.write_head(tmp_path, fields, heads.random_tensors(heads.FIELDS, ()))
    with pytest.raises(ValueError, match="num_speculative_tokens is 5; a block of 5 drafts at mos"):
        open_head(DFLASH, tmp_path, num_target_layers=heads.TARGET_LAYERS)


def test_weights_in_a_pickle_are_refused_with_what_converts_them(tmp_path):
    folder = write(tmp_path, "z-lab")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"in pytorch_model\.bin, a pickle.*Convert it where you"):
        load_drafter(folder, build(TARGET))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": 28}, "states of size 24 and the target's have 28"),
        ({"vocab_size": 50}, "is for 48 tokens and the target has 50"),
        ({"num_hidden_layers": 3}, r"after layers \[1, 2, 4\] and the target has 3 layers"),
    ],
)
def test_a_head_of_another_target_is_refused_in_a_sentence(tmp_path, change, sentence):
    params, config = read(write(tmp_path, "z-lab"))
    target = build(dataclasses.replace(TARGET, **change))
    with pytest.raises(ValueError, match=f"the DFlash head .*{sentence}; use a head that was"):
        dflash_drafter(target, config, params)


def test_a_head_is_loaded_in_the_dtype_of_its_target(tmp_path):
    write(tmp_path, "some tokens")
    target = build(dataclasses.replace(TARGET, dtype="bfloat16"))
    drafter = load_drafter(tmp_path, target)
    assert (drafter.taps, drafter.params["head"]["fc"].dtype) == ((1, 2, 4), "bfloat16")
    assert drafter.params["token_map"].shape == (30,)
    assert load_drafter(tmp_path, target, "float32").params["head"]["fc"].dtype == "float32"


def test_taps_stay_in_the_order_of_the_folder(tmp_path):
    """`fc` reads them next to one another."""
    write(tmp_path, "z-lab", {"dflash_config": INNER | {"target_layer_ids": [3, 0, 1]}})
    assert load_drafter(tmp_path, build(TARGET)).taps == (4, 1, 2)
