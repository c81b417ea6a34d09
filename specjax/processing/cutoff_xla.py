"""The cutoff of rows of logits in plain JAX: the reference that the kernels are judged by.

The threshold of each filter is found by bisection. A step of a bisection over the rows costs a pass
over them, so two things shorten it. Bounds come from the blocks' partials, by a bisection of
an array a hundred times smaller. If few blocks of each row can hold the threshold, only these
blocks are gathered and searched.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.bisection import Bracket, Extremes, initial_bracket, key_value, search
from specjax.core.logsumexp import MaxSum, merge_partials, split_blocks
from specjax.core.subnormal import smallest_equal
from specjax.core.temperature import Temperature, parse_temperature
from specjax.core.truncation import (
    BOUND_SLACK,
    Filters,
    RowBounds,
    RowQueries,
    extremes_blocks,
    mass_above,
    mass_bound,
    mass_weights,
    min_kept,
    min_p_threshold,
    refuse_nan,
    required_mass,
    search_cutoff,
    top_k_active,
    top_p_active,
)
from specjax.devices.placement import pvary_like
from specjax.devices.rows import LogitRows, logit_rows
from specjax.devices.vocabulary_split import VocabularySplit

# Blocks to which rows are gathered: an eighth of today's vocabularies, at the cost of half a pass
# over them. The top 128 tokens fit wherever they lie.
_NUM_GATHERED = 128

_MassAbove = Callable[[jax.Array], jax.Array]
_ExtremesInside = Callable[[Bracket], Extremes]


class _Row(NamedTuple):
    """Facts about each row that the searches share, f32[R] or bool[R].

    Attributes:
      anchor: the largest logit.
      scale: one over the temperature.
      mass: the mass of all tokens, in the scale of `mass_weights`.
      cuts_k: whether top-k is active.
      cuts_p: whether top-p is active.
      cuts: whether any filter is active.
      low: a bound: no logit below it is kept or decides what is kept; -inf where none is known.
    """

    anchor: jax.Array
    scale: jax.Array
    mass: jax.Array
    cuts_k: jax.Array
    cuts_p: jax.Array
    cuts: jax.Array
    low: jax.Array


def cutoff_of_rows(
    logits: jax.Array,
    temperature: jax.Array,
    filters: Filters,
    split: VocabularySplit | None = None,
) -> jax.Array:
    """Returns the cutoffs f32[R] of rows [R, V], with temperatures and filters [R].

    Where a vocabulary lies over devices, each counts and sums the tokens that it has. A step of a
    search adds these numbers, one per row.
    """
    scaling = parse_temperature(temperature)
    rows = logit_rows(logits, split)
    partials = rows.partials(scaling.scale)
    row = _row_facts(partials, scaling, filters, rows.vocab_size)
    body, tail = split_blocks(rows.true_logits())
    tails = () if tail is None else (tail,)

    def search(body: jax.Array) -> jax.Array:
        return _search_cutoff((body, *tails) if body.shape[1] else tails, row, filters, rows)

    def search_candidates() -> jax.Array:
        if body.shape[1] <= 2 * _NUM_GATHERED:
            return search(body)
        maxima = partials.max[:, : body.shape[1]]
        num_candidates = jnp.sum(maxima >= row.low[:, None], axis=1, dtype=jnp.int32)
        return jax.lax.cond(
            jnp.all((num_candidates <= _NUM_GATHERED) | ~row.cuts),
            lambda: search(_gather_top_blocks(body, maxima)),
            lambda: search(body),
        )

    cutoff = rows.read(search_candidates, lambda: search(body))
    return refuse_nan(jnp.where(row.cuts, cutoff, -jnp.inf), filters)


def _row_facts(partials: MaxSum, scaling: Temperature, filters: Filters, vocab_size: int) -> _Row:
    """Returns which filters are active in each row, and bounds from the blocks' partials."""
    whole = merge_partials(partials, scaling.scale)
    valid = jnp.isfinite(whole.max) & jnp.isfinite(whole.sum) & scaling.valid & ~scaling.greedy
    no = jnp.zeros_like(valid)
    row = _Row(whole.max, scaling.scale, whole.sum, no, no, no, jnp.full_like(whole.max, -jnp.inf))
    if filters.min_p is not None:
        # Each logit is compared exactly later; the bound only has to stay below that threshold.
        relative = min_p_threshold(filters.min_p) - jnp.float32(BOUND_SLACK)
        low = row.anchor + relative / row.scale
        row = row._replace(low=low, cuts=row.cuts | (valid & (filters.min_p > 0)))
    if filters.top_p is not None:
        cuts = valid & top_p_active(filters.top_p)
        row = row._replace(cuts_p=cuts, cuts=row.cuts | cuts)
        row = row._replace(low=jnp.maximum(row.low, _bound_top_p(partials, row, filters.top_p)))
    if filters.top_k is not None:
        cuts = valid & top_k_active(filters.top_k, vocab_size)
        row = row._replace(cuts_k=cuts, cuts=row.cuts | cuts)
        # Top-p weighs all that top-k keeps, down to the threshold of top-k.
        low = _bound_top_k(partials, row, filters.top_k)
        row = row._replace(low=jnp.where(cuts, low, row.low))
    return row._replace(low=smallest_equal(row.low))


