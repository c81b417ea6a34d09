"""The residual after a rejected draft: its masses, and the draw from them by blocks or by tiles.

    max(rho p - q, 0)        rho = 1 except in block verification

A rule has its own log-weights, `Schedule.log_weights`, up to an additive constant. These functions
run inside the kernels of `emit_tokens` and of block verification.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import exp_scaled, mask_below_cutoff, reduce_blocks
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_logprobs, residual_probs
from specjax.pallas.blocks import (
    load_blocks,
    load_logits,
    load_padded,
    load_raw_logits,
    partials_shape,
    tile_token_ids,
)
from specjax.pallas.gumbel_max import BlockNoise, Draw, SamplingRow, draw_noise, draw_token
from specjax.pallas.launch import make_exp2, output, reduce_where
from specjax.pallas.load_request import Schedule, load_draft_ids
from specjax.pallas.next_token import (
    AcceptedPrefix,
    draw_row,
    next_address,
    next_noise,
    row_block_logprobs,
)
from specjax.pallas.reduce_rows import ReducedRows
from specjax.pallas.split.shared_rows import load_first_token
from specjax.pallas.target_rows import VerifiedRows


class TileWinners(NamedTuple):
    """The token drawn from each tile of residuals, each [residuals, tiles].

    Attributes:
      mass: f32, of the tile.
      score: noise_dtype, of the drawn block: its log-mass plus its Gumbel.
      token: i32, drawn from that block.
      logit: f32, the token's.
    """

    mass: Any
    score: Any
    token: Any
    logit: Any


# Padding of a row of tiles.
_EMPTY_TILE = TileWinners(mass=0, score=-jnp.inf, token=0, logit=0)


def masses_shape(vocab_size: int, schedule: Schedule) -> Any:
    """Returns the shapes of the blocks' log-masses f32[B, N]; with a rule of their `Partials`."""
    partials = partials_shape(schedule.num_requests, vocab_size, schedule.tile, has_tiles=False)
    return partials.block_max if schedule.log_weights is None else partials


def winners_shape(tiles: tuple[int, int], schedule: Schedule) -> TileWinners:
    """Returns the shapes of the winners of [residuals, tiles]."""
    return TileWinners(
        output(tiles), output(tiles, schedule.noise_dtype), output(tiles, jnp.int32), output(tiles)
    )


def load_draft_logprobs(prefix: AcceptedPrefix, token_id: jax.Array) -> jax.Array:
    """Loads log q at token ids >= 0 of the target's vocabulary; -inf where the draft has none."""
    arrays, drafted = prefix.request.arrays, prefix.drafted
    first = load_first_token(arrays)
    if first is None:
        return _load_draft_columns(prefix, token_id)
    assert drafted is not None
    row, column = drafted.row, token_id - first
    x = load_logits(arrays.draft_logits, row.row_index, column, row.cutoff, column >= 0)
    return token_logprobs(x, drafted.normalizer, row.temperature.scale)


def _load_draft_columns(prefix: AcceptedPrefix, column: jax.Array) -> jax.Array:
    """Loads log q at columns >= 0 of this device; columns are token ids where rows are whole."""
    arrays, drafted = prefix.request.arrays, prefix.drafted
    assert drafted is not None
    row, draft_id = drafted.row, load_draft_ids(arrays, column)
    x = load_raw_logits(arrays.draft_logits, row.row_index, draft_id)
    return token_logprobs(
        mask_below_cutoff(x, row.cutoff), drafted.normalizer, row.temperature.scale
    )


