"""Queries, keys and values on their way from a product to attention: summed, scaled and turned.

Axes as in `specjax.models.pallas.attention`; `N` rows of a tile, each a head of a token.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.pallas.add_rms_norm import load_squares, scale_of
from specjax.pallas.launch import divide
from specjax.pallas.tiles import power_of_two

__all__ = [
    "Heads",
    "Placed",
    "Projected",
    "late_scales",
    "load_tile",
    "of_token",
    "place",
    "tile_mask",
]


class Heads(NamedTuple):
    """The arrays of a call, or in a kernel the references to them.

    Attributes:
      parts: [Q, B, T', H + 2 * G, D], queries, keys and values, none of them rotated, as Q parts of
        a sum.
      squares: f32[B, T', n], sums of squares by whose root mean the sum is divided; None where it
        has been.
      cos: f32[B, T, D / 2], of the angles by which queries and keys are turned.
      sin: likewise.
      positions: i32[B, T]; a token at -1 writes nothing and sees nothing.
      keys: [B, G, S, D].
      values: [B, G, S, D].
    """

    parts: Any
    squares: Any
    cos: Any
    sin: Any
    positions: Any
    keys: Any
    values: Any


class Placed(NamedTuple):
    """Queries ready for attention, and the cache with keys and values in it, in its own memory.

    Attributes:
      queries: [B, T, H, D].
      keys: [B, G, S, D], NaN for those that are not finite.
      values: [B, G, S, D], 0 for those that are not finite.
      places: i32[B, G, T], the position p of each token, or -2 - p if not all of its values are
        finite: its key still has to become NaN. -1 for none.
      counters: u32[B * G], zeros, for the launch behind this one to count in.
    """

    queries: Any
    keys: Any
    values: Any
    places: Any
    counters: Any


class Projected(NamedTuple):
    """The tokens of request `b`.

    Attributes:
      heads: arrays.
      b: the request.
      scale: of tokens i32[N], f32[N] to multiply by what they are projected to; None for nothing.
      turn: of both halves of heads, cosines and sines: both halves of turned heads.
    """

    heads: Heads
    b: jax.Array
    scale: Callable[[jax.Array], jax.Array] | None
    turn: Callable[..., Any]

    def tile(self, token: jax.Array, head: jax.Array, dim: jax.Array, mask: jax.Array) -> jax.Array:
        """Heads f32[N, dims] of tokens, rounded as the cache holds them.

        Args:
          token: i32[N].
          head: i32[N] or i32[].
          dim: i32[dims], in any order.
          mask: bool[N, dims], what there is of them.
        """
        parts = self.heads.parts
        total = jnp.zeros(mask.shape, jnp.float32)
        for q in range(parts.shape[0]):
            total += load_tile(parts, (q, self.b, token, head), dim, mask).astype(jnp.float32)
        if self.scale is not None:
            total *= self.scale(token)[:, None]
        return total.astype(self.heads.keys.dtype).astype(jnp.float32)

    def halves(
        self, token: jax.Array, head: jax.Array, inside: jax.Array, turned: bool = True
    ) -> tuple[jax.Array, jax.Array]:
        """Both halves of heads f32[N, at least D / 2] of tokens, rotated if they are to be.

        Args:
          token: i32[N].
          head: i32[N] or i32[].
          inside: bool[N], which tokens there are.
          turned: whether to rotate them.
        """
        half = self.heads.keys.shape[3] // 2
        dim = jax.lax.iota(jnp.int32, power_of_two(half))
        mask = tile_mask(inside, dim, half)
        x, y = (self.tile(token, head, index, mask) for index in (dim, dim + half))
        if not turned:
            return x, y
        at = (self.b, token)
        cos, sin = (load_tile(z, at, dim, mask) for z in (self.heads.cos, self.heads.sin))
        return self.turn(x, y, cos, sin)

    def rotated(self, token: jax.Array, head: jax.Array, mask: jax.Array) -> jax.Array:
        """Rotated heads [N, D] of tokens; arguments as of `tile`."""
        size = self.heads.keys.shape[3]
        dim, half = jax.lax.iota(jnp.int32, mask.shape[1]), jnp.int32(size // 2)
        angle, other = jax.lax.rem(dim, half), jax.lax.rem(dim + half, jnp.int32(size))
        x, y = (self.tile(token, head, index, mask) for index in (dim, other))
        at = (self.b, token)
        cos, sin = (load_tile(z, at, angle, mask) for z in (self.heads.cos, self.heads.sin))
        # The second of a pair is the first of the pair turned the other way.
        turned, _ = self.turn(x, y, cos, jnp.where(dim < half, sin, -sin))
        return turned.astype(self.heads.keys.dtype)


def place(
    heads: Heads,
    out: Placed,
    *,
    rule: Any,
    turn: Callable[..., Any],
    entries: Callable[..., Any],
) -> None:
    """One head of one request: a query is left for a later launch, the rest goes into the cache."""
    (groups, slots, head_dim), tokens = heads.keys.shape[1:], heads.positions.shape[1]
    num_queries = out.queries.shape[2]
    b, head = divide(pl.program_id(0), num_queries + 2 * groups)
    projected = Projected(heads, b, late_scales(heads.squares, b, tokens, rule), turn)
    token = jax.lax.iota(jnp.int32, power_of_two(tokens))
    inside = token < tokens
    place = plgpu.load(heads.positions.at[b, token], mask=inside, other=jnp.int32(-1))
    # Past the end, whatever does not belong into the cache.
    slot = jnp.where((place >= 0) & (place < slots), place, jnp.int32(slots))

    def store(to: Any, at: tuple[Any, ...], rows: jax.Array, halves: tuple[Any, Any]) -> None:
        half = jax.lax.iota(jnp.int32, halves[0].shape[1])
        for x, dim in zip(halves, (half, half + head_dim // 2), strict=True):
            mask = tile_mask(rows, half, head_dim // 2)
            plgpu.store(to.at[(*at, dim[None])], x.astype(to.dtype), mask=mask)

    @pl.when(head < num_queries)
    def _() -> None:
        store(out.queries, (b, token[:, None], head), inside, projected.halves(token, head, inside))

    @pl.when((head >= num_queries) & (head < num_queries + groups))
    def _() -> None:
        at = (b, head - num_queries, slot[:, None])
        keys = [x.astype(out.keys.dtype) for x in projected.halves(token, head, inside)]
        store(out.keys, at, slot < slots, tuple(entries(x, x)[0] for x in keys))
        out.counters[b * groups + head - num_queries] = jnp.uint32(0)

    @pl.when(head >= num_queries + groups)
    def _() -> None:
        g = head - num_queries - groups
        at, halves = (b, g, slot[:, None]), projected.halves(token, head, inside, turned=False)
        values = [x.astype(out.values.dtype) for x in halves]
        store(out.values, at, slot < slots, tuple(entries(x, x)[1] for x in values))
        # Their keys are another program's. To wait for one another would take longer than to tell
        # the launch behind, which seldom has anything to do.
        low, high = (~(jnp.abs(x) < jnp.inf) for x in values)
        spoilt = jnp.max((low | high).astype(jnp.int32), axis=1) > 0
        mark = jnp.maximum(place, -1)
        plgpu.store(out.places.at[b, g, token], jnp.where(spoilt, -2 - mark, mark), mask=inside)


def late_scales(
    squares: Any, b: jax.Array, tokens: int, rule: Any
) -> Callable[[jax.Array], jax.Array] | None:
    """What each token of request b has to be multiplied by, as `Projected` asks for it."""
    if squares is None:
        return None
    # One after the other: a tile of sums for every row takes longer.
    scales = [scale_of(load_squares(squares, b, jnp.int32(t)), rule) for t in range(tokens)]
    return lambda token: of_token(token, scales, jnp.float32(0))


def of_token(token: jax.Array, values: list[jax.Array], other: jax.Array) -> jax.Array:
    """For each of [N] tokens its own of a few values."""
    found = jnp.full(token.shape, other)
    for t, value in enumerate(values):
        found = jnp.where(token == t, value, found)
    return found


def tile_mask(inside: jax.Array, dim: jax.Array, size: int) -> jax.Array:
    """Which of [N, dims] there are, of heads of `size` dimensions."""
    mask = jnp.broadcast_to(inside[:, None], (inside.shape[0], dim.shape[0]))
    return mask if dim.shape[0] == size else mask & (dim < size)[None]


def load_tile(reference: Any, at: Any, dim: jax.Array, mask: jax.Array) -> jax.Array:
    """Rows [N, dims] of a reference [..., D], at places that are scalars or i32[N]."""
    at = [x[:, None] if jnp.ndim(x) else x for x in at]
    other = jnp.zeros((), reference.dtype)
    return plgpu.load(reference.at[(*at, dim[None])], mask=mask, other=other)
