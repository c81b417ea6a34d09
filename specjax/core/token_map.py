"""Draft vocabularies: the target's id of every draft id, and the draft's id of every target id.

A draft head may know `V_d` of the target's `V` tokens, in an order of its own. `token_map` i32[V_d]
holds the target's ids. Verification reads q at target ids, so it needs the inverse, i32[V].
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_token_map(name: str, token_map: Any, vocab_size: int) -> None:
    """Raises `ValueError` for a map on the host that repeats an id or leaves the vocabulary.

    A map on a device is not read: the ids there are the caller's promise.

    Args:
      name: of the argument, for the error.
      token_map: i32[V_d], or None.
      vocab_size: V of the target.
    """
    if not isinstance(token_map, np.ndarray):
        return
    low, high = int(token_map.min()), int(token_map.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{name} runs from {low} to {high}; each of its entries needs to be an id of the "
            f"target in [0, {vocab_size}). A table of offsets is one after its index is added."
        )
    most = np.bincount(token_map, minlength=1)
    if most.max() > 1:
        raise ValueError(
            f"{name} holds the id {int(np.argmax(most))} {int(most.max())} times; two draft ids of "
            "one token would share its probability, and verification reads that of one."
        )


def invert_token_map(token_map: jax.Array, vocab_size: int) -> jax.Array:
    """Returns the draft id of each of the target's ids, i32[V]; V_d where the draft has none.

    Ids outside [0, V) are left out, and of repeated ids the lowest draft id counts.

    Args:
      token_map: i32[V_d].
      vocab_size: V.
    """
    size = token_map.shape[0]
    # An index past the end is dropped; a negative one would count from the end.
    index = jnp.where(token_map < 0, jnp.int32(vocab_size), token_map)
    none = jnp.full((vocab_size,), size, jnp.int32)
    return none.at[index].min(jnp.arange(size, dtype=jnp.int32), mode="drop")


def map_draft_ids(token_map: jax.Array, draft_ids: jax.Array) -> jax.Array:
    """Returns target ids of drawn draft ids; -1 stays.

    A negative entry of the map becomes an id that no vocabulary holds. As -1 it would end the
    drafts because of what was drawn, which biases the output.
    """
    ids = jnp.take(token_map, jnp.maximum(draft_ids, 0), mode="clip")
    ids = jnp.where(ids < 0, jnp.int32(2**31 - 1), ids)
    return jnp.where(draft_ids < 0, jnp.int32(-1), ids)


def take_mapped(values: jax.Array, ids: jax.Array, fill_value: Any) -> jax.Array:
    """Returns `values[..., ids]`, with `fill_value` for ids outside the last axis."""
    inside = (ids >= 0) & (ids < values.shape[-1])
    taken = jnp.take(values, ids, axis=-1, mode="clip")
    inside = jnp.broadcast_to(inside, taken.shape)
    return jnp.where(inside, taken, jnp.asarray(fill_value, values.dtype))
