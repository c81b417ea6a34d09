"""Products of a decode step's few rows with a matrix that is read once.

`split_k_matmul` stores partial sums. `fused_glu` multiplies with a gate and an up projection, and
applies the activation. With at most 128 rows the time is that of reading the matrix. So
`tilings.matmul_tiling` and `tilings.glu_tiling` keep all of the memory busy: about one program per
multiprocessor, split along K if the columns alone give fewer. XLA multiplies more rows, and
`glu_activation` follows its product with gate and up.
Axes: `R` rows, `M` these and padding, `E` = K, the axis that is summed, `N` columns, `Q` split-K
parts.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specjax.models.decoder.pallas.add_rms_norm import inv_rms, load_squares
from specjax.models.decoder.pallas.tilings import GLU_TILE, MatmulTiling
from specjax.models.decoder.shared_math import NormSpec
from specjax.pallas.launch import divmod_i32, dot, launch, launch_dependents, output


class MatmulOperands(NamedTuple):
    """References.

    Attributes:
      rows: [R, E].
      matrix: [E, N]; of an output layer [N, E].
      squares: f32[R, n], sums of squares of the rows' deferred norm; None if there is none.
    """

    rows: Any
    matrix: Any
    squares: Any = None


class SplitKParts(NamedTuple):
    """`parts` f32[Q, R, N], whose sum over Q is the product."""

    parts: Any


class GLUOutput(NamedTuple):
    """`y` [R, N / 2]."""

    y: Any


class ActivationOperands(NamedTuple):
    """References.

    Attributes:
      gate_up: [R, N], the gate's columns, then the up projection's, undivided.
      squares: f32[R, n], sums of squares of the rows' deferred norm; None if there is none.
    """

    gate_up: Any
    squares: Any


def split_k_matmul_kernel(
    operands: MatmulOperands,
    out: SplitKParts,
    *,
    tiling: MatmulTiling,
    pdl: bool,
    is_table: bool = False,
) -> None:
    """Writes parts[q] = rows[:, K_q] @ matrix[K_q, tile] for one tile and one range K_q of K.

    Grid: (N / block_n) * split_k programs; one owns block_n columns and every row.
    Bytes: the matrix once, E * N * itemsize; the rows N / block_n times, from the L2 cache;
    R * N * split_k * 4 written.
    Why split-K: N / block_n tiles are fewer than the multiprocessors, and one without a tile would
    leave memory bandwidth unused. The reader of the parts adds them, which saves a launch.
    Memory order: loads begin after the previous launch has ended. With `pdl` a program executes
    `griddepcontrol.launch_dependents` after its last load and before its store. The next kernel may
    then start; its first instruction waits until all of this one's stores are visible.
    Reference: Hoque et al., 2024, arXiv:2402.00025: split-K for few rows in Triton.

    Args:
      operands: references.
      out: references.
      tiling: block sizes.
      pdl: whether the next kernel may start early. Only kernels of this library may then read the
        result: XLA's may load supposed constants before they wait.
      is_table: whether the matrix is [N, E].
    """
    num_tiles = out.parts.shape[2] // tiling.block_n
    program, rows = _tile_rows(operands, tiling)
    split, tile_index = divmod_i32(program, num_tiles)
    begin, end = (_first_step(operands, split + i, tiling) for i in (0, 1))
    start = tile_index * tiling.block_n
    (total,) = _accumulate(operands, rows, [start], begin, end, tiling, is_table)
    split = launch_dependents(split) if pdl else split
    _store_tile(out.parts, (split,), rows, start, total, tiling)


def fused_glu_kernel(
    operands: MatmulOperands,
    out: GLUOutput,
    *,
    tiling: MatmulTiling,
    norm: NormSpec,
    activation: Callable[[jax.Array], jax.Array],
    pdl: bool,
) -> None:
    """Writes y = activation(r * rows @ gate) * (r * rows @ up) for one tile; r = 1 / rms(x).

    The matrix is [gate, up], N / 2 columns each; r is the deferred norm, 1 if there is none.
    Grid: (N / 2) / block_n programs; one owns block_n columns of gate, those of up, and every row.
    Bytes: the matrix once, E * N * itemsize; the rows N / 2 / block_n times, from the L2 cache;
    R * N / 2 * itemsize written.
    Why no split-K: the activation needs the whole sum of the gate.
    Memory order: as in `split_k_matmul_kernel`. Reference: Shazeer, 2020, arXiv:2002.05202: GLU.

    Args:
      operands: references.
      out: references.
      tiling: block sizes; `split_k` is 1.
      norm: the deferred norm.
      activation: of the gate, in float32.
      pdl: whether the next kernel may start early, as in `split_k_matmul_kernel`.
    """
    size, width = operands.rows.shape[1], out.y.shape[1]
    tile_index, rows = _tile_rows(operands, tiling)
    # Loaded before the matrix and used after it, so that no operation waits for it.
    squares = None
    if operands.squares is not None:
        squares = load_squares(operands.squares, rows.loaded)
    starts = [tile_index * tiling.block_n, tile_index * tiling.block_n + width]
    num_steps = jnp.int32(size // tiling.block_k)
    gates, ups = _accumulate(operands, rows, starts, jnp.int32(0), num_steps, tiling)
    if squares is not None:
        factors = inv_rms(squares, norm)
        factors = factors[None] if tiling.swap_ab else factors[:, None]
        gates, ups = gates * factors, ups * factors
    tile_index = launch_dependents(tile_index) if pdl else tile_index
    _store_tile(out.y, (), rows, tile_index * tiling.block_n, activation(gates) * ups, tiling)


def glu_activation_kernel(
    operands: ActivationOperands,
    out: GLUOutput,
    *,
    norm: NormSpec,
    activation: Callable[[jax.Array], jax.Array],
) -> None:
    """Writes y = activation(r * gate) * (r * up) for one tile of a row; r = 1 / rms(x).

    Grid: R * tiles programs of 4 warps; one owns 1024 columns of one row.
    Bytes per row: N * itemsize read, N / 2 * itemsize written.
    Why a launch: XLA takes two more where the norm is deferred, for its sum and its root.
    Memory order: loads begin after XLA's product has ended. It triggers no launch early, because
    XLA's next product does not wait.
    Reference: Shazeer, 2020, arXiv:2002.05202: GLU.

    Args:
      operands: references.
      out: references.
      norm: the deferred norm.
      activation: of the gate, in float32.
    """
    width = out.y.shape[1]
    row, tile = divmod_i32(pl.program_id(0), GLU_TILE.num_tiles(width))
    column = tile * GLU_TILE.size + jax.lax.iota(jnp.int32, GLU_TILE.size)
    inside = column < width
    gate, up = (
        plgpu.load(
            operands.gate_up.at[row, start + column],
            mask=inside,
            other=jnp.zeros((), operands.gate_up.dtype),
        ).astype(jnp.float32)
        for start in (0, width)
    )
    if operands.squares is not None:
        factor = inv_rms(load_squares(operands.squares, row), norm)
        gate, up = gate * factor, up * factor
    plgpu.store(out.y.at[row, column], (activation(gate) * up).astype(out.y.dtype), mask=inside)


class _TileRows(NamedTuple):
    """Rows i32[M] of a tile: their numbers, and those to load, which repeat at the end."""

    number: jax.Array
    loaded: jax.Array


def _tile_rows(operands: MatmulOperands, tiling: MatmulTiling) -> tuple[jax.Array, _TileRows]:
    """Returns the program's number among those of its tile of rows, and the tile's rows.

    Tiles of rows that read the same part of the matrix are neighbours, so that one alone waits for
    memory. Padding repeats rows, so that a load needs no mask.
    """
    num_rows = operands.rows.shape[0]
    num_tiles = _num_row_tiles(num_rows, tiling)
    program, number = pl.program_id(0), jax.lax.iota(jnp.int32, tiling.block_m)
    if num_tiles > 1:
        program, tile = divmod_i32(program, num_tiles)
        number += tile * tiling.block_m
    return program, _TileRows(number, jax.lax.rem(number, jnp.int32(num_rows)))


def _num_row_tiles(num_rows: int, tiling: MatmulTiling) -> int:
    """Returns the number of tiles of R rows."""
    return -(-num_rows // tiling.block_m)


def _first_step(operands: MatmulOperands, split: jax.Array, tiling: MatmulTiling) -> jax.Array:
    """Returns the first step along K of a split; splits differ by at most one step."""
    return divmod_i32(split * (operands.rows.shape[1] // tiling.block_k), tiling.split_k)[0]


def _accumulate(
    operands: MatmulOperands,
    rows: _TileRows,
    starts: list[jax.Array],
    begin: jax.Array,
    end: jax.Array,
    tiling: MatmulTiling,
    is_table: bool = False,
) -> list[jax.Array]:
    """Returns the sums over steps `begin` to `end` along K, of the tiles of columns at `starts`.

    Each is f32[M, block_n], or f32[block_n, M] with swapped operands.
    """
    num_rows, zero = operands.rows.shape[0], jnp.zeros((), operands.rows.dtype)
    row, column = rows.loaded, jax.lax.iota(jnp.int32, tiling.block_n)
    offset = jax.lax.iota(jnp.int32, tiling.block_k)
    shape = (row.shape[0], tiling.block_n)
    # Padding reads nothing here: every program reads all rows, whose lines lie in a few places.
    is_row = jnp.broadcast_to((rows.number < num_rows)[:, None], (row.shape[0], tiling.block_k))
    mask, other = (None, None) if num_rows % row.shape[0] == 0 else (is_row, zero)

    def place(n: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        return ((n + column)[:, None], k[None]) if is_table else (k[:, None], (n + column)[None])

    def product(x: jax.Array, tile: jax.Array) -> jax.Array:
        axis = 1 if is_table else 0
        return dot(tile, x, (axis, 1)) if tiling.swap_ab else dot(x, tile, (1, axis))

    def step(i: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        k = i * tiling.block_k + offset
        x = plgpu.load(operands.rows.at[row[:, None], k[None]], mask=mask, other=other)
        tiles = [plgpu.load(operands.matrix.at[place(n, k)]) for n in starts]
        return [y + product(x, tile) for y, tile in zip(totals, tiles, strict=True)]

    zeros = jnp.zeros(shape[::-1] if tiling.swap_ab else shape, jnp.float32)
    return jax.lax.fori_loop(begin, end, step, [zeros for _ in starts])


def _store_tile(
    reference: Any,
    lead: tuple[Any, ...],
    rows: _TileRows,
    start: jax.Array,
    x: jax.Array,
    tiling: MatmulTiling,
) -> None:
    num_rows, row = reference.shape[-2], rows.number
    column = start + jax.lax.iota(jnp.int32, tiling.block_n)
    if tiling.swap_ab:
        row, column = row[None], column[:, None]
    else:
        row, column = row[:, None], column[None]
    inside = jnp.broadcast_to(row < num_rows, x.shape)
    plgpu.store(reference.at[(*lead, row, column)], x.astype(reference.dtype), mask=inside)


def split_k_matmul(
    x: jax.Array,
    matrix: jax.Array,
    *,
    tiling: MatmulTiling,
    pdl: bool,
    interpret: bool,
    is_table: bool = False,
) -> jax.Array:
    """Returns the product as split-K parts, f32[Q, B, T', N].

    Args:
      x: [B, T', E].
      matrix: [E, N]; with `is_table` [N, E].
      tiling: block sizes.
      pdl: whether the next kernel may start early, as in `split_k_matmul_kernel`.
      interpret: run in Pallas' interpreter.
      is_table: whether the matrix is an output layer's table.
    """
    *lead, size = x.shape
    num_rows, width = math.prod(lead), matrix.shape[0 if is_table else 1]
    kernel = functools.partial(
        split_k_matmul_kernel, tiling=tiling, pdl=pdl and not interpret, is_table=is_table
    )
    parts = launch(
        kernel,
        MatmulOperands(x.reshape(num_rows, size), matrix),
        SplitKParts(output((tiling.split_k, num_rows, width))),
        num_programs=width // tiling.block_n * tiling.split_k * _num_row_tiles(num_rows, tiling),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    ).parts
    return parts.reshape(tiling.split_k, *lead, width)


def fused_glu(
    x: jax.Array,
    squares: jax.Array | None,
    matrix: jax.Array,
    *,
    norm: NormSpec,
    activation: Callable[[jax.Array], jax.Array],
    tiling: MatmulTiling,
    pdl: bool,
    interpret: bool,
) -> jax.Array:
    """Returns activation(gate) * up of rows, [B, T', I].

    Args:
      x: [B, T', E].
      squares: f32[B, T', n], sums of squares of the rows' deferred norm; None if there is none.
      matrix: [E, 2 * I], the gate's columns, then the up projection's.
      norm: the deferred norm.
      activation: of the gate, in float32.
      tiling: block sizes.
      pdl: whether the next kernel may start early, as in `split_k_matmul_kernel`.
      interpret: run in Pallas' interpreter.
    """
    *lead, size = x.shape
    width, num_rows = matrix.shape[1] // 2, math.prod(lead)
    squares = None if squares is None else squares.reshape(num_rows, -1)
    kernel = functools.partial(
        fused_glu_kernel,
        tiling=tiling,
        norm=norm,
        activation=activation,
        pdl=pdl and not interpret,
    )
    y = launch(
        kernel,
        MatmulOperands(x.reshape(num_rows, size), matrix, squares),
        GLUOutput(output((num_rows, width), x.dtype)),
        num_programs=width // tiling.block_n * _num_row_tiles(num_rows, tiling),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    ).y
    return y.reshape(*lead, width)


def glu_activation(
    gate_up: jax.Array,
    squares: jax.Array | None,
    *,
    norm: NormSpec,
    activation: Callable[[jax.Array], jax.Array],
    dtype: Any,
    interpret: bool,
) -> jax.Array:
    """Returns activation(gate) * up of rows, [B, T', I].

    Args:
      gate_up: [B, T', 2 * I], the product's gate, then its up projection, undivided.
      squares: f32[B, T', n], sums of squares of the rows' deferred norm; None if there is none.
      norm: the deferred norm.
      activation: of the gate, in float32.
      dtype: of the result.
      interpret: run in Pallas' interpreter.
    """
    *lead, columns = gate_up.shape
    num_rows, width = math.prod(lead), columns // 2
    squares = None if squares is None else squares.reshape(num_rows, -1)
    y = launch(
        functools.partial(glu_activation_kernel, norm=norm, activation=activation),
        ActivationOperands(gate_up.reshape(num_rows, columns), squares),
        GLUOutput(output((num_rows, width), dtype)),
        num_programs=num_rows * GLU_TILE.num_tiles(width),
        num_warps=GLU_TILE.num_warps,
        interpret=interpret,
    ).y
    return y.reshape(*lead, width)
