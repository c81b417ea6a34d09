"""Attention of a few tokens to a cache: which kernels are launched, and how many programs.

Axes: `B` requests, `T` tokens fed, `T'` these and padding, `H` query heads, `G` key-value heads,
`S` cache slots, `D` head dimension, `E` hidden.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.pallas.attention_kernels import Looked, Rule, Seen, Unfinished, look, see
from specjax.models.pallas.combine import Parts, finish
from specjax.models.pallas.qkv import Heads, Placed, place
from specjax.models.pallas.tiles import (
    ATTENTION_SLOTS,
    attention_stages,
    is_alone,
    is_light,
    is_quickly_joined,
    num_attention_warps,
    num_parts_of_cache,
    query_rows,
)
from specjax.pallas.launch import launch, like

__all__ = ["attend"]


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
            Placed(
                queries,
                **cache_like,
                places=like((batch, groups, tokens), jnp.int32),
                counters=like((pairs,), jnp.uint32),
            ),
            num_programs=batch * (num_heads + 2 * groups),
            num_warps=4,
            interpret=interpret,
            in_place=in_place,
        )
        quick = is_quickly_joined(parts, rows, head_dim)
        looked = launch(
            functools.partial(look, rule=rule, interpret=interpret),
            Seen(placed.queries, placed.places, placed.keys, placed.values, placed.counters),
            Looked(
                unfinished,
                out if quick else None,
                cache_like["keys"],
                like((pairs,), jnp.uint32),
            ),
            num_programs=pairs * parts,
            num_warps=num_attention_warps(light),
            num_stages=stages,
            interpret=interpret,
            in_place={"keys": placed.keys, "counters": placed.counters},
        )
        cache, left, y = (looked.keys, placed.values), looked.parts, looked.y
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
