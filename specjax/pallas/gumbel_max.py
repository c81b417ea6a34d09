"""Two-level Gumbel-max by one program, from block weights that many have made."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import LogNormalizer, mask_below_cutoff
from specjax.core.noise import SAMPLING_BLOCK, Words, gumbel
from specjax.pallas.blocks import load_row
from specjax.pallas.launch import only
from specjax.pallas.tiles import power_of_two

__all__ = [
    "Drawn",
    "Noise",
    "Row",
    "block_index",
    "draw_noise",
    "draw_token",
    "num_noises",
    "whole_noise",
]


class Row(NamedTuple):
    """A row of logits and its law: `logits` a reference [R, V], `row` i32, `cutoff` f32 or None."""

    logits: Any
    row: jax.Array
    scale: jax.Array
    cutoff: jax.Array | None
    normalizer: LogNormalizer

    def kept(self, index: jax.Array) -> jax.Array:
        """Kept logits at token ids >= 0, -inf past the row's end."""
        return mask_below_cutoff(load_row(self.logits, self.row, index), self.cutoff)

    def logprobs(self, index: jax.Array) -> jax.Array:
        """Log-probabilities at token ids >= 0, -inf past the row's end."""
        return token_logprobs(self.kept(index), self.normalizer, self.scale)


class Noise(NamedTuple):
    """The address of a draw, and the Gumbels f[N] that choose one of blocks `first`, ..."""

    at: Words
    first: jax.Array
    blocks: jax.Array


class Drawn(NamedTuple):
    """A token i32, its kept logit f32, and the score f of its block, by which blocks compare."""

    token: jax.Array
    logit: jax.Array
    score: jax.Array


def block_index(block: jax.Array) -> jax.Array:
    """Token ids i32[SAMPLING_BLOCK] of a block."""
    return block * SAMPLING_BLOCK + jax.lax.iota(jnp.int32, SAMPLING_BLOCK)


def draw_noise(at: Words, first: jax.Array, num_blocks: int, noise_dtype: Any) -> Noise:
    """What a draw among blocks `first`, ... needs that waits for no logit."""
    place = first + jax.lax.iota(jnp.int32, num_blocks)
    return Noise(at, first, gumbel(at, 1, place.astype(jnp.uint32), noise_dtype))


def whole_noise(at: Words, vocab_size: int, noise_dtype: Any) -> Noise:
    """What a draw from a whole row needs that waits for no logit."""
    return draw_noise(at, jnp.int32(0), num_noises(vocab_size), noise_dtype)


def num_noises(vocab_size: int) -> int:
    """Blocks of a row, padded to a power of two."""
    return power_of_two(-(-vocab_size // SAMPLING_BLOCK))


def draw_token(
    row: Row,
    weights: jax.Array,
    noise: Noise,
    token_weights: Callable[[jax.Array, jax.Array], jax.Array],
) -> Drawn:
    """Draws a token by its block and its place in the block.

    Args:
      row: the target's.
      weights: f32[N], log-masses of the blocks of `noise`.
      noise: of the draw.
      token_weights: of token ids i32[SAMPLING_BLOCK] and their log-probabilities under the
        row's law makes their log-weights.

    Returns:
      What was drawn.
    """
    dtype = noise.blocks.dtype
    scores = weights.astype(dtype) + noise.blocks
    index = block_index(noise.first + first_argmax(scores))
    x = row.kept(index)
    fine = gumbel(noise.at, 0, index.astype(jnp.uint32), dtype)
    logprobs = token_logprobs(x, row.normalizer, row.scale)
    place = first_argmax(token_weights(index, logprobs).astype(dtype) + fine)
    chosen = jax.lax.iota(jnp.int32, SAMPLING_BLOCK) == place
    logit = jnp.max(jnp.where(chosen, x, -jnp.inf))
    return Drawn(only(index, chosen), logit, jnp.max(scores))
