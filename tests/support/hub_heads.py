"""`config.json` of published draft heads, as public sources quote them, and how each is read."""

_LLAMA_8B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}
_QWEN_8B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_TAPS = [1, 9, 17, 25, 33]
_Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": _TAPS},
}
_EAGLE_CONFIG = {
    "eagle_aux_hidden_state_layer_ids": [1, 15, 28],
    "next_layer_regular": True,
    "parallel_draft_heads_num_layers": None,
    "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def _speculators(kind, layer):
    method = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 3}
    return {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "DFlashSpeculator"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "base_model_ep_plan": None,
        "draft_vocab_size": 32000,
        "dtype": "bfloat16",
        "embed_requires_grad": True,
        "has_no_defaults_at_init": True,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method | {"verifier_accept_k": 1}],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3-8B"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer | {"_attn_implementation_autoset": True},
        "transformers_version": "4.57.1",
    }


_LLAMA_LAYER = {name: _LLAMA_8B[name] for name in _LLAMA_8B if name != "draft_vocab_size"}
_QWEN_LAYER = {name: _QWEN_8B[name] for name in _QWEN_8B if name != "num_target_layers"}
# Name -> kind, config.json, number of layers of the target.
PUBLISHED = {
    "EAGLE-3, first": ("eagle3", _LLAMA_8B | {"architectures": ["LlamaForCausalLM"]}, 32),
    "SpecForge": ("eagle3", _LLAMA_8B | {"architectures": ["LlamaForCausalLMEagle3"]}, 32),
    "ModelOpt": (
        "eagle3",
        _LLAMA_8B | {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": _EAGLE_CONFIG},
        32,
    ),
    "speculators EAGLE-3": (
        "eagle3",
        _speculators("eagle3", _LLAMA_LAYER)
        | {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [2, 16, 29]},
        32,
    ),
    "DeepSpec EAGLE-3": (
        "eagle3",
        _QWEN_8B
        | {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": _TAPS}
        | {"num_hidden_layers": 1, "layer_types": ["full_attention"], "ttt_length": 7},
        36,
    ),
    "z-lab": ("dflash", _QWEN_8B | _Z_LAB, 36),
    "z-lab Llama": (
        "dflash",
        _LLAMA_8B
        | {"architectures": ["DFlashDraftModel"], "block_size": 10, "num_hidden_layers": 5}
        | {"dflash_config": {"mask_token_id": 128002, "target_layer_ids": [1, 8, 15, 22, 29]}}
        | {"draft_vocab_size": None},
        32,
    ),
    "DeepSpec DFlash": (
        "dflash",
        _QWEN_8B
        | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 151669}
        | {"enable_confidence_head": False, "markov_rank": 0, "num_anchors": 512}
        | {"target_layer_ids": _TAPS},
        36,
    ),
    "speculators DFlash": (
        "dflash",
        _speculators("dflash", _QWEN_LAYER)
        | {"aux_hidden_state_layer_ids": [2, 10, 18, 26, 34], "mask_token_id": 151669}
        | {"block_size": 8, "sample_from_anchor": False, "sliding_window_non_causal": False},
        36,
    ),
}
