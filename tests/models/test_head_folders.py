"""Folders of trained draft heads: what they are, and what their config.json and tensors say."""

import json

import numpy as np
import pytest
from hub_heads import PUBLISHED
from safetensors.numpy import save_file

from specjax.models import TransformerConfig, load_drafter, read_draft
from specjax.models.heads.head_fields import HeadFields, default_taps
from specjax.models.heads.head_folder import HeadTensors, draft_kind, open_head
from specjax.models.heads.head_formats import DFLASH, EAGLE3
from specjax.models.hf.weight_map import WeightEntry

pytestmark = pytest.mark.once

LAYER = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}


def write_config(folder, fields):
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Qwen3Eagle3Model"]}, "eagle3"),
        ({"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 40}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"], "eagle_config": {"a": 1}}, "eagle3"),
        ({"architectures": ["LlamaForCausalLM"]}, "model"),
        ({}, "model"),
    ],
)
def test_config_json_alone_tells_what_a_folder_drafts_with(tmp_path, fields, kind):
    (tmp_path / "config.py").write_text("raise RuntimeError('this file is never run')")
    assert draft_kind(write_config(tmp_path, fields)) == kind


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle'; the draft heads"),
        ({"speculators_model_type": ["eagle3"]}, r"speculators_model_type \['eagle3'\]"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "architectures 'EagleLlamaForCausalLM'"),
        ({"architectures": ["MiMoMTPModel"]}, "that are supported have 'LlamaForCausalLMEagle3'"),
        ({"architectures": ["DominoDraftModel"]}, "architectures 'DominoDraftModel'; the draft he"),
        ({"architectures": ["Qwen3XPressModel"]}, "architectures 'Qwen3XPressModel'; the draft he"),
        (
            {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
            "projector_type 'domino'; the draft heads that are supported have 'dflash'",
        ),
        ({"model_type": "eagle"}, "has model_type 'eagle', which is a draft head's"),
        ({"model_type": "specjax_head"}, "no longer read; train an EAGLE-3 head for this target"),
        ({"model_type": "qwen3", "dflash_config": {"a": 1}}, "has dflash_config .*draft head's"),
        ({"model_type": "llama", "truncated_vocab_size": 9}, "truncated_vocab_size 9, which is a"),
    ],
)
def test_another_kind_of_head_is_refused_in_a_sentence(tmp_path, fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        draft_kind(write_config(tmp_path, fields))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(tmp_path, name):
    kind, fields, layers = PUBLISHED[name]
    # The tensors' shapes are compared when they are loaded.
    write_tensors(write_config(tmp_path, fields), **{"lm_head.weight": np.zeros(1, np.float32)})
    assert draft_kind(tmp_path) == kind
    form = EAGLE3 if kind == "eagle3" else DFLASH
    assert open_head(form, tmp_path, num_target_layers=layers)[0].layer.hidden_size == 4096


@pytest.mark.parametrize("is_named", [False, True])
def test_a_head_of_eagle_1_is_refused_as_a_head(tmp_path, is_named):
    # Its config.json is that of a Llama of one layer.
    fields = LAYER | {"architectures": ["LlamaForCausalLM"]} | ({"bias": False} if is_named else {})
    name = "layers.0.self_attn.q_proj.weight" if is_named else "model.fc.weight"
    write_tensors(write_config(tmp_path, fields), **{name: np.zeros((24, 48), np.float32)})
    sentence = "as heads of EAGLE-1 and EAGLE-2 do and models do not; of EAGLE's heads, those of"
    target = TransformerConfig(48, 24, 40, 2, 4, 2, 6)
    for read in (lambda: read_draft(tmp_path, target), lambda: load_drafter(tmp_path, None)):
        with pytest.raises(ValueError, match=f"has bias, {sentence}|holds fc.weight, {sentence}"):
            read()


IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("fields", "taps"),
    [
        ({}, None),
        ({"eagle_config": {"use_aux_hidden_state": True, IDS: []}}, None),
        ({IDS: [2, 4, 0]}, (2, 4, 0)),
        ({"eagle_config": {IDS: [1, 3, 6]}}, (2, 4, 7)),
        ({"target_layer_ids": [1, 9]}, (2, 10)),
        ({"dflash_config": {"target_layer_ids": [1, 9]}}, (2, 10)),
        ({IDS: [2, 4], "eagle_config": {IDS: [1, 3]}}, (2, 4)),
    ],
)
def test_taps_are_counted_by_the_convention_of_their_place(fields, taps):
    assert HeadFields(LAYER | fields, "config.json").taps == taps
    assert default_taps(36) == (2, 18, 33)


