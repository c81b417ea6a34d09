"""One decoder for Llama, Mistral, Qwen and Gemma, its folders, and the pair that ships with it."""

from specjax.models.chat import chat_prompt
from specjax.models.checkpoint import load, load_config, load_tokenizer, save
from specjax.models.config import RopeScaling, TransformerConfig
from specjax.models.pretrained import pretrained_folder
from specjax.models.transformer import Transformer, build, causal_hidden, functions

__all__ = [
    "RopeScaling",
    "Transformer",
    "TransformerConfig",
    "build",
    "causal_hidden",
    "chat_prompt",
    "functions",
    "load",
    "load_config",
    "load_tokenizer",
    "pretrained_folder",
    "save",
]
