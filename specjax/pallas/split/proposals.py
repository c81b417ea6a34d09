"""Proposals of devices for a request's next token, as numbers to exchange, and the choice.

Every device proposes the request's result as if its own token were the next one. The proposals
differ in that token alone, and the best score wins. If the total mass is at most `min_mass`, the
fallback tokens, drawn from the target's row p, compete instead.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import exp_scaled
from specjax.core.noise import SAMPLING_BLOCK
from specjax.core.residual import MIN_RESIDUAL_MASS, residual_logprobs
from specjax.pallas.gumbel_max import (
    Draw,
    draw_noise,
    draw_token,
    exclude_token,
    exclude_weight,
    num_padded_blocks,
)
from specjax.pallas.launch import cond_or, divmod_i32, output
from specjax.pallas.load_request import Schedule
from specjax.pallas.next_token import (
    AcceptedPrefix,
    has_given_bonus,
    next_address,
    row_block_logprobs,
    verification_of,
)
from specjax.pallas.residual import load_residual_terms
from specjax.pallas.split.shared_rows import best_of_devices
from specjax.types import Verification

# The first columns of a proposal; its tokens and their log-probabilities follow.
_ACCEPTED, _EMITTED, _MASS, _MIN_MASS, _SCORE = range(5)
_FALLBACK_SCORE, _FALLBACK_TOKEN, _FALLBACK_LOGPROB = range(5, 8)
_NUM_SCALARS = 8


class _Candidate(NamedTuple):
    """A device's draw, its mass, and the fallback draw for the case that no device has mass."""

    draw: Draw
    mass: jax.Array
    fallback: Draw


def proposal_shape(schedule: Schedule) -> Any:
    """Returns the shape of the proposals of a device, i32[B, 8 + 2 (K + 1)]."""
    return output((schedule.num_requests, _NUM_SCALARS + 2 * schedule.rows_per_request), jnp.int32)


def store_proposal(rows: Any, prefix: AcceptedPrefix, log_masses: Any, out: Any) -> None:
    """Stores this device's proposal for a request.

    Args:
      arrays: the call's arrays.
      rows: the target rows, with the partials of this device's blocks.
      prefix: the accepted prefix.
      log_masses: of the blocks of residuals, f32[B, blocks], or None where no draft has logits.
      out: reference of `proposal_shape`.
      schedule: of the launch.
    """
    b, arrays, schedule = prefix.request.b, prefix.request.arrays, prefix.request.schedule
    is_random = prefix.valid & ~prefix.request.temperature.greedy
    nothing = jnp.float32(-jnp.inf)
    none = Draw(jnp.int32(0), nothing, nothing)
    candidate = cond_or(
        is_random,
        lambda: _propose(rows, prefix, log_masses),
        _Candidate(none, jnp.float32(0), none),
    )
    score = jnp.where(is_random, candidate.draw.score, jnp.float32(0))
    # Without a draw the token is the same on every device, or only the device that has it scores.
    is_decided = ~is_random
    if arrays.bonus_token_ids is not None:
        is_given = has_given_bonus(prefix)
        column = arrays.bonus_token_ids[b] - arrays.first_token[0]
        is_here = (column >= 0) & (column < arrays.target_logits.shape[1])
        score = jnp.where(is_given, jnp.where(is_here, jnp.float32(0), nothing), score)
        is_decided |= is_given
    result = verification_of(prefix, lambda: candidate.draw)
    fallback = candidate.fallback
    scalars = {
        _ACCEPTED: result.num_accepted,
        _EMITTED: result.num_emitted,
        _MASS: jnp.where(is_decided, jnp.float32(1), candidate.mass),
        _MIN_MASS: jnp.where(is_decided, jnp.float32(0), _min_mass(prefix)),
        _SCORE: score,
        _FALLBACK_SCORE: fallback.score,
        _FALLBACK_TOKEN: fallback.token,
        _FALLBACK_LOGPROB: token_logprobs(fallback.logit, prefix.row.normalizer, prefix.row.scale),
    }
    for column, value in scalars.items():
        out[b, jnp.int32(column)] = _as_i32(value)
    i = jax.lax.iota(jnp.int32, result.token_ids.shape[0])
    inside = i < schedule.rows_per_request
    plgpu.store(out.at[b, _NUM_SCALARS + i], result.token_ids, mask=inside)
    logprobs_at = out.at[b, _NUM_SCALARS + schedule.rows_per_request + i]
    plgpu.store(logprobs_at, _as_i32(result.logprobs), mask=inside)


