"""Maps the tensors of a Hugging Face folder to arrays of the parameters."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.config import TransformerConfig

__all__ = [
    "WeightEntry",
    "concatenate_tensors",
    "get_path",
    "set_path",
    "split_tensors",
    "weight_entries",
]


class WeightEntry(NamedTuple):
    """An array of the parameters and the tensors that it concatenates.

    Attributes:
      path: keys into the nested parameters.
      names: of the tensors, concatenated along the array's last axis.
      shapes: of the tensors in the file; matrices of layers are `(out, in)` there.
      transposed: whether the array holds the tensors transposed, as `(in, out)`.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    transposed: bool


def weight_entries(config: TransformerConfig) -> Iterator[WeightEntry]:
    """Yields every array of the parameters of a model."""
    hidden = config.hidden_size
    table = ((config.vocab_size, hidden),)
    yield WeightEntry(("norm", "weight"), ("model.norm.weight",), ((hidden,),), False)
    yield WeightEntry(("embedding",), ("model.embed_tokens.weight",), table, False)
    if not config.tie_word_embeddings:
        yield WeightEntry(("head",), ("lm_head.weight",), table, False)
    shared = list(_layer_entries(config))
    for number in range(config.num_hidden_layers):
        for path, names, shapes, transposed in shared:
            named = tuple(f"model.layers.{number}.{name}" for name in names)
            yield WeightEntry(("layers", number, *path), named, shapes, transposed)


def _layer_entries(config: TransformerConfig) -> Iterator[WeightEntry]:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * size, config.num_key_value_heads * size

    def vector_entry(path: tuple[str, ...], name: str, size: int) -> WeightEntry:
        return WeightEntry(path, (name,), ((size,),), False)

    def matrix_entry(block: str, name: str, projections: dict[str, int], width: int) -> WeightEntry:
        names = tuple(f"{block}.{projection}_proj.weight" for projection in projections)
        shapes = tuple((out, width) for out in projections.values())
        return WeightEntry(("mlp" if block == "mlp" else "attention", name), names, shapes, True)

    mlp_norm = "pre_feedforward" if config.sandwich_norms else "post_attention"
    qkv = {"q": queries, "k": keys, "v": keys}
    yield vector_entry(("attention_norm", "weight"), "input_layernorm.weight", hidden)
    yield matrix_entry("self_attn", "qkv", qkv, hidden)
    yield matrix_entry("self_attn", "out", {"o": hidden}, queries)
    yield vector_entry(("mlp_norm", "weight"), f"{mlp_norm}_layernorm.weight", hidden)
    yield matrix_entry("mlp", "gate_up", {"gate": inner, "up": inner}, hidden)
    yield matrix_entry("mlp", "down", {"down": hidden}, inner)
    if config.qkv_bias:
        names = tuple(f"self_attn.{projection}_proj.bias" for projection in qkv)
        shapes = tuple((out,) for out in qkv.values())
        yield WeightEntry(("attention", "qkv_bias"), names, shapes, False)
    if config.out_bias:
        yield vector_entry(("attention", "out_bias"), "self_attn.o_proj.bias", hidden)
    if config.qk_norm:
        yield vector_entry(("attention", "query_norm", "weight"), "self_attn.q_norm.weight", size)
        yield vector_entry(("attention", "key_norm", "weight"), "self_attn.k_norm.weight", size)
    if config.sandwich_norms:
        name = "post_attention_layernorm.weight"
        yield vector_entry(("attention_out_norm", "weight"), name, hidden)
        yield vector_entry(("mlp_out_norm", "weight"), "post_feedforward_layernorm.weight", hidden)


def concatenate_tensors(tensors: list[jax.Array], transposed: bool, dtype: str) -> jax.Array:
    """Returns the array of an entry from its tensors."""
    arrays = [tensor.T if transposed else tensor for tensor in tensors]
    if len(arrays) == 1:
        return arrays[0].astype(dtype)
    return jnp.concatenate(arrays, axis=-1).astype(dtype)


def split_tensors(array: jax.Array, entry: WeightEntry) -> list[jax.Array]:
    """Returns the tensors of an entry from its array, the inverse of `concatenate_tensors`."""
    if len(entry.shapes) == 1:
        tensors = [array]
    else:
        ends = itertools.accumulate(shape[0] for shape in entry.shapes)
        tensors = jnp.split(array, list(ends)[:-1], axis=-1)
    return [tensor.T if entry.transposed else tensor for tensor in tensors]


def set_path(params: dict[Any, Any], path: tuple[str | int, ...], array: jax.Array) -> None:
    """Sets an array in nested parameters."""
    for key in path[:-1]:
        params = params.setdefault(key, {})
    params[path[-1]] = array


def get_path(params: Any, path: tuple[str | int, ...]) -> jax.Array:
    """Returns an array of nested parameters."""
    for key in path:
        params = params[key]
    return params
