"""`Model`: a language model as parameters and pure functions.

Axes: `B` requests, `L` tokens of each, `E` hidden, `V` vocabulary, `A` taps.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

__all__ = ["Model"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model: parameters and pure functions.

    It is a pytree whose leaves are the parameters, so that they are arguments of every compiled
    function and never constants. The functions are static: two models with equal functions share
    one compilation.

    Attributes:
      params: a pytree of arrays.
      init_cache: `(batch_size, max_length) -> cache`, a pytree indexed by position. A cache of
        a smaller `max_length` is the beginning of a larger one, leaf by leaf.
      apply: `(params, token_ids[B, L], positions[B, L], cache) ->
        (hidden[B, L, E], cache)`. Position -1 is padding: it writes nothing. Each
        token attends to the cached slots up to and including its own position, so that a smaller
        length rewinds the cache after a rejection.
      logits: `(params, hidden[..., E]) -> logits[..., V]`, apart from `apply` so that
        a prefill computes none.
      max_length: most tokens of a text that its positions take, or None.
      apply_with_taps: `(params, token_ids, positions, cache, taps) -> (hidden,
        features[B, L, A * E], cache)`, for drafters that read states from inside the model.
        `taps` are A static ints. Tap k is the residual stream after k layers, before any norm; tap
        0 is the embeddings. The states of the taps stand next to one another in `features`. None
        is a model that hands out none.
      placement: the `specjax.mesh.Placement` of a model that lies over devices, or None.
      split_logits: `logits` that are not gathered, of a model whose vocabulary lies over the
        `model` axis of its placement: [..., N * W] of N devices' W tokens each, N * W >= V,
        those past V padding. Or None.
    """

    params: Any
    init_cache: Callable[[int, int], Any]
    apply: Callable[[Any, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
    logits: Callable[[Any, jax.Array], jax.Array]
    max_length: int | None = None
    apply_with_taps: Callable[..., tuple[jax.Array, jax.Array, Any]] | None = None
    placement: Any = None
    split_logits: Callable[[Any, jax.Array], jax.Array] | None = None


jax.tree_util.register_dataclass(
    Model,
    data_fields=["params"],
    meta_fields=[
        "init_cache",
        "apply",
        "logits",
        "max_length",
        "apply_with_taps",
        "placement",
        "split_logits",
    ],
)
