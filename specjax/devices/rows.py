"""Blocks of split rows, their numbers gathered, and the logits of tokens wherever they lie."""

import jax
import jax.numpy as jnp

from specjax.devices.vocabulary_split import VocabularySplit

__all__ = ["first_token", "gather_blocks", "own_blocks", "take", "take_each", "true_row"]


def first_token(width: int, split: VocabularySplit) -> jax.Array:
    """Returns the id i32[] of the first token that this device has."""
    return jax.lax.axis_index(split.axis_name).astype(jnp.int32) * jnp.int32(width)


def true_row(row: jax.Array, first: jax.Array, split: VocabularySplit, fill: float) -> jax.Array:
    """Returns columns [..., N], from the id `first` on, with `fill` past the vocabulary's end."""
    ids = first + jnp.arange(row.shape[-1], dtype=jnp.int32)
    return jnp.where(ids < split.vocab_size, row, jnp.array(fill, row.dtype))


def own_blocks(
    row: jax.Array, split: VocabularySplit, block_size: int, fill: float = -jnp.inf
) -> jax.Array:
    """Returns the blocks that begin on this device.

    Where the device's tokens do not begin with a block, the first ones are the end of the previous
    device's last block. That device reads them: block_size - 1 numbers of each row travel.

    Args:
      row: [..., width].
      split: of the row.
      block_size: tokens of a block.
      fill: stands past the vocabulary's end.

    Returns:
      [..., ceil(width / block_size), block_size]. On a device where one block less begins,
      the last one is arbitrary.
    """
    width = row.shape[-1]
    num_blocks = -(-width // block_size)
    size = jax.lax.axis_size(split.axis_name)
    first = first_token(width, split)
    is_aligned = width % block_size == 0
    if not is_aligned:
        to_previous = [(device + 1, device) for device in range(size - 1)]
        rest = jax.lax.ppermute(row[..., : block_size - 1], split.axis_name, to_previous)
        # As long as the furthest slice needs it.
        spare = (*row.shape[:-1], num_blocks * block_size - width)
        row = jnp.concatenate([row, rest, jnp.full(spare, fill, row.dtype)], axis=-1)
        start = -first % block_size
        row = jax.lax.dynamic_slice_in_dim(row, start, num_blocks * block_size, axis=-1)
        first = first + start
    if not is_aligned or split.vocab_size < width * size:
        row = true_row(row, first, split, fill)
    return row.reshape(*row.shape[:-1], num_blocks, block_size)


def gather_blocks(
    values: jax.Array, width: int, split: VocabularySplit, block_size: int
) -> jax.Array:
    """Returns a number of every block of the vocabulary, in its order, on every device.

    Args:
      values: [..., ceil(width / block_size)], of the device's `own_blocks`.
      width: tokens of a row on each device.
      split: of the row.
      block_size: tokens of a block.

    Returns:
      [..., ceil(V / block_size)].
    """
    size = jax.lax.axis_size(split.axis_name)
    last = values.ndim - 1
    by_device = jax.lax.all_gather(values, split.axis_name, axis=last, to="invarying")
    num_blocks = -(-split.vocab_size // block_size)
    begins = [min(-(-device * width // block_size), num_blocks) for device in range(size + 1)]
    parts = [by_device[..., d, : begins[d + 1] - begins[d]] for d in range(size)]
    return jnp.concatenate(parts, axis=-1)


def take(row: jax.Array, index: jax.Array, split: VocabularySplit) -> jax.Array:
    """Returns the logits f32 of a row [width] at token ids, -inf for ids outside [0, V).

    One device has each token. The others add 0, which changes no number and keeps NaN.
    """
    width = row.shape[0]
    column = index - first_token(width, split)
    is_token = (index >= 0) & (index < split.vocab_size)
    is_here = is_token & (column >= 0) & (column < width)
    x = jnp.take(row, column, mode="clip").astype(jnp.float32)
    x = jax.lax.psum(jnp.where(is_here, x, jnp.float32(0)), split.axis_name)
    return jnp.where(is_token, x, -jnp.inf)


def take_each(rows: jax.Array, index: jax.Array, split: VocabularySplit) -> jax.Array:
    """Returns `take` f32[...] of rows [..., width], of each at its own token i32[...]."""
    flat = rows.reshape(-1, rows.shape[-1])
    taken = jax.vmap(lambda row, i: take(row, i, split))(flat, index.reshape(-1))
    return taken.reshape(index.shape)
