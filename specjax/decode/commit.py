"""Commits what a verification emitted to each request's tokens, and says who is done."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_shape, read_array, read_ids
from specjax.typing import Finish, Verification

__all__ = ["append", "commit", "unpad"]


def append(
    buffer: jax.Array, lengths: jax.Array, counts: jax.Array, values: jax.Array
) -> jax.Array:
    """Writes each request's first `counts` values behind its first `lengths` entries.

    Args:
      buffer: [B, L, ...].
      lengths: i32[B].
      counts: i32[B]; lengths + counts <= L.
      values: [B, K, ...], of the buffer's dtype.

    Returns:
      [B, L, ...].
    """
    place = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None] - lengths[:, None]
    inside = (place >= 0) & (place < counts[:, None])
    behind = tuple(range(2, buffer.ndim))
    place, inside = (jnp.expand_dims(x, behind) for x in (place, inside))
    moved = jnp.take_along_axis(values, jnp.clip(place, 0, values.shape[1] - 1), axis=1)
    return jnp.where(inside, moved, buffer)


def commit(
    token_ids: jax.Array,
    lengths: jax.Array,
    verification: Verification,
    *,
    eos_token_ids: Any = (),
    max_lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends the emitted tokens, up to the end of a sequence or the room there is.

    Args:
      token_ids: i32[B, L], committed tokens.
      lengths: i32[B], how many of each row are committed.
      verification: what the step emitted.
      eos_token_ids: ints or i32[E], tokens that end a request; they are committed.
      max_lengths: i32[B], at most L, which is what None means.

    Returns:
      token_ids i32[B, L], lengths i32[B], and finish i8[B]: 0 goes on, or one of `Finish`.
      A request that emitted nothing, for being inactive or invalid, has INVALID, or LENGTH
      if it is full: a loop keeps the reason by which a request ended first.

    Raises:
      ValueError: if the shapes do not fit together.

    Example:
      >>> outcome = specjax.Verification(
      ...     jnp.array([[7, 2, 9]]), jnp.array([2]), jnp.array([3]), jnp.zeros((1, 3)))
      >>> buffer = jnp.array([[5, -1, -1, -1, -1]])
      >>> tokens, lengths, finish = specjax.commit(
      ...     buffer, jnp.array([1]), outcome, eos_token_ids=(2,))
      >>> tokens.tolist(), lengths.tolist(), finish.tolist()
      ([[5, 7, 2, -1, -1]], [3], [2])
    """
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids has shape {token_ids.shape}; it needs [B, L].")
    size, room = token_ids.shape
    lengths = read_array("lengths", lengths, jnp.int32, (size,))
    emitted = verification.token_ids
    check_shape("verification.token_ids", emitted, (size, *emitted.shape[1:]))
    check_shape("verification.num_emitted", verification.num_emitted, (size,))
    check_shape("verification.num_accepted", verification.num_accepted, (size,))
    place = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    counts = verification.num_emitted
    eos = read_ids("eos_token_ids", eos_token_ids)
    ends = jnp.any(emitted[..., None] == eos[None, None], axis=-1) & (place < counts[:, None])
    first_end = jnp.min(jnp.where(ends, place, emitted.shape[1]), axis=1)
    limit = jnp.int32(room)
    if max_lengths is not None:
        limit = jnp.minimum(limit, read_array("max_lengths", max_lengths, jnp.int32, (size,)))
    counts = jnp.clip(jnp.minimum(counts, first_end + 1), 0, jnp.maximum(limit - lengths, 0))
    new_lengths = lengths + counts
    ended = [
        (first_end < counts, Finish.END_OF_SEQUENCE),
        (new_lengths >= limit, Finish.LENGTH),
        (verification.num_emitted == verification.num_accepted, Finish.INVALID),
    ]
    finish = jnp.select([case for case, _ in ended], [jnp.int8(why) for _, why in ended], 0)
    return append(token_ids, lengths, counts, emitted), new_lengths, finish.astype(jnp.int8)


def unpad(token_ids: Any, vocab_size: int | None = None) -> list[list[int]]:
    """Rows of token ids as lists, on the host, without padding.

    Args:
      token_ids: i32[B, L]; negative ids are padding.
      vocab_size: ids at or above it are dropped too. None drops none.

    Returns:
      One list per row.

    Example:
      >>> specjax.unpad(jnp.array([[3, 9, -1], [1, -1, -1]]), vocab_size=8)
      [[3], [1]]
    """
    rows = np.asarray(token_ids)
    limit = np.inf if vocab_size is None else vocab_size
    return [[int(token) for token in row if 0 <= token < limit] for row in rows]
