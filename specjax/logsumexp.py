"""Block partials of a logsumexp and their associative merge.

A row of logits is cut into blocks of `SAMPLING_BLOCK`; each block keeps its largest
logit and its sum of exponentials relative to it. From these follow the row's
logsumexp, the masses that choose a block when sampling, and the argmax.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.noise import SAMPLING_BLOCK

__all__ = [
    "BlockPartials",
    "RowStatistics",
    "block_partials",
    "block_weights",
    "keep",
    "row_logsumexp",
    "row_statistics",
    "split_blocks",
]


class BlockPartials(NamedTuple):
    """What is kept of each of N blocks.

    Attributes:
      max: f32[..., N], largest kept raw logit.
      sum: f32[..., N], of `exp((x - max) * scale)`.
    """

    max: jax.Array
    sum: jax.Array


class RowStatistics(NamedTuple):
    """What is kept of a row.

    Attributes:
      max: f32[...], largest kept raw logit.
      log_sum: f32[...], log of the sum of `exp((x - max) * scale)`.
      finite: bool[...], whether the row is a law: no NaN, no +inf, not -inf everywhere.
    """

    max: jax.Array
    log_sum: jax.Array
    finite: jax.Array


def keep(logits: jax.Array, cutoff: jax.Array | None) -> jax.Array:
    """Logits in f32, -inf below the cutoff; NaN stays, so that it is seen."""
    x = logits.astype(jnp.float32)
    return x if cutoff is None else jnp.where(x < cutoff, -jnp.inf, x)


def split_blocks(row: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Cuts the last axis into whole blocks `[..., n, SAMPLING_BLOCK]` and a tail.

    A view and not a padded copy: the tail, of less than a block, is apart, and None
    where the blocks come out even.
    """
    num_whole, num_left = divmod(row.shape[-1], SAMPLING_BLOCK)
    edge = num_whole * SAMPLING_BLOCK
    body = row[..., :edge].reshape(*row.shape[:-1], num_whole, SAMPLING_BLOCK)
    return body, (row[..., None, edge:] if num_left else None)


def block_partials(
    logits: jax.Array, scale: jax.Array, cutoff: jax.Array | None = None
) -> BlockPartials:
    """Partials of every block in one pass over the logits.

    Args:
      logits: [..., V], bf16, f16 or f32.
      scale: f32[...], one over the temperature, applied inside the exponent.
      cutoff: f32[...], logits below it are left out. None keeps all.

    Returns:
      Partials f32[..., ceil(V / SAMPLING_BLOCK)].
    """
    c = None if cutoff is None else cutoff[..., None, None]
    s = scale[..., None]

    def reduce(blocks: jax.Array) -> BlockPartials:
        x = keep(blocks, c)
        m = jnp.max(x, axis=-1)
        # An empty block has max -inf; shifting it by 0 instead leaves exp(-inf) = 0.
        shift = jnp.where(m == -jnp.inf, jnp.float32(0), m)
        return BlockPartials(m, jnp.sum(jnp.exp((x - shift[..., None]) * s[..., None]), axis=-1))

    body, tail = split_blocks(logits)
    partials = reduce(body)
    if tail is not None:
        last = reduce(tail)
        partials = BlockPartials(
            jnp.concatenate([partials.max, last.max], axis=-1),
            jnp.concatenate([partials.sum, last.sum], axis=-1),
        )
    # Without the barrier XLA turns the max of block maxima into another pass over the row.
    return jax.lax.optimization_barrier(partials)


def row_statistics(partials: BlockPartials, scale: jax.Array) -> RowStatistics:
    """Merges the partials of a row, in any order to the same result but for rounding.

    Args:
      partials: f32[..., N].
      scale: f32[...].

    Returns:
      Statistics f32[...], relative to the row's maximum, so that huge rows do not
      overflow.
    """
    m = jnp.max(partials.max, axis=-1)
    shift = jnp.where(m == -jnp.inf, jnp.float32(0), m)
    weights = jnp.exp((partials.max - shift[..., None]) * scale[..., None])
    total = jnp.sum(partials.sum * weights, axis=-1)
    finite = jnp.isfinite(total) & jnp.isfinite(m)
    # Behind the barrier every use sees the same bits: p == q is then exact.
    return jax.lax.optimization_barrier(RowStatistics(m, jnp.log(total), finite))


def row_logsumexp(row: RowStatistics, scale: jax.Array) -> jax.Array:
    """f32[...], the logsumexp of the kept logits times `scale`."""
    return row.max * scale + row.log_sum


def block_weights(partials: BlockPartials, row: RowStatistics, scale: jax.Array) -> jax.Array:
    """Log-probability of each block, f32[..., N], -inf for an empty one.

    Args:
      partials: f32[..., N].
      row: the statistics of the row the blocks belong to.
      scale: f32[...].

    Returns:
      f32[..., N].
    """
    relative = (partials.max - row.max[..., None]) * scale[..., None] - row.log_sum[..., None]
    return relative + jnp.log(partials.sum)
