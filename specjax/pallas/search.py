"""What answers for a row's logits where one program searches it: candidates, or the row itself."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core.bisection import Bracket, Extremes
from specjax.core.filters import Source
from specjax.core.truncation import (
    extremes_blocks,
    least_kept,
    mass_above,
    mass_weights,
)
from specjax.pallas.blocks import load_row
from specjax.pallas.launch import divide, fast_exp2
from specjax.pallas.quarters import Row
from specjax.pallas.tiles import Tile

__all__ = ["in_memory", "in_registers"]


def in_registers(x: jax.Array, row: Row, interpret: bool) -> Source:
    """Logits f32[N] that one program holds."""
    weights = mass_weights(x, row.anchor, row.scale, fast_exp2(interpret))
    return Source(
        lambda pivot: mass_above(x, None, pivot),
        lambda pivot: mass_above(x, weights, pivot),
        lambda bracket: extremes_blocks(x, bracket),
        lambda low: least_kept(x, low, row.anchor, row.scale, row.filters.min_p),
        # A look finds few of them left.
        halvings=4,
    )


def in_memory(
    logits: Any, b: jax.Array, count: jax.Array, row: Row, tile: Tile, interpret: bool
) -> Source:
    """The first `count` logits of row b, read again for every question."""
    tiles, _ = divide(count + (tile.size - 1), tile.size)
    lane = jax.lax.iota(jnp.int32, tile.size)
    zero = lane.astype(jnp.float32) * jnp.float32(0)

    def over(ask: Callable[[jax.Array], Any], merge: Callable[[Any, Any], Any], first: Any) -> Any:
        def read(number: jax.Array, so_far: Any) -> Any:
            index = number * tile.size + lane
            x = load_row(logits, b, index).astype(jnp.float32)
            x = jnp.where(index < count, x, jnp.float32(-jnp.inf))
            return jax.tree.map(merge, so_far, ask(x))

        return jax.lax.fori_loop(jnp.int32(0), tiles, read, first)

    def above(weights: Callable[[jax.Array], jax.Array], pivot: jax.Array) -> jax.Array:
        def ask(x: jax.Array) -> jax.Array:
            return jnp.where(x >= pivot, weights(x), jnp.float32(0))

        return jnp.sum(over(ask, jnp.add, zero))

    def weights(x: jax.Array) -> jax.Array:
        return mass_weights(x, row.anchor, row.scale, fast_exp2(interpret))

    def look(bracket: Bracket) -> Extremes:
        def ask(x: jax.Array) -> tuple[jax.Array, jax.Array]:
            found = extremes_blocks(x[:, None], jax.tree.map(lambda key: key[None], bracket))
            return found.least, -found.most

        least, most = over(ask, jnp.minimum, (zero + jnp.inf, zero + jnp.inf))
        return Extremes(jnp.min(least), -jnp.min(most))

    def least(low: jax.Array) -> jax.Array:
        def ask(x: jax.Array) -> jax.Array:
            min_p = row.filters.min_p
            law = row.anchor[None], row.scale[None], None if min_p is None else min_p[None]
            return least_kept(x[:, None], low[None], *law)

        return jnp.min(over(ask, jnp.minimum, zero + jnp.inf))

    return Source(
        lambda pivot: above(lambda x: jnp.ones_like(x), pivot),
        lambda pivot: above(weights, pivot),
        look,
        least,
    )
