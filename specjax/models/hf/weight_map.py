"""Where each tensor of a Hugging Face folder lies in the parameters, and how it is turned."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.config import TransformerConfig

__all__ = ["Entry", "join", "layout", "put", "split", "take"]


class Entry(NamedTuple):
    """One array of the parameters, and the tensors that it is made of.

    Attributes:
      place: keys of the nested parameters.
      names: of the tensors, side by side in the array's last axis.
      shapes: theirs in the file; matrices of layers are `(out, in)` there.
      turned: whether the array holds them transposed.
    """

    place: tuple[str | int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    turned: bool


def layout(config: TransformerConfig) -> Iterator[Entry]:
    """All arrays of the parameters, one by one: config.json may ask for any number of layers."""
    hidden = config.hidden_size
    table = ((config.vocab_size, hidden),)
    yield Entry(("norm", "weight"), ("model.norm.weight",), ((hidden,),), False)
    yield Entry(("embedding",), ("model.embed_tokens.weight",), table, False)
    if not config.tie_word_embeddings:
        yield Entry(("head",), ("lm_head.weight",), table, False)
    shared = list(_layer(config))
    for number in range(config.num_hidden_layers):
        for place, names, shapes, turned in shared:
            named = tuple(f"model.layers.{number}.{name}" for name in names)
            yield Entry(("layers", number, *place), named, shapes, turned)


def _layer(config: TransformerConfig) -> Iterator[Entry]:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size

    def vector(place: tuple[str, ...], name: str, size: int) -> Entry:
        return Entry(place, (name,), ((size,),), False)

    def matrices(block: str, name: str, parts: dict[str, int], width: int) -> Entry:
        names = tuple(f"{block}.{part}_proj.weight" for part in parts)
        shapes = tuple((out, width) for out in parts.values())
        return Entry(("mlp" if block == "mlp" else "attention", name), names, shapes, True)

    after = "pre_feedforward" if config.sandwich_norms else "post_attention"
    qkv = {"q": queries, "k": keys, "v": keys}
    yield vector(("attention_norm", "weight"), "input_layernorm.weight", hidden)
    yield matrices("self_attn", "qkv", qkv, hidden)
    yield matrices("self_attn", "out", {"o": hidden}, queries)
    yield vector(("mlp_norm", "weight"), f"{after}_layernorm.weight", hidden)
    yield matrices("mlp", "gate_up", {"gate": inner, "up": inner}, hidden)
    yield matrices("mlp", "down", {"down": hidden}, inner)
    if config.qkv_bias:
        names = tuple(f"self_attn.{part}_proj.bias" for part in qkv)
        shapes = tuple((out,) for out in qkv.values())
        yield Entry(("attention", "qkv_bias"), names, shapes, False)
    if config.out_bias:
        yield vector(("attention", "out_bias"), "self_attn.o_proj.bias", hidden)
    if config.qk_norm:
        yield vector(("attention", "query_norm", "weight"), "self_attn.q_norm.weight", size)
        yield vector(("attention", "key_norm", "weight"), "self_attn.k_norm.weight", size)
    if config.sandwich_norms:
        name = "post_attention_layernorm.weight"
        yield vector(("attention_out_norm", "weight"), name, hidden)
        yield vector(("mlp_out_norm", "weight"), "post_feedforward_layernorm.weight", hidden)


def join(parts: list[jax.Array], turned: bool, dtype: str) -> jax.Array:
    """The array of an entry, of its tensors as they lie in the file."""
    arrays = [part.T if turned else part for part in parts]
    if len(arrays) == 1:
        return arrays[0].astype(dtype)
    return jnp.concatenate(arrays, axis=-1).astype(dtype)


def split(array: jax.Array, entry: Entry) -> list[jax.Array]:
    """The tensors of an entry, of its array: what `join` is undone by."""
    if len(entry.shapes) == 1:
        parts = [array]
    else:
        ends = itertools.accumulate(shape[0] for shape in entry.shapes)
        parts = jnp.split(array, list(ends)[:-1], axis=-1)
    return [part.T if entry.turned else part for part in parts]


def put(params: dict[Any, Any], place: tuple[str | int, ...], array: jax.Array) -> None:
    """Sets one array of nested parameters."""
    for key in place[:-1]:
        params = params.setdefault(key, {})
    params[place[-1]] = array


def take(params: Any, place: tuple[str | int, ...]) -> jax.Array:
    """One array of nested parameters."""
    for key in place:
        params = params[key]
    return params
