"""Bad words: token sequences that must not be completed."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.processing.token_counts import History, recent_tokens

__all__ = ["forbid_words"]


def forbid_words(
    x: jax.Array, words: jax.Array, history: History, drafted: Any, first_row: jax.Array
) -> jax.Array:
    """Returns logits with -inf at the last token of each word whose others end before the row.

    Args:
      x: [B, R, V].
      words: i32, [N, M] or [B, N, M], padded at the end with -1.
      history: token ids and lengths, where M > 1.
      drafted: i32[B, D], or None.
      first_row: i32[]; row r comes after the first `first_row + r` drafted tokens.

    Returns:
      [B, R, V] of the dtype of x.
    """
    size, num_rows, vocab_size = x.shape
    if not words.size:
        return x
    words = words if words.ndim == 3 else words[None]
    num_before = words.shape[-1] - 1
    length = jnp.sum(jnp.cumprod((words >= 0).astype(jnp.int32), axis=-1), axis=-1)
    last = jnp.take_along_axis(words, jnp.maximum(length - 1, 0)[..., None], axis=-1)[..., 0]
    matches = jnp.broadcast_to((length > 0)[:, None], (size, num_rows, words.shape[1]))
    if num_before:
        assert history.token_ids is not None
        assert history.lengths is not None
        past = recent_tokens(history.token_ids, history.lengths, num_before)
        past = past if drafted is None else jnp.concatenate([past, drafted], axis=1)
        index = jnp.arange(num_before, dtype=jnp.int32)
        row = first_row + jnp.arange(num_rows, dtype=jnp.int32)
        # Both the tokens before a row and a word without its last token are aligned at their end.
        past = jnp.take(past, row[:, None] + index[None], axis=1, mode="clip")
        word_index = length[..., None] - 1 - num_before + index[None, None]
        aligned_words = jnp.take_along_axis(words, jnp.maximum(word_index, 0), axis=-1)
        equal = (word_index < 0)[:, None] | (past[:, :, None] == aligned_words[:, None])
        matches &= jnp.all(equal, axis=-1)
    # An index past the end is dropped.
    token = jnp.where(matches, last[:, None], vocab_size)
    request = jnp.arange(size, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    # Logits are scattered as bits, because XLA scatters floats in float32, on a copy of the rows.
    bits = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
    forbidden = jax.lax.bitcast_convert_type(jnp.array(-jnp.inf, x.dtype), bits)
    x_bits = jax.lax.bitcast_convert_type(x, bits)
    x_bits = x_bits.at[request, row, token].set(forbidden, mode="drop")
    return jax.lax.bitcast_convert_type(x_bits, x.dtype)
