"""The search of a cutoff by several pivots in each pass."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle_cutoff
import pytest

from specjax.core import bisection, pivot_search
from specjax.core.truncation import Filters, RowBounds, mass_weights

VOCAB = 640
pivot_keys = jax.jit(pivot_search.pivot_keys, static_argnums=(1, 3))


def rows(dtype):
    """Rows of normal, rounded, equal, partly absent and far logits; in f32 of all exponents."""
    rng = np.random.default_rng(0)
    x = (3 * rng.normal(size=(7, VOCAB))).astype(np.float32)
    x[1] = np.round(x[1])
    x[2] = 0.25
    x[3] = np.where(rng.random(VOCAB) < 0.5, -np.inf, x[3])
    x[4] = np.where(rng.random(VOCAB) < 0.5, np.float32(0.0), np.float32(-0.0))
    x[5] -= np.float32(30)
    x[6] = x[6] * np.exp(60 * rng.normal(size=VOCAB)).clip(1e-30, 1e30).astype(np.float32)
    return jnp.asarray(x[: 7 if dtype == jnp.float32 else 6], dtype).astype(jnp.float32)


def searching(num_pivots, unused_bits, passes):
    """The jitted search of a row with top-k and top-p, which appends its passes' numbers."""

    def search(row, top_k, top_p):
        anchor = jnp.max(row)
        weights = mass_weights(row, anchor, jnp.float32(1))

        def sums_above(asked):
            jax.debug.callback(lambda number: passes.append(int(number)), asked.number)
            each = jnp.where(asked.counts, jnp.float32(1), weights)
            above = row[None] >= asked.pivots[:, None]
            return jnp.sum(jnp.where(above, each[None], jnp.float32(0)), axis=1)

        bounds = RowBounds(
            anchor, jnp.sum(weights), top_k < VOCAB, top_p < 1, jnp.float32(-jnp.inf)
        )
        filters = Filters(top_k, top_p, None)
        return pivot_search.search_by_pivots(sums_above, filters, bounds, num_pivots, unused_bits)

    return jax.jit(search)


@pytest.mark.once
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("num_pivots", [1, 8])
def test_a_search_by_pivots_finds_the_logit_in_few_passes(num_pivots, dtype):
    unused, passes = pivot_search.unused_key_bits(dtype), []
    search = searching(num_pivots, unused, passes)
    for top_k, top_p in [(1, 1.0), (7, 1.0), (200, 1.0), (VOCAB, 0.7), (200, 0.5), (200, 0.999)]:
        for row in rows(dtype):
            low, is_logit = search(row, jnp.int32(top_k), jnp.float32(top_p))
            assert is_logit, (top_k, top_p)
            oracle_cutoff.check(row, low, 1.0, top_k=top_k, top_p=top_p)
    jax.effects_barrier()
    # Every other pass divides 2^32 keys, or 2^16 of bf16 and 2^19 of f16, by P + 1. Two searches,
    # and one pass between them.
    halvings = (32 - unused) / np.log2(num_pivots + 1)
    assert max(passes) <= 4 * np.ceil(halvings) + 1


@pytest.mark.once
def test_what_no_search_reached_is_no_logit():
    search = searching(8, 0, [])
    row = rows(jnp.float32)[3]
    # More logits than there are, and no filter.
    for top_k in (VOCAB - 1, VOCAB):
        low, is_logit = search(row, jnp.int32(top_k), jnp.float32(1))
        assert not is_logit
        assert low < np.min(row[row > -np.inf])


@pytest.mark.once
@pytest.mark.parametrize("unused_bits", [0, 13, 16])
def test_pivots_are_inside_a_bracket_and_divide_it_evenly(unused_bits):
    largest = (2**31 - 2**23) >> unused_bits
    pairs = [(-largest, largest), (-largest, -largest + 1), (-5, 4), (3, 4), (0, largest)]
    for low, high in pairs:
        ends = bisection.Bracket(np.int32(low), np.int32(high))
        for by_value in (True, False):
            keys = pivot_keys(ends, 8, np.array(by_value), unused_bits)
            keys = np.asarray(keys).astype(np.int64)
            assert np.all((keys > low) & (keys <= high))
            assert np.all(np.diff(keys) >= 0)
        part = (high - low) / 9
        wanted = np.clip(low + part * np.arange(1, 9), low + 1, high)
        np.testing.assert_allclose(keys, wanted, atol=16)
    # As values: the middles of the halves of what lies between -2 and 1.
    low, last = (int(bisection.ordered_key(jnp.float32(x))) >> unused_bits for x in (-2, 1))
    ends = bisection.Bracket(np.int32(low), np.int32(last + 1))
    keys = pivot_keys(ends, 2, np.array(True), unused_bits)
    values = bisection.key_value(pivot_search.widen_key(keys, unused_bits))
    np.testing.assert_allclose(values, [-1.25, 0.25], atol=0.01)
