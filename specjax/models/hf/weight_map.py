"""Maps the tensors of a Hugging Face folder to arrays of the parameters."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models.decoder.config import TransformerConfig

# Bytes, of arrays that JAX takes over on a CPU.
_ALIGNMENT = 64
# Written at a time.
_NUM_COLUMNS = 64


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


def vector_entry(path: tuple[str | int, ...], name: str, size: int) -> WeightEntry:
    """Returns the entry of a vector, which is a tensor of its own."""
    return WeightEntry(path, (name,), ((size,),), False)


def weight_entries(config: TransformerConfig) -> Iterator[WeightEntry]:
    """Yields every array of the parameters of a model."""
    hidden = config.hidden_size
    table = ((config.vocab_size, hidden),)
    yield vector_entry(("norm", "weight"), "model.norm.weight", hidden)
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


def assemble_arrays(
    entries: list[tuple[WeightEntry, list[np.ndarray]]], dtype: str
) -> Iterator[jax.Array]:
    """Yields the array of each entry, assembled from views of its tensors on its device."""
    if jax.default_backend() != "cpu":
        # One at a time, so that the tensors of only one are on the device as well.
        for entry, views in entries:
            yield jax.block_until_ready(concatenate_on_device(views, entry.transposed, dtype))
        return
    # JAX's programs would wait for those of the model, which may still compile. Most of
    # the time goes into new pages of memory: two threads take a third of the time of one.
    with futures.ThreadPoolExecutor(2) as pool:
        arrays = pool.map(lambda each: concatenate(each[1], each[0].transposed, dtype), entries)
        yield from map(jax.device_put, arrays)


def concatenate(views: list[np.ndarray], transposed: bool, dtype: str) -> np.ndarray:
    """Returns the array of tensors on the host, where a CPU's `jax.device_put` takes it over."""
    parts = [view.T if transposed else view for view in views]
    array = _empty((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)), dtype)
    ends = itertools.accumulate(part.shape[-1] for part in parts)
    for part, end in zip(parts, ends, strict=True):
        _write(array[..., end - part.shape[-1] : end], part)
    return array


def _empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns an array whose alignment lets a CPU's `jax.device_put` take it without a copy."""
    size = math.prod(shape) * jnp.dtype(dtype).itemsize
    buffer = np.empty(size + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + size].view(jnp.dtype(dtype)).reshape(shape)


def _write(out: np.ndarray, part: np.ndarray) -> None:
    """Writes a tensor a few columns at a time: no cache holds all rows of a transposed one."""
    is_upper_half = part.dtype == jnp.bfloat16 and out.dtype == np.float32
    for start in range(0, part.shape[-1], _NUM_COLUMNS):
        columns = (..., slice(start, start + _NUM_COLUMNS))
        if is_upper_half:
            # NumPy would convert one by one.
            bits, halves = out[columns].view(np.uint32), part[columns].view(np.uint16)
            np.left_shift(halves, 16, out=bits, dtype=np.uint32, casting="unsafe")
        else:
            out[columns] = part[columns]


@functools.partial(jax.jit, static_argnums=(1, 2))
def concatenate_on_device(views: list[Any], transposed: bool, dtype: str) -> jax.Array:
    """Returns the concatenated array of tensors, on their device."""
    # Compiled, so that transposing, concatenating and casting make no copies in between.
    parts = [jnp.asarray(view).T if transposed else jnp.asarray(view) for view in views]
    return (parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)).astype(dtype)


def stored_tensors(
    params: Any, entries: Iterable[WeightEntry], dtype: str
) -> dict[str, np.ndarray]:
    """Returns the tensors of a file by name, the inverse of `assemble_arrays`.

    Args:
      params: nested parameters.
      entries: their arrays.
      dtype: of the tensors.
    """
    stored = {}
    for entry in entries:
        ends = itertools.accumulate(shape[0] for shape in entry.shapes)
        tensors = jnp.split(get_path(params, entry.path), list(ends)[:-1], axis=-1)
        for name, tensor in zip(entry.names, tensors, strict=True):
            tensor = tensor.T if entry.transposed else tensor
            stored[name] = np.ascontiguousarray(jnp.asarray(tensor, dtype))
    return stored


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
