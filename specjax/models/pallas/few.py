"""What a layer does for few tokens: products, attention to a cache in two launches, sums.

Axes: `B` requests, `T` tokens fed, `T'` these and padding, `H` query heads, `G` key-value heads,
`S` cache slots, `D` head dimension, `E` hidden.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.pallas.add_rms_norm import Joined, Sum, join
from specjax.models.pallas.attention_kernels import Looked, Rule, Seen, Unfinished, look, see
from specjax.models.pallas.combine import Parts, finish
from specjax.models.pallas.matmul import Block, Factors, Gated, Multiplied, gate, multiply
from specjax.models.pallas.qkv import Heads, Placed, place
from specjax.pallas.launch import launch, like
from specjax.pallas.tiles import (
    ATTENTION_SLOTS,
    JOIN_TILE,
    Cut,
    attention_stages,
    is_alone,
    is_light,
    is_quickly_joined,
    num_attention_warps,
    num_parts_of_cache,
    query_rows,
)

__all__ = ["attend", "gated", "joined", "multiplied", "waited"]


class _Attended(NamedTuple):
    """[B, T', H, D]."""

    y: Any


def attend(
    heads: Heads,
    *,
    rule: Rule,
    turn: Callable[..., Any],
    entries: Callable[..., Any],
    room: int,
    interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """What few tokens see of the cache and of one another.

    The slots of a request and key-value head are shared out among programs, each of which leaves
    an unfinished softmax. Of few requests, whoever needs queries, keys and values sums, scales and
    turns them, and a launch behind puts the softmaxes together, a program to a query head. Of more,
    a launch before does the one; the last program to leave a softmax does the other, unless that
    would take longer than a launch. No position may be there twice in a request, but for -1.

    Args:
      heads: arrays.
      rule: how the slots are weighed.
      turn: of both halves of heads, cosines and sines: both halves of turned heads.
      entries: of rotated keys and of values: both as the cache holds them.
      room: bytes of shared memory that a program may have.
      interpret: run in Pallas' interpreter.

    Returns:
      [B, T', H * D], zeros from T on, and the cache with the tokens in it.
    """
    (batch, groups, slots, head_dim), tokens = heads.keys.shape, heads.positions.shape[1]
    padded, num_heads = heads.parts.shape[2], heads.parts.shape[3] - 2 * groups
    alone, pairs, dtype = is_alone(batch), batch * groups, heads.keys.dtype
    rows = query_rows(tokens, padded, num_heads // groups, alone)
    light, stages = is_light(rows, head_dim), attention_stages(rows, head_dim, dtype.itemsize, room)
    parts = num_parts_of_cache(pairs, slots)
    lead = (pairs, parts + alone, rows)
    unfinished = Parts(like((*lead, head_dim)), like(lead), like(lead))
    out = like((batch, padded, num_heads, head_dim), dtype)
    cache_like = {"keys": like(heads.keys.shape, dtype), "values": like(heads.values.shape, dtype)}
    in_place = {"keys": heads.keys, "values": heads.values}
    if alone:
        seen = launch(
            functools.partial(see, rule=rule, turn=turn, entries=entries),
            heads,
            Unfinished(unfinished, **cache_like),
            num_programs=pairs * (parts + 1),
            num_warps=num_attention_warps(light),
            # A part of one chunk has no loop to load ahead for, only less room beside others.
            num_stages=1 if parts * ATTENTION_SLOTS >= slots else stages,
            interpret=interpret,
            in_place=in_place,
        )
        cache, left, y = (seen.keys, seen.values), seen.parts, None
    else:
        queries = like((batch, tokens, num_heads, head_dim), dtype)
        placed = launch(
            functools.partial(place, rule=rule, turn=turn, entries=entries),
            heads,
            Placed(queries, **cache_like, counters=like((pairs,), jnp.uint32)),
            num_programs=batch * (num_heads + 2 * groups),
            num_warps=4,
            interpret=interpret,
            in_place=in_place,
        )
        cache, quick = (placed.keys, placed.values), is_quickly_joined(parts, rows, head_dim)
        looked = launch(
            functools.partial(look, rule=rule, interpret=interpret),
            Seen(placed.queries, heads.positions, *cache, placed.counters),
            Looked(unfinished, out if quick else None, like((pairs,), jnp.uint32)),
            num_programs=pairs * parts,
            num_warps=num_attention_warps(light),
            num_stages=stages,
            interpret=interpret,
            in_place={"counters": placed.counters},
        )
        left, y = looked.parts, looked.y
    if y is None:
        y = launch(
            functools.partial(finish, tokens=tokens),
            left,
            _Attended(out),
            num_programs=batch * padded * num_heads,
            num_warps=1,
            interpret=interpret,
        ).y
    return y.reshape(batch, padded, -1), cache


def multiplied(
    x: jax.Array, matrix: jax.Array, *, cut: Cut, early: bool, interpret: bool
) -> jax.Array:
    """A product, as parts of a sum.

    Args:
      x: [B, T, E].
      matrix: [E, N].
      cut: how it is shared out.
      early: whether the kernel behind may start before the end, as `start_next` says.
      interpret: run in Pallas' interpreter.

    Returns:
      f32[Q, B, T, N].
    """
    *lead, size = x.shape
    rows, width = math.prod(lead), matrix.shape[1]
    parts = launch(
        functools.partial(multiply, cut=cut, early=early and not interpret),
        Factors(x.reshape(rows, size), matrix),
        Multiplied(like((cut.parts, rows, width))),
        num_programs=width // cut.columns * cut.parts,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        interpret=interpret,
    ).parts
    return parts.reshape(cut.parts, *lead, width)


def gated(
    x: jax.Array,
    squares: jax.Array | None,
    matrix: jax.Array,
    *,
    mlp: Block,
    cut: Cut,
    early: bool,
    interpret: bool,
) -> jax.Array:
    """`activation(gate) * up` of products with a matrix that is both.

    Args:
      x: [B, T, E].
      squares: f32[B, T, n], sums of squares of the rows by whose root mean they are to be divided;
        None where they are.
      matrix: [E, 2 * I], the gate beside what it gates.
      mlp: whose gate it is.
      cut: how it is shared out.
      early: as of `multiplied`.
      interpret: run in Pallas' interpreter.

    Returns:
      [B, T, I].
    """
    *lead, size = x.shape
    inner, rows = matrix.shape[1] // 2, math.prod(lead)
    squares = None if squares is None else squares.reshape(rows, -1)
    y = launch(
        functools.partial(gate, cut=cut, block=mlp, early=early and not interpret),
        Factors(x.reshape(rows, size), matrix, squares),
        Gated(like((rows, inner), x.dtype)),
        num_programs=inner // cut.columns,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        interpret=interpret,
    ).y
    return y.reshape(*lead, inner)


def joined(
    x: jax.Array, parts: jax.Array | None, weight: jax.Array, *, offset: float, interpret: bool
) -> Joined:
    """A product added to the residual stream, and the beginning of the norm behind it.

    Args:
      x: [B, T, E].
      parts: [Q, B, T, E], of the product; None adds nothing.
      weight: [E], of the norm, but for its offset.
      offset: added to the weight.
      interpret: run in Pallas' interpreter.

    Returns:
      The stream [B, T, E], the same with the weight, and sums of its squares f32[B, T, n].
    """
    *lead, size = x.shape
    rows, tiles = math.prod(lead), JOIN_TILE.count(size)
    parts = None if parts is None else parts.reshape(-1, rows, size)
    done = launch(
        functools.partial(join, offset=offset),
        Sum(x.reshape(rows, size), parts, weight),
        Joined(like((rows, size), x.dtype), like((rows, size), x.dtype), like((rows, tiles))),
        num_programs=rows * tiles,
        num_warps=JOIN_TILE.num_warps,
        interpret=interpret,
    )
    return Joined(*(y.reshape(*lead, -1) for y in done))


def waited(x: jax.Array, *, interpret: bool) -> jax.Array:
    """The same array, read by a kernel of ours: whoever reads it then need not wait as ours do."""
    rows = x.reshape(1, -1, x.shape[-1])
    nothing = jnp.zeros(x.shape[-1:], x.dtype)
    return joined(rows, None, nothing, offset=0.0, interpret=interpret)[0].reshape(x.shape)
