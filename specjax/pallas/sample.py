"""`gumbel_sample` in two launches: many programs reduce a row, one program draws its token.

    sample_reduce_kernel   maximum and sum of each block of 128 tokens; Gumbels of the blocks
    sample_draw_kernel     a block by Gumbel-max, then a token of it

No row is reduced twice, and none is copied.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import SampleArrays
from specjax.call_options import CallOptions
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import MaxSum, RowStatistics, row_logsumexp, row_statistics
from specjax.core.noise import SAMPLING_BLOCK, Hash, Words, address
from specjax.core.temperature import Temperature, parse_temperature
from specjax.pallas.blocks import (
    Partials,
    RowTile,
    load_blocks,
    load_padded,
    partials_shape,
    store_partials,
)
from specjax.pallas.gumbel_max import (
    BlockNoise,
    SamplingRow,
    draw_noise,
    draw_row_token,
    num_padded_blocks,
)
from specjax.pallas.kernel_config import KernelConfig, Tile
from specjax.pallas.launch import divmod_i32, launch, output
from specjax.pallas.split.shared_rows import load_first_token, unpadded
from specjax.pallas.threefry import make_threefry
from specjax.types import Sample


class _Reduced(NamedTuple):
    """Partials of the rows' blocks, and their Gumbels [B, N], or None if the draw makes them."""

    partials: Partials
    gumbels: Any


# The call's arrays and its reduced rows.
DrawOperands = tuple[SampleArrays, _Reduced]


class DrawnRow(NamedTuple):
    """The inputs of a row's draw: the row, its blocks, their noise, its temperature."""

    row: SamplingRow
    blocks: MaxSum
    noise: BlockNoise
    temperature: Temperature
    statistics: RowStatistics


def sample_rows(arrays: SampleArrays, options: CallOptions) -> Sample:
    """Draws one token per row.

    Args:
      arrays: one key, position, stream, temperature and cutoff per row.
      options: static.

    Returns:
      `Sample`.
    """
    rows = arrays.logits.shape[:1]
    sample = Sample(output(rows, jnp.int32), output(rows), output(rows))
    operands = (arrays, reduce_rows(arrays, options))
    return launch_draw(sample_draw_kernel, operands, sample, options)


def launch_draw(
    kernel: Callable[..., None], operands: DrawOperands, outputs: Any, options: CallOptions
) -> Any:
    """Launches a kernel of one program per row, and returns its outputs."""
    return launch(
        functools.partial(kernel, options=options),
        operands,
        outputs,
        num_programs=operands[0].logits.shape[0],
        num_warps=options.implementation.config(KernelConfig).num_draw_warps,
        interpret=options.implementation.interpret,
    )


def reduce_rows(arrays: SampleArrays, options: CallOptions) -> _Reduced:
    """Launches the reduction of rows, and returns the partials and Gumbels."""
    num_rows, vocab_size = arrays.logits.shape
    config = options.implementation.config(KernelConfig)
    interpret = options.implementation.interpret
    tile = config.reduce_tile(num_rows, vocab_size)
    num_tiles, num_blocks = tile.num_tiles(vocab_size), num_padded_blocks(vocab_size)
    num_splits = config.noise_splits(num_rows, num_blocks)
    return launch(
        functools.partial(
            sample_reduce_kernel, tile=tile, num_splits=num_splits, interpret=interpret
        ),
        arrays,
        _Reduced(
            partials_shape(num_rows, vocab_size, tile, has_tiles=False),
            output((num_rows, num_blocks), options.noise_dtype) if num_splits else None,
        ),
        num_programs=num_rows * (num_splits + num_tiles),
        num_warps=tile.num_warps,
        interpret=interpret,
    )


