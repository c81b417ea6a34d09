"""The messages between devices of a split vocabulary in a verification, without the rest."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

AXIS = "model"


def gather(numbers: jax.Array) -> jax.Array:
    """What all devices tell, by their gather."""
    return jax.lax.all_gather(numbers, AXIS, to="invarying")


def gather_by_sum(numbers: jax.Array) -> jax.Array:
    """What all devices tell, f32, by a sum: XLA has a kernel of its own for small ones."""
    is_own = jnp.arange(jax.lax.axis_size(AXIS)) == jax.lax.axis_index(AXIS)
    return jax.lax.psum(jnp.where(is_own[:, None, None], numbers, 0).astype(jnp.float32), AXIS)


EXCHANGES = {"messages": gather, "sums": gather_by_sum}


def exchange(
    tell: Callable[..., Any], inputs: Any, keys: Any, positions: jax.Array, temperature: Any
) -> Any:
    """The messages of a call of `rejection_sample` alone: the second depends on the first."""
    logits = inputs.target_logits
    size, num_rows, width = logits.shape
    tiles = jnp.zeros((size * num_rows, 3 * -(-width // 8192) + 2)) + positions[0]
    told = tell(tiles)
    proposals = jnp.zeros((size, 8 + 2 * num_rows), jnp.int32) + told[-1, 0, 0].astype(jnp.int32)
    told = tell(proposals)
    return told, told[-1, :, 0].astype(jnp.int32)