def _gather_top_blocks(body: jax.Array, maxima: jax.Array) -> jax.Array:
    """Returns the blocks [R, _NUM_GATHERED, SAMPLING_BLOCK] with the largest maxima."""
    _, index = jax.lax.top_k(maxima, _NUM_GATHERED)
    return jax.vmap(lambda blocks, index: blocks[index])(body, index)


def _bound_top_k(partials: MaxSum, row: _Row, top_k: jax.Array) -> jax.Array:
    """Returns the k-th largest maximum of a block, f32[R]: at least k logits reach it."""
    target = top_k.astype(jnp.float32)
    bracket = initial_bracket(jnp.full_like(row.anchor, -jnp.inf), row.anchor, row.cuts_k)
    bracket = _search(
        bracket,
        target,
        lambda pivot: mass_above(partials.max, None, pivot),
        lambda bracket: extremes_blocks(partials.max, bracket),
    )
    return key_value(bracket.low)


def _bound_top_p(partials: MaxSum, row: _Row, top_p: jax.Array) -> jax.Array:
    """Returns a logit f32[R] at or above which the partials prove enough mass."""
    target = required_mass(top_p, row.mass) * jnp.float32(1 + BOUND_SLACK)
    bracket = initial_bracket(row.low, row.anchor, row.cuts_p)
    bracket = _search(
        bracket, target, lambda pivot: mass_bound(partials, pivot, row.anchor, row.scale), None
    )
    return key_value(bracket.low)


def _search_cutoff(
    arrays: tuple[jax.Array, ...], row: _Row, filters: Filters, rows: LogitRows
) -> jax.Array:
    """Returns the cutoffs f32[R], given arrays of blocks that hold every logit that is kept."""
    blocks = tuple(array.astype(jnp.float32) for array in arrays)
    anchor, scale = row.anchor[:, None], row.scale[:, None]
    min_p = None if filters.min_p is None else filters.min_p[:, None]

    def merge(two: Any, values: list[jax.Array]) -> jax.Array:
        return rows.merge(two, functools.reduce(two, values))

    def mass(pivot: jax.Array) -> jax.Array:
        weights = (mass_weights(x, anchor[..., None], scale[..., None]) for x in blocks)
        weighted = zip(blocks, weights, strict=True)
        return merge(jnp.add, [mass_above(x, w, pivot[:, None]).sum(-1) for x, w in weighted])

    def count(pivot: jax.Array) -> jax.Array:
        return merge(jnp.add, [mass_above(x, None, pivot[:, None]).sum(-1) for x in blocks])

    def extremes(bracket: Bracket) -> Extremes:
        ends = Bracket(bracket.low[:, None], bracket.high[:, None])
        each = [extremes_blocks(x, ends) for x in blocks]
        least = merge(jnp.minimum, [x.least.min(-1) for x in each])
        return Extremes(least, merge(jnp.maximum, [x.most.max(-1) for x in each]))

    def smallest_kept(low: jax.Array) -> jax.Array:
        each = [min_kept(x, low[:, None], anchor, scale, min_p).min(-1) for x in blocks]
        return merge(jnp.minimum, each)

    cuts_k = None if filters.top_k is None else row.cuts_k
    cuts_p = None if filters.top_p is None else row.cuts_p
    bounds = RowBounds(row.anchor, row.mass, cuts_k, cuts_p, row.low)
    queries = RowQueries(count, mass, extremes, smallest_kept)
    return search_cutoff(queries, filters, bounds)


def _search(
    bracket: Bracket, target: jax.Array, mass: _MassAbove, extremes: _ExtremesInside | None
) -> Bracket:
    """Returns the bracket of `search` for brackets [R], also inside `shard_map`."""
    return search(pvary_like(bracket, bracket, target), target, mass, extremes)
