"""The arrays of a transformer by name, and the transformer of such arrays.

In `Model.params` the embedding table and the layers are where draft heads read them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

__all__ = ["EMBEDDING", "Graph", "name_arrays", "nest_params", "split_transformer"]

EMBEDDING = "embedder.input_embedding"


@dataclasses.dataclass(frozen=True)
class Graph:
    """A transformer without its arrays: equal for two transformers of one config.

    Attributes:
      graphdef: of Flax NNX.
      treedef: of the state.
      names: of the state's arrays, in order.
    """

    graphdef: Any
    treedef: Any
    names: tuple[str, ...]

    def __hash__(self) -> int:
        # A config of tunix is compared, and has no hash.
        return hash(self.names)

    def build(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the transformer with these arrays, by name."""
        leaves = [arrays[name] for name in self.names]
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def build_from_params(self, params: Mapping[str, Any]) -> Any:
        """Returns the transformer with the arrays of `nest_params`."""
        arrays = {EMBEDDING: params["embedding"], **params["others"]}
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
    """Returns a transformer's graph, and its arrays by name."""
    graphdef, state = nnx.split(transformer)
    arrays = name_arrays(state)
    return Graph(graphdef, jax.tree.structure(state), tuple(arrays)), arrays


def nest_params(arrays: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Returns arrays as `Model.params`: the embedding, each layer, and others.

    Args:
      arrays: by name.
      num_layers: of the transformer.
    """
    layers: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    others = {}
    for name, array in arrays.items():
        kind, *rest = name.split(".")
        if kind == "layers":
            layers[int(rest[0])][name] = array
        elif name != EMBEDDING:
            others[name] = array
    return {"embedding": arrays[EMBEDDING], "layers": layers, "others": others}
