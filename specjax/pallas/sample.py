"""`gumbel_sample` in two launches: many programs reduce a row, one draws its token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from specjax.logits import read_temperature
from specjax.logsumexp import block_weights, merge_blocks, row_logsumexp
from specjax.noise import address
from specjax.pallas.launch import divide, launch, like
from specjax.pallas.logsumexp import (
    Partials,
    Share,
    load_blocks,
    partials_like,
    store_partials,
)
from specjax.pallas.pick import Row, argmax_tokens, draw_noise, draw_token
from specjax.pallas.tiles import DRAW_WARPS, row_tile
from specjax.sampling import first_argmax
from specjax.typing import Sample

__all__ = ["sample_rows"]


class _Rows(NamedTuple):
    logits: Any
    key: Any
    position: Any
    stream: Any
    temperature: Any
    cutoff: Any


class _Reduced(NamedTuple):
    rows: _Rows
    partials: Partials


def sample_rows(
    logits: jax.Array,
    key: jax.Array,
    position: jax.Array,
    stream: jax.Array,
    temperature: jax.Array,
    cutoff: jax.Array | None,
    *,
    noise_dtype: Any,
    interpret: bool,
) -> Sample:
    """Draws one token per row.

    Args:
      logits: [B, V], bf16, f16 or f32.
      key: u32[B, 2].
      position: i32[B].
      stream: i32[B].
      temperature: f32[B].
      cutoff: f32[B] or None.
      noise_dtype: float32 or float64.
      interpret: run in Pallas' interpreter.

    Returns:
      `Sample`.
    """
    size, vocab_size = logits.shape
    tile = row_tile(size, vocab_size)
    count = tile.count(vocab_size)
    rows = _Rows(logits, key, position, stream, temperature, cutoff)

    def reduce_kernel(rows: _Rows, partials: Partials) -> None:
        b, number = divide(pl.program_id(0), count)
        scale = read_temperature(rows.temperature[b]).scale
        share = Share(rows.logits, b, number, scale, _at(rows.cutoff, b))
        store_partials(share, partials, b, tile, interpret)

    def draw_kernel(reduced: _Reduced, out: Sample) -> None:
        _draw(reduced, out, pl.program_id(0), noise_dtype)

    partials = launch(
        reduce_kernel,
        rows,
        partials_like(size, vocab_size, tile, tiles=False),
        num_programs=size * count,
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    return launch(
        draw_kernel,
        _Reduced(rows, partials),
        Sample(like((size,), jnp.int32), like((size,)), like((size,))),
        num_programs=size,
        num_warps=DRAW_WARPS,
        interpret=interpret,
    )


def _draw(reduced: _Reduced, out: Sample, b: jax.Array, noise_dtype: Any) -> None:
    """Draws row b's token and writes its sample."""
    rows, cutoff = reduced.rows, _at(reduced.rows.cutoff, b)
    vocab_size = rows.logits.shape[1]
    blocks = load_blocks(reduced.partials, b, vocab_size)
    scaling = read_temperature(rows.temperature[b])
    at = address((rows.key[b, 0], rows.key[b, 1]), rows.position[b], rows.stream[b])
    noise = draw_noise(at, vocab_size, noise_dtype)
    merged = merge_blocks(blocks, scaling.scale)

    def greedy() -> tuple[jax.Array, jax.Array]:
        return argmax_tokens(rows.logits, b, cutoff, first_argmax(blocks.max)), -merged.law.log_sum

    def random() -> tuple[jax.Array, jax.Array]:
        row = Row(rows.logits, b, scaling.scale, cutoff, merged.law)
        weights = block_weights(blocks, merged.law, scaling.scale)
        return draw_token(row, weights, noise, lambda _, logprobs: logprobs)

    token, logprob = jax.lax.cond(scaling.greedy, greedy, random)
    valid = scaling.valid & merged.finite
    out.token_ids[b] = jnp.where(valid, token, jnp.int32(-1))
    out.logprobs[b] = jnp.where(valid, logprob, jnp.float32(0))
    out.logsumexp[b] = row_logsumexp(merged.law, scaling.scale)


def _at(values: Any, b: jax.Array) -> jax.Array | None:
    return None if values is None else values[b]
