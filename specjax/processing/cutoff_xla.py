"""The cutoff of rows of logits in plain JAX: the reference that the kernels are judged by.

Each filter's threshold is searched by halving. A search over the rows costs a pass over
them per halving, so two things come first: bounds from the blocks' partials, by the same
search over an array a hundred times smaller, and a gather of the few blocks of each row
that can hold the threshold, where they are few.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.bisection import Bracket, Extremes, initial_bracket, key_value, search
from specjax.core.logsumexp import BlockPartials, block_partials, merge_partials, split_blocks
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
    required_mass,
    search_cutoff,
    top_k_active,
    top_p_active,
)
from specjax.mesh import pvary_like

__all__ = ["cutoff_of_rows"]

# Blocks that rows are gathered down to: an eighth of today's vocabularies, at the cost of half a
# pass over them; room for the top 128 wherever they lie.
_NUM_GATHERED = 128

_Weigh = Callable[[jax.Array], jax.Array]
_Look = Callable[[Bracket], Extremes]


class _Row(NamedTuple):
    """What the searches share, f32[R] or bool[R].

    Attributes:
      anchor: the largest logit.
      scale: one over the temperature.
      mass: of all tokens, in the scale of `mass_weights`.
      cuts_k: whether top-k cuts this row.
      cuts_p: likewise top-p.
      cuts: whether any filter does.
      low: no logit below it is kept, nor tells what is; -inf where that is unknown.
    """

    anchor: jax.Array
    scale: jax.Array
    mass: jax.Array
    cuts_k: jax.Array
    cuts_p: jax.Array
    cuts: jax.Array
    low: jax.Array


def cutoff_of_rows(logits: jax.Array, temperature: jax.Array, filters: Filters) -> jax.Array:
    """`logit_cutoff` for rows [R, V] and parameters [R]: f32[R]."""
    scaling = parse_temperature(temperature)
    partials = block_partials(logits, scaling.scale)
    row = _read_rows(partials, scaling, filters, logits.shape[1])
    body, tail = split_blocks(logits)
    rest = () if tail is None else (tail,)

    def search(body: jax.Array) -> jax.Array:
        return _least_kept((body, *rest) if body.shape[1] else rest, row, filters)

    if body.shape[1] <= 2 * _NUM_GATHERED:
        least = search(body)
    else:
        maxima = partials.max[:, : body.shape[1]]
        num_candidates = jnp.sum(maxima >= row.low[:, None], axis=1, dtype=jnp.int32)
        least = jax.lax.cond(
            jnp.all((num_candidates <= _NUM_GATHERED) | ~row.cuts),
            lambda: search(_likeliest_blocks(body, maxima)),
            lambda: search(body),
        )
    return jnp.where(row.cuts, least, -jnp.inf)


def _read_rows(
    partials: BlockPartials, scaling: Temperature, filters: Filters, vocab_size: int
) -> _Row:
    """What the blocks tell of each row, and what is asked of it."""
    whole = merge_partials(partials, scaling.scale)
    law = jnp.isfinite(whole.max) & jnp.isfinite(whole.sum) & scaling.valid & ~scaling.greedy
    no = jnp.zeros_like(law)
    row = _Row(whole.max, scaling.scale, whole.sum, no, no, no, jnp.full_like(whole.max, -jnp.inf))
    if filters.min_p is not None:
        # What decides is a comparison made for each logit: this bound only has to stay below it.
        relative = min_p_threshold(filters.min_p) - jnp.float32(BOUND_SLACK)
        low = row.anchor + relative / row.scale
        row = row._replace(low=low, cuts=row.cuts | (law & (filters.min_p > 0)))
    if filters.top_p is not None:
        cuts = law & top_p_active(filters.top_p)
        row = row._replace(cuts_p=cuts, cuts=row.cuts | cuts)
        row = row._replace(low=jnp.maximum(row.low, _bound_top_p(partials, row, filters.top_p)))
    if filters.top_k is not None:
        cuts = law & top_k_active(filters.top_k, vocab_size)
        row = row._replace(cuts_k=cuts, cuts=row.cuts | cuts)
        # What top-p weighs is all that top-k kept, down to top-k's own threshold.
        low = _bound_top_k(partials, row, filters.top_k)
        row = row._replace(low=jnp.where(cuts, low, row.low))
    return row._replace(low=smallest_equal(row.low))


def _likeliest_blocks(body: jax.Array, maxima: jax.Array) -> jax.Array:
    """The `_NUM_GATHERED` blocks [R, n, SAMPLING_BLOCK] whose largest logits are largest."""
    _, index = jax.lax.top_k(maxima, _NUM_GATHERED)
    return jax.vmap(lambda blocks, index: blocks[index])(body, index)


def _bound_top_k(partials: BlockPartials, row: _Row, top_k: jax.Array) -> jax.Array:
    """The k-th largest of the blocks' maxima, f32[R]: as many logits reach it."""
    target = top_k.astype(jnp.float32)
    bracket = initial_bracket(jnp.full_like(row.anchor, -jnp.inf), row.anchor, row.cuts_k)
    bracket = _search(
        bracket,
        target,
        lambda pivot: mass_above(partials.max, None, pivot),
        lambda bracket: extremes_blocks(partials.max, bracket),
    )
    return key_value(bracket.low)


