"""Bounds of Z, the mass of a prefix's residual, from the heaviest blocks of its target row.

`block` explains Z and rho. The reduction stored the mass of every block of 128 tokens. The blocks
are dealt into groups. The heaviest block of each group is read, in the target row and in its draft
row. Let z be the residual in these blocks, and P, Q the masses of target and draft in all others:

    z + max(rho P - Q, 0) <= Z <= z + rho P        Q <= 1 - (the draft's mass in these blocks)

These bounds decide most prefixes: the other blocks of a language model's row weigh little. A second
round over the rest would take longer than the residuals that it saves.

References:
  Sun et al., 2024, arXiv:2403.10444.
"""

import jax
import jax.numpy as jnp

from specjax.core.block_acceptance import OPEN, accept_by_bounds
from specjax.core.gumbel_max import first_argmax
from specjax.core.logsumexp import LogNormalizer, block_logprobs, exp_scaled
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.residual import residual_probs
from specjax.pallas.block.judge import JudgedRequest, longest_below, needs_residual
from specjax.pallas.blocks import Partials, load_some_blocks
from specjax.pallas.gumbel_max import num_padded_blocks
from specjax.pallas.launch import cond_or, make_exp2, reduce_where
from specjax.pallas.next_token import AcceptedPrefix
from specjax.pallas.residual import load_residual_terms


def bound_open(judged: JudgedRequest, partials: Partials, is_own: jax.Array) -> JudgedRequest:
    """Returns a judged request with its open prefixes bounded, from the longest down.

    Prefixes shorter than an accepted one are not bounded: the longest accepted prefix counts.

    Args:
      judged: the request.
      partials: of the target rows.
      is_own: bool[N], the prefixes that this program bounds.
    """
    i, k = jax.lax.iota(jnp.int32, judged.status.shape[0]), judged.request.schedule.max_draft_tokens

    def next_open(status: jax.Array, below: jax.Array) -> jax.Array:
        return longest_below(is_own & needs_residual(status, i) & (status == OPEN), i, below)

    def bound(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        status, j = state
        prefix, u = judged.prefix(j), reduce_where(judged.uniform, i == j)
        # The bounds of a one-hot draft are Z itself: no block tightens them.
        assert prefix.drafted is not None
        bounded = cond_or(
            ~prefix.drafted.one_hot,
            lambda: _bound(prefix, u, partials),
            reduce_where(status, i == j),
        )
        status = jnp.where(i == j, bounded, status)
        return status, next_open(status, j)

    start = (judged.status, next_open(judged.status, jnp.int32(k)))
    status, _ = jax.lax.while_loop(lambda state: state[1] >= 0, bound, start)
    return judged._replace(status=status)


def _bound(prefix: AcceptedPrefix, u: jax.Array, partials: Partials) -> jax.Array:
    """Returns the status i32 of an open prefix by the bounds from its row's heaviest blocks."""
    log_rho = prefix.log_rho
    assert log_rho is not None
    masses = _block_masses(prefix, partials)
    exp2 = make_exp2(prefix.request.schedule.interpret)
    best = first_argmax(masses)
    column = jax.lax.broadcasted_iota(jnp.int32, masses.shape, 1)
    unread = jnp.where(column == best[:, None], jnp.float32(0), masses)
    block = jax.lax.iota(jnp.int32, best.shape[0]) * masses.shape[1] + best
    shape = (best.shape[0], SAMPLING_BLOCK)
    token_id = jax.lax.broadcasted_iota(jnp.int32, shape, 1) + block[:, None] * SAMPLING_BLOCK
    p, q = load_residual_terms(prefix, token_id, prefix.row.logprobs(token_id))
    residual, draft_mass = _total(residual_probs(p, q, exp2)), _total(exp_scaled(q, exp2=exp2))
    unread_mass, unread_draft_mass = exp_scaled(log_rho) * _total(unread), 1 - draft_mass
    least = residual + jnp.maximum(unread_mass - unread_draft_mass, 0)
    return accept_by_bounds(u, log_rho, least, residual + unread_mass)


def _total(x: jax.Array) -> jax.Array:
    # An axis at a time: Triton's lowering of two at once fails under a mesh of explicit axes.
    return jnp.sum(jnp.sum(x, axis=-1))


def _block_masses(prefix: AcceptedPrefix, partials: Partials) -> jax.Array:
    """Returns p of the blocks of a prefix's target row, f32[groups, N]."""
    request, vocab_size = prefix.request, prefix.request.arrays.target_logits.shape[1]
    num_blocks = num_padded_blocks(vocab_size)
    groups = min(request.schedule.config.num_bound_groups, num_blocks)
    shape = (groups, num_blocks // groups)
    block = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * shape[1]
    block += jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    index = request.row_index(prefix.num_accepted)
    blocks = load_some_blocks(partials, index, block, vocab_size)
    normalizer = LogNormalizer(*[x[None] for x in prefix.row.normalizer])
    return exp_scaled(block_logprobs(blocks, normalizer, prefix.row.scale[None]))
