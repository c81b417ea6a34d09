"""A Flax decoder for Llama, Mistral, Qwen and Gemma, its files, and the two models that ship.

Open `decoder/` first: the layers, the transformer, and its step in plain JAX or in the kernels.
`sharding` runs a decoder over the devices of a mesh. `hf/` reads and writes Hugging Face folders.
`heads/` holds published heads, which draft from the target's hidden states, and `load_drafter`
loads a head or a draft model. `pretrained/` holds the target and the drafts that ship.

Axes: `B` requests, `T` new tokens, `E` hidden, `D` head dimension, `V` vocabulary. The command
imports this package; the packages of sampling do not, so Flax is optional.
"""

from specjax.models.decoder.causal import causal_hidden, causal_taps
from specjax.models.decoder.config import TransformerConfig
from specjax.models.decoder.rope import RopeScaling
from specjax.models.decoder.transformer import Transformer, build, functions
from specjax.models.heads.dflash import DFlashConfig, build_dflash
from specjax.models.heads.drafters import dflash_drafter, eagle3_drafter
from specjax.models.heads.eagle3 import Eagle3Config, build_eagle3, unrolled_eagle3
from specjax.models.heads.head_folder import draft_kind
from specjax.models.heads.head_formats import load_dflash, load_eagle3, save_dflash, save_eagle3
from specjax.models.hf.chat_template import chat_prompt
from specjax.models.hf.checkpoint import load, load_shapes, load_tokenizer, save
from specjax.models.hf.config_json import load_config
from specjax.models.load_drafter import DraftInfo, load_drafter, read_draft
from specjax.models.pretrained import pretrained_folder
from specjax.models.sharding import split_model

__all__ = [
    "DFlashConfig",
    "DraftInfo",
    "Eagle3Config",
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "build",
    "build_dflash",
    "build_eagle3",
    "causal_hidden",
    "causal_taps",
    "chat_prompt",
    "dflash_drafter",
    "draft_kind",
    "eagle3_drafter",
    "functions",
    "load",
    "load_config",
    "load_dflash",
    "load_drafter",
    "load_eagle3",
    "load_shapes",
    "load_tokenizer",
    "pretrained_folder",
    "read_draft",
    "save",
    "save_dflash",
    "save_eagle3",
    "split_model",
    "unrolled_eagle3",
]
