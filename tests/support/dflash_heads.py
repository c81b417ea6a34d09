"""Folders of small random DFlash heads, in the format of z-lab, and their variants."""

import eagle3_heads
import numpy as np

VOCAB, SIZE, TARGET_LAYERS, BLOCK = 48, 24, 4, 5
FIELDS = {
    "model_type": "qwen3",
    "architectures": ["DFlashDraftModel"],
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "layer_types": ["full_attention"] * 2,
    "num_target_layers": TARGET_LAYERS,
    "block_size": BLOCK,
    "dflash_config": {"mask_token_id": VOCAB - 2, "target_layer_ids": [0, 1, 3]},
}
# Name -> fields of its config.json that differ, and which tensors are the head's own.
VARIANTS = {
    "z-lab": ({}, ()),
    "own tables": ({"attention_bias": True}, ("lm_head", "embed_tokens")),
    "anchor": ({"sample_from_anchor": True}, ("embed_tokens",)),
    "some tokens": ({"draft_vocab_size": 30}, ("lm_head",)),
}
write_head, random_d2t = eagle3_heads.write_head, eagle3_heads.random_d2t


def variant(name):
    """The fields of a variant, and its own tensors."""
    changes, owned = VARIANTS[name]
    return FIELDS | changes, owned


def random_tensors(fields, owned, seed=0):
    """Tensors by their published names: weights 0.3 N(0, 1), norms about 1, some biases."""
    rng, size, inner = np.random.default_rng(seed), fields["hidden_size"], 40
    heads = fields["num_attention_heads"] * fields["head_dim"]
    keys = fields["num_key_value_heads"] * fields["head_dim"]
    shapes = {"fc": (size, 3 * size), "hidden_norm": (size,), "norm": (size,)}
    biased = []
    for n in range(fields["num_hidden_layers"]):
        layer, attention = f"layers.{n}.", f"layers.{n}.self_attn."
        shapes |= {
            f"{layer}input_layernorm": (size,),
            f"{layer}post_attention_layernorm": (size,),
            f"{attention}q_proj": (heads, size),
            f"{attention}k_proj": (keys, size),
            f"{attention}v_proj": (keys, size),
            f"{attention}o_proj": (size, heads),
            f"{attention}q_norm": (fields["head_dim"],),
            f"{attention}k_norm": (fields["head_dim"],),
            f"{layer}mlp.gate_proj": (inner, size),
            f"{layer}mlp.up_proj": (inner, size),
            f"{layer}mlp.down_proj": (size, inner),
        }
        biased += [f"{attention}{x}_proj" for x in "qkvo"] * bool(fields.get("attention_bias"))
    if "embed_tokens" in owned:
        shapes["embed_tokens"] = (VOCAB, size)
    if "lm_head" in owned:
        shapes["lm_head"] = (fields.get("draft_vocab_size", VOCAB), size)
    found = {
        f"{name}.weight": 0.3 * rng.normal(size=shape) + ("norm" in name)
        for name, shape in shapes.items()
    }
    found |= {f"{name}.bias": 0.3 * rng.normal(size=shapes[name][0]) for name in biased}
    return {name: x.astype(np.float32) for name, x in found.items()}


def in_speculators(fields):
    """The config.json of `speculators` that says the same."""
    names = ("draft_vocab_size", "sample_from_anchor", "block_size")
    outer = {name: fields[name] for name in names if name in fields}
    left_out = (*names, "architectures", "num_target_layers", "dflash_config")
    inner = fields["dflash_config"]
    return outer | {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {n: x for n, x in fields.items() if n not in left_out},
        "mask_token_id": inner["mask_token_id"],
        "aux_hidden_state_layer_ids": [i + 1 for i in inner["target_layer_ids"]],
    }


def in_deep_spec(fields):
    """The config.json of DeepSpec that says the same of a head that drafts from the anchor."""
    inner = fields["dflash_config"]
    left_out = ("dflash_config", "sample_from_anchor")
    kept = {name: fields[name] for name in fields if name not in left_out}
    return (
        kept
        | inner
        | {
            "architectures": ["Qwen3DSparkModel"],
            "num_anchors": 512,
            "enable_confidence_head": False,
            "markov_rank": 0,
        }
    )
