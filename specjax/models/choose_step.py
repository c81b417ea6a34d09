"""Chooses the implementation of one step through a decoder or a layer: plain JAX or the kernels.

The choice is made once per step. The plain step holds nothing that exists for the kernels; the
kernels' step is `specjax.models.kernel_step`, which is imported where it runs.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from specjax.implementation import Implementation, resolve_implementation, select
from specjax.mesh import pvary_like

__all__ = ["run_decoder", "run_layer"]

_MAX_ROWS = 64


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
      cache: a pair of keys and values for each layer.
      implementation: None chooses at lowering; a name means that one.
      taps: numbers of layers, after which the residual stream [B, T, E] is returned, too.
    """

    def kernels(*operands: Any) -> Any:
        from specjax.models.kernel_step import decode_step

        return decode_step(*operands, taps=taps)

    plain = functools.partial(type(model).plain, taps=taps)
    return _choose(implementation, plain, kernels, model, token_ids, positions, cache)


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
      cache: keys and values, two [B, G, S, D].
      implementation: None chooses at lowering; a name means that one.
      rows: what attention reads instead of the norm of the stream, or None.
    """

    def kernels(*operands: Any) -> Any:
        from specjax.models.kernel_step import layer_step

        return layer_step(*operands)

    plain = type(layer).plain
    operands = (x, cos_sin, positions, cache, rows)
    return _choose(implementation, plain, kernels, layer, *operands)


def _choose(
    implementation: str | Implementation | None,
    plain: Callable[..., Any],
    kernels: Callable[..., Any],
    module: nnx.Module,
    *operands: Any,
) -> Any:
    """Runs one of two steps of a module; derivatives are those of the plain one.

    More than 64 rows, such as a prompt, take the plain step: the kernels would read every matrix
    again for each 64 rows.

    Args:
      implementation: None chooses at lowering; a name means that one.
      plain: from the module and the operands.
      kernels: from the resolved implementation, the module and the operands.
      module: whose step it is.
      *operands: pytrees of arrays; the first has the leading axes [B, T].
    """
    resolved = resolve_implementation(implementation)
    batch, tokens = operands[0].shape[:2]
    if resolved.name == "xla" or not 0 < batch * tokens <= _MAX_ROWS:
        return plain(module, *operands)
    graph, state = nnx.split(module)

    def bind(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(state: Any, *operands: Any) -> Any:
            return step(nnx.merge(graph, state), *operands)

        return run

    by_kernels = bind(functools.partial(kernels, resolved))
    step = jax.custom_jvp(select(resolved, bind(plain), by_kernels))
    step.defjvp(lambda primals, tangents: jax.jvp(bind(plain), primals, tangents))
    # Inside shard_map an empty cache and a weight differ over no axis; a launch does as a whole.
    everything = (state, *operands)
    return step(*pvary_like(everything, everything))
