"""The launch of a large batch that reduces target rows, and evaluates their drafted tokens.

In a small batch `verify_reduce_kernel` reduces every row, and every program of the next launch
evaluates its request's drafted tokens. In a large batch `verify_accept_kernel` does both: the last
program of a row to arrive evaluates it, by a function that is passed. A call with a rule takes this
kernel in a batch of any size.

In its grid the programs of row 0 of all requests come first, then those of row 1, and so on. The
stop of a request is the row where its accepted prefix ends: a rejection, or the bonus row. The
program that finds it publishes it. Programs of later rows that start afterwards return without
reading. No row waits for another. In a larger batch more programs lie between rows i and i + 1, so
fewer rows are read for nothing. A tile with a logit above the drafted token's rejects a greedy
request's token before the row is reduced.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import FlatBatch
from specjax.core.acceptance import accept_greedy, accept_random, accept_synthetic
from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import LogNormalizer, MaxSum, row_statistics
from specjax.core.noise import Stream, uniform
from specjax.core.subnormal import flush_subnormals, largest_equal
from specjax.pallas.blocks import (
    Partials,
    load_tiles,
    partials_shape,
    reduce_tile,
    store_blocks,
    store_partials,
    tile_argmax,
)
from specjax.pallas.launch import cond_or, divmod_i32, is_last_arrival, output, reduce_where
from specjax.pallas.load_request import (
    DraftedToken,
    Request,
    Schedule,
    load_drafted,
    load_drafted_logit,
    load_drafted_logits,
    load_masked,
    load_request,
)


class VerifiedRows(NamedTuple):
    """Target rows [B * (K + 1)] read so far, with their `AcceptanceResult`s.

    Attributes:
      partials: of the rows that were read.
      shift: f32, of the normalizer.
      log_sum: f32, of the normalizer.
      logprobs: f32, log p of the drafted tokens; of the drawn tokens in coupled sampling.
      argmax: i32, id of the row's largest logit, valid where the request is greedy; the drawn token
        in coupled sampling.
      counters: u32[B, K + 2]. `[:, i]` counts the programs that are done with row i. `[:, K + 1]`
        publishes the stop: 0 while none is known, else K + 1 - i for the smallest known row i that
        ends the accepted prefix. So `atomic_max` keeps the smallest row. Without log-probabilities
        of greedy requests u32[B, K + 3]: `residual_last_draw_kernel` counts in the last one.
    """

    partials: Partials
    shift: Any
    log_sum: Any
    logprobs: Any
    argmax: Any
    counters: Any


class AcceptanceResult(NamedTuple):
    """Results of target rows [R] and of the drafted tokens at their positions.

    Attributes:
      normalizer: f32, its `log_sum` NaN where the row is invalid.
      logprobs: f32, log p of the drafted tokens; of the drawn tokens in coupled sampling.
      argmax: i32, id of the row's largest logit, valid where the request is greedy; the drawn token
        in coupled sampling.
      accepted: bool, whether the drafted token is accepted; False where there is none.
      drafted: the drafted tokens; None where K is 0 and in coupled sampling.
    """

    normalizer: LogNormalizer
    logprobs: jax.Array
    argmax: jax.Array
    accepted: jax.Array
    drafted: DraftedToken | None


def evaluate_acceptance(request: Request, i: jax.Array, partials: Partials) -> AcceptanceResult:
    """Evaluates the acceptance tests of target rows `i`, i32[R], of a request.

    A drafted token x is accepted if `uniform < p(x) / q(x)`. A greedy request accepts the argmax.
    Synthetic acceptance accepts at given rates. Rows that are not reduced are invalid.
    """
    arrays, schedule = request.arrays, request.schedule
    exists, has_draft = schedule.is_reduced(request, i), i < request.num_draft_tokens
    scale = request.temperature.scale
    index = request.row_index(i)
    tiles = load_tiles(partials, index, exists)
    if schedule.max_draft_tokens:
        drafted = load_drafted(request, i, has_draft)
        logit = load_drafted_logits(request, i, drafted.token_id, has_draft)
        address = request.address(i, Stream.accept(i))
        u = uniform(address, jnp.zeros_like(i, jnp.uint32), schedule.noise_dtype, schedule.threefry)
    normalizer, is_valid = normalize(tiles, scale)
    # If the request is not greedy, this loads uninitialized memory, which nothing uses.
    best_tile = first_argmax(flush_subnormals(tiles.max))
    argmax = load_masked(partials.tile_argmax, (index, best_tile), exists).astype(jnp.int32)
    if schedule.max_draft_tokens == 0:
        return AcceptanceResult(normalizer, jnp.zeros_like(i, jnp.float32), argmax, i < 0, None)
    logprobs = token_logprobs(logit, normalizer, scale)
    if arrays.conditional_rates is None:
        accepted = jnp.where(
            request.temperature.greedy,
            accept_greedy(drafted.token_id, argmax),
            accept_random(u, logprobs, drafted.logprob),
        )
    else:
        rate = load_masked(arrays.conditional_rates, (request.b, i), has_draft)
        inside = (drafted.token_id >= 0) & (drafted.token_id < schedule.vocab_size(arrays))
        accepted = inside & accept_synthetic(u, rate)
    accepted = accepted & has_draft & is_valid
    return AcceptanceResult(normalizer, logprobs, argmax, accepted, drafted)


def normalize(tiles: MaxSum, scale: jax.Array) -> tuple[LogNormalizer, jax.Array]:
    """Returns the normalizer of rows [R] by their tiles, its `log_sum` NaN of invalid rows.

    Args:
      tiles: f32[R, tiles], from `load_tiles`.
      scale: f32, one over the temperature.

    Returns:
      The normalizer, and bool[R], whether a row is valid.
    """
    normalizer, valid = row_statistics(tiles, jnp.broadcast_to(scale, tiles.max.shape[:-1]))
    log_sum = jnp.where(valid, normalizer.log_sum, jnp.nan)
    return normalizer._replace(log_sum=log_sum), valid


# Evaluates rows i32[R] of a request, as `evaluate_acceptance`; one in `verify_accept_kernel`.
Evaluate = Callable[[Request, jax.Array, Partials], AcceptanceResult]


def accept_rows(
    arrays: FlatBatch, schedule: Schedule, evaluate: Evaluate = evaluate_acceptance
) -> VerifiedRows:
    """Launches the reduction and evaluation of each request's rows up to its stop."""
    vocab_size = arrays.target_logits.shape[1]
    num_rows = schedule.num_requests * schedule.rows_per_request
    # Without log-probabilities of greedy requests, a later launch also counts its programs.
    num_counters = schedule.rows_per_request + 1 + schedule.options.skips_greedy_sums
    zeros = jnp.zeros((schedule.num_requests, num_counters), jnp.uint32)
    return schedule.launch(
        verify_accept_kernel,
        (arrays, zeros),
        VerifiedRows(
            partials_shape(num_rows, vocab_size, schedule.tile),
            output((num_rows,)),
            output((num_rows,)),
            output((num_rows,)),
            output((num_rows,), jnp.int32),
            zeros,
        ),
        num_programs=num_rows * schedule.tile.num_tiles(vocab_size),
        evaluate=evaluate,
    )


