"""Attention of few tokens to a cache: a program to a part of its slots, and parts put together.

Axes as in `specjax.pallas.few`; `M` rows of a tile, the query heads of one key-value head, token
behind token; `N` keys of a tile; `P` parts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.pallas.gate import late_scale
from specjax.pallas.launch import divide
from specjax.pallas.softmax import Queries, Softmax, add, nothing
from specjax.pallas.tiles import ATTENTION_SLOTS, MIN_DOT, at_least_dot, power_of_two

__all__ = ["Heads", "Parts", "Rule", "Unfinished", "finish", "see"]


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


class Unfinished(NamedTuple):
    """What each part of the slots leaves, and the cache, in its own memory.

    Attributes:
      mixed: f32[B * G, P, M, D], values weighted by `exp(score - peak)`.
      peak: f32[B * G, P, M], at least the largest score.
      total: f32[B * G, P, M], the weights' sum.
      keys: [B, G, S, D].
      values: [B, G, S, D].
    """

    mixed: Any
    peak: Any
    total: Any
    keys: Any
    values: Any


class Parts(NamedTuple):
    """What is put together: `mixed`, `peak` and `total` as in `Unfinished`."""

    mixed: Any
    peak: Any
    total: Any


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


def see(heads: Heads, out: Unfinished, *, rule: Rule, turn: Callable[..., Any]) -> None:
    """One part of the slots of one request and key-value head, or the tokens that are fed."""
    groups, slots, head_dim = heads.keys.shape[1:]
    tokens, parts = heads.positions.shape[1], out.peak.shape[1] - 1
    shared = heads.parts.shape[3] // groups - 2
    pair, part = divide(pl.program_id(0), parts + 1)
    b, g = divide(pair, groups)
    dim = jax.lax.iota(jnp.int32, at_least_dot(head_dim))

    def load(i: jax.Array) -> _Chunk:
        slot = (part + i * parts) * ATTENTION_SLOTS + jax.lax.iota(jnp.int32, ATTENTION_SLOTS)
        inside = (slot < slots) & (part < parts)
        mask = _mask(inside, dim, head_dim)
        keys, values = (_tile(x, (b, g, slot), dim, mask) for x in (heads.keys, heads.values))
        return _Chunk(slot, inside, keys, values)

    # Asked for before anything is known of the tokens: it is the longest to come.
    chunk = load(jnp.int32(0))
    row = jax.lax.iota(jnp.int32, out.peak.shape[2])
    token, head = divide(row, shared)
    inside = token < tokens
    places = [heads.positions[b, t] for t in range(tokens)]
    scales = None
    if heads.squares is not None:
        scales = [late_scale(heads.squares, (b, t), rule) for t in range(tokens)]
    projected = _Projected(heads, b, scales)
    rows = projected.rotated(token, g * shared + head, _mask(inside, dim, head_dim), turn)
    queries = Queries(rows, _of_token(token, places, jnp.int32(-1)))
    begin = nothing(row.shape[0], dim.shape[0])

    def leave(state: Softmax) -> None:
        plgpu.store(out.peak.at[pair, part, row], state.peak)
        plgpu.store(out.total.at[pair, part, row], state.total)
        at = (pair, part, row[:, None], dim[None])
        plgpu.store(out.mixed.at[at], state.mixed, mask=_mask(inside, dim, head_dim))

    @pl.when(part == parts)
    def _() -> None:
        fed = jax.lax.iota(jnp.int32, MIN_DOT)
        place, mask = _of_token(fed, places, jnp.int32(-1)), _mask(fed < tokens, dim, head_dim)
        key_head = jnp.full_like(fed, shared * groups) + g
        keys = projected.rotated(fed, key_head, mask, turn)
        values = projected.tile(fed, key_head + groups, dim, mask).astype(heads.keys.dtype)
        leave(add(begin, queries, keys, values, place, rule))
        # Past the end, whatever does not belong into the cache.
        slot = jnp.where((place >= 0) & (place < slots), place, jnp.int32(slots))
        mask = _mask(slot < slots, dim, head_dim)
        for cache, new in ((out.keys, keys), (out.values, values)):
            plgpu.store(cache.at[b, g, slot[:, None], dim[None]], new, mask=mask)

    @pl.when(part < parts)
    def _() -> None:
        def weigh(chunk: _Chunk, state: Softmax) -> Softmax:
            # The tokens that are fed stand for their slots, which are being written.
            inside = chunk.inside
            for place in places:
                inside &= chunk.slot != place
            slot = jnp.where(inside, chunk.slot, jnp.int32(-1))
            return add(state, queries, chunk.keys, chunk.values, slot, rule)

        start, end = _chunks_of(places, part, parts, slots, rule.window)
        rest = jax.lax.fori_loop(
            jnp.maximum(start, 1), end, lambda i, state: weigh(load(i), state), weigh(chunk, begin)
        )
        leave(rest)


class _Chunk(NamedTuple):
    """Slots i32[N] of a cache, which of them exist, their keys [N, D] and values [N, D]."""

    slot: jax.Array
    inside: jax.Array
    keys: jax.Array
    values: jax.Array


class _Projected(NamedTuple):
    """The tokens of request `b`, and what each of them has to be multiplied by, or None."""

    heads: Heads
    b: jax.Array
    scales: list[jax.Array] | None

    def tile(self, token: jax.Array, head: jax.Array, dim: jax.Array, mask: jax.Array) -> jax.Array:
        """Heads f32[N, dims] of tokens, rounded as the cache holds them."""
        parts = self.heads.parts
        total = jnp.zeros(mask.shape, jnp.float32)
        for q in range(parts.shape[0]):
            total += _tile(parts, (q, self.b, token, head), dim, mask).astype(jnp.float32)
        if self.scales is not None:
            total *= _of_token(token, self.scales, jnp.float32(0))[:, None]
        return total.astype(self.heads.keys.dtype).astype(jnp.float32)

    def rotated(
        self, token: jax.Array, head: jax.Array, mask: jax.Array, turn: Callable[..., Any]
    ) -> jax.Array:
        """Rotated heads [N, D] of tokens."""
        size = self.heads.keys.shape[3]
        dim, half = jax.lax.iota(jnp.int32, mask.shape[1]), jnp.int32(size // 2)
        angle, other = jax.lax.rem(dim, half), jax.lax.rem(dim + half, jnp.int32(size))
        x, y = (self.tile(token, head, index, mask) for index in (dim, other))
        at = (self.b, token)
        cos, sin = (_tile(z, at, angle, mask) for z in (self.heads.cos, self.heads.sin))
        # The second of a pair is the first of the pair turned the other way.
        turned, _ = turn(x, y, cos, jnp.where(dim < half, sin, -sin))
        return turned.astype(self.heads.keys.dtype)


def _of_token(token: jax.Array, values: list[jax.Array], other: jax.Array) -> jax.Array:
    """For each of [N] tokens its own of a few values."""
    found = jnp.full(token.shape, other)
    for t, value in enumerate(values):
        found = jnp.where(token == t, value, found)
    return found


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


def _mask(inside: jax.Array, dim: jax.Array, size: int) -> jax.Array:
    """Which of [N, dims] there are, of heads of `size` dimensions."""
    mask = jnp.broadcast_to(inside[:, None], (inside.shape[0], dim.shape[0]))
    return mask if dim.shape[0] == size else mask & (dim < size)[None]


def _load(reference: Any, at: Any, mask: jax.Array, other: Any) -> jax.Array:
    return plgpu.load(reference.at[at], mask=mask, other=jnp.asarray(other, reference.dtype))


def _tile(reference: Any, at: Any, dim: jax.Array, mask: jax.Array) -> jax.Array:
    """Rows [N, dims] of a reference [..., D], at places that are scalars or i32[N]."""
    at = [x[:, None] if jnp.ndim(x) else x for x in at]
    return _load(reference, (*at, dim[None]), mask, 0)


def finish(parts: Parts, out: Any, *, tokens: int) -> None:
    """One query head of one token of `out.y` [B, T', H, D]: the parts' softmaxes together."""
    batch, padded, num_heads, head_dim = out.y.shape
    groups = parts.peak.shape[0] // batch
    row, head = divide(pl.program_id(0), num_heads)
    b, t = divide(row, padded)
    g, r = divide(head, num_heads // groups)
    pair, row = b * groups + g, t * (num_heads // groups) + r
    part = jax.lax.iota(jnp.int32, power_of_two(parts.peak.shape[1]))
    inside = (part < parts.peak.shape[1]) & (t < tokens)
    dim = jax.lax.iota(jnp.int32, at_least_dot(head_dim))
    peak = _load(parts.peak, (pair, part, row), inside, -jnp.inf)
    total = _load(parts.total, (pair, part, row), inside, 0)
    mixed = _tile(parts.mixed, (pair, part, row), dim, _mask(inside, dim, head_dim))
    # Padding has no part at all.
    weight = jnp.exp(peak - jnp.maximum(jnp.max(peak), -3e38))
    whole = jnp.sum(weight * total)
    y = jnp.sum(weight[:, None] * mixed, axis=0) / jnp.where(whole > 0, whole, 1.0)
    plgpu.store(out.y.at[b, t, head, dim], y.astype(out.y.dtype), mask=dim < head_dim)
