"""`tunix_model`: a transformer of google-tunix as a `specjax.Model`.

A cache of tunix is written at one index for all requests. Here the model is mapped over requests of
batch 1, each with its own index. So slot i of a request's cache is its token i, without holes.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from specjax.types import Model

_EMBEDDING = "embedder.input_embedding"
_FAMILIES = ("Qwen3", "Llama3", "Gemma")
# A transformer traced under a mesh constrains arrays of whole batches, but these are rows.
_NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())
# Maximum number of tokens that the transformer reads at once, and of extra slots after a text.
_CHUNK_SIZE = 128


def tunix_model(transformer: Any) -> Model:
    """Returns a transformer of google-tunix 0.1.7 as a `specjax.Model`.

    `Model.params` hold the transformer's arrays, not copies. Two transformers of one config give
    models that share compiled programs.

    The cache has 128 slots more than a text. A call writes entries after a request's last token,
    too. Later tokens overwrite these slots before they read them.

    Args:
      transformer: a `Qwen3`, `Llama3` or `Gemma` of tunix, Gemma 2 among them, with adapters of
        LoRA on the layers or without.

    Returns:
      `Model` with taps, which draft heads read.

    Raises:
      ValueError: for another class, for experts, for LoRA on the embedding or lm_head, and for
        flash attention, which reads no cache.

    Example:
      With tunix installed::

        from flax import nnx
        from tunix.models.llama3.model import Llama3, ModelConfig

        target = tunix_model(Llama3(ModelConfig.llama3p2_1b(), rngs=nnx.Rngs(0)))
        specjax.generate(target, specjax.ngram_drafter(), ...)
    """
    return make_model(*split_transformer(transformer))


@dataclasses.dataclass(frozen=True)
class Graph:
    """A transformer without its arrays: equal for two transformers of one config.

    Attributes:
      graphdef: of Flax NNX.
      treedef: of the state.
      names: of the state's arrays, in order.
      num_layers: layers.
      cache_shape: heads of keys and values, and numbers of a head.
      dtype: of keys and values.
    """

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]
    num_layers: int
    cache_shape: tuple[int, int]
    dtype: Any

    def __hash__(self) -> int:
        # A config of tunix is compared, and has no hash.
        return hash(self.names)

    def build(self, arrays: Mapping[str, jax.Array]) -> Any:
        """Returns the transformer with these arrays, by name."""
        leaves = [arrays[name] for name in self.names]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def build_from_params(self, params: Mapping[str, Any]) -> Any:
        """Returns the transformer with the arrays of `Model.params`."""
        arrays = {_EMBEDDING: params["embedding"], **params["other_arrays"]}
        for layer in params["layers"]:
            arrays |= layer
        return self.build(arrays)


def name_arrays(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a state of Flax NNX, or of nested dicts of its arrays, by name."""
    arrays = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        # In a state each array is the value of a variable.
        arrays[name.removesuffix(".value")] = leaf
    return arrays


def split_transformer(transformer: Any) -> tuple[Graph, dict[str, Any]]:
    """Returns a transformer's graph, and its arrays by name; refuses what `tunix_model` refuses."""
    kinds = [kind for kind in type(transformer).__mro__ if kind.__module__.startswith("tunix.")]
    if not any(kind.__name__ in _FAMILIES for kind in kinds):
        raise ValueError(
            f"transformer is {type(transformer).__name__}; it needs to be one of tunix's "
            f"{', '.join(_FAMILIES)}. docs/adapters.md shows how another becomes a Model."
        )
    config = transformer.config
    for field in ("num_experts", "use_flash_attention"):
        if getattr(config, field, None):
            raise ValueError(
                f"the transformer's config has {field}={getattr(config, field)!r}, which is not "
                "mapped over requests; it needs a config without."
            )
    adapters = nnx.to_flat_state(nnx.state(transformer, nnx.LoRAParam))
    if any(path[0] in ("embedder", "lm_head") for path, _ in adapters):
        raise ValueError(
            "the transformer has LoRA on its embedding or lm_head, which is applied within a call "
            "alone; it needs LoRA on the layers only."
        )
    # Llama and Gemma compute in the dtype of their arrays.
    table_dtype = transformer.embedder.input_embedding.get_value().dtype
    dtype = jnp.dtype(getattr(config, "dtype", table_dtype))
    graphdef, state = nnx.split(transformer)
    arrays, cache_shape = name_arrays(state), (config.num_kv_heads, config.head_dim)
    treedef = jax.tree.structure(state)
    graph = Graph(graphdef, treedef, tuple(arrays), config.num_layers, cache_shape, dtype)
    return graph, arrays


def make_model(graph: Graph, arrays: Mapping[str, jax.Array]) -> Model:
    """Returns the model of a graph and its arrays by name.

    In `Model.params` the embedding table and the layers are where draft heads read them.
    """
    init_cache, apply, logits, apply_with_taps = _model_functions(graph)
    layers: list[dict[str, Any]] = [{} for _ in range(graph.num_layers)]
    other_arrays = {}
    for name, array in arrays.items():
        kind, *path = name.split(".")
        if kind == "layers":
            layers[int(path[0])][name] = array
        elif name != _EMBEDDING:
            other_arrays[name] = array
    params = {"embedding": arrays[_EMBEDDING], "layers": layers, "other_arrays": other_arrays}
    return Model(params, init_cache, apply, logits, apply_with_taps=apply_with_taps)


