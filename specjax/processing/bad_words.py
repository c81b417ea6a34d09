"""Token sequences that must not be completed: -inf at the last token where the others stand."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.processing.token_counts import History, recent_tokens

__all__ = ["forbid_words"]


def forbid_words(
    x: jax.Array, words: jax.Array, history: History, drafted: Any, first_row: jax.Array
) -> jax.Array:
    """-inf at the last token of each word whose other tokens stand before the row."""
    size, num_rows, vocab_size = x.shape
    if not words.size:
        return x
    words = words if words.ndim == 3 else words[None]
    before = words.shape[-1] - 1
    length = jnp.sum(jnp.cumprod((words >= 0).astype(jnp.int32), axis=-1), axis=-1)
    last = jnp.take_along_axis(words, jnp.maximum(length - 1, 0)[..., None], axis=-1)[..., 0]
    matches = jnp.broadcast_to((length > 0)[:, None], (size, num_rows, words.shape[1]))
    if before:
        assert history.token_ids is not None
        assert history.lengths is not None
        past = recent_tokens(history.token_ids, history.lengths, before)
        past = past if drafted is None else jnp.concatenate([past, drafted], axis=1)
        place = jnp.arange(before, dtype=jnp.int32)
        row = first_row + jnp.arange(num_rows, dtype=jnp.int32)
        # The tokens before a row end at the right; so are words laid against them.
        past = jnp.take(past, row[:, None] + place[None], axis=1, mode="clip")
        at = length[..., None] - 1 - before + place[None, None]
        wanted = jnp.take_along_axis(words, jnp.maximum(at, 0), axis=-1)
        same = (at < 0)[:, None] | (past[:, :, None] == wanted[:, None])
        matches &= jnp.all(same, axis=-1)
    # An index past the end is dropped.
    index = jnp.where(matches, last[:, None], vocab_size)
    rows = jnp.arange(size, dtype=jnp.int32)[:, None, None]
    place = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    # As bits: XLA would scatter in float32, and make a copy of the rows for that.
    bits = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
    forbidden = jax.lax.bitcast_convert_type(jnp.array(-jnp.inf, x.dtype), bits)
    x_bits = jax.lax.bitcast_convert_type(x, bits)
    x_bits = x_bits.at[rows, place, index].set(forbidden, mode="drop")
    return jax.lax.bitcast_convert_type(x_bits, x.dtype)