def test_the_speculators_format_names_its_layer_its_k_and_its_verifier():
    layer = {name: LAYER[name] for name in LAYER if name != "vocab_size"}
    fields = {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": 40,
        "dtype": "bfloat16",
        "speculators_config": {
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "other", "speculative_tokens": 9},
                {"proposal_type": "greedy", "speculative_tokens": 3},
            ],
            "verifier": {"name_or_path": "meta/Llama"},
        },
    }
    head = HeadFields(fields, "config.json")
    # The format leaves out what is the class's own.
    assert (head.layer.vocab_size, head.draft_vocab_size) == (32000, 40)
    assert (head.layer.hidden_size, head.target_hidden_size) == (24, 24)
    assert (head.layer.dtype, head.num_speculative_tokens) == ("bfloat16", 3)
    assert head.verifier == "meta/Llama"
    qwen = {"speculators_model_type": "eagle3", "transformer_layer_config": {}}
    assert HeadFields(qwen, "config.json").layer.qk_norm


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({IDS: [2, -1]}, rf"has {IDS} \[2, -1\]; it needs to be a list of layer ids"),
        ({IDS: [2, 4], "eagle_config": {IDS: [2, 4]}}, r"differ: after \[2, 4\] and \[3, 5\]"),
        ({"eagle_config": [1]}, r"has eagle_config \[1\]; it needs to be an object"),
        ({"draft_vocab_size": 49}, "a draft's vocabulary is a part of the target's"),
        ({"draft_vocab_size": "40"}, "draft_vocab_size '40'; it needs to be a size"),
        ({"target_hidden_size": 0}, "target_hidden_size 0; it needs to be a size"),
        ({"quantization_config": {}}, "quantised weights are not supported"),
        ({"hidden_size": None}, "has hidden_size None"),
        (
            {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
            "speculative_tokens 0; it needs to be an integer >= 1",
        ),
    ],
)
def test_what_a_config_may_not_say_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        HeadFields(LAYER | fields, "config.json")


def write_tensors(folder, **tensors):
    save_file({name: np.asarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    return HeadTensors(folder)


@pytest.mark.parametrize(
    "name", ["layers.0.a", "midlayer.a", "model.layers.0.a", "model.midlayer.a"]
)
def test_a_tensor_has_one_name_in_every_format(tmp_path, name):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensors = write_tensors(tmp_path, **{name: array, "t2d": np.ones(5, bool)})
    assert "layers.0.a" in tensors
    entry = WeightEntry(("a",), ("layers.0.a",), ((2, 3),), False)
    np.testing.assert_array_equal(tensors.load([entry], "float32")["a"], array)
    both = write_tensors(tmp_path, **{"midlayer.a": array, "layers.0.a": array})
    with pytest.raises(ValueError, match=r"holds midlayer\.a; config\.json asks for no such"):
        both.load([entry], "float32")


def test_d2t_holds_offsets_and_every_token_once(tmp_path):
    ids = np.array([0, 3, 4, 9])
    tensors = write_tensors(tmp_path, d2t=ids - np.arange(4))
    found = tensors.read_token_map(4, 10)
    assert (found.tolist(), found.dtype) == (ids.tolist(), np.int32)
    with pytest.raises(ValueError, match="maps draft token 3 to token 9 by d2t; the target has"):
        tensors.read_token_map(4, 9)
    with pytest.raises(ValueError, match=r"holds d2t with shape \(4,\)"):
        tensors.read_token_map(5, 10)
    with pytest.raises(ValueError, match="maps 2 draft tokens to token 3 by d2t"):
        write_tensors(tmp_path, d2t=np.array([0, 3, 3]) - np.arange(3)).read_token_map(3, 10)
    with pytest.raises(ValueError, match="holds d2t in F32; it needs I32 or I64"):
        write_tensors(tmp_path, d2t=np.zeros(3, np.float32)).read_token_map(3, 10)
    assert write_tensors(tmp_path, d2t=np.zeros(5, np.int32)).read_token_map(5, 5) is None
    without = write_tensors(tmp_path, t2d=np.ones(5, bool))
    assert without.read_token_map(5, 5) is None
    with pytest.raises(ValueError, match=r"has no tensor d2t; config\.json gives the draft 4 of"):
        without.read_token_map(4, 5)


def test_weights_in_a_pickle_are_refused_with_what_converts_them(tmp_path):
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        HeadTensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(ValueError, match=r"a pickle.*torch\.load\('pytorch_model\.bin', weights_o"):
        HeadTensors(tmp_path)
