"""Attention of few tokens to a cache: a program to a part of its slots.

Axes as in `specjax.models.pallas.attention`; `M` rows of a tile, the query heads of one key-value
head, token after token; `N` keys of a tile; `P` parts.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.pallas.combine import Parts, leave, together, write
from specjax.models.pallas.online_softmax import Queries, Softmax, add, is_seen, nothing, summed
from specjax.models.pallas.qkv import (
    Heads,
    Projected,
    late_scales,
    load_tile,
    of_token,
    tile_mask,
)
from specjax.models.pallas.tiles import ATTENTION_SLOTS, MIN_DOT, at_least_dot
from specjax.pallas.launch import arrive, divide, value_when
from specjax.pallas.tiles import power_of_two

__all__ = ["Looked", "Rule", "Seen", "Unfinished", "look", "see"]


class Unfinished(NamedTuple):
    """What each part of the slots leaves, and the cache, in its own memory.

    Attributes:
      parts: `Parts`.
      keys: [B, G, S, D].
      values: [B, G, S, D].
    """

    parts: Parts
    keys: Any
    values: Any


class Seen(NamedTuple):
    """References that a part of the slots is looked at through.

    Attributes:
      queries: [B, T, H, D].
      places: i32[B, G, T], as `Placed` has them.
      keys: [B, G, S, D], with those of the places.
      values: [B, G, S, D], likewise.
      counters: u32[B * G], zeros.
    """

    queries: Any
    places: Any
    keys: Any
    values: Any
    counters: Any


class Looked(NamedTuple):
    """What the parts of the slots leave, and what is put together of them.

    Attributes:
      parts: `Parts`; anything, where a part is the whole and `y` is asked for.
      y: [B, T', H, D], zeros from T on; None if another launch puts it together.
      keys: [B, G, S, D], in their own memory, NaN where values were not finite.
      counters: u32[B * G], how many parts have been left; zeros where nobody waits for the last.
    """

    parts: Parts
    y: Any
    keys: Any
    counters: Any


class Rule(Protocol):
    """How the slots are weighed."""

    @property
    def scale(self) -> float:
        """Multiplies the scores."""

    @property
    def window(self) -> int | None:
        """How many tokens back a token sees, itself included; None is all."""

    @property
    def softcap(self) -> float | None:
        """The c of scores s that become c tanh(s / c), or None."""

    @property
    def size(self) -> int:
        """E, of the rows that were squared."""

    @property
    def eps(self) -> float:
        """Added to their mean square."""


def see(
    heads: Heads,
    out: Unfinished,
    *,
    rule: Rule,
    turn: Callable[..., Any],
    entries: Callable[..., Any],
) -> None:
    """One part of the slots of one request and key-value head, or the tokens that are fed."""
    groups, slots, head_dim = heads.keys.shape[1:]
    tokens, parts = heads.positions.shape[1], out.parts.peak.shape[1] - 1
    shared = heads.parts.shape[3] // groups - 2
    pair, part = divide(pl.program_id(0), parts + 1)
    b, g = divide(pair, groups)
    dim = jax.lax.iota(jnp.int32, at_least_dot(head_dim))
    share = _Share(heads.keys, heads.values, (b, g), part, parts)

    # Asked for before anything is known of the tokens: it is the longest to come.
    chunk = share.load(jnp.int32(0))
    row = jax.lax.iota(jnp.int32, out.parts.peak.shape[2])
    token, head = divide(row, shared)
    inside = token < tokens
    places = [heads.positions[b, t] for t in range(tokens)]
    projected = Projected(heads, b, late_scales(heads.squares, b, tokens, rule), turn)
    rows = projected.rotated(token, g * shared + head, tile_mask(inside, dim, head_dim))
    queries = Queries(rows, of_token(token, places, jnp.int32(-1)))
    begin = nothing(row.shape[0], dim.shape[0], MIN_DOT)

    @pl.when(part == parts)
    def _() -> None:
        fed = jax.lax.iota(jnp.int32, MIN_DOT)
        place, mask = of_token(fed, places, jnp.int32(-1)), tile_mask(fed < tokens, dim, head_dim)
        key_head = shared * groups + g
        keys = projected.rotated(fed, key_head, mask)
        values = projected.tile(fed, key_head + groups, dim, mask).astype(heads.keys.dtype)
        stored = entries(keys, values)
        if tokens > 1:
            # One token sees itself: nothing has to be kept from it, and keys need not wait.
            keys, values = stored
        done = summed(add(begin, queries, keys, values, place, rule))
        leave(out.parts, pair, part, done, inside)
        # Past the end, whatever does not belong into the cache.
        slot = jnp.where((place >= 0) & (place < slots), place, jnp.int32(slots))
        mask = tile_mask(slot < slots, dim, head_dim)
        for cache, new in zip((out.keys, out.values), stored, strict=True):
            plgpu.store(cache.at[b, g, slot[:, None], dim[None]], new, mask=mask)

    @pl.when(part < parts)
    def _() -> None:
        # The tokens that are fed stand for their slots, which are being written.
        done = share.weigh(chunk, queries, places, places, rule)
        leave(out.parts, pair, part, done, inside)


def look(placed: Seen, out: Looked, *, rule: Rule, interpret: bool) -> None:
    """One part of the slots of one request and key-value head: the tokens fed have theirs.

    The last to arrive puts the parts together, if it is to be done here.
    """
    groups, _, head_dim = placed.keys.shape[1:]
    tokens, parts = placed.places.shape[2], out.parts.peak.shape[1]
    shared = placed.queries.shape[2] // groups
    pair, part = divide(pl.program_id(0), parts)
    b, g = divide(pair, groups)
    dim = jax.lax.iota(jnp.int32, at_least_dot(head_dim))
    share = _Share(placed.keys, placed.values, (b, g), part, parts)
    row = jax.lax.iota(jnp.int32, out.parts.peak.shape[2])
    token, head = divide(row, shared)
    inside = token < tokens
    marks = [placed.places[b, g, t] for t in range(tokens)]
    places = [jnp.maximum(mark, -2 - mark) for mark in marks]
    mask = tile_mask(inside, dim, head_dim)
    rows = load_tile(placed.queries, (b, token, g * shared + head), dim, mask)
    queries = Queries(rows, of_token(token, places, jnp.int32(-1)))
    done = share.weigh(None, queries, places, [], rule)
    done = done._replace(total=done.total + _spoil(marks, queries, out.keys, (b, g), rule))
    if out.y is None:
        leave(out.parts, pair, part, done, inside)
    elif parts == 1:
        write(out.y, b, g, groups, done)
    else:
        leave(out.parts, pair, part, done, inside)

        @pl.when(arrive(out.counters, (pair,), parts, interpret))
        def _() -> None:
            write(out.y, b, g, groups, together(out.parts, pair, inside))


def _spoil(marks: list[jax.Array], queries: Queries, keys: Any, pair: Any, rule: Rule) -> jax.Array:
    """Of each row f32[M], NaN if it sees a token whose values are not finite, and 0 elsewhere.

    Makes the keys of such tokens NaN, for steps to come. Other programs may be reading them: to a
    row that sees them it is all one what they find, and no other row depends on them.

    Args:
      marks: `places` of `Placed`, of one request and head.
      queries: the rows.
      keys: [B, G, S, D], of the cache.
      pair: the request and the head.
      rule: what the rows see.
    """
    slots, head_dim = keys.shape[2:]

    def spoil() -> jax.Array:
        # -1 where there is nothing to do, or no slot.
        spoilt = [jnp.where(mark >= -1 - slots, -2 - mark, jnp.int32(-1)) for mark in marks]
        token = jax.lax.iota(jnp.int32, power_of_two(len(marks)))
        dim = jax.lax.iota(jnp.int32, power_of_two(head_dim))
        slot = of_token(token, spoilt, jnp.int32(-1))
        mask = tile_mask(slot >= 0, dim, head_dim)
        nan = jnp.full(mask.shape, jnp.nan, keys.dtype)
        plgpu.store(keys.at[(*pair, slot[:, None], dim[None])], nan, mask=mask)
        seen = [is_seen(queries.position, slot, rule) for slot in spoilt]
        return jnp.where(functools.reduce(jnp.logical_or, seen), jnp.float32(jnp.nan), 0.0)

    is_any = functools.reduce(jnp.minimum, marks) < -1
    return value_when(is_any, spoil, jnp.zeros(queries.position.shape, jnp.float32))


class _Chunk(NamedTuple):
    """Slots i32[N] of a cache, which of them exist, their keys [N, D] and values [N, D]."""

    slot: jax.Array
    inside: jax.Array
    keys: jax.Array
    values: jax.Array


class _Share(NamedTuple):
    """Every `parts`-th chunk of the cache at `pair`, a request and a head, from `part` on."""

    keys: Any
    values: Any
    pair: tuple[jax.Array, jax.Array]
    part: jax.Array
    parts: int

    def load(self, i: jax.Array) -> _Chunk:
        """Its i-th chunk."""
        slots, head_dim = self.keys.shape[2:]
        slot = (self.part + i * self.parts) * ATTENTION_SLOTS
        slot += jax.lax.iota(jnp.int32, ATTENTION_SLOTS)
        dim = jax.lax.iota(jnp.int32, at_least_dot(head_dim))
        inside = (slot < slots) & (self.part < self.parts)
        mask, at = tile_mask(inside, dim, head_dim), (*self.pair, slot)
        return _Chunk(
            slot, inside, *(load_tile(x, at, dim, mask) for x in (self.keys, self.values))
        )

    def weigh(
        self,
        first: _Chunk | None,
        queries: Queries,
        places: list[jax.Array],
        hidden: list[jax.Array],
        rule: Rule,
    ) -> Softmax:
        """What queries of tokens at some places see of it, but for the slots that are hidden.

        The first chunk may have been loaded before.
        """

        def weighed(chunk: _Chunk, state: Softmax) -> Softmax:
            inside = chunk.inside
            for place in hidden:
                inside &= chunk.slot != place
            slot = jnp.where(inside, chunk.slot, jnp.int32(-1))
            return add(state, queries, chunk.keys, chunk.values, slot, rule)

        slots = self.keys.shape[2]
        start, end = _chunks_of(places, self.part, self.parts, slots, rule.window)
        state = nothing(*queries.rows.shape, ATTENTION_SLOTS)
        if first is not None:
            start, state = jnp.maximum(start, 1), weighed(first, state)

        def weigh_next(i: jax.Array, state: Softmax) -> Softmax:
            return weighed(self.load(i), state)

        return summed(jax.lax.fori_loop(start, end, weigh_next, state))


def _chunks_of(
    places: list[jax.Array], part: jax.Array, parts: int, slots: int, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Which of its chunks a part has to look at: those of slots that any token may see."""
    last, lowest = jnp.int32(-1), jnp.int32(slots)
    for place in places:
        last = jnp.maximum(last, place)
        lowest = jnp.minimum(lowest, jnp.where(place < 0, jnp.int32(slots), place))
    chunks, _ = divide(jnp.minimum(last, slots - 1) + ATTENTION_SLOTS, ATTENTION_SLOTS)
    end, _ = divide(jnp.maximum(chunks - part + (parts - 1), 0), parts)
    if window is None:
        return jnp.int32(0), end
    skipped, _ = divide(jnp.maximum(lowest - (window - 1), 0), ATTENTION_SLOTS)
    start, _ = divide(jnp.maximum(skipped - part + (parts - 1), 0), parts)
    return start, end
