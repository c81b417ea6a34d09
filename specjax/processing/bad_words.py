"""Bad words: token sequences that must not be completed."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from specjax.processing.history import History, recent_tokens


def bad_words_array(words: Sequence[Any]) -> np.ndarray:
    """Returns token sequences as one padded array on the host.

    Args:
      words: token sequences for all requests, or a sequence of B of these, one per request.

    Returns:
      i32[N, M] or i32[B, N, M], padded at the end with -1.

    Raises:
      ValueError: for an empty sequence or a negative id among the tokens.

    Example:
      >>> specjax.bad_words_array([[5], [7, 2]]).tolist()
      [[5, -1], [7, 2]]
    """
    if not all(map(_is_sequence, words)):
        raise ValueError("words holds a single token; each word is a sequence of token ids.")
    nested = any(_is_sequence(token) for word in words for token in word)
    batch = [list(map(list, request)) for request in (words if nested else [words])]
    ids = [token for request in batch for word in request for token in word]
    if not all(isinstance(token, SupportsIndex) for token in ids):
        raise ValueError(
            "words holds a token that is no integer; each word is a sequence of token ids."
        )
    if min(ids, default=0) < 0 or not all(word for request in batch for word in request):
        raise ValueError("words holds an empty sequence or a negative id; a word is token ids.")
    num_words = max((len(request) for request in batch), default=0)
    longest = max((len(word) for request in batch for word in request), default=1)
    array = np.full((len(batch), num_words, longest), -1, np.int32)
    for b, request in enumerate(batch):
        for n, word in enumerate(request):
            array[b, n, : len(word)] = word
    return array if nested else array[0]


def _is_sequence(value: Any) -> bool:
    # An array without axes is an iterable by its type only.
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def word_lengths(words: jax.Array) -> jax.Array:
    """Returns how many tokens each word i32[..., M] has before its padding, i32[...]."""
    return jnp.sum(jnp.cumprod((words >= 0).astype(jnp.int32), axis=-1), axis=-1)


def forbid_words(
    x: jax.Array,
    words: jax.Array,
    history: History,
    drafted: Any,
    first_row: jax.Array,
    columns: Callable[[jax.Array], jax.Array] = lambda token_ids: token_ids,
) -> jax.Array:
    """Returns logits with -inf at the last token of each word whose others end before the row.

    Args:
      x: [B, R, V].
      words: i32, [N, M] or [B, N, M], padded at the end with -1.
      history: token ids and lengths, where M > 1.
      drafted: i32[B, D], or None.
      first_row: i32[]; row r comes after the first `first_row + r` drafted tokens.
      columns: gives the columns of x where tokens stand, one past the end for those that do not.

    Returns:
      [B, R, V] of the dtype of x.
    """
    size, num_rows, vocab_size = x.shape
    if not words.size:
        return x
    words = words if words.ndim == 3 else words[None]
    num_before = words.shape[-1] - 1
    length = word_lengths(words)
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
    token = jnp.where(matches, columns(last)[:, None], vocab_size)
    request = jnp.arange(size, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(num_rows, dtype=jnp.int32)[None, :, None]
    # Logits are scattered as bits, because XLA scatters floats in float32, on a copy of the rows.
    bits = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
    forbidden = jax.lax.bitcast_convert_type(jnp.array(-jnp.inf, x.dtype), bits)
    x_bits = jax.lax.bitcast_convert_type(x, bits)
    x_bits = x_bits.at[request, row, token].set(forbidden, mode="drop")
    return jax.lax.bitcast_convert_type(x_bits, x.dtype)
