"""What `config.json` of each family means, in the words of transformers 4 and of 5."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from hub_configs import (
    GEMMA_2_2B,
    GEMMA_3_1B,
    GEMMA_3_4B,
    LLAMA_3_2_1B,
    MISTRAL_7B,
    PUBLISHED,
    QWEN_2_5_05B,
)

from specjax.models import RopeScaling, TransformerConfig, build
from specjax.models.decoder.rope import rope_cos_sin
from specjax.models.hf.config_json import read_fields, write_fields
from specjax.models.hf.weight_map import get_path, weight_entries

QWEN = dict(rope_theta=1e6, tie_word_embeddings=True, bos_token_id=151643)
QWEN |= dict(eos_token_ids=(151645,), rms_norm_eps=1e-6, dtype="bfloat16")
GEMMA = dict(sandwich_norms=True, norm_offset=1.0, query_scale=1 / 16, bos_token_id=2)
GEMMA |= dict(hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-6)
GEMMA_3 = GEMMA | dict(qk_norm=True, rope_theta=1e6, local_rope_theta=1e4, dtype="bfloat16")
MISTRAL = TransformerConfig(
    *(32000, 4096, 14336, 32, 32, 8, 128),
    tie_word_embeddings=False,
    max_position_embeddings=32768,
    bos_token_id=1,
    eos_token_ids=(2,),
    dtype="bfloat16",
    layer_windows=(4096,) * 32,
)
EXPECTED = {
    "Llama 2 7B": TransformerConfig(
        *(32000, 4096, 11008, 32, 32, 32, 128, 1e-5, 1e4, False, 4096, 1, (2,), "float16")
    ),
    "Llama 3.2 1B": TransformerConfig(
        *(128256, 2048, 8192, 16, 32, 8, 64, 1e-5, 5e5, True, 131072, 128000, (128001,)),
        dtype="bfloat16",
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    ),
    "SmolLM2 135M": TransformerConfig(
        *(49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, True, 2048, 0, (0,), "bfloat16")
    ),
    "Mistral 7B": MISTRAL,
    "Mistral 7B v0.3": dataclasses.replace(
        MISTRAL, layer_windows=(), rope_theta=1e6, vocab_size=32768
    ),
    "Qwen2.5 0.5B": TransformerConfig(
        *(151936, 896, 4864, 24, 14, 2, 64), **QWEN, qkv_bias=True, max_position_embeddings=32768
    ),
    "Qwen3 0.6B": TransformerConfig(
        *(151936, 1024, 3072, 28, 16, 8, 128), **QWEN, qk_norm=True, max_position_embeddings=40960
    ),
    "Gemma 2 2B": TransformerConfig(
        *(256000, 2304, 9216, 26, 8, 4, 256),
        **GEMMA,
        eos_token_ids=(1,),
        embedding_scale=48.0,
        max_position_embeddings=8192,
        attention_softcap=50.0,
        logit_softcap=30.0,
        layer_windows=(4096, None) * 13,
    ),
    "Gemma 3 1B": TransformerConfig(
        *(262144, 1152, 6912, 26, 4, 1, 256),
        **GEMMA_3,
        eos_token_ids=(1, 106),
        embedding_scale=1152**0.5,
        max_position_embeddings=32768,
        layer_windows=((512,) * 5 + (None,)) * 4 + (512,) * 2,
    ),
    "Gemma 3 4B": TransformerConfig(
        *(262208, 2560, 10240, 34, 8, 4, 256),
        **GEMMA_3,
        eos_token_ids=(1, 106),
        embedding_scale=2560**0.5,
        max_position_embeddings=131072,
        rope_scaling=RopeScaling("linear", 8.0),
        layer_windows=((1024,) * 5 + (None,)) * 5 + (1024,) * 4,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read(name):
    assert read_fields(PUBLISHED[name]) == EXPECTED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_configuration_is_written_so_that_it_is_read_back(name):
    fields = write_fields(EXPECTED[name])
    assert read_fields(fields) == EXPECTED[name]
    # Without a window and with nothing else of its own, it is a Llama.
    kind = {"Mistral 7B v0.3": "llama", "Gemma 3 4B": "gemma3_text"}
    assert fields["model_type"] == kind.get(name, PUBLISHED[name]["model_type"])


def test_a_quantization_of_null_is_none():
    assert read_fields(MISTRAL_7B | {"quantization_config": None}) == MISTRAL


def test_untied_embeddings_are_read_outside_the_text_model_too():
    assert EXPECTED["Gemma 3 4B"].tie_word_embeddings
    untied = dataclasses.replace(EXPECTED["Gemma 3 4B"], tie_word_embeddings=False)
    assert read_fields(GEMMA_3_4B | {"tie_word_embeddings": False}) == untied


def test_a_combination_that_no_family_has_is_not_written():
    config = dataclasses.replace(MISTRAL, qk_norm=True, attention_softcap=5.0)
    with pytest.raises(ValueError, match="no supported family has this combination"):
        write_fields(config)


def test_the_fields_of_transformers_5_are_read():
    fields = {k: v for k, v in LLAMA_3_2_1B.items() if k not in ("rope_theta", "rope_scaling")}
    fields["rope_parameters"] = LLAMA_3_2_1B["rope_scaling"] | {"rope_theta": 5e5}
    fields["dtype"] = fields.pop("torch_dtype")
    assert read_fields(fields) == EXPECTED["Llama 3.2 1B"]
    gone = ("rope_theta", "rope_scaling", "rope_local_base_freq", "sliding_window_pattern")
    fields = {k: v for k, v in GEMMA_3_1B.items() if k not in gone}
    fields["layer_types"] = ((["sliding_attention"] * 5 + ["full_attention"]) * 5)[:26]
    fields["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    scaled = dataclasses.replace(EXPECTED["Gemma 3 1B"], rope_scaling=RopeScaling("linear", 2.0))
    assert read_fields(fields) == scaled


def test_the_layers_behind_the_first_have_the_window_if_it_is_used():
    used = QWEN_2_5_05B | {"use_sliding_window": True}
    assert read_fields(used).layer_windows == (None,) * 21 + (32768,) * 3
    assert read_fields(used | {"max_window_layers": 24}).layer_windows == ()
    types = ["full_attention", "sliding_attention"] * 12
    assert read_fields(used | {"layer_types": types}).layer_windows == (None, 32768) * 12


MIXED = ["full_attention", *["sliding_attention"] * 3] * 8


@pytest.mark.parametrize("kind", ["mistral", "ministral"])
def test_a_mistral_has_its_window_in_the_layers_that_are_said_to_have_it(kind):
    fields = MISTRAL_7B | {"model_type": kind}
    assert read_fields(fields) == MISTRAL
    assert read_fields(fields | {"layer_types": None}) == MISTRAL
    mixed = dataclasses.replace(MISTRAL, layer_windows=(None, 4096, 4096, 4096) * 8)
    assert read_fields(fields | {"layer_types": MIXED}) == mixed
    none = read_fields(fields | {"layer_types": ["full_attention"] * 32})
    assert none == dataclasses.replace(MISTRAL, layer_windows=())
    written = write_fields(mixed)
    assert written["architectures"] == ["MinistralForCausalLM"]
    assert read_fields(written) == mixed
    # With types, transformers would take it for a Ministral.
    assert "layer_types" not in write_fields(MISTRAL)


# Fields that change logits somewhere: a value that does, and those that change nothing.
CHANGING = {
    "layer_types": (["full_attention", "sliding_attention"] * 16, None, ["full_attention"] * 32),
    "mlp_layer_types": (["sparse"] * 32, None, ["dense"] * 32),
    "per_layer_config": ({"1": {"rms_norm_eps": 0.1}}, None, {}),
    "attention_chunk_size": (8192, None),
    "interleaved_sliding_window": (4096, None),
    "is_causal": (False, True),
    "is_encoder_decoder": (True, False),
    "add_cross_attention": (True, False),
    "sliding_window": (4096, None),
    "sliding_window_pattern": (2, None),
    "use_bidirectional_attention": (True, False, None),
    "alibi": (True, False),
    "no_rope_layer_interval": (4, None, 0),
    "no_rope_layers": ([1, 1, 1, 0] * 8, None, [], [1] * 32),
    "partial_rotary_factor": (0.5, None, 1, 1.0),
    "rope_interleave": (True, False),
    "rope_interleaved": (True, False),
    "rope_local_base_freq": (10000, None),
    "rotary_pct": (0.25, 1.0),
    "use_mrope": (True, False),
    "attention_multiplier": (0.1, None),
    "attn_logit_softcapping": (50.0, None),
    "attn_temperature_tuning": (True, False),
    "clip_qkv": (8.0, None),
    "qk_layernorm": (True, False),
    "query_pre_attn_scalar": (256, None),
    "use_qk_norm": (True, False),
    "embedding_multiplier": (12.0, 1.0),
    "final_logit_softcapping": (30.0, None),
    "lm_head_multiplier": (0.5, 1.0),
    "logit_scale": (0.0625, None, 1),
    "logits_scaling": (8.0, 1.0),
    "logits_soft_cap": (30.0, None),
    "mlp_bias": (True, False, None),
    "parallel_attn": (True, False),
    "residual_multiplier": (0.22, 1.0),
    "use_parallel_residual": (True, False),
}
# Those that a family has; Llama has none.
WINDOW_FIELDS = {"sliding_window", "layer_types"}
MULTIMODAL_FIELDS = WINDOW_FIELDS | {
    "query_pre_attn_scalar",
    "sliding_window_pattern",
    "rope_local_base_freq",
}
SOFTCAP_FIELDS = {"attn_logit_softcapping", "final_logit_softcapping"}
FAMILY_FIELDS = {
    "llama": set(),
    "mistral": WINDOW_FIELDS,
    "qwen2": WINDOW_FIELDS,
    "qwen3": WINDOW_FIELDS,
    "gemma2": WINDOW_FIELDS | SOFTCAP_FIELDS | {"query_pre_attn_scalar", "sliding_window_pattern"},
    "gemma3_text": MULTIMODAL_FIELDS | {"final_logit_softcapping"},
    "gemma3": MULTIMODAL_FIELDS,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_field_that_changes_logits_and_is_not_read_is_refused(model):
    fields = PUBLISHED[model]
    for name in CHANGING.keys() - FAMILY_FIELDS[fields["model_type"]]:
        changing, *harmless = CHANGING[name]
        for value, is_refused in ((changing, True), *((value, False) for value in harmless)):
            change = {name: value}
            if "text_config" in fields:
                change = {"text_config": fields["text_config"] | change}
            if not is_refused:
                assert read_fields(fields | change) == EXPECTED[model], (name, value)
                continue
            with pytest.raises(ValueError, match=f"{name} .*, which changes the logits and is not"):
                read_fields(fields | change)


@pytest.mark.parametrize("model", PUBLISHED)
def test_fields_that_do_not_change_the_logits_pass(model):
    fields = {
        "_name_or_path": "here",
        "architectures": ["XForCausalLM"],
        "attention_dropout": 0.1,
        "auto_map": {"AutoModelForCausalLM": "modeling.X"},
        "id2label": {"0": "a"},
        "is_llama_config": True,
        "max_window_layers": 48,
        "pad_token_id": 2,
        "pretraining_tp": 2,
        "sliding_window_size": 4096,
        "transformers_version": "4.46.0",
        "use_cache": False,
    }
    assert read_fields(PUBLISHED[model] | fields) == EXPECTED[model]


def test_a_window_that_is_switched_off_is_none_where_there_is_a_switch():
    switched_off = {"use_sliding_window": False, "sliding_window": 4096}
    assert read_fields(LLAMA_3_2_1B | switched_off) == EXPECTED["Llama 3.2 1B"]
    assert read_fields(QWEN_2_5_05B | switched_off) == EXPECTED["Qwen2.5 0.5B"]
    null = {"use_sliding_window": False, "sliding_window": None}
    assert read_fields(MISTRAL_7B | null) == dataclasses.replace(MISTRAL, layer_windows=())
    for fields in (MISTRAL_7B, GEMMA_2_2B):
        with pytest.raises(ValueError, match="use_sliding_window False and sliding_window 4096; m"):
            read_fields(fields | switched_off)


def test_every_other_gemma_2_layer_has_the_window_regardless_of_the_pattern():
    assert read_fields(GEMMA_2_2B | {"sliding_window_pattern": 2}) == EXPECTED["Gemma 2 2B"]
    with pytest.raises(ValueError, match=r"sliding_window_pattern 3, .*; it needs to be 2 or a"):
        read_fields(GEMMA_2_2B | {"sliding_window_pattern": 3})


def test_qwen_2_has_its_biases_regardless_of_attention_bias():
    for bias in (True, False):
        assert read_fields(QWEN_2_5_05B | {"attention_bias": bias}) == EXPECTED["Qwen2.5 0.5B"]


def test_the_oldest_name_of_a_scaling_is_refused_where_transformers_scales_nothing():
    scaled = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_fields(LLAMA_3_2_1B | scaled).rope_scaling == RopeScaling("linear", 2.0)
    with pytest.raises(ValueError, match="type 'linear' and no rope_type, which scales nothing"):
        read_fields(GEMMA_3_1B | scaled)


@pytest.mark.parametrize("family", ["mistral", "ministral"])
def test_biases_of_a_family_without_any_are_refused(family):
    with pytest.raises(ValueError, match="attention_bias True, which changes the logits and is"):
        read_fields(MISTRAL_7B | {"model_type": family, "attention_bias": True})


def test_the_older_scaling_replaces_the_newer_with_its_base():
    # Transformers 5 drops the newer words whole.
    both = {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}}
    assert read_fields(LLAMA_3_2_1B | both) == EXPECTED["Llama 3.2 1B"]


@pytest.mark.parametrize(
    "architectures",
    [
        ["LlamaForSequenceClassification"],
        ["LlamaModel"],
        ["Qwen2ForRewardModel", "Qwen2Model"],
        ["LlamaForCausalLMEagle3"],
        "MistralModel",
        [None],
        3,
    ],
)
def test_an_architecture_without_a_head_for_the_next_token_is_refused(architectures):
    for fields in (LLAMA_3_2_1B, GEMMA_3_4B):
        with pytest.raises(ValueError, match=r"has architectures .*; a model needs a head for the"):
            read_fields(fields | {"architectures": architectures})


@pytest.mark.parametrize("architectures", [None, [], ["LlamaModel", "LlamaForCausalLM"]])
def test_an_architecture_that_predicts_tokens_or_is_not_named_passes(architectures):
    assert read_fields(LLAMA_3_2_1B | {"architectures": architectures}) == EXPECTED["Llama 3.2 1B"]
    multimodal = GEMMA_3_4B | {"architectures": ["Gemma3ForConditionalGeneration"]}
    assert read_fields(multimodal) == EXPECTED["Gemma 3 4B"]


NUMBER = "it needs to be a positive number"
GPTQ = {"bits": 4, "quant_method": "gptq"}
LLAMA_3 = LLAMA_3_2_1B["rope_scaling"]


@pytest.mark.parametrize(
    ("fields", "change", "sentence"),
    [
        (QWEN_2_5_05B, {"layer_types": ["full_attention"]}, "has 1 layer_types; .* its 24 layers"),
        (
            QWEN_2_5_05B,
            {"layer_types": ["chunked"]},
            r"layer_types \['chunked'\]; it needs to be nu",
        ),
        (
            QWEN_2_5_05B,
            {"layer_types": ["sliding_attention"] * 24},
            "sliding attention; it needs sliding_window",
        ),
        (GEMMA_2_2B, {"sliding_window": None}, "sliding attention; it needs sliding_window"),
        (GEMMA_3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern 0; it needs"),
        (MISTRAL_7B, {"sliding_window": 0}, "sliding_window 0; it needs to be an integer"),
        (
            MISTRAL_7B,
            {"num_hidden_layers": 2**30},
            "num_hidden_layers 1073741824; it needs to be an integer from 1 to 1024",
        ),
        (GEMMA_2_2B, {"query_pre_attn_scalar": 0}, f"query_pre_attn_scalar 0; {NUMBER}"),
        (GEMMA_2_2B, {"attn_logit_softcapping": -1}, f"attn_logit_softcapping -1; {NUMBER}"),
        (GEMMA_2_2B, {"hidden_activation": "relu"}, "hidden_activation 'relu'; it needs to be 's"),
        (MISTRAL_7B, {"quantization_config": GPTQ}, "quantization_config with quant_method 'gptq'"),
        (GEMMA_3_4B, {"quantization_config": GPTQ}, "quantization_config with quant_method 'gptq'"),
        (MISTRAL_7B, {"quantization_config": {}}, "quantization_config with quant_method None"),
        (MISTRAL_7B, {"quantization_config": 8}, "quantization_config with quant_method None"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (LLAMA_3_2_1B, {"rope_scaling": LLAMA_3 | {"factor": 0}}, f"factor 0; {NUMBER}"),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            f"low_freq_factor None; {NUMBER}",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_scaling": LLAMA_3 | {"low_freq_factor": 4.0}},
            "low_freq_factor 4.0; it needs to be below high_freq_factor",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_type": "default"}},
            "rotates a part of each head",
        ),
        (
            LLAMA_3_2_1B,
            {"original_max_position_embeddings": 4096},
            "original_max_position_embeddings 4096 and rope_scaling with 8192",
        ),
        (
            LLAMA_3_2_1B,
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 50.0}}},
            "rope_parameters for each kind of layer; model_type 'llama' needs them for all layers",
        ),
        (
            GEMMA_3_1B,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
            "rope_parameters for all layers; model_type 'gemma3_text' needs them for full_atten",
        ),
        (
            GEMMA_3_1B,
            {"rope_parameters": {"full_attention": 3}},
            "full_attention 3; it needs to be",
        ),
        (
            GEMMA_3_1B,
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "scales those of sliding_attention by 'linear'",
        ),
        (
            GEMMA_3_1B,
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "by 'yarn'; only 'linear' and 'llama3'",
        ),
        ({"model_type": "gemma3"}, {}, "text_config None; it needs to be an object"),
        ({"model_type": "mixtral"}, {}, "model_type 'mixtral'; it needs to be one of"),
    ],
)
def test_fields_that_no_family_has_are_refused_in_a_sentence(fields, change, sentence):
    with pytest.raises(ValueError, match=sentence) as refusal:
        read_fields(fields | change, "the file")
    assert re.match(r"the file [^\n]*\.$", str(refusal.value))


def test_a_configuration_that_does_not_fit_its_layers_is_refused():
    sizes = (64, 16, 32, 2, 4, 2, 4)
    with pytest.raises(ValueError, match="layer_windows has 1 entries"):
        TransformerConfig(*sizes, layer_windows=(3,))
    with pytest.raises(ValueError, match="hidden_act is 'relu'"):
        TransformerConfig(*sizes, hidden_act="relu")


def test_scaled_wavelengths_are_those_of_the_paper():
    # Llama 3.1, transformers' `_compute_llama3_parameters`, in float64.
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    plain = 1e4 ** -(np.arange(0, 32, 2) / 32)
    lengths = 2 * np.pi / plain
    fraction = (64 / lengths - 1) / 3
    interpolated = (1 - fraction) * plain / 8 + fraction * plain
    expected = np.where(lengths > 64, plain / 8, np.where(lengths < 16, plain, interpolated))
    assert len({*np.sign(expected - plain), *np.sign(expected - plain / 8)}) == 3
    cos, sin = rope_cos_sin(1e4, scaling, 32, jnp.array([[1]]))
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 0, 0], expected, rtol=1e-5)
    linear = rope_cos_sin(1e4, RopeScaling("linear", 4.0), 32, jnp.array([[4]]))
    unscaled = rope_cos_sin(1e4, None, 32, jnp.array([[1]]))
    for first, second in zip(linear, unscaled, strict=True):
        np.testing.assert_allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    "features",
    [
        dict(qkv_bias=True, tie_word_embeddings=False),
        dict(qkv_bias=True, out_bias=True),
        dict(qk_norm=True),
        dict(sandwich_norms=True, norm_offset=1.0),
    ],
)
def test_the_weight_entries_name_every_array_of_a_model_once(features):
    config = TransformerConfig(64, 16, 32, 2, 4, 2, 4, **features)
    params = build(config).params
    entries = list(weight_entries(config))
    names = [name for entry in entries for name in entry.names]
    assert len(set(names)) == len(names)
    num_parameters = 0
    for entry in entries:
        array = get_path(params, entry.path)
        assert array.size == sum(int(np.prod(shape)) for shape in entry.shapes)
        num_parameters += array.size
    assert num_parameters == sum(a.size for a in _leaves(params))


def _leaves(params):
    if isinstance(params, dict):
        return [leaf for value in params.values() for leaf in _leaves(value)]
    return [params]
