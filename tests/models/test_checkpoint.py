"""Folders: what is written is read back, and a bad one is refused in a sentence."""

import dataclasses
import io
import itertools
import json
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors.flax import load_file, save_file

from specjax.file_io import quote
from specjax.models import (
    TransformerConfig,
    build,
    chat_prompt,
    load,
    load_config,
    load_shapes,
    load_tokenizer,
    pretrained_folder,
    save,
)
from specjax.models.hf.config_json import read_fields
from specjax.models.hf.weight_map import weight_entries

CONFIG = TransformerConfig(
    vocab_size=48,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    bos_token_id=0,
    eos_token_ids=(0, 5),
)


def tokenizer():
    return tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "model", build(CONFIG).params, CONFIG, tokenizer(), dtype="float32")
    return tmp_path / "model"


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_model_is_read_back_bit_for_bit(tmp_path, tied):
    config = TransformerConfig(32, 16, 24, 2, 4, 1, 4, tie_word_embeddings=tied)
    model = build(config, seed=1)
    save(tmp_path, model.params, config, tokenizer(), dtype="float32")
    again, loaded_config = load(tmp_path, "float32")
    assert loaded_config == config
    assert (again.init_cache, again.apply, again.logits) == tuple(
        getattr(model, name) for name in ("init_cache", "apply", "logits")
    )
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert load_tokenizer(tmp_path).encode("ab").ids == [0, 1]


def test_the_layout_is_that_of_hugging_face(folder):
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (12, 24)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (24, 40)
    assert "lm_head.weight" not in tensors
    x = jax.random.normal(jax.random.key(0), (24,))
    qkv = x @ build(CONFIG).params["layers"][0]["attention"]["qkv"]
    key = tensors["model.layers.0.self_attn.k_proj.weight"] @ x
    np.testing.assert_allclose(qkv[24:36], key, atol=1e-6)
    fields = json.loads((folder / "config.json").read_text())
    assert fields["model_type"] == "llama"
    assert fields["eos_token_id"] == [0, 5]


