"""The residual of a pair of rows, as kernels load it: log q beside log p, masses of blocks."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import keep
from specjax.core.residual import residual_probs
from specjax.pallas.blocks import load_row, tile_index
from specjax.pallas.ending import Ending
from specjax.pallas.inputs import DraftedToken, Inputs, Plan
from specjax.pallas.launch import fast_exp2

__all__ = ["draft_logprobs", "reduce_masses", "store_masses"]


def draft_logprobs(draft: Any, drafted: DraftedToken | None, index: jax.Array) -> jax.Array:
    """Log q at token ids >= 0 of the target's vocabulary; -inf past the draft's."""
    assert drafted is not None
    place = drafted.place
    x = keep(load_row(draft, place.row, index), place.cutoff)
    return token_logprobs(x, drafted.law, place.scaling.scale)


def reduce_masses(inputs: Inputs, ending: Ending, number: jax.Array, plan: Plan) -> jax.Array:
    """Masses f32[blocks] of the residual in tile `number`."""
    index = tile_index(plan.tile, number)
    p, q = ending.row.logprobs(index), draft_logprobs(inputs.draft, ending.drafted, index)
    return jnp.sum(residual_probs(p, q, fast_exp2(plan.interpret)), axis=-1)


def store_masses(inputs: Inputs, ending: Ending, number: jax.Array, out: Any, plan: Plan) -> None:
    """Stores the log-masses of tile `number` into row b of `out` [B, blocks]."""
    masses = reduce_masses(inputs, ending, number, plan)
    where = number * plan.tile.blocks + jax.lax.iota(jnp.int32, plan.tile.blocks)
    plgpu.store(out.at[ending.request.b, where], jnp.log(masses))
