"""Two-level Gumbel-max by one program, from block weights that many have made."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.logsumexp import Law, keep
from specjax.noise import SAMPLING_BLOCK, Words, gumbel
from specjax.pallas.logsumexp import load_row
from specjax.pallas.tiles import power_of_two
from specjax.sampling import first_argmax, token_logprobs

__all__ = ["Noise", "Row", "argmax_tokens", "block_index", "draw_noise", "draw_token"]


class Row(NamedTuple):
    """A row of logits and its law: `logits` a reference [R, V], `row` i32, `cutoff` f32 or None."""

    logits: Any
    row: jax.Array
    scale: jax.Array
    cutoff: jax.Array | None
    law: Law

    def logprobs(self, index: jax.Array) -> jax.Array:
        """Log-probabilities at token ids >= 0, -inf past the row's end."""
        x = keep(load_row(self.logits, self.row, index), self.cutoff)
        return token_logprobs(x, self.law, self.scale)


class Noise(NamedTuple):
    """The address of a draw, and the Gumbels that choose its block, f[N]."""

    at: Words
    blocks: jax.Array


def block_index(block: jax.Array) -> jax.Array:
    """Token ids i32[SAMPLING_BLOCK] of a block."""
    return block * SAMPLING_BLOCK + jax.lax.iota(jnp.int32, SAMPLING_BLOCK)


def draw_noise(at: Words, vocab_size: int, noise_dtype: Any) -> Noise:
    """What a draw needs that waits for no logit."""
    num_blocks = power_of_two(-(-vocab_size // SAMPLING_BLOCK))
    return Noise(at, gumbel(at, 1, jax.lax.iota(jnp.uint32, num_blocks), noise_dtype))


def argmax_tokens(
    logits: Any, row: jax.Array, cutoff: jax.Array | None, block: jax.Array
) -> jax.Array:
    """The argmax of rows i32[...] whose first largest block is known; ties go to the lowest id."""
    shape = (*row.shape, SAMPLING_BLOCK)
    place = jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    index = block[..., None] * SAMPLING_BLOCK + place
    x = load_row(logits, jnp.broadcast_to(row[..., None], shape), index)
    x = keep(x, None if cutoff is None else cutoff[..., None])
    return block * SAMPLING_BLOCK + first_argmax(x)


def draw_token(
    row: Row,
    weights: jax.Array,
    noise: Noise,
    token_weights: Callable[[jax.Array, jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Draws a token by its block and its place in the block.

    Args:
      row: the target's.
      weights: f32[N], log-masses of the blocks.
      noise: of the draw.
      token_weights: of token ids i32[SAMPLING_BLOCK] and their log-probabilities under the
        row's law makes their log-weights.

    Returns:
      The token i32[] and its log-probability f32[] under the row's law.
    """
    dtype = noise.blocks.dtype
    block = first_argmax(weights.astype(dtype) + noise.blocks)
    index = block_index(block)
    logprobs = row.logprobs(index)
    fine = gumbel(noise.at, 0, index.astype(jnp.uint32), dtype)
    token = block * SAMPLING_BLOCK + first_argmax(
        token_weights(index, logprobs).astype(dtype) + fine
    )
    return token, jnp.max(jnp.where(index == token, logprobs, -jnp.inf))