def _as_i32(value: jax.Array) -> jax.Array:
    """Returns the bits of an array."""
    return jax.lax.bitcast_convert_type(value, jnp.int32)


def _propose(rows: Any, prefix: AcceptedPrefix, residual_log_masses: Any) -> _Candidate:
    """Draws from this device's share of the residual, or of the row without a one-hot draft."""
    arrays, schedule = prefix.request.arrays, prefix.request.schedule
    address, width = next_address(prefix), arrays.target_logits.shape[1]
    first_block, _ = divmod_i32(arrays.first_token[0], SAMPLING_BLOCK)
    num_blocks, dtype, drafted = num_padded_blocks(width), schedule.noise_dtype, prefix.drafted
    noise = draw_noise(address, first_block, num_blocks, dtype, schedule.threefry)
    is_excluded = prefix.rejected & ~prefix.from_residual

    def load_row() -> jax.Array:
        return row_block_logprobs(rows, prefix)

    def load_row_without_draft() -> jax.Array:
        if drafted is None:
            return load_row()
        vocab_size = schedule.vocab_size(arrays)
        return exclude_token(prefix.row, load_row(), drafted.token_id, is_excluded, vocab_size)[0]

    def load_residual() -> jax.Array:
        block = jax.lax.iota(jnp.int32, num_blocks)
        at, inside = residual_log_masses.at[prefix.request.b, block], block * SAMPLING_BLOCK < width
        return plgpu.load(at, mask=inside, other=jnp.float32(-jnp.inf))

    def weigh(token_id: jax.Array, logprobs: jax.Array) -> jax.Array:
        if drafted is None:
            return logprobs
        exclude = exclude_weight(drafted.token_id, is_excluded)
        if residual_log_masses is None:
            return exclude(token_id, logprobs)
        return jax.lax.cond(
            prefix.from_residual,
            lambda: residual_logprobs(*load_residual_terms(prefix, token_id, logprobs)),
            lambda: exclude(token_id, logprobs),
        )

    def draw_from_whole_row() -> Draw:
        return draw_token(prefix.row, load_row(), noise, lambda _, logprobs: logprobs)

    log_masses = (
        load_row_without_draft()
        if residual_log_masses is None
        else jax.lax.cond(prefix.from_residual, load_residual, load_row_without_draft)
    )
    mass, draw = jnp.sum(exp_scaled(log_masses)), draw_token(prefix.row, log_masses, noise, weigh)
    none = draw._replace(score=jnp.full_like(draw.score, -jnp.inf))
    return _Candidate(draw, mass, cond_or(mass <= _min_mass(prefix), draw_from_whole_row, none))


def _min_mass(prefix: AcceptedPrefix) -> jax.Array:
    """Returns the total mass of all devices up to which a residual counts as empty."""
    return jnp.where(prefix.from_residual, jnp.float32(MIN_RESIDUAL_MASS), jnp.float32(0))


def choose(gathered: jax.Array, schedule: Schedule) -> Verification:
    """Returns the result of a batch from the proposals of all devices, i32[D, B, columns]."""
    numbers = jax.lax.bitcast_convert_type(gathered, jnp.float32)
    mass = jnp.sum(numbers[:, :, _MASS], axis=0)
    has_mass = mass > numbers[0, :, _MIN_MASS]
    scores = jnp.where(has_mass[None], numbers[:, :, _SCORE], numbers[:, :, _FALLBACK_SCORE])
    best = best_of_devices(gathered, scores)
    num_rows = schedule.rows_per_request
    tokens, logprobs = best[:, _NUM_SCALARS:][:, :num_rows], best[:, _NUM_SCALARS + num_rows :]
    num_accepted = best[:, _ACCEPTED]
    is_next = jnp.arange(num_rows)[None] == num_accepted[:, None]
    is_fallback = ~has_mass[:, None] & is_next
    logprobs = jnp.where(is_fallback, best[:, _FALLBACK_LOGPROB, None], logprobs)
    return Verification(
        token_ids=jnp.where(is_fallback, best[:, _FALLBACK_TOKEN, None], tokens),
        num_accepted=num_accepted,
        num_emitted=best[:, _EMITTED],
        logprobs=jax.lax.bitcast_convert_type(logprobs, jnp.float32),
    )