def _bound_top_p(partials: BlockPartials, row: _Row, top_p: jax.Array) -> jax.Array:
    """A logit, f32[R], at and above which lies enough mass by what the blocks tell."""
    target = required_mass(top_p, row.mass) * jnp.float32(1 + BOUND_SLACK)
    bracket = initial_bracket(row.low, row.anchor, row.cuts_p)
    bracket = _search(
        bracket,
        target,
        lambda pivot: mass_bound(partials, pivot, row.anchor, row.scale),
        None,
    )
    return key_value(bracket.low)


def _least_kept(parts: tuple[jax.Array, ...], row: _Row, filters: Filters) -> jax.Array:
    """The smallest logit f32[R] that all filters keep, of blocks that hold all they keep."""
    x = tuple(part.astype(jnp.float32) for part in parts)
    anchor, scale = row.anchor[:, None], row.scale[:, None]
    min_p = None if filters.min_p is None else filters.min_p[:, None]

    def merge(two: Callable[..., jax.Array], parts: list[jax.Array]) -> jax.Array:
        return functools.reduce(two, parts)

    def weigh(pivot: jax.Array) -> jax.Array:
        weights = (mass_weights(part, anchor[..., None], scale[..., None]) for part in x)
        pairs = zip(x, weights, strict=True)
        return merge(jnp.add, [mass_above(part, w, pivot[:, None]).sum(-1) for part, w in pairs])

    def number(pivot: jax.Array) -> jax.Array:
        return merge(jnp.add, [mass_above(part, None, pivot[:, None]).sum(-1) for part in x])

    def look(bracket: Bracket) -> Extremes:
        ends = Bracket(bracket.low[:, None], bracket.high[:, None])
        found = [extremes_blocks(part, ends) for part in x]
        least = merge(jnp.minimum, [part.least.min(-1) for part in found])
        return Extremes(least, merge(jnp.maximum, [part.most.max(-1) for part in found]))

    def least(low: jax.Array) -> jax.Array:
        kept = [min_kept(part, low[:, None], anchor, scale, min_p).min(-1) for part in x]
        return merge(jnp.minimum, kept)

    cuts_k = None if filters.top_k is None else row.cuts_k
    cuts_p = None if filters.top_p is None else row.cuts_p
    searched = RowBounds(row.anchor, row.mass, cuts_k, cuts_p, row.low)
    return search_cutoff(RowQueries(number, weigh, look, least), filters, searched)


def _search(bracket: Bracket, target: jax.Array, weigh: _Weigh, look: _Look | None) -> Bracket:
    """`search` of brackets [R], inside `shard_map`, too."""
    return search(pvary_like(bracket, bracket, target), target, weigh, look)
