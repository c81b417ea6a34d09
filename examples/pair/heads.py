"""The two kinds of draft head that `train_head.py` trains, behind one set of functions."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models import (
    Eagle3Config,
    HeadConfig,
    TransformerConfig,
    build_eagle3,
    build_head,
    causal_hidden,
    causal_taps,
    functions,
    save_eagle3,
    save_head,
    unrolled_eagle3,
    unrolled_hidden,
)

# What a layer of the target and one of a head have in common.
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_SIZES += ("head_dim", "rms_norm_eps", "rope_theta")


class Head(NamedTuple):
    """A kind of head for a target.

    Attributes:
      config: of the head.
      begin: `(target parameters, seed) -> parameters` to train from.
      target_states: `(target parameters, ids[B, T], attention) -> (hidden[B, T, E], features)`.
      unroll: `(parameters, tokens[B, T, E], features, steps) -> rows[steps, B, T, H]` of proposals
        that begin at every token, as `unrolled_hidden` and `unrolled_eagle3` return them.
      logits: `(parameters, target parameters, rows) -> logits`.
      save: `(folder, parameters)`.
    """

    config: Any
    begin: Callable[[Any, int], Any]
    target_states: Callable[..., tuple[jax.Array, jax.Array]]
    unroll: Callable[..., jax.Array]
    logits: Callable[[Any, Any, jax.Array], jax.Array]
    save: Callable[[pathlib.Path, Any], None]


def last_state_head(target: TransformerConfig, window: int) -> Head:
    """A head of specjax's own kind, on the last state; its layer has the target's sizes."""
    config = HeadConfig(**{name: getattr(target, name) for name in _SIZES}, window=window)

    def begin(params: Any, seed: int) -> Any:
        """The target's last layer and norm, of the sum of token and state; little is random."""
        own, one = build_head(config, seed), jnp.eye(config.hidden_size)
        mix = 0.5 * jnp.concatenate([one, 0 * one, one]) + 0.25 * own["mix"]
        return own | _last_layer(own, target, params) | {"mix": mix}

    def target_states(params: Any, ids: jax.Array, attention: Any) -> tuple[jax.Array, jax.Array]:
        hidden = causal_hidden(target, params, ids, attention)
        return hidden, hidden

    return Head(
        config,
        begin,
        target_states,
        lambda params, *rows: unrolled_hidden(config, params, *rows),
        lambda params, extra, rows: functions(target)[2](extra, rows),
        lambda folder, params: save_head(folder, params, config),
    )


def eagle3_head(target: TransformerConfig, taps: tuple[int, ...]) -> Head:
    """An EAGLE-3 head with an lm_head of its own; its layer has the target's sizes."""
    names = (*_SIZES, "max_position_embeddings")
    layer = TransformerConfig(
        vocab_size=target.vocab_size,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        **{name: getattr(target, name) for name in names},
    )
    size = target.hidden_size
    config = Eagle3Config(layer, size, target.vocab_size, taps, norm_before_residual=True)

    def begin(params: Any, seed: int) -> Any:
        """The last tap alone through the target's last layer, norm and table; little is random."""
        own, one = build_eagle3(config, seed), jnp.eye(size)
        start = own | _last_layer(own, target, params)
        fc = jnp.concatenate([0 * one] * (len(taps) - 1) + [one]) + 0.25 * own["fc"]
        # Attention of a layer reads the state; here the token stands before it.
        qkv = _last(params)["attention"]["qkv"]
        attention = {"qkv": jnp.concatenate([0.5 * qkv, qkv])}
        layer = start["layer"] | {"attention": start["layer"]["attention"] | attention}
        table = params.get("head", params["embedding"])
        # A copy of the table: training takes the memory of what it begins with.
        return start | {"fc": fc, "layer": layer, "head": table + 0.0}

    def logits(params: Any, extra: Any, rows: jax.Array) -> jax.Array:
        return rows @ params["head"].T

    return Head(
        config,
        begin,
        lambda params, ids, attention: causal_taps(target, params, ids, taps, attention),
        lambda params, *rows: unrolled_eagle3(config, params, *rows),
        logits,
        lambda folder, params: save_eagle3(folder, params, config),
    )


def _last(params: Any) -> Any:
    """The target's last layer."""
    return params["layers"][max(params["layers"])]


def _last_layer(own: Any, target: TransformerConfig, params: Any) -> dict[str, Any]:
    """The target's last layer and norm, as arrays of the head."""

    def copied(own: Any, other: Any) -> Any:
        """What a plain layer has of the target's, which may have biases and more norms."""
        if isinstance(own, dict):
            return {name: copied(own[name], other[name]) for name in own}
        return other + (target.norm_offset if other.ndim == 1 else 0.0)

    last = {"layer": _last(params), "norm": params["norm"]}
    return {name: copied(own[name], last[name]) for name in last}
