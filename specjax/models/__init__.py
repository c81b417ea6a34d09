"""A compact decoder of the Llama family, its folders, and the pair that ships with it."""

from specjax.models.checkpoint import load, load_config, load_tokenizer, save
from specjax.models.config import TransformerConfig
from specjax.models.pretrained import pretrained_folder
from specjax.models.transformer import Transformer, build, causal_hidden, functions

__all__ = [
    "Transformer",
    "TransformerConfig",
    "build",
    "causal_hidden",
    "functions",
    "load",
    "load_config",
    "load_tokenizer",
    "pretrained_folder",
    "save",
]
