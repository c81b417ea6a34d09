"""The residual after a rejected draft: its masses by blocks, and the draw from them.

    max(rho p - q, 0)        rho = 1 but in block verification

A rule has weights of its own, `Plan.log_weights`. These functions run inside the kernels of
`emit_tokens` and of block verification.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.call_arrays import VerifyArrays
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import exp_scaled, mask_below_cutoff
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_logprobs, residual_probs
from specjax.pallas.blocks import load_raw_logits, tile_token_ids
from specjax.pallas.gumbel_max import BlockNoise, Draw, draw_token
from specjax.pallas.launch import make_exp2
from specjax.pallas.load_request import DraftedToken, Plan, load_draft_ids
from specjax.pallas.next_token import AcceptedPrefix, row_block_logprobs
from specjax.pallas.reduce_rows import ReducedRows
from specjax.pallas.target_rows import VerifiedRows

__all__ = [
    "draw_residual",
    "load_draft_logprobs",
    "reduce_masses",
    "residual_operands",
    "store_log_masses",
]


def load_draft_logprobs(
    arrays: VerifyArrays, drafted: DraftedToken | None, token_id: jax.Array
) -> jax.Array:
    """Loads log q at token ids >= 0 of the target's vocabulary; -inf where the draft has none."""
    assert drafted is not None
    row, draft_id = drafted.row, load_draft_ids(arrays, token_id)
    x = load_raw_logits(arrays.draft_logits, row.row_index, draft_id)
    x = mask_below_cutoff(x, row.cutoff)
    return token_logprobs(x, drafted.normalizer, row.temperature.scale)


def residual_operands(
    arrays: VerifyArrays, prefix: AcceptedPrefix, token_id: jax.Array, logprobs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns log(rho p) and log q at token ids, from log p."""
    drafted = prefix.drafted
    draft_logprobs = load_draft_logprobs(arrays, drafted, token_id)
    if prefix.log_rho is None or drafted is None:
        return logprobs, draft_logprobs
    one_hot = jnp.where(token_id == drafted.token_id, jnp.float32(jnp.inf), -jnp.inf)
    return logprobs + prefix.log_rho, jnp.where(drafted.one_hot, one_hot, draft_logprobs)


def reduce_masses(
    arrays: VerifyArrays, prefix: AcceptedPrefix, tile_index: jax.Array, plan: Plan
) -> jax.Array:
    """Returns sum max(rho p - q, 0) of each block of tile `tile_index`, f32[blocks]."""
    token_id = tile_token_ids(plan.tile, tile_index)
    logprobs = prefix.row.logprobs(token_id)
    if plan.log_weights is not None:
        weights = plan.log_weights(arrays, prefix, token_id, logprobs, plan)
        return jnp.sum(exp_scaled(weights, exp2=make_exp2(plan.interpret)), axis=-1)
    logprobs, draft_logprobs = residual_operands(arrays, prefix, token_id, logprobs)
    return jnp.sum(residual_probs(logprobs, draft_logprobs, make_exp2(plan.interpret)), axis=-1)


def store_log_masses(
    arrays: VerifyArrays,
    prefix: AcceptedPrefix,
    tile_index: jax.Array,
    out: Any,
    row: jax.Array,
    plan: Plan,
) -> None:
    """Stores the log-masses of the blocks of tile `tile_index` in a row of `out`."""
    masses = reduce_masses(arrays, prefix, tile_index, plan)
    blocks = tile_index * plan.tile.num_blocks + jax.lax.iota(jnp.int32, plan.tile.num_blocks)
    plgpu.store(out.at[row, blocks], jnp.log(masses))


def draw_residual(
    arrays: VerifyArrays,
    rows: ReducedRows | VerifiedRows,
    residual_log_masses: Any,
    prefix: AcceptedPrefix,
    noise: BlockNoise,
    plan: Plan,
) -> Draw:
    """Draws from a residual by its blocks' log-masses; from the row if it is empty.

    The log-masses are f32[B, N], of block verification f32[B * K, N].
    """
    block_index = jax.lax.iota(jnp.int32, noise.gumbels.shape[0])
    inside = block_index * SAMPLING_BLOCK < arrays.target_logits.shape[1]
    least: Any = MIN_RESIDUAL_MASS
    mass_row, drafted = prefix.request.b, prefix.drafted
    if plan.log_weights is not None and drafted is not None:
        least = jnp.where(drafted.one_hot, jnp.float32(0), jnp.float32(least))
    if prefix.log_rho is not None:
        mass_row = mass_row * plan.max_draft_tokens + prefix.num_accepted
        least = jnp.float32(least) * jnp.exp(prefix.log_rho)
    index, other = (mass_row, block_index), jnp.float32(-jnp.inf)
    log_masses = plgpu.load(residual_log_masses.at[index], mask=inside, other=other)
    is_empty = jnp.sum(exp_scaled(log_masses)) <= least
    row_log_masses = row_block_logprobs(arrays, rows, prefix, plan)

    def token_log_weights(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        if plan.log_weights is not None:
            weights = plan.log_weights(arrays, prefix, token_id, logprobs, plan)
            return jnp.where(is_empty, logprobs, weights)
        operands = residual_operands(arrays, prefix, token_id, logprobs)
        return jnp.where(is_empty, logprobs, residual_logprobs(*operands))

    return draw_token(
        prefix.row, jnp.where(is_empty, row_log_masses, log_masses), noise, token_log_weights
    )
