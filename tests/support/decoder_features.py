"""What families of decoders have beyond Llama, in one configuration."""

from specjax.models import RopeScaling

FEATURES = {
    "rope_scaling": RopeScaling("llama3", 4.0, 1.0, 4.0, 8),
    "local_rope_theta": 100.0,
    "layer_windows": (3, None),
    "qkv_bias": True,
    "out_bias": True,
    "qk_norm": True,
    "sandwich_norms": True,
    "norm_offset": 1.0,
    "query_scale": 0.5,
    "attention_softcap": 5.0,
    "logit_softcap": 9.0,
    "hidden_act": "gelu_pytorch_tanh",
}
