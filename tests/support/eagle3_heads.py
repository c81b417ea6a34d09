"""Folders of small random EAGLE-3 heads, in every format and variant."""

import json

import numpy as np
from safetensors.numpy import save_file

VOCAB, SIZE, TARGET_LAYERS = 48, 24, 4
FIELDS = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
}
# Name -> fields of its config.json that differ, and which tensors are the head's own.
VARIANTS = {
    "llama": ({}, ("lm_head",)),
    "qwen3": (
        {"model_type": "qwen3", "norm_output": True, "attention_bias": True},
        ("lm_head", "embed_tokens"),
    ),
    "fc_norm": ({"fc_norm": True, "norm_before_residual": True, "logit_scale": 1.5}, ()),
    "norm_before_fc": ({"norm_before_fc": True, "bias": True}, ("embed_tokens",)),
    "other size": (
        {"target_hidden_size": 36, "hidden_size": SIZE},
        ("lm_head", "embed_tokens"),
    ),
    # DeepSpec's: an id stands for the output of that layer.
    "four taps": (
        {
            "architectures": ["Qwen3Eagle3Model"],
            "model_type": "qwen3",
            "eagle_config": None,
            "target_layer_ids": [0, 1, 2, 3],
        },
        ("lm_head", "embed_tokens"),
    ),
    "some tokens": ({"draft_vocab_size": 30, "norm_output": True}, ("lm_head",)),
}


def variant(name):
    """The fields of a variant, and its own tensors."""
    changes, owned = VARIANTS[name]
    return FIELDS | changes, owned


def num_taps(fields):
    """How many taps a head reads: three where its folder names none."""
    nested = (fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = fields.get("target_layer_ids") or nested
    return 3 if ids is None else len(ids)


def random_tensors(fields, owned, seed=0):
    """Tensors by their names in `speculators`: weights 0.3 N(0, 1), norms about 1, some biases."""
    rng, size = np.random.default_rng(seed), fields["hidden_size"]
    target, draft = fields.get("target_hidden_size", size), fields.get("draft_vocab_size", VOCAB)
    inner, heads = fields["intermediate_size"], fields["num_attention_heads"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    layer, attention = "layers.0.", "layers.0.self_attn."
    shapes = {
        "fc": (size, num_taps(fields) * target),
        "norm": (size,),
        f"{layer}input_layernorm": (size,),
        f"{layer}hidden_norm": (size,),
        f"{layer}post_attention_layernorm": (size,),
        f"{attention}q_proj": (heads * fields["head_dim"], 2 * size),
        f"{attention}k_proj": (keys, 2 * size),
        f"{attention}v_proj": (keys, 2 * size),
        f"{attention}o_proj": (size, heads * fields["head_dim"]),
        f"{layer}mlp.gate_proj": (inner, size),
        f"{layer}mlp.up_proj": (inner, size),
        f"{layer}mlp.down_proj": (size, inner),
    }
    if fields.get("fc_norm"):
        shapes |= {f"fc_norm.{n}": (target,) for n in range(num_taps(fields))}
    if fields.get("norm_before_fc"):
        shapes["input_norm"] = (num_taps(fields) * target,)
    if fields["model_type"] == "qwen3":
        shapes |= {f"{attention}{x}_norm": (fields["head_dim"],) for x in "qk"}
    if "embed_tokens" in owned:
        shapes["embed_tokens"] = (VOCAB, size)
    if "lm_head" in owned:
        shapes["lm_head"] = (draft, size)
    biased = ["fc"] if fields.get("bias") else []
    if fields.get("attention_bias"):
        biased += [f"{attention}{x}_proj" for x in "qkvo"]
    found = {
        f"{name}.weight": 0.3 * rng.normal(size=shape) + ("norm" in name)
        for name, shape in shapes.items()
    }
    found |= {f"{name}.bias": 0.3 * rng.normal(size=shapes[name][0]) for name in biased}
    return {name: x.astype(np.float32) for name, x in found.items()}


def random_d2t(fields, seed=1):
    """Offsets of a part of the vocabulary, not constant."""
    draft = fields.get("draft_vocab_size", VOCAB)
    ids = np.sort(np.random.default_rng(seed).permutation(VOCAB)[:draft])
    return ids - np.arange(draft)


def write_head(folder, fields, tensors, rename=lambda name: name):
    """Writes a folder; `d2t` and `t2d` where the draft knows a part of the vocabulary."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    stored = {rename(name): np.ascontiguousarray(x) for name, x in tensors.items()}
    if fields.get("draft_vocab_size", VOCAB) < VOCAB:
        d2t = random_d2t(fields)
        stored |= {"d2t": d2t, "t2d": np.isin(np.arange(VOCAB), d2t + np.arange(len(d2t)))}
    save_file(stored, folder / "model.safetensors")
    return folder
