"""Two-level Gumbel-max: one program draws a token from block masses of many programs.

The argmax of log-weights plus independent Gumbel noise is a sample of the weights. A row of V
tokens would need V noises. Here a block of 128 tokens is drawn by the blocks' log-masses, then a
token of that block by the tokens' log-weights:

    block = argmax_i (log mass_i + g_i)        token = argmax_{j in block} (log weight_j + g_j)

That needs V / 128 + 128 noises, and reads 128 logits of the row again. The draw is exact: the
maximum of a block's token scores is distributed as its log-mass plus a Gumbel, and is independent
of its argmax.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import LogNormalizer, MaxSum, block_logprobs, mask_below_cutoff
from specjax.core.noise import BLOCK_LEVEL, SAMPLING_BLOCK, TOKEN_LEVEL, Hash, Words, gumbel
from specjax.core.subnormal import flush_subnormals
from specjax.pallas.blocks import block_argmax, load_logits, load_raw_logits
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import divmod_i32, reduce_where


class SamplingRow(NamedTuple):
    """A row of logits, and the scale, cutoff and normalizer of its log-probabilities.

    Attributes:
      logits: reference [R, V].
      row_index: i32, the row.
      scale: f32, one over the temperature, 1 where greedy.
      cutoff: f32, or None.
      normalizer: of the row.
      first_token: i32, the id of the reference's first token, where a vocabulary is split; its
        logits of other devices' tokens are -inf. None stands for 0.
    """

    logits: Any
    row_index: jax.Array
    scale: jax.Array
    cutoff: jax.Array | None
    normalizer: LogNormalizer
    first_token: jax.Array | None = None

    def kept_logits(self, token_id: jax.Array) -> jax.Array:
        """Returns kept logits at token ids >= 0; -inf below the cutoff and past the row's end."""
        if self.first_token is not None:
            column = token_id - self.first_token
            return load_logits(self.logits, self.row_index, column, self.cutoff, column >= 0)
        x = load_raw_logits(self.logits, self.row_index, token_id)
        return mask_below_cutoff(x, self.cutoff)

    def logprobs(self, token_id: jax.Array) -> jax.Array:
        """Returns log-probabilities at token ids >= 0; -inf where no logit is kept."""
        return token_logprobs(self.kept_logits(token_id), self.normalizer, self.scale)


class BlockNoise(NamedTuple):
    """The noise of a draw; no logit affects it.

    Attributes:
      address: of the draw.
      first_block: i32, the first of the N blocks of the draw.
      gumbels: noise_dtype[N], of blocks `first_block`, `first_block + 1`, ...
      threefry: the hash of the kernel.
    """

    address: Words
    first_block: jax.Array
    gumbels: jax.Array
    threefry: Hash


class Draw(NamedTuple):
    """A drawn token.

    Attributes:
      token: i32.
      logit: f32, its kept logit.
      score: noise_dtype, its block's log-mass plus Gumbel; tiles compare by it.
    """

    token: jax.Array
    logit: jax.Array
    score: jax.Array


def block_token_ids(block: jax.Array) -> jax.Array:
    """Returns the token ids i32[SAMPLING_BLOCK] of a block."""
    return block * SAMPLING_BLOCK + jax.lax.iota(jnp.int32, SAMPLING_BLOCK)


def draw_noise(
    address: Words, first_block: jax.Array, num_blocks: int, noise_dtype: Any, threefry: Hash
) -> BlockNoise:
    """Returns the noise of a draw among `num_blocks` blocks from `first_block` on."""
    block = first_block + jax.lax.iota(jnp.int32, num_blocks)
    gumbels = gumbel(address, BLOCK_LEVEL, block.astype(jnp.uint32), noise_dtype, threefry)
    return BlockNoise(address, first_block, gumbels, threefry)


def draw_row_noise(address: Words, vocab_size: int, noise_dtype: Any, threefry: Hash) -> BlockNoise:
    """Returns the noise of a draw among all blocks of a row."""
    return draw_noise(address, jnp.int32(0), num_padded_blocks(vocab_size), noise_dtype, threefry)


