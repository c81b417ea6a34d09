"""Bounds of Z, the mass of a prefix's residual, from the heaviest blocks of its target row.

`block` explains Z and rho. The reduction stored the mass of every block of 128 tokens. The blocks
are dealt into groups. A round reads the heaviest unread block of each group, of the target row and
of its draft row. With z the residual in the blocks read so far, and P, Q the target's and the
draft's mass in all others:

    z + max(rho P - Q, 0) <= Z <= z + rho P        Q <= 1 - (the draft's mass in the blocks read)

Few rounds suffice for rows of a language model: the blocks that they leave unread weigh little.

References:
  Sun et al., 2024, arXiv:2403.10444.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.call_arrays import VerifyArrays
from specjax.core.block_acceptance import OPEN, accept_by_bounds
from specjax.core.gumbel_max import first_argmax
from specjax.core.logsumexp import LogNormalizer, block_logprobs, exp_scaled
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.residual import residual_probs
from specjax.pallas.block.judge import JudgedRequest, is_read
from specjax.pallas.blocks import Partials, load_some_blocks
from specjax.pallas.gumbel_max import num_padded_blocks
from specjax.pallas.launch import make_exp2, select_one
from specjax.pallas.load_request import Plan
from specjax.pallas.next_token import AcceptedPrefix
from specjax.pallas.residual import load_residual_terms

__all__ = ["bound_open"]


class _Bounded(NamedTuple):
    """State of the rounds.

    Attributes:
      num_rounds: i32, done so far.
      masses: f32[groups, N], p of the blocks that are not read yet; 0 where read.
      residual: f32, z of the blocks that are read.
      draft_mass: f32, q of the blocks that are read.
      status: i32, `OPEN` until the bounds decide.
    """

    num_rounds: jax.Array
    masses: jax.Array
    residual: jax.Array
    draft_mass: jax.Array
    status: jax.Array


def bound_open(
    arrays: VerifyArrays, judged: JudgedRequest, partials: Partials, plan: Plan
) -> JudgedRequest:
    """Returns a judged request whose open prefixes are bounded, from the longest down.

    Prefixes shorter than an accepted one are not bounded: the longest accepted prefix counts.
    """
    i = jax.lax.iota(jnp.int32, judged.status.shape[0])

    def next_open(status: jax.Array, below: jax.Array) -> jax.Array:
        is_open = is_read(status, i) & (status == OPEN) & (i < below)
        return jnp.max(jnp.where(is_open, i, jnp.int32(-1)))

    def bound(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        status, j = state
        prefix, u = judged.prefix(arrays, j), select_one(judged.uniform, i == j)
        status = jnp.where(i == j, _bound(arrays, prefix, u, partials, plan), status)
        return status, next_open(status, j)

    start = (judged.status, next_open(judged.status, jnp.int32(plan.max_draft_tokens)))
    status, _ = jax.lax.while_loop(lambda state: state[1] >= 0, bound, start)
    return judged._replace(status=status)


def _bound(
    arrays: VerifyArrays, prefix: AcceptedPrefix, u: jax.Array, partials: Partials, plan: Plan
) -> jax.Array:
    """Returns what the heaviest blocks say of an open prefix and its uniform: its status, i32."""
    log_rho = prefix.log_rho
    assert log_rho is not None
    assert prefix.drafted is not None
    masses, rho = _block_masses(arrays, prefix, partials, plan), exp_scaled(log_rho)
    exp2 = make_exp2(plan.interpret)

    def read(state: _Bounded) -> _Bounded:
        best = first_argmax(state.masses)
        column = jax.lax.broadcasted_iota(jnp.int32, state.masses.shape, 1)
        masses = jnp.where(column == best[:, None], jnp.float32(0), state.masses)
        block = jax.lax.iota(jnp.int32, best.shape[0]) * masses.shape[1] + best
        shape = (best.shape[0], SAMPLING_BLOCK)
        token_id = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        token_id += block[:, None] * SAMPLING_BLOCK
        p, q = load_residual_terms(arrays, prefix, token_id, prefix.row.logprobs(token_id))
        residual = state.residual + _total(residual_probs(p, q, exp2))
        draft_mass = state.draft_mass + _total(exp_scaled(q, exp2=exp2))
        unread_mass, unread_draft_mass = rho * _total(masses), 1 - draft_mass
        least = residual + jnp.maximum(unread_mass - unread_draft_mass, 0)
        status = accept_by_bounds(u, log_rho, least, residual + unread_mass)
        return _Bounded(state.num_rounds + 1, masses, residual, draft_mass, status)

    zero = jnp.float32(0)
    start = _Bounded(jnp.int32(0), masses, zero, zero, jnp.int32(OPEN))
    # Bounds of a one-hot draft are Z already. No block says more, so there are no rounds.
    rounds = jnp.where(prefix.drafted.one_hot, jnp.int32(0), plan.config.num_bound_rounds)
    return jax.lax.while_loop(
        lambda state: (state.num_rounds < rounds) & (state.status == OPEN), read, start
    ).status


def _total(x: jax.Array) -> jax.Array:
    # An axis at a time: Triton's lowering of two at once fails under a mesh of explicit axes.
    return jnp.sum(jnp.sum(x, axis=-1))


def _block_masses(
    arrays: VerifyArrays, prefix: AcceptedPrefix, partials: Partials, plan: Plan
) -> jax.Array:
    """Returns p of the blocks of a prefix's target row, f32[groups, N]."""
    num_blocks = num_padded_blocks(arrays.target_logits.shape[1])
    groups = min(plan.config.num_bound_groups, num_blocks)
    shape = (groups, num_blocks // groups)
    block = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * shape[1]
    block += jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    index = prefix.request.b * plan.rows_per_request + prefix.num_accepted
    blocks = load_some_blocks(partials, index, block, arrays.target_logits.shape[1])
    normalizer = LogNormalizer(*[x[None] for x in prefix.row.normalizer])
    return exp_scaled(block_logprobs(blocks, normalizer, prefix.row.scale[None]))
