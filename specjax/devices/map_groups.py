"""A function of rows by groups of 8, in which a row's bits depend on no other row.

    rows [B, T, ...] -> groups [N, 1, 8, ...] -> function of [1, 8, ...], one group at a time

The order of a processor's sums follows from their shapes. So each group has one shape, whatever B
and T are.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_GROUP = 8


def map_groups(function: Callable[..., Any], *arrays: jax.Array) -> Any:
    """Returns the results [B, T, ...] of a function of rows [1, 8, ...] for rows [B, T, ...].

    An axis after T may have size 0.

    Example:
      >>> map_groups(lambda rows: rows.sum(-1), jnp.ones((2, 3, 4))).tolist()
      [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """
    batch, tokens = arrays[0].shape[:2]
    num_groups = -(-batch * tokens // _GROUP)
    num_rows = num_groups * _GROUP

    def group(x: jax.Array) -> jax.Array:
        rows = x.reshape(batch * tokens, *x.shape[2:])
        rows = jnp.pad(rows, ((0, num_rows - batch * tokens), *((0, 0),) * (rows.ndim - 1)))
        return rows.reshape(num_groups, 1, _GROUP, *rows.shape[1:])

    def ungroup(y: jax.Array) -> jax.Array:
        rows = y.reshape(num_rows, *y.shape[3:])[: batch * tokens]
        return rows.reshape(batch, tokens, *rows.shape[1:])

    results = jax.lax.map(lambda groups: function(*groups), [group(x) for x in arrays])
    return jax.tree.map(ungroup, results)
