"""The reference of coupled sampling: draws the target's token row by row until a draft differs.

    y_i = the target's draw at (position + i, TARGET)        accept x_i iff x_i = y_i

Rows are read in order and only while drafts are accepted. What is emitted is always the target's
draw, so that the output is what `gumbel_sample` gives without a draft.

References:
  Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.logsumexp import LogNormalizer, RowStatistics
from specjax.core.noise import Stream
from specjax.devices.placement import pvary_like
from specjax.samplers.reference.next_token import emit, is_active
from specjax.samplers.reference.request import RequestRows, first_false
from specjax.types import Verification


class _DrawState(NamedTuple):
    """State of the loop over target rows.

    Attributes:
      num_accepted: i32, drafted tokens that the target drew too; index of the row read last.
      active: bool, whether the last draw was the drafted token, so that the next row is read.
      row: statistics of the row read last.
      token: i32, drawn from that row.
      logprob: f32, log p of the token.
      logprobs: f32[K], log p of the accepted tokens.
    """

    num_accepted: jax.Array
    active: jax.Array
    row: RowStatistics
    token: jax.Array
    logprob: jax.Array
    logprobs: jax.Array


def couple_request(rows: RequestRows, only_maxima: jax.Array | None = None) -> Verification:
    """Verifies the drafted tokens of one request by coupled sampling.

    Args:
      rows: one request and its rows; those of the draft are not read.
      only_maxima: as in `verify_request`.

    Returns:
      `Verification` without a batch axis.
    """
    request, k = rows.request, rows.request.token_ids.shape[0]

    def judge(index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, RowStatistics]:
        i = jnp.minimum(index, k - 1)
        token, logprob, row = rows.target_row(index).draw(
            rows.address(index, Stream.TARGET), rows.temperature, rows.noise_dtype, only_maxima
        )
        accepted = (index < request.num_tokens) & row.valid & (token == request.token_ids[i])
        return accepted, token, logprob, row

    def draw_at_once() -> Verification:
        drawn = jax.vmap(judge)(pvary_like(jnp.arange(k + 1, dtype=jnp.int32), request))
        n = first_false(drawn[0] & is_active(request))
        _, token, logprob, row = jax.tree.map(lambda x: x[n], drawn)
        return emit(rows, n, row, token, logprob, drawn[2][:k])

    def step(state: _DrawState) -> _DrawState:
        index = state.num_accepted
        i = jnp.minimum(index, k - 1)
        accepted, token, logprob, row = judge(index)
        logprobs = state.logprobs.at[i].set(jnp.where(accepted, logprob, state.logprobs[i]))
        num_accepted = index + accepted.astype(jnp.int32)
        state_after = _DrawState(num_accepted, accepted, row, token, logprob, logprobs)
        return pvary_like(state_after, state)

    def draw_in_turn() -> Verification:
        zero = jnp.float32(0)
        start = _DrawState(
            num_accepted=jnp.int32(0),
            active=is_active(request),
            row=RowStatistics(LogNormalizer(zero, zero), jnp.bool_(False)),
            token=jnp.int32(-1),
            logprob=zero,
            logprobs=jnp.zeros((k,), jnp.float32),
        )
        start = pvary_like(start, request, rows.target)
        end = jax.lax.while_loop(lambda state: state.active, step, start)
        n = end.num_accepted
        return emit(rows, n, end.row, end.token, end.logprob, end.logprobs)

    return rows.target.read(draw_in_turn, draw_at_once)
