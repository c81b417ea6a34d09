"""Attention of new tokens to a cache: the launches and their numbers of programs.

Few tokens of B < 4 requests (fused): each program prepares the queries that it reads, and a second
launch combines the splits of the cache.

    fused_attention_kernel  ->  combine_kernel

Else a first launch prepares queries, keys and values once. In the second launch the last program
of a tile combines its splits, unless that takes longer than a launch.

    prepare_qkv_kernel  ->  attention_kernel  (->  combine_kernel)

Axes: `B` requests, `T` new tokens, `T'` these and padding, `H` query heads, `G` key-value heads,
`S` cache slots, `D` head dimension.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.decoder.pallas.attention_kernels import (
    AttentionOperands,
    AttentionOutputs,
    FusedOutputs,
    attention_kernel,
    fused_attention_kernel,
)
from specjax.models.decoder.pallas.combine import CombineOperands, PartialSoftmax, combine_kernel
from specjax.models.decoder.pallas.qkv import PreparedQKV, num_token_tiles, prepare_qkv_kernel
from specjax.models.decoder.pallas.request_qkv import QKVOperands
from specjax.models.decoder.pallas.tilings import AttentionTiling
from specjax.models.decoder.shared_math import AttentionSpec, NormSpec
from specjax.pallas.launch import launch, output


class _Output(NamedTuple):
    """`y` [B, T', H, D], the output."""

    y: Any


def decode_attention(
    operands: QKVOperands,
    *,
    spec: AttentionSpec,
    norm: NormSpec,
    head_norm: NormSpec | None,
    tiling: AttentionTiling,
    interpret: bool,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Writes keys and values at their positions, and attends to all slots up to each token's own.

    Args:
      operands: arrays. Positions are distinct in a request, except for -1.
      spec: scale, window and soft cap.
      norm: the deferred norm of queries, keys and values.
      head_norm: of queries and keys, whose weights are operands; None if they have none.
      tiling: from `attention_tiling` for these shapes.
      interpret: run in Pallas' interpreter.

    Returns:
      [B, T', H * D], zeros from T on, and the cache with the tokens in it.
    """
    attend = _fused_attention if tiling.prepares_in_attention else _attention
    partials, y, cache = attend(operands, spec, norm, head_norm, tiling, interpret)
    y_shape = _output_shape(operands)
    batch, num_padded_tokens, num_query_heads, _ = y_shape.shape
    if y is None:
        assert partials is not None
        y = launch(
            functools.partial(
                combine_kernel,
                num_kv_heads=operands.keys.shape[1],
                is_causal=spec.is_causal,
                tiling=tiling,
            ),
            CombineOperands(partials, operands.positions),
            _Output(y_shape),
            num_programs=batch * num_padded_tokens * num_query_heads,
            num_warps=1,
            interpret=interpret,
        ).y
    return y.reshape(batch, num_padded_tokens, -1), cache


def _fused_attention(
    operands: QKVOperands,
    spec: AttentionSpec,
    norm: NormSpec,
    head_norm: NormSpec | None,
    tiling: AttentionTiling,
    interpret: bool,
) -> tuple[PartialSoftmax, None, tuple[jax.Array, jax.Array]]:
    """Returns the partial softmax of every split, no output yet, and the cache."""
    keys, values = operands.keys, operands.values
    num_request_kv_heads, num_partials = keys.shape[0] * keys.shape[1], tiling.num_splits + 1
    results = launch(
        functools.partial(
            fused_attention_kernel,
            spec=spec,
            norm=norm,
            head_norm=head_norm,
            interpret=interpret,
        ),
        operands,
        FusedOutputs(
            _partials_shape(operands, num_partials, tiling),
            keys,
            values,
        ),
        num_programs=num_request_kv_heads * num_partials,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    )
    return results.partials, None, (results.keys, results.values)


def _attention(
    operands: QKVOperands,
    spec: AttentionSpec,
    norm: NormSpec,
    head_norm: NormSpec | None,
    tiling: AttentionTiling,
    interpret: bool,
) -> tuple[PartialSoftmax | None, jax.Array | None, tuple[jax.Array, jax.Array]]:
    """Returns the partial softmax of every split, the output or None, and the cache.

    The output is None if `combine_kernel` is to write it.
    """
    keys, values, y_shape = operands.keys, operands.values, _output_shape(operands)
    (_, num_kv_heads, _, head_dim), (batch, num_tokens) = keys.shape, operands.positions.shape
    num_tiles, num_query_heads = batch * num_kv_heads * tiling.num_tiles, y_shape.shape[2]
    is_whole = tiling.num_splits == 1 and tiling.combines_in_attention
    prepared = launch(
        functools.partial(
            prepare_qkv_kernel,
            norm=norm,
            head_norm=head_norm,
            token_tile=tiling.prepared_tokens,
        ),
        operands,
        PreparedQKV(
            output((batch, num_tokens, num_query_heads, head_dim), keys.dtype),
            keys,
            values,
            output((num_tiles,), jnp.uint32),
        ),
        num_programs=batch * num_token_tiles(num_tokens) * (num_query_heads + num_kv_heads),
        num_warps=4,
        interpret=interpret,
    )
    results = launch(
        functools.partial(attention_kernel, spec=spec, tiling=tiling, interpret=interpret),
        AttentionOperands(
            prepared.queries,
            operands.positions,
            prepared.keys,
            prepared.values,
            prepared.counters,
            operands.rows,
        ),
        AttentionOutputs(
            None if is_whole else _partials_shape(operands, tiling.num_splits, tiling),
            y_shape if tiling.combines_in_attention else None,
            prepared.counters,
        ),
        num_programs=num_tiles * tiling.num_splits,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        interpret=interpret,
    )
    return results.partials, results.y, (prepared.keys, prepared.values)


def _partials_shape(
    operands: QKVOperands, num_partials: int, tiling: AttentionTiling
) -> PartialSoftmax:
    (_, num_kv_heads, _, head_dim), batch = operands.keys.shape, len(operands.positions)
    num_tiles = 1 if tiling.prepares_in_attention else tiling.num_tiles
    lead = (batch * num_kv_heads * num_tiles, num_partials, tiling.num_rows)
    return PartialSoftmax(output((*lead, head_dim)), output(lead), output(lead))


def _output_shape(operands: QKVOperands) -> Any:
    _, num_kv_heads, _, head_dim = operands.keys.shape
    batch, num_padded_tokens, num_heads = operands.parts.shape[1:4]
    num_query_heads = num_heads - 2 * num_kv_heads
    return output((batch, num_padded_tokens, num_query_heads, head_dim), operands.keys.dtype)
