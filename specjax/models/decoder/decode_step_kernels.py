"""A step of few tokens through a decoder or a layer, or one product, by the kernels.

Reads the parameters of the plain steps in `transformer` and `layers`, and returns equal arrays.
Between layers the residual stream has begun its next norm.
Axes: `B` requests, `T` new tokens, `E` hidden, `D` head dimension.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from specjax.implementation import Implementation
from specjax.models.decoder.decode_ops import (
    Addend,
    DeferredNorm,
    KernelChoice,
    PartialProduct,
    QKVWeights,
    attention,
    begin_norm,
    can_defer_norm,
    glu,
    kernel_choice,
    kv_tiling,
    matmul,
    matmul_table,
    product_tiling,
)
from specjax.models.decoder.layers import (
    Attention,
    Layer,
    RMSNorm,
    linear,
    sum_shares,
    summed_linear,
)

_MIN_ROWS = 8
# Maximum of extra numbers, beyond one product, that devices exchange as unsummed parts: 256 KB. On
# two H200s that psum takes 1.6 us longer than one of 16 KB; the launch that adds parts takes 1.7.
_MAX_SENT_NUMBERS = 1 << 16


def _num_padding_tokens(batch: int, tokens: int) -> int:
    """Returns the number of padding tokens per request, so that XLA multiplies 8 rows.

    XLA reads weights at half the rate for fewer rows.
    """
    return max(-(-_MIN_ROWS // batch) - tokens, 0)


def _is_in_kernels(layer: Layer, x: Any, choice: KernelChoice) -> bool:
    """Returns whether kernels run all products of a layer, and pad rows to their tiles."""
    attention, mlp = layer.attention, layer.mlp
    tilings = [product_tiling(x, mlp.gate_up[...], choice, is_gated=True)]
    for matrix in (attention.qkv, attention.out, mlp.down):
        tilings.append(product_tiling(x, matrix[...], choice))
    return None not in tilings and attention.out_bias is None and can_defer_norm(x)


def decode_step(
    implementation: Implementation,
    model: Any,
    token_ids: jax.Array,
    positions: jax.Array,
    cache: Any,
    *,
    taps: tuple[int, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...], Any]:
    """Returns hidden states [B, T, E] after the last norm, taps and cache, through the kernels.

    Args:
      implementation: resolved, and not plain JAX.
      model: a `Transformer`.
      token_ids: i32[B, T].
      positions: i32[B, T], -1 for no token.
      cache: a pair of keys and values for each layer.
      taps: as in `run_decoder`.
    """
    choice, tokens = kernel_choice(implementation), token_ids.shape[1]
    rows = jax.ShapeDtypeStruct((*token_ids.shape, 1), model.embedding[...].dtype)
    padding = 0
    if choice.config.row_invariant and not can_defer_norm(rows):
        # XLA would compute the norms: their order follows from the number of rows.
        raise ValueError("row_invariant is True in float16; it needs bfloat16 or float32.")
    if not all(_is_in_kernels(layer, rows, choice) for layer in model.layers):
        padding = _num_padding_tokens(*token_ids.shape)
    x = model.embed(jnp.pad(token_ids, ((0, 0), (0, padding))))
    cos_sin, written = model.cos_sin(positions), []
    norms: list[RMSNorm] = [*(layer.attention_norm for layer in model.layers), model.norm]
    (_, normed), states = begin_norm(x, None, norms[0], choice), [x]
    for layer, entry, norm in zip(model.layers, cache, norms[1:], strict=True):
        operands = (x, normed, cos_sin[layer.rope], positions, entry)
        x, normed, entry = _layer(choice, *nnx.split((layer, norm)), *operands)
        written.append(entry)
        states.append(x)
    last = PartialProduct(normed.rows[None], normed.squares)
    hidden = last.reduce(model.norm.spec).astype(x.dtype)[:, :tokens]
    return hidden, tuple(states[tap][:, :tokens] for tap in taps), tuple(written)


# JAX traces an inner `jit` once for equal layers, and lowers it to one function; XLA inlines it.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _layer(
    choice: KernelChoice,
    graph: Any,
    state: Any,
    x: jax.Array,
    normed: DeferredNorm,
    cos_sin: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: Any,
) -> tuple[jax.Array, DeferredNorm, Any]:
    """Returns the stream after a layer, its following norm, and the cache."""
    layer, norm = nnx.merge(graph, state)
    x, parts, cache = _advance(layer, choice, x, normed, cos_sin, positions, cache)
    return *begin_norm(x, Addend(parts, norm=layer.mlp_out_norm), norm, choice), cache


def layer_step(
    implementation: Implementation,
    layer: Layer,
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: Any,
    rows: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Returns the residual stream [B, T, E] after one layer, and its cache, through the kernels.

    Args:
      implementation: resolved, and not plain JAX.
      layer: the layer.
      x: [B, T, E], the residual stream.
      cos_sin: of the layer's rotary embeddings.
      positions: i32[B, T], -1 for no token.
      cache: keys and values.
      rows: the input of attention instead of the norm of x, or None.
    """
    choice = kernel_choice(implementation)
    if rows is None:
        _, normed = begin_norm(x, None, layer.attention_norm, choice)
    else:
        normed = DeferredNorm(rows, None)
    # XLA reads the parts here: no kernel of this library follows.
    x, parts, cache = _advance(
        layer, choice, x, normed, cos_sin, positions, cache, next_is_kernel=False
    )
    return Addend(parts, norm=layer.mlp_out_norm).add_to(x), cache