def llama(tensors, token_ids):
    """Logits of one sequence in NumPy float64, straight from Hugging Face's tensors."""
    weights = {name: np.asarray(array, np.float64) for name, array in tensors.items()}
    length, size, group = len(token_ids), CONFIG.head_dim, 2

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps) * weights[name]

    def heads(x, name):
        return (x @ weights[name].T).reshape(length, -1, size).transpose(1, 0, 2)

    angles = np.arange(length)[:, None] * CONFIG.rope_theta ** (-np.arange(0, size, 2) / size)
    cos, sin = (np.tile(f(angles), 2) for f in (np.cos, np.sin))

    def rotate(x):
        return x * cos + np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin

    x = weights["model.embed_tokens.weight"][token_ids]
    for number in range(CONFIG.num_hidden_layers):
        layer = f"model.layers.{number}."
        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (heads(y, f"{layer}self_attn.{n}_proj.weight") for n in "qkv")
        k, v = (np.repeat(a, group, axis=0) for a in (rotate(k), v))
        scores = rotate(q) @ k.transpose(0, 2, 1) / np.sqrt(size)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        exp_scores = np.exp(scores - scores.max(-1, keepdims=True))
        y = (
            (exp_scores / exp_scores.sum(-1, keepdims=True) @ v)
            .transpose(1, 0, 2)
            .reshape(length, -1)
        )
        x = x + y @ weights[layer + "self_attn.o_proj.weight"].T
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (y @ weights[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[layer + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["model.embed_tokens.weight"].T


def test_a_loaded_model_computes_the_logits_of_llama(tmp_path):
    params = jax.tree.map(lambda a: a * 8, build(CONFIG, seed=2).params)
    save(tmp_path, params, CONFIG, tokenizer(), dtype="float32")
    model, _ = load(tmp_path, "float32")
    token_ids = np.array([3, 40, 7, 7, 21, 0, 11])
    positions = jnp.arange(7)[None]
    hidden, _ = model.apply(
        model.params, jnp.array(token_ids)[None], positions, model.init_cache(1, 7)
    )
    expected = llama(load_file(tmp_path / "model.safetensors"), token_ids)
    np.testing.assert_allclose(
        model.logits(model.params, hidden)[0], expected, rtol=2e-4, atol=2e-4 * expected.std()
    )


def test_a_checkpoint_is_bfloat16_and_read_as_asked(tmp_path):
    save(tmp_path, build(CONFIG).params, CONFIG, tokenizer())
    assert load_config(tmp_path).dtype == "bfloat16"
    default = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    for asked, expected_dtype in (
        (None, default),
        ("bfloat16", "bfloat16"),
        ("float32", "float32"),
    ):
        model, config = load(tmp_path, asked)
        assert config.dtype == expected_dtype
        assert model.params["embedding"].dtype == jnp.dtype(expected_dtype)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        load_tokenizer(folder) if name == "tokenizer.json" else load(folder)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        load(tmp_path / "nowhere")
    for read in (load, load_config, load_tokenizer):
        with pytest.raises(ValueError, match="the name of the folder is empty; it needs to be"):
            read("")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_file_of_garbage_is_refused(folder, name):
    (folder / name).write_bytes(b"garbage, not a file of this kind")
    with pytest.raises(ValueError, match=name):
        load_tokenizer(folder) if name == "tokenizer.json" else load(folder)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'; it needs to be one of.*'llama', 'mistral'"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\]; it needs to be one of"),
        ({"hidden_size": None}, "hidden_size None; it needs to be an integer from 1 to 262144"),
        ({"hidden_size": 2**18}, r"norm.weight with shape \(24,\); by config.json .* \(262144,\)"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling with factor None; it needs"),
        ({"attention_bias": True}, r"has no tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
        ({"model_type": "qwen3"}, r"has no tensor model\.layers\.0\.self_attn\.q_norm\.weight"),
        ({"mlp_bias": True}, "mlp_bias True, which changes the logits and is not read"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq'; quantised we"),
        ({"quantization_config": {}}, "has a quantization_config with quant_method None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5, which changes the logits"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'; it needs to be 'silu' or 'gelu_pyt"),
        ({"vocab_size": 49}, r"embed_tokens.weight with shape \(48, 24\).*\(49, 24\)"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"num_hidden_layers": 1024}, "has no tensor model.layers.2"),
        ({"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(folder, fields, sentence):
    edit_config(folder, **fields)
    with pytest.raises(ValueError, match=sentence):
        load(folder)
    # Before anything is traced, as the command compiles while the weights are read.
    with pytest.raises(ValueError, match=sentence):
        load_shapes(folder)


def test_shapes_are_there_without_weights(folder):
    model, _ = load(folder, "float32")
    (folder / "model.safetensors").unlink()
    shapes, config = load_shapes(folder, "float32")
    assert config == CONFIG
    expected = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.params)
    assert shapes.params == expected


SMALL = dict(vocab_size=48, hidden_size=24, intermediate_size=40, num_hidden_layers=2)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6)
MODEL_TYPES = ["llama", "mistral", "ministral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3"]
HOSTILE = [0, -1, 2**25, 2**31 - 1, 2**31, 2**63, 10**30, 1e9, 24.5, float("inf"), "24"]
HOSTILE += [[24], [[]] * 1000, {}, True, "9" * 10**5]


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_a_hostile_size_is_refused_in_a_short_sentence(kind):
    def fields(name, value):
        given = SMALL | {name: value}
        return {"model_type": kind} | ({"text_config": given} if kind == "gemma3" else given)

    read_fields(fields("vocab_size", 48))
    for name in SMALL:
        for value in HOSTILE:
            with pytest.raises(
                ValueError, match=f"^config.json has {name} .*; it needs to"
            ) as refusal:
                read_fields(fields(name, value))
            assert len(str(refusal.value)) < 300


def test_the_largest_sizes_have_products_below_63_bits():
    # Of more, XLA divides by zero when it weighs a product.
    most = {}
    for name in SMALL:
        with pytest.raises(ValueError, match="an integer from 1 to") as refusal:
            read_fields({"model_type": "llama"} | SMALL | {name: 2**40})
        most[name] = int(re.search(r"from 1 to (\d+)", str(refusal.value))[1])
    largest = TransformerConfig(**most)
    for entry in itertools.islice(weight_entries(largest), 20):
        assert sum(map(math.prod, entry.shapes)) * 8 < 2**63
        assert sum(shape[0] for shape in entry.shapes) < 2**31


NULL = "an integer from 1 to 4096, or null"
LENGTH = "an integer from 1 to 2147483647"
NUMBER = "a positive number below 2**127"
IDS = "a token id, a list of them or null"


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("vocab_size", "48", "an integer from 1 to 16777216"),
        ("hidden_size", 24.0, "an integer from 1 to 262144"),
        ("num_hidden_layers", [2], "an integer from 1 to 1024"),
        ("max_position_embeddings", 2**31, LENGTH),
        ("num_key_value_heads", "2", NULL),
        ("num_key_value_heads", 0, NULL),
        ("num_key_value_heads", -2, NULL),
        ("head_dim", "a", NULL),
        ("head_dim", 6.5, NULL),
        ("head_dim", 0, NULL),
        ("max_position_embeddings", None, LENGTH),
        ("max_position_embeddings", "1024", LENGTH),
        ("rms_norm_eps", "x", NUMBER),
        ("rms_norm_eps", None, NUMBER),
        ("rms_norm_eps", float("nan"), NUMBER),
        ("rope_theta", "10000", NUMBER),
        ("rope_theta", 0, NUMBER),
        ("rope_theta", float("inf"), NUMBER),
        ("rope_theta", 10**400, NUMBER),
        ("rope_theta", [1e4], NUMBER),
        ("rope_scaling", [1], "an object or null"),
        ("rope_scaling", "linear", "an object or null"),
        ("rope_parameters", 1, "an object or null"),
        ("tie_word_embeddings", "false", "true or false"),
        ("tie_word_embeddings", None, "true or false"),
        ("bos_token_id", "x", "a token id or null"),
        ("bos_token_id", [0], "a token id or null"),
        ("eos_token_id", "x", IDS),
        ("eos_token_id", [0, "x"], IDS),
        ("eos_token_id", [[0]], IDS),
        ("eos_token_id", -1, IDS),
        ("eos_token_id", 2**31, IDS),
        ("eos_token_id", True, IDS),
        ("torch_dtype", "int9", "'bfloat16', 'float16', 'float32' or null"),
        ("torch_dtype", ["float32"], "'bfloat16', 'float16', 'float32' or null"),
        ("dtype", "", "'bfloat16', 'float16', 'float32' or null"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_by_name_and_file(folder, name, value, needed):
    edit_config(folder, **{name: value})
    sentence = f"{folder / 'config.json'} has {name} {quote(value)}; it needs to be {needed}."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        load_config(folder)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; it needs to be a multiple"),
        ({"head_dim": 5}, "head_dim is 5; it needs to be even"),
        ({"head_dim": None, "num_attention_heads": 48}, "head_dim is 1; it needs to be even"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused_by_file(folder, fields, sentence):
    edit_config(folder, **fields)
    with pytest.raises(ValueError, match=sentence) as refusal:
        load_config(folder)
    assert str(refusal.value).startswith(f"{folder / 'config.json'} contradicts itself: ")


@pytest.mark.parametrize(
    ("fields", "name", "kind"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling", "'dynamic'"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling", "None"),
        ({"rope_scaling": {"rope_type": ["default"]}}, "rope_scaling", r"\['default'\]"),
        (
            {"rope_scaling": {"type": "default"}, "rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters",
            "'yarn'",
        ),
    ],
)
def test_scaled_rotary_embeddings_are_refused_wherever_they_are_asked_for(
    folder, fields, name, kind
):
    edit_config(folder, **fields)
    with pytest.raises(ValueError, match=f"{name} that scales the rotary embeddings by {kind}"):
        load_config(folder)


def test_absent_and_null_fields_have_the_defaults_of_hugging_face(folder):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for name in (
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "tie_word_embeddings",
        "max_position_embeddings",
        "bos_token_id",
        "eos_token_id",
        "torch_dtype",
        "rope_scaling",
    ):
        del fields[name]
    path.write_text(json.dumps(fields))
    expected = TransformerConfig(48, 24, 40, 2, 4, 4, 6, 1e-6, 10000.0, False, 2048, None, ())
    assert load_config(folder) == expected
    names = ("num_key_value_heads", "head_dim", "bos_token_id", "eos_token_id", "torch_dtype")
    edit_config(folder, **dict.fromkeys(names))
    assert load_config(folder) == expected
    edit_config(
        folder, rope_parameters={"rope_theta": 500, "rope_type": "default"}, dtype="float16"
    )
    assert load_config(folder) == dataclasses.replace(expected, rope_theta=500.0, dtype="float16")


def test_eos_tokens_are_read_from_the_generation_config(folder):
    path = folder / "generation_config.json"
    for eos_token_ids, expected in (([0, 7], (0, 7)), (9, (9,)), (None, (0, 5))):
        path.write_text(json.dumps({"eos_token_id": eos_token_ids, "top_k": 20}))
        assert load_config(folder).eos_token_ids == expected
    path.write_text(json.dumps({"eos_token_id": "x"}))
    with pytest.raises(ValueError, match=r"generation_config\.json has eos_token_id 'x'; it needs"):
        load_config(folder)


def test_a_missing_tensor_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"has no tensor model\.norm\.weight"):
        load(folder)


UNREAD = {
    "a bias": "model.layers.0.self_attn.q_proj.bias",
    "a layer more": "model.layers.2.mlp.up_proj.weight",
    "a norm": "model.layers.1.self_attn.q_norm.weight",
    "a bias of the head": "lm_head.bias",
    "what makes it a classifier": "score.weight",
    "vision of a text model": "vision_tower.patch.weight",
    "nearly a buffer": "model.layers.0.self_attn.rotary_emb.weight",
}


@pytest.mark.parametrize("name", UNREAD.values(), ids=UNREAD)
def test_a_tensor_that_is_not_read_is_refused(folder, name):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {name: jnp.ones(24)}, file)
    sentence = f"{file} holds {name}; config.json asks for no such tensor, but the logits may"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        load(folder)
    save_file(tensors | {name: jnp.ones(24), "other": jnp.ones(1)}, file)
    with pytest.raises(ValueError, match=r"holds .*, and 1 more that are not read; config"):
        load(folder)


def test_a_tensor_that_the_index_leaves_out_is_refused_too(folder):
    names, _ = split_into_shards(folder)
    tensors = load_file(folder / names[1])
    save_file(tensors | {"lm_head.weight": jnp.ones((48, 24))}, folder / names[1])
    with pytest.raises(ValueError, match=f"{names[1]} holds lm_head.weight; config.json asks for"):
        load(folder)


def test_buffers_of_rotary_embeddings_are_left_out(folder):
    before, _ = load(folder, "float32")
    file = folder / "model.safetensors"
    buffers = (f"model.layers.{n}.self_attn.rotary_emb.inv_freq" for n in range(2))
    save_file(load_file(file) | dict.fromkeys(buffers, jnp.ones(3)), file)
    jax.tree.map(np.testing.assert_array_equal, load(folder, "float32")[0].params, before.params)


@pytest.mark.parametrize("outer", ["language_model.", "model.language_model."])
def test_only_the_vision_tensors_of_a_multimodal_model_are_left_out(folder, outer):
    before, _ = load(folder, "float32")
    inner = "model." if outer == "language_model." else ""
    vision_prefix = "" if outer == "language_model." else "model."
    tensors = {
        name.replace("model.", outer + inner, 1): array
        for name, array in load_file(folder / "model.safetensors").items()
    }
    for name in ("vision_tower.patch.weight", "multi_modal_projector.mm_input_projection_weight"):
        tensors[vision_prefix + name] = jnp.ones(3)
    save_file(tensors, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, load(folder, "float32")[0].params, before.params)
    save_file(tensors | {"audio_tower.patch.weight": jnp.ones(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds audio_tower\.patch\.weight; config.json asks for"):
        load(folder)


def test_an_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has adapter_config\.json; adapters are not supported"):
        load(folder)


POINTER = """\
version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 12345
"""


def render_chat(folder):
    return chat_prompt(folder, [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", load),
        ("generation_config.json", load),
        ("model.safetensors", load),
        ("model-00001-of-00002.safetensors", load),
        ("model.safetensors.index.json", load),
        ("tokenizer.json", load_tokenizer),
        ("tokenizer_config.json", render_chat),
        ("chat_template.jinja", render_chat),
    ],
)
def test_a_git_lfs_pointer_is_named_with_its_remedy(folder, name, read):
    if "model-" in name or "index" in name:
        split_into_shards(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / name).write_text(POINTER)
    sentence = f"{folder / name} is a Git LFS pointer, not the file itself; run `git l"
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}fs pull` in its folder"):
        read(folder)


def test_quantised_weights_are_not_read_as_numbers(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(jnp.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds model\.norm\.weight in I8; quantised"):
        load(folder)


def add_tied_head(folder, change):
    """Adds a head that is tied to the embedding, and returns its values."""
    tensors = load_file(folder / "model.safetensors")
    head = change(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    return head


LAST_CHANGED = {
    "values": lambda a: a.at[-1, -1].add(1),
    "shape": lambda a: a[:-1],
    "values in another dtype": lambda a: a.at[-1, -1].add(1).astype(jnp.bfloat16),
    "numbers that are none": lambda a: a.astype(jnp.int32),
}


@pytest.mark.parametrize("change", LAST_CHANGED.values(), ids=LAST_CHANGED)
@pytest.mark.parametrize("chunk", [2**22, 7])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(folder, monkeypatch, change, chunk):
    monkeypatch.setattr("specjax.models.hf.mapped_tensors._COMPARE_CHUNK", chunk)
    head = add_tied_head(folder, change)
    sentence = (
        f"{folder / 'model.safetensors'} holds lm_head.weight, which differs from "
        "model.embed_tokens.weight, to which config.json ties it; set tie_word_embeddings to false "
        "there, or remove the tensor."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        load(folder)
    if head.dtype == jnp.float32 and head.shape == (48, 24):
        # The first of the two remedies that the sentence names.
        edit_config(folder, tie_word_embeddings=False)
        np.testing.assert_array_equal(load(folder, "float32")[0].params["head"], head)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_head_that_equals_the_embedding_changes_nothing(tmp_path, monkeypatch, dtype):
    save(tmp_path, build(CONFIG).params, CONFIG, tokenizer(), dtype="bfloat16")
    without, _ = load(tmp_path)
    monkeypatch.setattr("specjax.models.hf.mapped_tensors._COMPARE_CHUNK", 100)
    add_tied_head(tmp_path, lambda a: a.astype(dtype))
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path)[0].params, without.params)


def split_into_shards(folder):
    """Splits the tensors of a folder into two files and an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    weight_map = {tensor: names[place % 2] for place, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file(
            {t: tensors[t] for t, place in weight_map.items() if place == name}, folder / name
        )
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names, index


def test_weights_in_several_files_are_those_in_one(folder):
    whole, _ = load(folder, "float32")
    split_into_shards(folder)
    sharded, _ = load(folder, "float32")
    jax.tree.map(np.testing.assert_array_equal, sharded.params, whole.params)


def test_a_tensor_is_read_from_the_part_that_the_index_names(folder):
    whole, _ = load(folder, "float32")
    names, index = split_into_shards(folder)
    weight_map = json.loads(index.read_text())["weight_map"]
    # Stale ones in every part that the index does not name for them.
    for name in names:
        tensors = load_file(folder / name)
        stale = {t: jnp.full((3,), 7.0) for t, place in weight_map.items() if place != name}
        save_file(tensors | stale, folder / name)
    sharded, _ = load(folder, "float32")
    jax.tree.map(np.testing.assert_array_equal, sharded.params, whole.params)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_an_index_that_names_the_wrong_part_for_a_tensor_is_refused(folder, name):
    names, index = split_into_shards(folder)
    weight_map = json.loads(index.read_text())["weight_map"]
    wrong = next(part for part in names if part != weight_map[name])
    index.write_text(json.dumps({"weight_map": weight_map | {name: wrong}}))
    sentence = f"{index} names '{wrong}' for the tensor {name}, which that file does not hold."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        load(folder)


def test_a_part_that_is_missing_or_garbage_is_named(folder):
    names, index = split_into_shards(folder)
    (folder / names[0]).write_bytes(b"garbage, not a file of this kind")
    with pytest.raises(ValueError, match=f"{names[0]} cannot be read as safetensors"):
        load(folder)
    (folder / names[0]).unlink()
    with pytest.raises(ValueError, match=f"index.json names '{names[0]}'; there is no such file"):
        load(folder)
    for content in ("{}", "[]", "garbage", '{"weight_map": ["a"]}', '{"weight_map": {"a": [1]}}'):
        index.write_text(content)
        with pytest.raises(ValueError, match="cannot be read as an index"):
            load(folder)


def test_an_index_names_no_file_outside_its_folder(folder):
    _, index = split_into_shards(folder)
    (folder.parent / "other.safetensors").write_bytes(b"")
    for name in ("../other.safetensors", str(folder.parent / "other.safetensors"), "", "..", 3):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ValueError, match=r"index|there is no such file in its folder"):
            load(folder)


def test_parameters_outlive_their_file(folder):
    model, _ = load(folder, "float32")
    before = jax.tree.map(np.array, model.params)
    with (folder / "model.safetensors").open("r+b") as file:
        size = file.seek(0, 2)
        file.seek(0)
        file.write(b"\xff" * size)
    jax.tree.map(np.testing.assert_array_equal, model.params, before)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_load_that_takes_long_shows_a_bar_on_a_terminal(folder, monkeypatch, terminal):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm-256color")
    load(folder)
    assert not stderr.getvalue(), "a short load shows nothing"
    monkeypatch.setattr("specjax.models.hf.checkpoint._SECONDS_BEFORE_BAR", 0.0)
    load(folder)
    assert ("loading model" in stderr.getvalue()) is terminal


def test_a_configuration_nested_without_end_is_refused(folder):
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_config(folder)


@pytest.mark.parametrize("asked", ["int8", "int9", "", jnp.int8, np.float64, np.dtype("int8"), 3])
def test_a_dtype_that_no_model_has_is_refused(folder, asked):
    name = "float64" if asked is np.float64 else asked if asked in ("int9", "", 3) else "int8"
    with pytest.raises(ValueError, match=f"dtype is '{name}'; it needs to be one of"):
        load(folder, asked)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_a_dtype_is_given_as_jax_takes_it(folder, name):
    for asked in (getattr(jnp, name), jnp.dtype(name), jnp.zeros(1, name).dtype):
        model, config = load(folder, asked)
        assert config == load(folder, name)[1]
        assert model.params["embedding"].dtype == jnp.dtype(name)


def test_lengths_in_the_tokenizer_neither_truncate_nor_pad_a_prompt(folder):
    trained = tokenizer()
    trained.enable_truncation(2)
    trained.enable_padding(length=8)
    trained.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("abba").ids == [0, 1, 1, 0]


def test_an_embedded_model_has_one_of_three_roles():
    assert pretrained_folder("target").name == "target"
    with pytest.raises(ValueError, match="'target', 'draft' or 'eagle3'"):
        pretrained_folder("judge")