def num_padded_blocks(vocab_size: int) -> int:
    """Returns the number of blocks of a row, padded to a power of two."""
    return next_power_of_2(-(-vocab_size // SAMPLING_BLOCK))


def draw_token(
    row: SamplingRow,
    block_log_masses: jax.Array,
    noise: BlockNoise,
    token_log_weights: Callable[[jax.Array, jax.Array], jax.Array],
) -> Draw:
    """Draws a block, then a token of the block.

    Args:
      row: the row whose token is drawn.
      block_log_masses: f32[N], log-masses of the blocks of `noise`.
      noise: of the draw.
      token_log_weights: from token ids i32[SAMPLING_BLOCK] and their log-probabilities by the row
        to their log-weights.

    Returns:
      The draw.
    """
    dtype = noise.gumbels.dtype
    scores = block_log_masses.astype(dtype) + noise.gumbels
    token_id = block_token_ids(noise.first_block + first_argmax(scores))
    x = row.kept_logits(token_id)
    index = token_id.astype(jnp.uint32)
    token_gumbels = gumbel(noise.address, TOKEN_LEVEL, index, dtype, noise.threefry)
    logprobs = token_logprobs(x, row.normalizer, row.scale)
    best_index = first_argmax(token_log_weights(token_id, logprobs).astype(dtype) + token_gumbels)
    mask = jax.lax.iota(jnp.int32, SAMPLING_BLOCK) == best_index
    logit = jnp.max(jnp.where(mask, x, -jnp.inf))
    return Draw(reduce_where(token_id, mask), logit, jnp.max(scores))


def exclude_weight(
    token_id: jax.Array, is_excluded: jax.Array
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the `token_log_weights` of `draw_token` without a token, where it is excluded."""

    def exclude(ids: jax.Array, logprobs: jax.Array) -> jax.Array:
        return jnp.where(is_excluded & (ids == token_id), -jnp.inf, logprobs)

    return exclude


def exclude_token(
    row: SamplingRow,
    block_log_masses: jax.Array,
    token_id: jax.Array,
    is_excluded: jax.Array,
    vocab_size: int,
) -> tuple[jax.Array, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Returns log-masses f32[N] of a row's blocks without a token, where `is_excluded` is True.

    Its block is summed again without it. Also returns the `token_log_weights` of `draw_token`.
    """
    exclude = exclude_weight(token_id, is_excluded)
    block_index = jax.lax.iota(jnp.int32, block_log_masses.shape[0])
    if row.first_token is not None:
        block_index += divmod_i32(row.first_token, SAMPLING_BLOCK)[0]
    block, _ = divmod_i32(jnp.clip(token_id, 0, vocab_size - 1), SAMPLING_BLOCK)
    ids = block_token_ids(block)
    mass = jnp.sum(jnp.exp(exclude(ids, row.logprobs(ids))))
    is_changed = is_excluded & (block_index == block)
    return jnp.where(is_changed, jnp.log(mass), block_log_masses), exclude


def draw_row_token(
    row: SamplingRow, blocks: MaxSum, greedy: jax.Array, noise: BlockNoise
) -> tuple[jax.Array, jax.Array]:
    """Draws a token from a row, or takes the row's argmax where it is greedy.

    Args:
      row: the row.
      blocks: partials of its blocks, f32[N].
      greedy: bool.
      noise: of the draw among these blocks.

    Returns:
      The token i32 and its kept logit f32.
    """

    def take_argmax() -> tuple[jax.Array, jax.Array]:
        block = first_argmax(flush_subnormals(blocks.max))
        # The shift of a row's normalizer is its largest logit.
        argmax = block_argmax(row.logits, row.row_index, row.cutoff, block)
        return argmax, row.normalizer.shift

    def draw_random() -> tuple[jax.Array, jax.Array]:
        log_masses = block_logprobs(blocks, row.normalizer, row.scale)
        draw = draw_token(row, log_masses, noise, lambda _, logprobs: logprobs)
        return draw.token, draw.logit

    return jax.lax.cond(greedy, take_argmax, draw_random)
