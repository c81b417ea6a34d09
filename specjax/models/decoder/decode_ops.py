"""Operations of a decode step through the kernels: split-K products, deferred norms, attention.

Norms and split-K sums are lazy: between operations a row is a `DeferredNorm` and a product a
`PartialProduct`, and the next operation finishes them. If a kernel has no tiling for the shapes,
XLA runs that one operation.
Axes: `B` requests, `T` tokens with padding, `E` hidden, `N` of a product, `Q` split-K parts.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.implementation import Implementation
from specjax.models.decoder.attention import attend
from specjax.models.decoder.layers import RMSNorm, residual_add
from specjax.models.decoder.pallas.add_rms_norm import AddNormOperands, add_rms_norm, inv_rms
from specjax.models.decoder.pallas.attention import decode_attention
from specjax.models.decoder.pallas.matmul import fused_glu, glu_activation, split_k_matmul
from specjax.models.decoder.pallas.request_qkv import QKVOperands
from specjax.models.decoder.pallas.tilings import (
    INVARIANT_BLOCK_M,
    NUM_MULTIPROCESSORS,
    AttentionTiling,
    DecodeConfig,
    MatmulTiling,
    attention_tiling,
    glu_tiling,
    matmul_tiling,
    norm_tile,
    pad_to_mma,
)
from specjax.models.decoder.shared_math import AttentionSpec, NormSpec


class KernelChoice(NamedTuple):
    """Settings of the kernels of one decode step.

    Attributes:
      config: sizes other than the defaults.
      shared_memory_bytes: of a program.
      supports_pdl: whether a kernel can start before the previous one has ended (sm_90).
      interpret: run in Pallas' interpreter.
    """

    config: DecodeConfig
    shared_memory_bytes: int
    supports_pdl: bool
    interpret: bool


def kernel_choice(implementation: Implementation) -> KernelChoice:
    """Returns the kernels' settings by an implementation."""
    config, device = implementation.config(DecodeConfig), implementation.device_facts()
    return KernelChoice(
        config, device.shared_memory_bytes, device.supports_pdl, implementation.interpret
    )


class DeferredNorm(NamedTuple):
    """Rows of an RMSNorm, whose division by the root mean square may be deferred.

    Attributes:
      rows: [B, T, E].
      squares: f32[B, T, n], partial sums of squares; None where the rows are divided.
    """

    rows: jax.Array
    squares: jax.Array | None


class PartialProduct(NamedTuple):
    """A product in split-K parts, of rows whose norm may be deferred.

    Attributes:
      parts: [Q, B, T, N], whose sum over Q is the product.
      squares: as in `DeferredNorm`.
    """

    parts: jax.Array
    squares: jax.Array | None = None

    def reduce(self, norm: NormSpec | None = None) -> jax.Array:
        """Returns the product [B, T, N], in float32 if a sum or division was deferred.

        `norm` is the deferred one, read only if there are squares.
        """
        if self.parts.shape[0] == 1 and self.squares is None:
            return self.parts[0]
        total = jnp.sum(self.parts.astype(jnp.float32), axis=0)
        if self.squares is None:
            return total
        assert norm is not None
        squares = jnp.split(self.squares, self.squares.shape[-1], axis=-1)
        return total * inv_rms(squares, norm)


class QKVWeights(NamedTuple):
    """What follows the product of queries, keys and values in a kernel: a bias, and QK-norm.

    Attributes:
      bias: [(H + 2 * G) * D], or None.
      query_norm: [D], weight of the norm of each query, or None.
      key_norm: [D], weight of the norm of each key, or None.
      head_norm: constants of both norms, or None.
    """

    bias: jax.Array | None = None
    query_norm: jax.Array | None = None
    key_norm: jax.Array | None = None
    head_norm: NormSpec | None = None