def sample_reduce_kernel(
    arrays: SampleArrays, out: _Reduced, *, tile: Tile, num_splits: int, interpret: bool
) -> None:
    """Writes m_i = max x and l_i = sum exp((x - m_i) / τ) of the blocks of a tile, or Gumbels.

    Grid: B * (num_splits + tiles) programs of 8 warps. The first B * num_splits write the Gumbels
    of the rows' blocks, each for a share of a row. Each of the others owns a tile of one row.
    Bytes per row: V * itemsize read; V / 128 * 8 written, and V / 128 * 4 or 8 for the Gumbels.
    Why tiles: a row needs many programs to be read at the memory's full rate. Why noise splits: the
    noise needs no logit, and the draw waits for it.
    Memory order: the programs of this launch do not wait for one another. The next launch begins to
    load after this one has ended. Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867: (m,
    l).
    """
    num_rows, vocab_size = arrays.logits.shape
    program = pl.program_id(0)
    tile_program = program - num_rows * num_splits

    @pl.when(tile_program >= 0)
    def _() -> None:
        b, tile_index = divmod_i32(tile_program, tile.num_tiles(vocab_size))
        scale = parse_temperature(arrays.temperature[b]).scale
        cutoff = _load_optional(arrays.cutoff, b)
        logits = unpadded(arrays.logits, arrays)
        row_tile = RowTile(logits, b, tile_index, scale, cutoff, tile, interpret)
        store_partials(row_tile, out.partials, b)

    if num_splits:

        @pl.when(tile_program < 0)
        def _() -> None:
            b, split = divmod_i32(program, num_splits)
            count = out.gumbels.shape[1] // num_splits
            threefry, dtype = make_threefry(interpret), out.gumbels.dtype
            at = _address(arrays, b, threefry)
            first = _first_block(arrays)
            base = split * count
            noise = draw_noise(at, base if first is None else base + first, count, dtype, threefry)
            block = base + jax.lax.iota(jnp.int32, count)
            plgpu.store(out.gumbels.at[b, block], noise.gumbels)


def sample_draw_kernel(operands: DrawOperands, out: Sample, *, options: CallOptions) -> None:
    """Writes one token of a row, drawn by two-level Gumbel-max, its log p and the row's logsumexp.

    Formula: block = argmax_i (log mass_i + g_i), token = argmax_{j in block} (log p_j + g_j); the
    argmax of the row where it is greedy.
    Grid: B programs of 8 warps; one owns a row.
    Bytes per row: V / 128 * 8 of partials read, V / 128 * 4 or 8 of Gumbels, and the logits of the
    drawn block; 12 written.
    Why one program: the choice of a block needs all of them, about a thousand, four per thread.
    Memory order: the previous launch has ended when it begins to load. It does not trigger the next
    launch early.
    Reference: Maddison et al., 2014, arXiv:1411.0030: Gumbel-max, and the maximum of a block.
    """
    b = pl.program_id(0)
    row, blocks, noise, temperature, statistics = load_row(operands, b, options)
    normalizer = statistics.normalizer
    token, logit = draw_row_token(row, blocks, temperature.greedy, noise)
    logprob = token_logprobs(logit, normalizer, temperature.scale)
    valid = temperature.valid & statistics.valid
    out.token_ids[b] = jnp.where(valid, token, jnp.int32(-1))
    out.logprobs[b] = jnp.where(valid, logprob, jnp.float32(0))
    out.logsumexp[b] = row_logsumexp(normalizer, temperature.scale)


def load_row(operands: DrawOperands, b: jax.Array, options: CallOptions) -> DrawnRow:
    """Loads the inputs of row b's draw; makes its noise if the reduction made none."""
    arrays, reduced = operands
    cutoff = _load_optional(arrays.cutoff, b)
    blocks = load_blocks(reduced.partials, b, arrays.logits.shape[1])
    threefry = make_threefry(options.implementation.interpret)
    first = _first_block(arrays)
    first_block = jnp.int32(0) if first is None else first
    draw_address = _address(arrays, b, threefry)
    if reduced.gumbels is None:
        num_blocks = num_padded_blocks(arrays.logits.shape[1])
        noise = draw_noise(draw_address, first_block, num_blocks, options.noise_dtype, threefry)
    else:
        gumbels = load_padded(reduced.gumbels, b, 0)
        noise = BlockNoise(draw_address, first_block, gumbels, threefry)
    temperature = parse_temperature(arrays.temperature[b])
    statistics = row_statistics(blocks, temperature.scale)
    row = SamplingRow(
        unpadded(arrays.logits, arrays),
        b,
        temperature.scale,
        cutoff,
        statistics.normalizer,
        load_first_token(arrays),
    )
    return DrawnRow(row, blocks, noise, temperature, statistics)


def _first_block(arrays: SampleArrays) -> jax.Array | None:
    """Returns the first block of a device's tokens; None where rows are whole."""
    first = load_first_token(arrays)
    return None if first is None else divmod_i32(first, SAMPLING_BLOCK)[0]


def _address(arrays: SampleArrays, b: jax.Array, threefry: Hash) -> Words:
    key = arrays.keys[b, 0], arrays.keys[b, 1]
    return address(key, arrays.positions[b], arrays.stream[b], threefry)


def _load_optional(values: Any, b: jax.Array) -> jax.Array | None:
    return None if values is None else values[b]