def verify_accept_kernel(
    operands: tuple[FlatBatch, Any], out: VerifiedRows, *, schedule: Schedule, evaluate: Evaluate
) -> None:
    """Reduces a tile of a target row; the row's last program evaluates its drafted token.

    Formula: m_i = max x, l_i = sum exp((x - m_i) / τ) per block. Then `evaluate` accepts the
    drafted token x if u < p(x) / q(x), if a rule does, or if the row draws x (`draw_and_compare`).
    Grid: (K + 1) * B * tiles programs of 8 warps, of 4 if there are many, row 0 of all requests
    first; one owns a tile of 8192 logits of one row.
    Bytes per row: V * itemsize read, once more for each of the entropy and the rank that a rule
    names; V / 128 * 8 + tiles * 12 + 16 written. A program of a row past the published stop reads
    its request's scalars alone.
    Why this order: row i + 1 of a request starts about B * tiles programs after row i. In a large
    batch row i is evaluated by then, so that rows after a rejection are hardly read.
    Memory order: `is_last_arrival` on `counters[b, i]`, then `atomic_max` publishes the stop in
    `counters[b, K + 1]`. A program that reads an older stop reads a row in vain. No result depends
    on it, because the stop only moves towards the first row that accepts nothing. A tile that
    rejects a greedy request's token publishes before its row is reduced.
    References: Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    arrays = operands[0]
    num_tiles, rows_per_request = schedule.num_tiles(arrays), schedule.rows_per_request
    index, tile_index = divmod_i32(pl.program_id(0), num_tiles)
    i, b = divmod_i32(index, schedule.num_requests)
    request = load_request(arrays, b, schedule)
    stop_at = (b, jnp.int32(rows_per_request))

    def load_published() -> jax.Array:
        # Atomic, because the threads of a program must all take one branch.
        return plgpu.atomic_max(out.counters, stop_at, jnp.uint32(0)).astype(jnp.int32)

    def publish_stop() -> None:
        plgpu.atomic_max(out.counters, stop_at, (rows_per_request - i).astype(jnp.uint32))

    stop = rows_per_request - cond_or(i > 0, load_published, jnp.int32(0))

    def arrive() -> jax.Array:
        return is_last_arrival(out.counters, (b, i), num_tiles, schedule.interpret)

    @pl.when(request.active & (i <= request.num_draft_tokens) & ~(stop < i))
    def _() -> None:
        _store_tile(request, i, tile_index, out.partials, publish_stop)
        if schedule.options.skips_greedy_sums and is_decided_by_tiles(request):
            # The tiles of a greedy request have already decided.
            is_last = cond_or(~request.temperature.greedy, arrive, i < 0)
        else:
            is_last = arrive()

        @pl.when(is_last)
        def _() -> None:
            row = i + jax.lax.iota(jnp.int32, 1)
            result = evaluate(request, row, out.partials)
            at = b * rows_per_request + row
            plgpu.store(out.shift.at[at], result.normalizer.shift)
            plgpu.store(out.log_sum.at[at], result.normalizer.log_sum)
            plgpu.store(out.logprobs.at[at], result.logprobs)
            plgpu.store(out.argmax.at[at], result.argmax)
            is_accepted = reduce_where(result.accepted.astype(jnp.int32), row == i)
            pl.when(is_accepted == 0)(publish_stop)


def is_decided_by_tiles(request: Request) -> bool:
    """Returns whether a greedy request's drafted tokens are compared with each tile's maximum."""
    options, rates = request.schedule.options, request.arrays.conditional_rates
    return rates is None and options.max_draft_tokens > 0 and options.greedy_is_argmax


def _store_tile(
    request: Request,
    i: jax.Array,
    tile_index: jax.Array,
    partials: Partials,
    publish_stop: Callable[[], None],
) -> None:
    """Stores a tile's partials; its maximum may reject a greedy request's drafted token.

    Without log-probabilities the tiles alone decide: none may exceed the drafted token's logit, nor
    reach it at a lower id. A tile's argmax is then stored only if it may be the row's.
    """
    at, greedy = request.row_index(i), request.temperature.greedy
    row_tile = request.row_tile(i, tile_index)
    has_draft, by_tiles = i < request.num_draft_tokens, is_decided_by_tiles(request)
    only_maxima = greedy if request.schedule.options.skips_greedy_sums else None
    if only_maxima is None or not by_tiles:
        tile_max = store_partials(row_tile, partials, at, only_maxima)
        if by_tiles:

            @pl.when(greedy & has_draft)
            def reject_greedy() -> None:
                _, logit = load_drafted_logit(request, i)
                pl.when(largest_equal(logit) < tile_max)(publish_stop)

        return
    token_id, logit = load_drafted_logit(request, i)
    blocks = reduce_tile(row_tile, only_maxima)
    tile_max = store_blocks(blocks, row_tile, partials, at)
    largest, drafted = flush_subnormals(tile_max), flush_subnormals(logit)

    @pl.when(greedy & ~(largest < drafted))
    def decide_greedy() -> None:
        argmax = tile_argmax(row_tile, blocks.max)
        partials.tile_argmax[at, tile_index] = argmax
        # Ties go to the lowest id. Masked tokens and tokens of +inf are not accepted.
        is_argmax = (largest == drafted) & (argmax >= token_id) & jnp.isfinite(drafted)
        pl.when(has_draft & ~is_argmax)(publish_stop)