def load_residual_terms(
    prefix: AcceptedPrefix, token_id: jax.Array, logprobs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log(rho p) and log q at token ids, from log p.

    In block verification q of a one-hot draft is +inf at its token, 0 elsewhere: the residual is
    then rho p without the token.
    """
    drafted = prefix.drafted
    draft_logprobs = load_draft_logprobs(prefix, token_id)
    if prefix.log_rho is None or drafted is None:
        return logprobs, draft_logprobs
    one_hot = jnp.where(token_id == drafted.token_id, jnp.float32(jnp.inf), -jnp.inf)
    logprobs = _row_times_rho(prefix).logprobs(token_id)
    return logprobs, jnp.where(drafted.one_hot, one_hot, draft_logprobs)


def _row_times_rho(prefix: AcceptedPrefix) -> SamplingRow:
    """Returns the deciding row with rho in its normalizer, which saves an operation per logit."""
    row = prefix.row
    if prefix.log_rho is None:
        return row
    log_sum = row.normalizer.log_sum - prefix.log_rho
    return row._replace(normalizer=row.normalizer._replace(log_sum=log_sum))


def reduce_masses(prefix: AcceptedPrefix, tile_index: jax.Array) -> jax.Array:
    """Returns sum max(rho p - q, 0) of each block of tile `tile_index`, f32[blocks].

    The draft was sampled.
    """
    # Columns of this device, not token ids: the id of its first token is a loaded value. With it
    # added, Triton would not see that a thread's logits are contiguous.
    schedule = prefix.request.schedule
    column, exp2 = tile_token_ids(schedule.tile, tile_index), make_exp2(schedule.interpret)
    draft_logprobs = _load_draft_columns(prefix, column)
    logprobs = _row_times_rho(prefix)._replace(first_token=None).logprobs(column)
    return jnp.sum(residual_probs(logprobs, draft_logprobs, exp2), axis=-1)


def store_log_masses(prefix: AcceptedPrefix, tile_index: jax.Array, out: Any) -> None:
    """Stores the log-masses of tile `tile_index`'s blocks in `out` of `masses_shape`."""
    row, schedule = prefix.request.b, prefix.request.schedule
    num_blocks = schedule.tile.num_blocks
    blocks = tile_index * num_blocks + jax.lax.iota(jnp.int32, num_blocks)
    if schedule.log_weights is None:
        masses = reduce_masses(prefix, tile_index)
        plgpu.store(out.at[row, blocks], jnp.log(masses))
        return
    token_id = tile_token_ids(schedule.tile, tile_index)
    weights = schedule.log_weights(prefix, token_id, prefix.row.logprobs(token_id))
    one = jnp.ones((1,), jnp.float32)
    partials = reduce_blocks(weights, one, exp2=make_exp2(schedule.interpret))
    plgpu.store(out.block_max.at[row, blocks], partials.max)
    plgpu.store(out.block_sum.at[row, blocks], partials.sum)


def draw_residual(
    rows: ReducedRows | VerifiedRows,
    residual_log_masses: Any,
    prefix: AcceptedPrefix,
    noise: BlockNoise,
) -> Draw:
    """Draws from a residual by its blocks' log-masses; from the row if it is empty.

    The log-masses are f32[B, N], of block verification f32[B * K, N].
    """
    block_index = jax.lax.iota(jnp.int32, noise.gumbels.shape[0])
    inside = block_index * SAMPLING_BLOCK < prefix.request.arrays.target_logits.shape[1]
    min_mass: Any = MIN_RESIDUAL_MASS
    mass_row = prefix.request.b
    if prefix.log_rho is not None:
        assert prefix.drafted is not None
        mass_row = mass_row * prefix.request.schedule.max_draft_tokens + prefix.num_accepted
        min_mass = jnp.float32(min_mass) * jnp.exp(prefix.log_rho)
        # With a one-hot draft the residual is rho p without a token, exactly: every mass counts.
        min_mass = jnp.where(prefix.drafted.one_hot, jnp.float32(0), min_mass)
    index, other = (mass_row, block_index), jnp.float32(-jnp.inf)
    log_masses = plgpu.load(residual_log_masses.at[index], mask=inside, other=other)
    is_empty = jnp.sum(exp_scaled(log_masses)) <= min_mass
    row_log_masses = row_block_logprobs(rows, prefix)

    def token_log_weights(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        terms = load_residual_terms(prefix, token_id, logprobs)
        return jnp.where(is_empty, logprobs, residual_logprobs(*terms))

    return draw_token(
        prefix.row, jnp.where(is_empty, row_log_masses, log_masses), noise, token_log_weights
    )


def draw_by_rule(
    rows: ReducedRows | VerifiedRows, partials: Any, prefix: AcceptedPrefix, noise: BlockNoise
) -> Draw:
    """Draws by a rule's log-weights, less their largest; from the row if none is finite.

    The `Partials` are of the weights' blocks.
    """
    request, log_weights = prefix.request, prefix.request.schedule.log_weights
    blocks = load_blocks(partials, request.b, request.arrays.target_logits.shape[1])
    largest = jnp.max(blocks.max)
    is_empty = largest == -jnp.inf
    shift = jnp.where(is_empty, jnp.float32(0), largest)
    log_masses = blocks.max - shift + jnp.log(blocks.sum)
    row_log_masses = row_block_logprobs(rows, prefix)

    def token_log_weights(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        assert log_weights is not None
        weights = log_weights(prefix, token_id, logprobs)
        return jnp.where(is_empty, logprobs, weights - shift)

    return draw_token(
        prefix.row, jnp.where(is_empty, row_log_masses, log_masses), noise, token_log_weights
    )


def draw_tile(prefix: AcceptedPrefix, tile_index: jax.Array, out: TileWinners) -> None:
    """Draws a token from one tile of a residual, and stores it as the tile's winner."""
    row, schedule = prefix.request.b, prefix.request.schedule
    # The noise depends on no logit: it is computed while the logits are being loaded.
    address = next_address(prefix)
    first_block = tile_index * schedule.tile.num_blocks
    noise = draw_noise(
        address, first_block, schedule.tile.num_blocks, schedule.noise_dtype, schedule.threefry
    )
    masses = reduce_masses(prefix, tile_index)

    def token_log_weights(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        return residual_logprobs(*load_residual_terms(prefix, token_id, logprobs))

    winner = draw_token(prefix.row, jnp.log(masses), noise, token_log_weights)
    out.mass[row, tile_index] = jnp.sum(masses)
    out.score[row, tile_index] = winner.score
    out.token[row, tile_index] = winner.token
    out.logit[row, tile_index] = winner.logit


def choose_winner(rows: Any, prefix: AcceptedPrefix, winners: TileWinners) -> Draw:
    """Returns the winner of a residual's best tile, or a draw from the row if it is empty.

    Args:
      arrays: the call's arrays.
      rows: the target rows, with their partials.
      prefix: the accepted prefix.
      winners: of the tiles of residuals.
      row: i32, the residual among them.
      schedule: of the launch.
    """
    total, winner = _best_tile(winners, prefix.request.b)

    def draw_from_row() -> Draw:
        return draw_row(rows, prefix, next_noise(prefix))

    has_residual = prefix.from_residual & (total > MIN_RESIDUAL_MASS)
    return jax.lax.cond(has_residual, lambda: winner, draw_from_row)


def _best_tile(winners: TileWinners, row: jax.Array) -> tuple[jax.Array, Draw]:
    """Returns (total mass f32[], winning draw) over a row of tiles."""
    masses, scores, tokens, logits = [
        load_padded(values, row, other) for values, other in zip(winners, _EMPTY_TILE, strict=True)
    ]
    mask = jax.lax.iota(jnp.int32, scores.shape[0]) == first_argmax(scores)
    winner = Draw(reduce_where(tokens, mask), reduce_where(logits, mask), jnp.max(scores))
    return jnp.sum(masses), winner