@functools.lru_cache(maxsize=64)
def _model_functions(graph: Graph) -> tuple[Any, Any, Any, Any]:
    """Returns the functions of a model; equal ones for equal graphs, to share programs."""

    def init_cache(batch_size: int, max_length: int) -> Any:
        shape = (batch_size, max_length + _CHUNK_SIZE, *graph.cache_shape)
        zeros = functools.partial(jnp.zeros, shape, graph.dtype)
        return [{"k": zeros(), "v": zeros()} for _ in range(graph.num_layers)]

    def apply_with_taps(
        params: Any,
        token_ids: jax.Array,
        positions: jax.Array,
        cache: Any,
        taps: tuple[int, ...],
    ) -> tuple[jax.Array, jax.Array, Any]:
        read = jax.vmap(functools.partial(_read_row, graph, params, taps))
        return _read_chunks(read, token_ids, positions, cache)

    def apply(
        params: Any, token_ids: jax.Array, positions: jax.Array, cache: Any
    ) -> tuple[jax.Array, Any]:
        hidden, _, cache = apply_with_taps(params, token_ids, positions, cache, ())
        return hidden, cache

    def logits(params: Any, hidden: jax.Array) -> jax.Array:
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        with _NO_MESH:
            rows = _decode(graph.build_from_params(params), rows)
        return rows.reshape(*hidden.shape[:-1], rows.shape[-1])

    return init_cache, apply, logits, apply_with_taps


def _read_chunks(read: Any, token_ids: jax.Array, positions: jax.Array, cache: Any) -> Any:
    """Returns the outputs of `read` for i32[B, L] tokens, in chunks of at most `_CHUNK_SIZE`."""
    size, width = token_ids.shape
    if width <= _CHUNK_SIZE:
        return read(token_ids, positions, cache)
    missing = ((0, 0), (0, -width % _CHUNK_SIZE))
    chunks = (
        jnp.pad(array, missing, constant_values=fill).reshape(size, -1, _CHUNK_SIZE).swapaxes(0, 1)
        for array, fill in ((token_ids, 0), (positions, -1))
    )

    def read_next(cache: Any, chunk: tuple[jax.Array, ...]) -> tuple[Any, Any]:
        hidden, features, cache = read(*chunk, cache)
        return cache, (hidden, features)

    cache, rows = jax.lax.scan(read_next, cache, tuple(chunks))
    hidden, features = (
        array.swapaxes(0, 1).reshape(size, -1, array.shape[-1])[:, :width] for array in rows
    )
    return hidden, features, cache


def _read_row(
    graph: Graph,
    params: Any,
    taps: tuple[int, ...],
    token_ids: jax.Array,
    positions: jax.Array,
    cache: Any,
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns hidden states [L, E], features [L, A * E] and the cache of one request.

    The transformer writes L slots from an index on. Tokens are moved before the padding. Without
    tokens the index is that of the slots after the text.
    """
    num_slots = cache[0]["k"].shape[0]
    is_token = positions >= 0
    first = jnp.argmax(is_token).astype(jnp.int32)
    token_ids, positions = (jnp.roll(array, -first) for array in (token_ids, positions))
    start = jnp.where(is_token.any(), positions[0], jnp.int32(num_slots - _CHUNK_SIZE))
    at = jnp.maximum(positions, 0)
    mask = jnp.arange(num_slots, dtype=jnp.int32)[None, None, :] <= at[None, :, None]

    transformer = graph.build_from_params(params)
    states = _record_states(transformer)
    caches = {
        f"layer_{number}": {"end_index": start[None]} | jax.tree.map(lambda x: x[None], layer)
        for number, layer in enumerate(cache)
    }
    with _NO_MESH:
        # The transformer's logits are unused, so a compiled program drops them.
        _, caches = transformer(token_ids[None], at[None], caches, mask)
    rows = jnp.concatenate([states[-1], *(states[tap] for tap in taps)], axis=-1)[0]
    rows = jnp.roll(rows, first, axis=0)
    size = states[-1].shape[-1]
    cache = [
        {name: caches[f"layer_{number}"][name][0] for name in layer}
        for number, layer in enumerate(cache)
    ]
    return rows[:, :size], rows[:, size:], cache


def _record_states(transformer: Any) -> list[jax.Array]:
    """Returns a list that the next call fills: inputs of each layer and the last norm, its output.

    The transformer itself is called, because only its call applies adapters of LoRA.
    """
    states: list[jax.Array] = []

    def record(function: Any, keeps_output: bool = False) -> Any:
        def call(x: jax.Array, *options: Any, **named: Any) -> Any:
            states.append(x)
            output = function(x, *options, **named)
            if keeps_output:
                states.append(output)
            return output

        return call

    # Past the checks of NNX: this transformer is built for one call.
    object.__setattr__(transformer, "layers", [record(layer) for layer in transformer.layers])
    norm = record(transformer.final_norm, keeps_output=True)
    object.__setattr__(transformer, "final_norm", norm)
    return states


def _decode(transformer: Any, hidden: jax.Array) -> jax.Array:
    """Returns the logits [1, N, V] of hidden states [1, N, E]."""
    if hasattr(transformer, "lm_head"):
        return jnp.asarray(transformer.lm_head(hidden))
    logits = transformer.embedder.decode(hidden)
    cap = getattr(transformer, "final_logits_softcap", None)
    return jnp.asarray(logits if cap is None else jnp.tanh(logits / cap) * cap)
