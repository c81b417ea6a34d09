"""Online softmax: attention of rows to keys that arrive block by block.

Row i has scores s_ij = log2(e) * scale * <q_i, k_j> with its visible keys j. After each block

    m_i = max_j s_ij     l_i = sum_j 2^(s_ij - m_i)     acc_i = sum_j 2^(s_ij - m_i) v_j

and acc_i / l_i is the attention of row i. A block that raises the maximum from m to m' first
scales l_i and acc_i by 2^(m - m'). GPUs have an instruction for powers of two, and one for the
product and the difference in s_ij - m_i.
Axes: `M` rows, `N` keys of a block, `D` head dimension.

References:
  Dao et al., 2022, arXiv:2205.14135: FlashAttention, Algorithm 1.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.models.decoder.shared_math import AttentionSpec, is_visible
from specjax.pallas.launch import dot

_MASKED = -1e30  # Finite: a row that attends to no slot must not subtract infinities.


class Queries(NamedTuple):
    """Rows of queries [M, D], and their positions i32[M], -1 for none."""

    rows: jax.Array
    position: jax.Array


class OnlineSoftmax(NamedTuple):
    """State of rows: m_i f32[M], l_i f32[M] and acc f32[M, D].

    While blocks are added, `l_i` is f32[M, N]: each column of a block has a separate sum. A sum
    over columns would make a program's warps wait for one another a second time per block, after
    the maximum.
    """

    m_i: jax.Array
    l_i: jax.Array
    acc: jax.Array


def init(num_rows: int, head_dim: int, block_size: int | None = None) -> OnlineSoftmax:
    """Returns the state of rows before the first block.

    Args:
      num_rows: M.
      head_dim: D.
      block_size: N, for a state that blocks are added to.
    """
    columns = () if block_size is None else (block_size,)
    return OnlineSoftmax(
        jnp.full((num_rows,), _MASKED, jnp.float32),
        jnp.zeros((num_rows, *columns), jnp.float32),
        jnp.zeros((num_rows, head_dim), jnp.float32),
    )


def reduce_l(state: OnlineSoftmax) -> OnlineSoftmax:
    """Returns the state after the last block: `l_i` summed over the columns of blocks."""
    return state._replace(l_i=jnp.sum(state.l_i, axis=1))


def update(
    state: OnlineSoftmax,
    queries: Queries,
    keys: jax.Array,
    values: jax.Array,
    slot: jax.Array | None,
    spec: AttentionSpec,
    exp2: Callable[[jax.Array], jax.Array],
) -> OnlineSoftmax:
    """Returns the state after one more block of keys.

    Args:
      state: of the rows so far, from `init` with N.
      queries: the rows.
      keys: [N, D].
      values: [N, D], finite where a row does not attend to them.
      slot: i32[N], of the keys; -1 for none. None: every row attends to every key.
      spec: scale, window and soft cap.
      exp2: x -> 2^x, from `launch.make_exp2`.
    """
    scores, scale = dot(queries.rows, keys, (1, 1)), spec.scale
    if spec.softcap is not None:
        scores, scale = jnp.tanh(scores * (scale / spec.softcap)), spec.softcap
    scale *= math.log2(math.e)
    visible = None
    if slot is not None:
        visible = is_visible(queries.position[:, None], slot[None], spec.window)
    highest = jnp.max(scores if visible is None else jnp.where(visible, scores, _MASKED), axis=1)
    m_i = jnp.maximum(state.m_i, highest * scale)
    p = exp2(scores * scale - m_i[:, None])
    if visible is not None:
        p = jnp.where(visible, p, 0.0)
    alpha = exp2(state.m_i - m_i)
    return OnlineSoftmax(
        m_i,
        state.l_i * alpha[:, None] + p,
        state.acc * alpha[:, None] + dot(p.astype(values.dtype), values, (1, 0)),
    )
