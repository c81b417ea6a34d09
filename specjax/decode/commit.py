"""`commit`: appends emitted tokens to each request and finds its end; `Origin` and `Finish`."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import check_shape, parse_array, parse_ids, parse_optional
from specjax.types import Verification


class Finish:
    """Reasons for which a request ended; 0 while it goes on."""

    LENGTH = 1
    END_OF_SEQUENCE = 2
    INVALID = 3


class Origin:
    """How a token came to be committed; 0 is the prompt."""

    ACCEPTED = 1
    RECOVERED = 2
    BONUS = 3


def append(
    buffer: jax.Array, lengths: jax.Array, counts: jax.Array, values: jax.Array
) -> jax.Array:
    """Returns the buffer with each request's first `counts` values after its first `lengths`.

    Args:
      buffer: [B, L, ...].
      lengths: i32[B].
      counts: i32[B]; lengths + counts <= L.
      values: [B, K, ...], of the buffer's dtype.

    Returns:
      [B, L, ...].
    """
    index = jnp.arange(buffer.shape[1], dtype=jnp.int32)[None] - lengths[:, None]
    inside = (index >= 0) & (index < counts[:, None])
    trailing_axes = tuple(range(2, buffer.ndim))
    index, inside = (jnp.expand_dims(x, trailing_axes) for x in (index, inside))
    shifted = jnp.take_along_axis(values, jnp.clip(index, 0, values.shape[1] - 1), axis=1)
    return jnp.where(inside, shifted, buffer)


def commit(
    token_ids: jax.Array,
    lengths: jax.Array,
    verification: Verification,
    *,
    eos_token_ids: Any = (),
    max_lengths: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Appends the emitted tokens of a step to each request, and says which requests end.

    A request takes its emitted tokens up to its maximum length, or up to the first that ends it.

    Args:
      token_ids: i32[B, L], committed tokens.
      lengths: i32[B], how many of each request's tokens are committed.
      verification: `Verification` of the step.
      eos_token_ids: int, ints or one array i32[E], tokens that end a request; they are committed.
        Under `jit` an argument must be an array.
      max_lengths: i32[B], at most L. None is L.

    Returns:
      token_ids i32[B, L], lengths i32[B], and finish i8[B]: 0 for a request that goes on, or one
      of `Finish`. A request that emitted nothing is inactive or invalid: it has INVALID, or LENGTH
      if it is full. A loop keeps the first reason for which a request ended, and ignores later
      ones.

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
    size = token_ids.shape[0]
    lengths = parse_array("lengths", lengths, jnp.int32, (size,))
    emitted = verification.token_ids
    check_shape("verification.token_ids", emitted, (size, *emitted.shape[1:]))
    check_shape("verification.num_emitted", verification.num_emitted, (size,))
    check_shape("verification.num_accepted", verification.num_accepted, (size,))
    eos_token_ids = jnp.asarray(parse_ids("eos_token_ids", eos_token_ids))
    max_lengths = parse_optional("max_lengths", max_lengths, jnp.int32, (size,))
    return append_emitted(token_ids, lengths, verification, eos_token_ids, max_lengths)


def append_emitted(
    token_ids: jax.Array,
    lengths: jax.Array,
    verification: Verification,
    eos_token_ids: jax.Array,
    max_lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Implements `commit` for checked arrays."""
    emitted, counts = verification.token_ids, verification.num_emitted
    index = jnp.arange(emitted.shape[1], dtype=jnp.int32)[None]
    # [E] for the batch, or [B, E] where each request has its own, to compare with [B, K + 1, 1].
    eos_token_ids = jnp.expand_dims(eos_token_ids, 1 if eos_token_ids.ndim == 2 else (0, 1))
    is_eos = jnp.any(emitted[..., None] == eos_token_ids, axis=-1)
    is_eos &= index < counts[:, None]
    first_eos = jnp.min(jnp.where(is_eos, index, emitted.shape[1]), axis=1)
    limit = jnp.int32(token_ids.shape[1])
    if max_lengths is not None:
        limit = jnp.minimum(limit, max_lengths)
    counts = jnp.clip(jnp.minimum(counts, first_eos + 1), 0, jnp.maximum(limit - lengths, 0))
    new_lengths = lengths + counts
    finish_cases = [
        (first_eos < counts, Finish.END_OF_SEQUENCE),
        (new_lengths >= limit, Finish.LENGTH),
        # A valid request emits one token besides the accepted ones.
        (verification.num_emitted == verification.num_accepted, Finish.INVALID),
    ]
    conditions, reasons = zip(*finish_cases, strict=True)
    finish = jnp.select(conditions, [jnp.int8(reason) for reason in reasons], 0)
    return append(token_ids, lengths, counts, emitted), new_lengths, finish.astype(jnp.int8)
