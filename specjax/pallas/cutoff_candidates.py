"""The logits of a row that can be its cutoff, gathered by the program that searches them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.truncation import mass_weights
from specjax.pallas.cutoff_bound import QUARTER, Row, Rows
from specjax.pallas.launch import divide, fast_exp2
from specjax.pallas.tiles import KernelConfig

__all__ = ["Found", "gather"]

# What is counted by ones and what by these share an i32.
_SEVERAL = 1 << 15

# Far above what a sum of 32 rounds.
_ROUNDING = 1e-5


class Found(NamedTuple):
    """Room in which the program of each row notes what it gathers.

    Attributes:
      quarters: i32[R, M], of blocks.
      values: f32[R, N], logits.
    """

    quarters: Any
    values: Any


def gather(
    rows: Rows,
    row: Row,
    b: jax.Array,
    low: jax.Array,
    found: Found,
    config: KernelConfig,
    interpret: bool,
) -> jax.Array:
    """Notes the logits of a row that reach `low`, and how many they are, i32.

    Where few reach it most quarters do so by their largest logit alone, as their sums tell. The
    others are read, unless they are too many.

    Args:
      rows: all rows.
      row: what is known of this one.
      b: its place.
      low: f32.
      found: where they are noted, behind one another and in any order; only as many as fit.
      config: how many sub-blocks are read at once.
      interpret: run in Pallas' interpreter.
    """
    largest, most = row.quarters.max, found.values.shape[1]
    # Of a row without a bound nothing is noted: it is searched itself.
    reaches = (largest >= low) & (low > -jnp.inf)
    # What the others weigh is known but for the sum's rounding.
    others = row.quarters.sum * jnp.float32(1 + _ROUNDING) - 1
    several = reaches & (others >= mass_weights(low, largest, row.scale, fast_exp2(interpret)))
    single = reaches & ~several
    (place, known), (which, count) = _counted(single, several)
    fits = single & (place < most)
    # Beyond the end the interpreter drops what the mask leaves out.
    plgpu.store(found.values.at[b, jnp.where(fits, place, most)], largest, mask=fits)
    quarter = jax.lax.iota(jnp.int32, largest.shape[0])
    which = jnp.where(several, which, largest.shape[0])
    plgpu.store(found.quarters.at[b, which], quarter, mask=several)
    _settle(interpret)
    total = known
    few, scanned = count <= config.small_scan, count <= config.max_scanned
    many = (count > config.small_scan) & scanned
    for size, wanted in ((config.small_scan, few), (config.large_scan, many)):
        turns, _ = divide(jnp.where(wanted, count, 0) + (size - 1), size)
        note = functools.partial(_note, rows, b, low, found, count, size)
        total = jax.lax.fori_loop(jnp.int32(0), turns, note, total)
    _settle(interpret)
    return jnp.where(scanned, total, jnp.int32(most + 1))


def _note(
    rows: Rows,
    b: jax.Array,
    low: jax.Array,
    found: Found,
    count: jax.Array,
    size: int,
    turn: jax.Array,
    known: jax.Array,
) -> jax.Array:
    """Reads the next `size` of `count` quarters, notes what reaches `low`, and counts it."""
    vocab_size, most = rows.logits.shape[1], found.values.shape[1]
    slot = turn * size + jax.lax.iota(jnp.int32, size)
    quarter = plgpu.load(found.quarters.at[b, slot], mask=slot < count, other=jnp.int32(0))
    # Masked where there is none: a `where` would hide that tokens are in order.
    token = quarter[:, None] * QUARTER + jax.lax.iota(jnp.int32, QUARTER)[None]
    there = (slot < count)[:, None] & (token < vocab_size)
    other = jnp.asarray(-jnp.inf, rows.logits.dtype)
    x = plgpu.load(rows.logits.at[b, token], mask=there, other=other).astype(jnp.float32)
    reaches = (x >= low) & (x > -jnp.inf)
    ones = reaches.astype(jnp.int32)
    before, number = _places(jnp.sum(ones, axis=1, dtype=jnp.int32))
    place = known + before[:, None] + jnp.cumsum(ones, axis=1, dtype=jnp.int32) - 1
    fits = reaches & (place < most)
    plgpu.store(found.values.at[b, jnp.where(fits, place, most)], x, mask=fits)
    return known + number


def _places(counts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where each of i32[N] begins when they stand behind one another, and the sum of all."""
    return jnp.cumsum(counts, dtype=jnp.int32) - counts, jnp.sum(counts, dtype=jnp.int32)


def _counted(
    single: jax.Array, several: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The `_places` of both bool[N]; at once where one sum holds both."""
    ones, others = single.astype(jnp.int32), several.astype(jnp.int32)
    if single.shape[0] >= _SEVERAL:
        return _places(ones), _places(others)
    both = _places(ones + others * _SEVERAL)
    low, high = zip(*(divide(counts, _SEVERAL)[::-1] for counts in both), strict=True)
    return low, high


def _settle(interpret: bool) -> None:
    """What a thread has stored is there for the others of its program."""
    if not interpret:
        plgpu.debug_barrier()