def product(implementation: Implementation, x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns few rows [B, T, E] times a matrix [E, N], in the rows' dtype, through a kernel.

    Args:
      implementation: resolved, and not plain JAX.
      x: rows.
      matrix: the right factor.
    """
    batch, tokens = x.shape[:2]
    padding = _num_padding_tokens(batch, tokens)
    rows = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
    y = PartialProduct(matmul(rows, matrix, kernel_choice(implementation))).reduce()
    return y.astype(x.dtype)[:, :tokens]


def table_product(implementation: Implementation, x: jax.Array, table: jax.Array) -> jax.Array:
    """Returns rows [B, T, E] times the transpose of a table [V, E], in the rows' dtype.

    Args:
      implementation: resolved, and not plain JAX.
      x: rows.
      table: of an output layer.
    """
    parts = matmul_table(x, table, kernel_choice(implementation))
    # A chain of additions has one order for any number of rows.
    return sum(parts[1:], parts[0]).astype(x.dtype)


def _advance(
    layer: Layer,
    choice: KernelChoice,
    x: jax.Array,
    normed: DeferredNorm,
    cos_sin: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    cache: Any,
    next_is_kernel: bool = True,
) -> tuple[jax.Array, jax.Array, Any]:
    """Returns the stream before the MLP is added, the MLP's parts, and the cache.

    Args:
      layer: the layer.
      choice: of the kernels.
      x: [B, T, E], the residual stream.
      normed: of `attention_norm`.
      cos_sin: of the layer's rotary embeddings.
      positions: i32[B, T].
      cache: keys and values.
      next_is_kernel: whether `begin_norm` adds the parts.
    """
    norm, mlp = layer.attention_norm.spec, layer.mlp
    qkv, weights = _project(layer.attention, choice, normed, positions, cache, norm)
    y, cache = attention(
        qkv,
        cos_sin,
        positions,
        cache,
        choice,
        spec=layer.attention.spec,
        norm=norm,
        weights=weights,
    )
    out, bias = layer.attention.out, layer.attention.out_bias
    axis_name = layer.attention.axis_name
    is_summed = axis_name is not None
    is_added = can_defer_norm(x)
    if bias is None or (is_added and choice.config.adds_biases):
        is_kernel = is_added and not is_summed
        parts = matmul(y, out[...], choice, next_is_kernel=is_kernel, is_summed=is_summed)
        parts = _sum_parts(parts, axis_name)
    else:
        parts, bias = summed_linear(y, out, bias, axis_name)[None], None
    addend = Addend(parts, None if bias is None else bias[...], layer.attention_out_norm)
    x, normed = begin_norm(x, addend, layer.mlp_norm, choice)
    parts = glu(
        normed,
        mlp.gate_up[...],
        mlp.down[...],
        choice,
        norm=layer.mlp_norm.spec,
        activation=mlp.activation,
        next_is_kernel=next_is_kernel and is_added and not is_summed,
        is_summed=is_summed,
    )
    return x, _sum_parts(parts, axis_name), cache


def _sum_parts(parts: jax.Array, axis_name: str | None) -> jax.Array:
    """Returns split-K parts summed over devices, f32[Q, B, T, E]; without an axis the parts.

    Few rows are sent as parts, which the next kernel adds: that is faster than a launch that adds
    them first. The parts of many rows are added first, Q = 1.
    """
    if axis_name is None:
        return parts
    if math.prod(parts.shape[1:]) * (len(parts) - 1) > _MAX_SENT_NUMBERS:
        parts = PartialProduct(parts).reduce()[None]
    return sum_shares(parts, axis_name)


def _project(
    module: Attention,
    choice: KernelChoice,
    x: DeferredNorm,
    positions: jax.Array,
    cache: Any,
    norm: Any,
) -> tuple[PartialProduct, QKVWeights]:
    """Returns queries, keys and values [B, T', heads * D], none rotated, and what follows."""
    bias, query_norm, key_norm = module.qkv_bias, module.query_norm, module.key_norm
    rows = (x.rows.shape[1], module.num_heads + 2 * module.num_kv_heads)
    is_kernel = kv_tiling(rows, positions.shape, cache, choice) is not None
    is_added = bias is None or (is_kernel and choice.config.adds_biases)
    if is_added and (is_kernel or query_norm is None):
        parts = matmul(x.rows, module.qkv[...], choice, next_is_kernel=is_kernel)
        weights = QKVWeights(None if bias is None else bias[...])
        if query_norm is not None and key_norm is not None:
            norms = query_norm.weight[...], key_norm.weight[...], query_norm.spec
            weights = QKVWeights(weights.bias, *norms)
        return PartialProduct(parts, x.squares), weights
    if x.squares is None:
        y = linear(x.rows, module.qkv, bias)
    else:
        y = PartialProduct(matmul(x.rows, module.qkv[...], choice), x.squares).reduce(norm)
        if bias is not None:
            y += bias[...].astype(jnp.float32)[None, None]
        y = y.astype(x.rows.dtype)
    return PartialProduct(module.normed_heads(y).reshape(1, *y.shape)), QKVWeights()
