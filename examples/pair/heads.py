"""The EAGLE-3 head that `train_head.py` trains: its sizes, and what its training begins with."""

from typing import Any

import jax.numpy as jnp

from specjax.models import Eagle3Config, TransformerConfig, build_eagle3

# What a layer of the target and one of a head have in common.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_SIZES += ("head_dim", "rms_norm_eps", "rope_theta", "max_position_embeddings")


def head_config(target: TransformerConfig, taps: tuple[int, ...]) -> Eagle3Config:
    """Returns a head with an lm_head of its own, whose layer has the target's sizes."""
    layer = TransformerConfig(
        vocab_size=target.vocab_size,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        **{name: getattr(target, name) for name in _SIZES},
    )
    size = target.hidden_size
    return Eagle3Config(layer, size, target.vocab_size, taps, norm_before_residual=True)


def first_params(config: Eagle3Config, target: TransformerConfig, params: Any, seed: int) -> Any:
    """Returns a head: the last tap through the target's last layer, norm and table.

    Only a small part of `fc` is random, by the seed.
    """
    own, one = build_eagle3(config, seed), jnp.eye(target.hidden_size)
    last = params["layers"][max(params["layers"])]

    def copied(own: Any, other: Any) -> Any:
        """Returns what a plain layer has of the target's, which may have biases and more norms."""
        if isinstance(own, dict):
            return {name: copied(own[name], other[name]) for name in own}
        return other + (target.norm_offset if other.ndim == 1 else 0.0)

    # Attention of a layer reads the state; here the token stands before it.
    qkv = last["attention"]["qkv"]
    layer = copied(own["layer"], last)
    layer["attention"]["qkv"] = jnp.concatenate([0.5 * qkv, qkv])
    fc = jnp.concatenate([0 * one] * (len(config.taps) - 1) + [one]) + 0.25 * own["fc"]
    norm = copied(own["norm"], params["norm"])
    # A copy of the table: training takes the memory of what it begins with.
    table = params.get("head", params["embedding"]) + 0.0
    return own | {"fc": fc, "layer": layer, "norm": norm, "head": table}