class Addend(NamedTuple):
    """A product that is added to the residual stream.

    Attributes:
      parts: [Q, B, T, E], whose sum over Q is the product.
      bias: [E], of the product, or None.
      norm: of the product with its bias, or None.
    """

    parts: jax.Array
    bias: jax.Array | None = None
    norm: RMSNorm | None = None

    def add_to(self, x: jax.Array) -> jax.Array:
        """Returns the stream [B, T, E] with the product, which has no bias, added by XLA."""
        y = PartialProduct(self.parts).reduce().astype(x.dtype)
        return residual_add(x, y, self.norm)


def can_defer_norm(x: Any) -> bool:
    """Returns whether the division of a norm of rows may follow their product.

    Not in float16: residual streams reach thousands, and undivided products would overflow.
    """
    return x.dtype != jnp.float16


def begin_norm(
    x: jax.Array, addend: Addend | None, norm: RMSNorm, choice: KernelChoice
) -> tuple[jax.Array, DeferredNorm]:
    """Returns the stream with a product added, and a norm of it, deferred where possible.

    Args:
      x: [B, T, E], the residual stream.
      addend: the product, without a bias unless `can_defer_norm` holds; None adds nothing.
      norm: that begins.
      choice: of the kernels.
    """
    if not can_defer_norm(x):
        x = x if addend is None else addend.add_to(x)
        return x, DeferredNorm(norm(x), None)
    operands, added_norm = AddNormOperands(x, None, norm.weight[...]), None
    if addend is not None:
        operands = operands._replace(parts=addend.parts, bias=addend.bias)
        if addend.norm is not None:
            operands = operands._replace(added_weight=addend.norm.weight[...])
            added_norm = addend.norm.spec
    outputs = add_rms_norm(
        operands,
        offset=norm.spec.offset,
        tile=norm_tile(math.prod(x.shape[:-1]), x.shape[-1], added_norm is not None, choice.config),
        added_norm=added_norm,
        interpret=choice.interpret,
    )
    stream = x if addend is None else outputs.x
    return stream, DeferredNorm(outputs.weighted_rows, outputs.squares)


def matmul(
    x: jax.Array,
    matrix: jax.Array,
    choice: KernelChoice,
    *,
    next_is_kernel: bool = False,
    is_summed: bool = False,
) -> jax.Array:
    """Returns the product of [B, T, E] with [E, N] as parts [Q, B, T, N].

    Args:
      x: rows.
      matrix: the right factor.
      choice: of the kernels.
      next_is_kernel: whether only a kernel of this library reads the parts, which may start early.
      is_summed: whether products of other devices are added, so that no part is rounded.
    """
    tiling = product_tiling(x, matrix, choice)
    if tiling is None:
        is_many = math.prod(x.shape[:2]) > choice.config.max_matmul_rows
        if next_is_kernel and is_many and num_xla_parts(x, matrix) == 2:
            return _halves(x, matrix)
        dtype = jnp.float32 if is_summed else None
        return jnp.matmul(x, matrix, preferred_element_type=dtype)[None]
    pdl = next_is_kernel and choice.supports_pdl
    return split_k_matmul(x, matrix, tiling=tiling, pdl=pdl, interpret=choice.interpret)


def matmul_table(x: jax.Array, table: jax.Array, choice: KernelChoice) -> jax.Array:
    """Returns the product of [B, T, E] with the transpose of a table as parts [Q, B, T, V].

    Args:
      x: rows, of which none may depend on another.
      table: [V, E], of an output layer.
      choice: of the kernels.
    """
    shape = jax.ShapeDtypeStruct(table.shape[::-1], table.dtype)
    tiling = product_tiling(x, shape, choice, is_table=True)
    assert tiling is not None  # `row_invariant` refuses a table that no tile divides.
    interpret = choice.interpret
    return split_k_matmul(x, table, tiling=tiling, pdl=False, interpret=interpret, is_table=True)


