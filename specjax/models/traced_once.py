"""A layer's function is traced and lowered once, whatever the number of layers.

Equal layers call one inner `jax.jit`, which JAX traces once for equal shapes, and which becomes one
function of the lowered program. XLA inlines the calls: the compiled program is that of layers
written out.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

__all__ = ["call_traced_once"]


def call_traced_once(
    function: Callable[..., Any], static: Any, modules: Any, *operands: Any
) -> Any:
    """Returns `function(static, modules, *operands)`.

    Args:
      function: of a module's level, so that it is the same object in every call.
      static: hashable, what else decides on the trace.
      modules: one or a tuple; what is no parameter in them decides on the trace, too.
      *operands: pytrees of arrays.
    """
    graph, state = nnx.split(modules)
    return _call(function, static, graph, state, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(function: Any, static: Any, graph: Any, state: Any, *operands: Any) -> Any:
    return function(static, nnx.merge(graph, state), *operands)
