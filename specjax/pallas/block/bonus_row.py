"""The bonus row of a large batch, read only if all drafted tokens are accepted.

Block verification needs every row with a drafted token before it knows what it accepts. The row
after the last one decides only the next token, for the few requests that accept the whole draft.
So `verify_reduce_kernel` skips it. The programs of `block_residual_kernel` have no residual to read
for such a request, and reduce it instead. In a small batch all rows are read at about the same
time: a later read would save nothing.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.core.gumbel_max import first_argmax
from specjax.core.logsumexp import LogNormalizer, row_statistics
from specjax.core.subnormal import flush_subnormals
from specjax.pallas.blocks import Partials, load_tiles, store_partials
from specjax.pallas.kernel_config import Tile
from specjax.pallas.launch import cond_or
from specjax.pallas.load_request import Request
from specjax.pallas.next_token import AcceptedPrefix


def reduce_bonus_row(
    request: Request, partials: Partials, first_tile: jax.Array, num_programs: int, tile: Tile
) -> None:
    """Reduces a program's share of a request's bonus row.

    Args:
      arrays: the call's arrays.
      request: one that accepts its whole draft.
      partials: references to those of all rows.
      first_tile: i32, the program's first tile; it also owns every `num_programs`-th after it.
      num_programs: that share the row.
      tile: of target rows.
      schedule: of the launch.
    """
    n, skips_sums = request.num_draft_tokens, request.schedule.options.skips_greedy_sums
    num_tiles = tile.num_tiles(request.arrays.target_logits.shape[1])
    for skipped in range(0, num_tiles, num_programs):
        tile_index = first_tile + skipped

        @pl.when(tile_index < num_tiles)
        def _(tile_index: jax.Array = tile_index) -> None:
            row_tile = request.row_tile(n, tile_index, tile)
            only_maxima = row_tile.greedy if skips_sums else None
            store_partials(row_tile, partials, request.row_index(n), only_maxima)


def add_bonus_row(prefix: AcceptedPrefix, partials: Partials) -> AcceptedPrefix:
    """Returns an accepted prefix with the statistics of the bonus row, if that decides."""
    row, request = prefix.row, prefix.request

    def load_bonus() -> tuple[LogNormalizer, jax.Array]:
        index = request.row_index(prefix.num_accepted)
        tiles = load_tiles(partials, index, request.active)
        normalizer, is_valid = row_statistics(tiles, row.scale)
        log_sum = jnp.where(is_valid, normalizer.log_sum, jnp.nan)
        # If the request is not greedy, this loads uninitialized memory, which nothing uses.
        argmax = partials.tile_argmax[index, first_argmax(flush_subnormals(tiles.max))]
        return LogNormalizer(normalizer.shift, log_sum), argmax

    known = (row.normalizer, prefix.argmax)
    normalizer, argmax = cond_or(~prefix.rejected & request.active, load_bonus, known)
    valid = request.active & jnp.isfinite(normalizer.log_sum)
    return prefix._replace(row=row._replace(normalizer=normalizer), valid=valid, argmax=argmax)