def num_xla_parts(x: jax.Array, matrix: jax.Array) -> int:
    """Returns 2 if tiles of 128 x 128 need at most three quarters of the multiprocessors; else 1.

    K has to divide by 256. XLA would split such a product along K, too, and launch a kernel that
    adds the parts. On an H100 a down projection of an 8B model takes 53.6 us in two parts for 62.0
    at 256 rows, and 85.2 for 82.1 at 512. Queries, keys and values of 256 rows were split by XLA.
    """
    (*lead, size), width = x.shape, matrix.shape[1]
    num_tiles = -(-math.prod(lead) // 128) * -(-width // 128)
    return 2 if 4 * num_tiles <= 3 * NUM_MULTIPROCESSORS and size % 256 == 0 else 1


def _halves(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns the products of both halves of the axis that is summed, f32[2, B, T, N]."""
    (*lead, size), width = x.shape, matrix.shape[1]
    rows = x.reshape(math.prod(lead), 2, size // 2)
    matrix = matrix.reshape(2, size // 2, width)
    parts = jnp.einsum("rqk,qkn->qrn", rows, matrix, preferred_element_type=jnp.float32)
    return parts.reshape(2, *lead, width)


def glu(
    x: DeferredNorm,
    gate_up: jax.Array,
    down: jax.Array,
    choice: KernelChoice,
    *,
    norm: NormSpec,
    activation: Callable[[jax.Array], jax.Array],
    next_is_kernel: bool,
    is_summed: bool,
) -> jax.Array:
    """Returns (activation(x @ gate) * (x @ up)) @ down as parts [Q, B, T, E].

    Args:
      x: its input.
      gate_up: [E, 2 * I], the gate's columns, then the up projection's.
      down: [I, E].
      choice: of the kernels.
      norm: of the input.
      activation: of the gate.
      next_is_kernel: as in `matmul`.
      is_summed: as in `matmul`.
    """
    tiling = product_tiling(x.rows, gate_up, choice, is_gated=True)
    if tiling is None:
        y = glu_activation(
            x.rows @ gate_up,
            x.squares,
            norm=norm,
            activation=activation,
            dtype=x.rows.dtype,
            interpret=choice.interpret,
        )
    else:
        # XLA's own product does not wait as a kernel of ours does.
        next_waits = product_tiling(x.rows, down, choice) is not None
        y = fused_glu(
            *x,
            gate_up,
            norm=norm,
            activation=activation,
            tiling=tiling,
            pdl=next_waits and choice.supports_pdl,
            interpret=choice.interpret,
        )
    return matmul(y, down, choice, next_is_kernel=next_is_kernel, is_summed=is_summed)


def attention(
    qkv: PartialProduct,
    cos_sin: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: Any,
    choice: KernelChoice,
    *,
    spec: AttentionSpec,
    norm: NormSpec,
    weights: QKVWeights,
) -> tuple[jax.Array, Any]:
    """Writes keys and values at their positions, and attends to all slots up to each token's own.

    Args:
      qkv: [B, T', (H + 2 * G) * D], queries, keys and values, none of them rotated; rows from T on
        are padding.
      cos_sin: of the rotary embeddings, two f32[B, T, 1, D / 2].
      positions: i32[B, T], distinct in a request except for -1, which is no token.
      cache: keys and values, as in `attention.attend`.
      choice: of the kernels.
      spec: scale, window and soft cap.
      norm: the deferred norm of `qkv`.
      weights: that `qkv` lacks. Only where `kv_tiling` has a tiling.

    Returns:
      [B, T', H * D], zeros from T on, and the cache with the tokens in it.
    """
    keys, values, *rows = cache
    parts = qkv.parts.reshape(*qkv.parts.shape[:3], -1, keys.shape[3])
    tiling = kv_tiling(parts.shape[2:4], positions.shape, cache, choice)
    if tiling is None:
        assert all(part is None for part in weights)
        squares = None if qkv.squares is None else qkv.squares[:, :, None]
        heads = PartialProduct(parts, squares).reduce(norm).astype(keys.dtype)
        tokens, padded = positions.shape[1], heads.shape[1]
        y, cache = attend(heads[:, :tokens], cos_sin, positions, cache, spec=spec)
        return jnp.pad(y, ((0, 0), (0, padded - tokens), (0, 0))), cache
    cos, sin = (x[:, :, 0] for x in cos_sin)
    operands = QKVOperands(parts, qkv.squares, cos, sin, positions.astype(jnp.int32), keys, values)
    if rows:
        operands = operands._replace(rows=rows[0])
    operands = operands._replace(query_norm=weights.query_norm, key_norm=weights.key_norm)
    if weights.bias is not None:
        operands = operands._replace(bias=weights.bias.reshape(parts.shape[3:]))
    return decode_attention(
        operands,
        spec=spec,
        norm=norm,
        head_norm=weights.head_norm,
        tiling=tiling,
        interpret=choice.interpret,
    )


def kv_tiling(
    rows: tuple[int, ...], positions: tuple[int, ...], cache: Any, choice: KernelChoice
) -> AttentionTiling | None:
    """Returns the tiling of attention, or None if XLA attends.

    Args:
      rows: (T', H + 2 * G), of the projection.
      positions: (B, T).
      cache: keys and values, as in `attention.attend`.
      choice: of the kernels.

    Raises:
      ValueError: if XLA would attend, and a row's bits may depend on no other row.
    """
    keys, _, *cache_rows = cache
    config = choice.config
    if cache_rows:
        # A request may attend to what another one of the same launch writes.
        config = dataclasses.replace(config, prepares_in_attention=False)
    queries_per_kv = rows[1] // keys.shape[1] - 2
    tiling = attention_tiling(
        positions,
        keys.shape,
        num_padded_tokens=rows[0],
        queries_per_kv=queries_per_kv,
        itemsize=keys.dtype.itemsize,
        shared_memory_bytes=choice.shared_memory_bytes,
        config=config,
    )
    if tiling is None and config.row_invariant:
        raise ValueError(
            f"The kernels have no tiling for {queries_per_kv} queries of {keys.shape[3]} numbers "
            "to a key; row_invariant needs at most 128 queries, and tiles that fit shared memory."
        )
    return tiling


def product_tiling(
    x: Any, matrix: Any, choice: KernelChoice, *, is_gated: bool = False, is_table: bool = False
) -> MatmulTiling | None:
    """Returns the tiling of x @ matrix, of a gate's if `is_gated`; None if XLA multiplies.

    `is_table` is as in `matmul_tiling`.

    Raises:
      ValueError: if XLA would multiply, and a row's bits may depend on no other row.
    """
    rows, (size, width) = x.shape[0] * x.shape[1], matrix.shape
    is_invariant = choice.config.row_invariant
    tiling, more = None, (x.dtype.itemsize, choice.shared_memory_bytes)
    if x.dtype == matrix.dtype and (is_invariant or rows <= choice.config.max_matmul_rows):
        few = min(rows, 64) if is_invariant else rows
        if is_gated:
            tiling = glu_tiling(few, size, width // 2, *more)
        else:
            tiling = matmul_tiling(few, size, width, *more, is_table=is_table)
    if not is_invariant:
        # Where a tile's rows are half a line of memory, the kernels were not timed next to XLA.
        return None if size * x.dtype.itemsize % 128 else tiling
    if tiling is None:
        raise ValueError(
            f"The kernels have no tile that divides a matrix of {size} x {width} numbers; "
            "row_invariant needs multiples of 32."
        )
    # All but the rows of a tile follows from the matrix: up to 64 rows have one tiling. As right
    # operands rows have the same sums in a tile of 16 as in one of 128.
    block_m = pad_to_mma(min(rows, INVARIANT_BLOCK_M))
    row_bytes = (block_m + (1 + is_gated) * tiling.block_n) * x.dtype.itemsize
    most = max(1, choice.shared_memory_bytes // (tiling.block_k * row_bytes))
    return tiling._replace(swap_ab=True, block_m=block_m, num_stages=min(tiling.num_stages, most))
