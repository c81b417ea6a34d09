"""Chooses the implementation of a decoder's or layer's step, or of a product: JAX or the kernels.

The choice is made once per step. The plain step has no code for the kernels. Their step is
`specjax.models.decoder.decode_step_kernels`, which is imported where it runs.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.devices.placement import pvary_like
from specjax.implementation import Implementation, choose_implementation, resolve_implementation
from specjax.models.decoder.attention import layer_caches
from specjax.models.decoder.layers import table_logits
from specjax.models.decoder.row_groups import decode_by_groups, logits_by_groups
from specjax.types import Pieces


def run_decoder(
    model: Any,
    token_ids: jax.Array,
    positions: jax.Array,
    cache: Any,
    implementation: str | Implementation | None = None,
    taps: tuple[int, ...] = (),
) -> tuple[jax.Array, tuple[jax.Array, ...], Any]:
    """Returns hidden states [B, T, E] of a `Transformer`, its taps and the cache with the tokens.

    Args:
      model: the module.
      token_ids: i32[B, T].
      positions: i32[B, T], -1 for no token.
      cache: a pair of keys and values for each layer, or `Pieces` with such a cache.
      implementation: None chooses at lowering; a name means that one.
      taps: numbers of layers, after which the residual stream [B, T, E] is returned, too.
    """

    def kernels(*operands: Any) -> Any:
        from specjax.models.decoder.decode_step_kernels import decode_step

        return decode_step(*operands, taps=taps)

    cache, resolved = layer_caches(cache), resolve_implementation(implementation)
    decode = decode_by_groups if resolved.row_invariant else type(model).plain
    plain = functools.partial(decode, taps=taps)
    return _choose_step(resolved, plain, kernels, model, token_ids, positions, cache)


def run_layer(
    layer: Any,
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: Any,
    implementation: str | Implementation | None = None,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Returns the residual stream [B, T, E] after a `Layer` by itself, and its cache.

    Args:
      layer: the module.
      x: [B, T, E], the residual stream.
      cos_sin: of the layer's rotary embeddings, two f32[B, T, 1, D / 2].
      positions: i32[B, T], -1 for no token.
      cache: keys and values, two [B, G, S, D], or `Pieces` with such a cache.
      implementation: None chooses at lowering; a name means that one.
      rows: the input of attention instead of the norm of the stream, or None.
    """

    def kernels(*operands: Any) -> Any:
        from specjax.models.decoder.decode_step_kernels import layer_step

        return layer_step(*operands)

    if isinstance(cache, Pieces):
        cache = (*cache.cache, cache.rows)
    plain = type(layer).plain
    operands = (x, cos_sin, positions, cache, rows)
    return _choose_step(implementation, plain, kernels, layer, *operands)


def run_product(
    x: jax.Array, matrix: jax.Array, implementation: str | Implementation | None = None
) -> jax.Array:
    """Returns rows [B, T, E] times a matrix [E, N], in the rows' dtype.

    Args:
      x: rows.
      matrix: the right factor.
      implementation: None chooses at lowering; a name means that one.
    """

    def kernels(*operands: Any) -> Any:
        from specjax.models.decoder.decode_step_kernels import product

        return product(*operands)

    num_rows = math.prod(x.shape[:2])
    return _choose(implementation, jnp.matmul, kernels, num_rows, x, matrix)


def run_table(
    hidden: jax.Array, table: jax.Array, implementation: str | Implementation | None = None
) -> jax.Array:
    """Returns logits [..., V] of hidden states [..., E] by an output layer's table [V, E].

    XLA multiplies, unless a row's bits may depend on no other row (`Implementation.row_invariant`).

    Args:
      hidden: rows.
      table: of the layer.
      implementation: None chooses at lowering; a name means that one.
    """
    resolved = resolve_implementation(implementation)
    if not resolved.row_invariant:
        return table_logits(table, hidden)

    def kernels(*operands: Any) -> Any:
        from specjax.models.decoder.decode_step_kernels import table_product

        return table_product(*operands)

    rows = hidden.reshape(1, -1, hidden.shape[-1])
    logits = _choose(resolved, logits_by_groups, kernels, rows.shape[1], rows, table)
    return logits.reshape(*hidden.shape[:-1], -1)


def _choose_step(
    implementation: str | Implementation | None,
    plain: Callable[..., Any],
    kernels: Callable[..., Any],
    module: nnx.Module,
    *operands: Any,
) -> Any:
    """Returns the outputs of one of two steps of a module.

    Args:
      implementation: None chooses at lowering; a name means that one.
      plain: from the module and the operands.
      kernels: from the resolved implementation, the module and the operands.
      module: whose step it is.
      *operands: pytrees of arrays; the first has the leading axes [B, T].
    """
    graph, state = nnx.split(module)

    def run_plain(state: Any, *operands: Any) -> Any:
        return plain(nnx.merge(graph, state), *operands)

    def run_kernels(resolved: Implementation, state: Any, *operands: Any) -> Any:
        return kernels(resolved, nnx.merge(graph, state), *operands)

    num_rows = math.prod(operands[0].shape[:2])
    return _choose(implementation, run_plain, run_kernels, num_rows, state, *operands)


def _choose(
    implementation: str | Implementation | None,
    plain: Callable[..., Any],
    kernels: Callable[..., Any],
    num_rows: int,
    *operands: Any,
) -> Any:
    """Returns one of two functions of the operands; derivatives are those of the plain one.

    Args:
      implementation: None chooses at lowering; a name means that one.
      plain: from the operands.
      kernels: from the resolved implementation and the operands.
      num_rows: B * T; without rows the plain function runs.
      *operands: pytrees of arrays.
    """
    resolved = resolve_implementation(implementation)
    if resolved.name == "xla" or num_rows == 0:
        return plain(*operands)
    step = jax.custom_jvp(
        choose_implementation(resolved, plain, functools.partial(kernels, resolved))
    )
    step.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
    # Inside shard_map an empty cache and a weight differ over no axis; a launch does as a whole.
    return step(*pvary_like(operands, operands))
