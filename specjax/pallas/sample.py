"""`gumbel_sample` in two launches: many programs reduce a row, one draws its token."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.core.gumbel_max import first_argmax, token_logprobs
from specjax.core.logsumexp import block_logprobs, row_logsumexp, row_statistics
from specjax.core.noise import Words, address
from specjax.core.subnormal import flush_subnormals
from specjax.core.temperature import parse_temperature
from specjax.pallas.blocks import (
    Partials,
    Share,
    block_argmax,
    load_blocks,
    load_line,
    partials_like,
    store_partials,
)
from specjax.pallas.gumbel_max import Noise, Row, draw_noise, draw_token, num_noises, whole_noise
from specjax.pallas.launch import divide, launch, like
from specjax.pallas.tiles import DRAW_WARPS, Tile, num_parts_of_noise, row_tile
from specjax.typing import Sample

__all__ = ["sample_rows"]


class _Rows(NamedTuple):
    logits: Any
    key: Any
    position: Any
    stream: Any
    temperature: Any
    cutoff: Any

    def address(self, b: jax.Array) -> Words:
        return address((self.key[b, 0], self.key[b, 1]), self.position[b], self.stream[b])


class _Reduced(NamedTuple):
    partials: Partials
    noise: Any


class _Operands(NamedTuple):
    rows: _Rows
    reduced: _Reduced


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
    count, num_blocks = tile.count(vocab_size), num_noises(vocab_size)
    parts = num_parts_of_noise(size, num_blocks)
    rows = _Rows(logits, key, position, stream, temperature, cutoff)

    def reduce_kernel(rows: _Rows, out: _Reduced) -> None:
        # The programs of the noise come first: it waits for no logit, and the draw for it.
        number = pl.program_id(0)
        behind = number - size * parts

        @pl.when(behind >= 0)
        def _() -> None:
            _reduce(rows, out.partials, behind, tile, interpret)

        if parts:

            @pl.when(behind < 0)
            def _() -> None:
                b, part = divide(number, parts)
                num = num_blocks // parts
                noise = draw_noise(rows.address(b), part * num, num, noise_dtype)
                where = noise.first + jax.lax.iota(jnp.int32, num)
                plgpu.store(out.noise.at[b, where], noise.blocks)

    def draw_kernel(operands: _Operands, out: Sample) -> None:
        _draw(operands, out, noise_dtype)

    reduced = launch(
        reduce_kernel,
        rows,
        _Reduced(
            partials_like(size, vocab_size, tile, tiles=False),
            like((size, num_blocks), noise_dtype) if parts else None,
        ),
        num_programs=size * (parts + count),
        num_warps=tile.num_warps,
        interpret=interpret,
    )
    return launch(
        draw_kernel,
        _Operands(rows, reduced),
        Sample(like((size,), jnp.int32), like((size,)), like((size,))),
        num_programs=size,
        num_warps=DRAW_WARPS,
        interpret=interpret,
    )


def _reduce(rows: _Rows, out: Partials, number: jax.Array, tile: Tile, interpret: bool) -> None:
    b, part = divide(number, tile.count(rows.logits.shape[1]))
    scale = parse_temperature(rows.temperature[b]).scale
    share = Share(rows.logits, b, part, scale, _at(rows.cutoff, b), None)
    store_partials(share, out, b, tile, interpret)


def _draw(operands: _Operands, out: Sample, noise_dtype: Any) -> None:
    """Draws row b's token and writes its sample."""
    (rows, reduced), b = operands, pl.program_id(0)
    cutoff = _at(rows.cutoff, b)
    blocks = load_blocks(reduced.partials, b, rows.logits.shape[1])
    at = rows.address(b)
    if reduced.noise is None:
        noise = whole_noise(at, rows.logits.shape[1], noise_dtype)
    else:
        noise = Noise(at, jnp.int32(0), load_line(reduced.noise, b, 0))
    scaling = parse_temperature(rows.temperature[b])
    merged = row_statistics(blocks, scaling.scale)

    def greedy() -> tuple[jax.Array, jax.Array]:
        block = first_argmax(flush_subnormals(blocks.max))
        best = block_argmax(rows.logits, b, cutoff, block)
        return best, merged.normalizer.shift

    def random() -> tuple[jax.Array, jax.Array]:
        row = Row(rows.logits, b, scaling.scale, cutoff, merged.normalizer)
        weights = block_logprobs(blocks, merged.normalizer, scaling.scale)
        drawn = draw_token(row, weights, noise, lambda _, logprobs: logprobs)
        return drawn.token, drawn.logit

    token, logit = jax.lax.cond(scaling.greedy, greedy, random)
    logprob = token_logprobs(logit, merged.normalizer, scaling.scale)
    valid = scaling.valid & merged.valid
    out.token_ids[b] = jnp.where(valid, token, jnp.int32(-1))
    out.logprobs[b] = jnp.where(valid, logprob, jnp.float32(0))
    out.logsumexp[b] = row_logsumexp(merged.normalizer, scaling.scale)


def _at(values: Any, b: jax.Array) -> jax.Array | None:
    return None if values is None else values[b]
