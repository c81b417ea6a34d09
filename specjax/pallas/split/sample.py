"""`gumbel_sample` and coupled sampling of a split vocabulary: two launches, one message.

A device draws from its own tokens. That is the row's draw if the device is the one whose draw wins:

    score of the row = score among the device's tokens + log of the device's mass

So one message carries each device's (m, l), its token, the token's logit and its score.

References:
  Maddison et al., 2014, arXiv:1411.0030: Gumbel-max, and the maximum of a block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.call_arrays import SampleArrays, VerifyInputs, cumulative_counts, flatten
from specjax.call_options import CallOptions
from specjax.core.acceptance import num_valid_drafts
from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import (
    MaxSum,
    block_logprobs,
    merge_partials,
    row_logsumexp,
    row_statistics,
)
from specjax.core.noise import Stream
from specjax.core.subnormal import flush_subnormals
from specjax.core.temperature import parse_temperature
from specjax.devices.placement import pvary_like
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.pallas.blocks import block_argmax
from specjax.pallas.gumbel_max import Draw, draw_token
from specjax.pallas.launch import output
from specjax.pallas.sample import DrawOperands, launch_draw, load_row, reduce_rows, sample_rows
from specjax.pallas.split.shared_rows import best_of_devices, first_token_of
from specjax.types import Sample, Verification

# A device's proposal for a row, f32[5]: its (m, l), and a token, its logit and score.
_MAX, _SUM, _TOKEN, _LOGIT, _SCORE = range(5)


def choose_sampler(options: CallOptions) -> Callable[[SampleArrays], Sample]:
    """Returns the function that draws from whole rows, or from those of a split vocabulary."""
    if options.split is None:
        return functools.partial(sample_rows, options=options)
    return functools.partial(sample_split, options=options, split=options.split)


def sample_split(arrays: SampleArrays, options: CallOptions, split: VocabularySplit) -> Sample:
    """Draws one token per row of a vocabulary that lies over a mesh axis.

    Args:
      arrays: this device's columns; one key, position, stream, temperature and cutoff per row.
      options: static.
      split: of the vocabulary.
    """
    num_rows, width = arrays.logits.shape
    shard = arrays._replace(first_token=first_token_of(width, split))
    # All operands of a kernel must vary over the same axes.
    shard = pvary_like(shard, shard)
    values = output((num_rows, len((_MAX, _SUM, _TOKEN, _LOGIT, _SCORE))))
    operands = (shard, reduce_rows(shard, options))
    proposals = launch_draw(split_sample_kernel, operands, values, options)
    gathered = jax.lax.all_gather(proposals, split.axis_name, to="invarying")
    return _choose(gathered, arrays.temperature)


def split_sample_kernel(operands: DrawOperands, out: Any, *, options: CallOptions) -> None:
    """Writes a token of this device's share of a row, drawn by two-level Gumbel-max, and its score.

    Formula: that of `sample_draw_kernel`, by the share's own normalizer.
    Grid: R programs of 8 warps; one owns a row.
    Bytes per row: those of `sample_draw_kernel`, of the share's blocks; 20 written.
    Why one program: as in `sample_draw_kernel`.
    Memory order: the launch before has ended when it begins to load. It does not trigger the next
    launch early.
    Reference: Maddison et al., 2014, arXiv:1411.0030: Gumbel-max, and the maximum of a block.
    """
    b = pl.program_id(0)
    drawn = load_row(operands, b, options)
    row, whole = drawn.row, merge_partials(drawn.blocks, drawn.row.scale)
    normalizer = row.normalizer

    def take_argmax() -> Draw:
        block = first_argmax(flush_subnormals(drawn.blocks.max))
        token = block_argmax(row.logits, row.row_index, row.cutoff, block)
        token += operands[0].first_token[0]
        return Draw(token, normalizer.shift, normalizer.shift)

    def draw_random() -> Draw:
        log_masses = block_logprobs(drawn.blocks, normalizer, row.scale)
        return draw_token(row, log_masses, drawn.noise, lambda _, logprobs: logprobs)

    draw = jax.lax.cond(drawn.temperature.greedy, take_argmax, draw_random)
    values = {
        _MAX: whole.max,
        _SUM: whole.sum,
        _TOKEN: draw.token.astype(jnp.float32),
        _LOGIT: draw.logit,
        _SCORE: draw.score,
    }
    for column, value in values.items():
        out[b, jnp.int32(column)] = value


def _choose(gathered: jax.Array, temperature: jax.Array) -> Sample:
    """Returns the samples of rows from the proposals of all devices, f32[D, R, 5]."""
    parsed = parse_temperature(temperature)
    partials = MaxSum(gathered[..., _MAX].T, gathered[..., _SUM].T)
    statistics = row_statistics(partials, parsed.scale)
    normalizer = statistics.normalizer
    log_masses = block_logprobs(partials, normalizer, parsed.scale).T
    scores = jnp.where(log_masses == -jnp.inf, -jnp.inf, gathered[..., _SCORE] + log_masses)
    scores = jnp.where(parsed.greedy[None], flush_subnormals(gathered[..., _MAX]), scores)
    best = best_of_devices(gathered, scores)
    valid = parsed.valid & statistics.valid
    logprob = token_logprobs(best[:, _LOGIT], normalizer, parsed.scale)
    return Sample(
        token_ids=jnp.where(valid, best[:, _TOKEN].astype(jnp.int32), jnp.int32(-1)),
        logprobs=jnp.where(valid, logprob, jnp.float32(0)),
        logsumexp=row_logsumexp(normalizer, parsed.scale),
    )


def target_samples(inputs: VerifyInputs, k: int) -> SampleArrays:
    """Returns the arrays that draw every target row on its request's target stream.

    Args:
      inputs: with this device's columns of the rows.
      k: K >= 1.
    """
    logits, first_row = flatten(inputs.target_logits, 1), _first_rows(inputs, k)
    num_rows = logits.shape[0]
    row = jnp.arange(num_rows, dtype=jnp.int32)
    if cumulative_counts(inputs.draft) is None:
        owner = row // (k + 1)
    else:
        is_at_or_after = row[:, None] >= first_row[None, 1:]
        owner = jnp.sum(is_at_or_after, axis=1, dtype=jnp.int32)
    return SampleArrays(
        logits=logits,
        keys=inputs.keys[owner],
        positions=inputs.positions[owner] + row - first_row[owner],
        stream=jnp.full((num_rows,), Stream.TARGET, jnp.int32),
        temperature=inputs.temperature[owner],
        cutoff=flatten(inputs.target_cutoff),
    )


def _first_rows(inputs: VerifyInputs, k: int) -> jax.Array:
    """Returns the first target row of each request, i32[B]."""
    request = jnp.arange(inputs.temperature.shape[0], dtype=jnp.int32)
    starts = cumulative_counts(inputs.draft)
    return request * (k + 1) if starts is None else starts[:-1] + request


def compare_draws(inputs: VerifyInputs, drawn: Sample, options: CallOptions) -> Verification:
    """Returns the verification of drafted tokens by the draws of all target rows.

    Args:
      inputs: as in `target_samples`.
      drawn: of every target row.
      options: static; K >= 1.
    """
    k = options.max_draft_tokens
    i = jnp.arange(k + 1, dtype=jnp.int32)[None]
    token_ids, num_tokens = inputs.draft.token_ids, inputs.draft.num_tokens
    if (cu := cumulative_counts(inputs.draft)) is not None:
        starts = cu[:-1]
        counts = jnp.maximum(cu[1:] - starts, 0)
        num_tokens = counts if num_tokens is None else jnp.minimum(num_tokens, counts)
        token_ids = jnp.take(token_ids, starts[:, None] + i[:, :k], mode="clip")
    last_row = drawn.token_ids.shape[0] - 1
    # The row of each request at each position, up to its bonus row.
    rows = jnp.minimum(_first_rows(inputs, k)[:, None] + i, last_row)
    num_tokens = num_valid_drafts(token_ids, num_tokens)
    tokens, logprobs = drawn.token_ids[rows], drawn.logprobs[rows]
    greedy = parse_temperature(inputs.temperature).greedy[:, None]
    if not options.greedy_logprobs:
        logprobs = jnp.where(greedy, jnp.float32(0), logprobs)
    active = (num_tokens >= 0) & parse_temperature(inputs.temperature).valid
    is_valid = tokens >= 0
    drafted = jnp.pad(token_ids, ((0, 0), (0, 1)), constant_values=-1)
    accepted = (i < num_tokens[:, None]) & is_valid & (tokens == drafted) & active[:, None]
    n = jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    is_emitted = active[:, None] & is_valid & (i <= n[:, None])
    return Verification(
        token_ids=jnp.where(is_emitted, tokens, jnp.int32(-1)),
        num_accepted=n,
        num_emitted=jnp.sum(is_emitted, axis=1, dtype=jnp.int32),
        logprobs=jnp.where(is_emitted, logprobs, jnp.float32(0)),
    )
