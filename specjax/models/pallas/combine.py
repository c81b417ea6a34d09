"""Softmaxes of parts of a cache, left by as many programs, and put together.

Axes as in `specjax.models.pallas.attention_kernels`.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.pallas.online_softmax import Softmax, nothing
from specjax.models.pallas.qkv import load_tile, tile_mask
from specjax.models.pallas.tiles import at_least_dot, num_parts_at_once
from specjax.pallas.launch import divide
from specjax.pallas.tiles import power_of_two

__all__ = ["Parts", "finish", "leave", "together", "write"]


class Parts(NamedTuple):
    """What each part of the slots leaves.

    Attributes:
      mixed: f32[B * G, P, M, D], values weighted by `exp(score - peak)`; of padding, anything.
      peak: f32[B * G, P, M], at least the largest score.
      total: f32[B * G, P, M], the weights' sum.
    """

    mixed: Any
    peak: Any
    total: Any


def leave(
    parts: Parts, pair: jax.Array, part: jax.Array, state: Softmax, inside: jax.Array
) -> None:
    """Stores what one part holds of rows, of which there are those inside, bool[M]."""
    rows, dims = state.mixed.shape
    row, dim = jax.lax.iota(jnp.int32, rows), jax.lax.iota(jnp.int32, dims)
    plgpu.store(parts.peak.at[pair, part, row], state.peak)
    plgpu.store(parts.total.at[pair, part, row], state.total)
    at, mask = (pair, part, row[:, None], dim[None]), tile_mask(inside, dim, parts.mixed.shape[3])
    plgpu.store(parts.mixed.at[at], state.mixed, mask=mask)


def together(parts: Parts, pair: jax.Array, inside: jax.Array) -> Softmax:
    """The rows of a request and key-value head over all parts; those not inside see nothing."""
    (count, rows, head_dim), dims = parts.mixed.shape[1:], at_least_dot(parts.mixed.shape[3])
    row, dim = jax.lax.iota(jnp.int32, rows), jax.lax.iota(jnp.int32, dims)
    mask = tile_mask(inside, dim, head_dim)
    # Of those that are loaded together none waits for another.
    width = math.gcd(count, num_parts_at_once(rows, head_dim))

    def load(part: jax.Array) -> Softmax:
        at = (pair, part, row)
        peak, total = _load(parts.peak, at, inside, -jnp.inf), _load(parts.total, at, inside, 0)
        return Softmax(peak, total, load_tile(parts.mixed, at, dim, mask))

    def add(i: jax.Array, state: Softmax) -> Softmax:
        several = [state, *(load(i * width + k) for k in range(width))]
        peak = functools.reduce(jnp.maximum, [each.peak for each in several])
        weights = [jnp.exp(each.peak - peak) for each in several]
        pairs = list(zip(several, weights, strict=True))
        totals = [each.total * weight for each, weight in pairs]
        mixed = [each.mixed * weight[:, None] for each, weight in pairs]
        return Softmax(peak, functools.reduce(jnp.add, totals), functools.reduce(jnp.add, mixed))

    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(count // width), add, nothing(rows, dims))


def write(y: Any, b: jax.Array, g: jax.Array, groups: int, state: Softmax) -> None:
    """Stores the rows of a request and key-value head: zeros where they saw nothing, NaN of NaN."""
    padded, num_heads, head_dim = y.shape[1:]
    rows, dims = state.mixed.shape
    dim = jax.lax.iota(jnp.int32, dims)
    token, head = divide(jax.lax.iota(jnp.int32, rows), num_heads // groups)
    values = state.mixed / jnp.where(state.total == 0, 1.0, state.total)[:, None]
    at = (b, token[:, None], (g * (num_heads // groups) + head)[:, None], dim[None])
    plgpu.store(y.at[at], values.astype(y.dtype), mask=tile_mask(token < padded, dim, head_dim))


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
    mixed = load_tile(parts.mixed, (pair, part, row), dim, tile_mask(inside, dim, head_dim))
    # Padding has no part at all.
    weight = jnp.exp(peak - jnp.maximum(jnp.max(peak), -3e38))
    whole = jnp.sum(weight * total)
    y = jnp.sum(weight[:, None] * mixed, axis=0) / jnp.where(whole == 0, 1.0, whole)
    plgpu.store(out.y.at[b, t, head, dim], y.astype(out.y.dtype), mask=dim < head_dim)


def _load(reference: Any, at: Any, mask: jax.Array, other: Any) -> jax.Array:
    return plgpu.load(reference.at[at], mask=mask, other=jnp.asarray(other, reference.dtype))
