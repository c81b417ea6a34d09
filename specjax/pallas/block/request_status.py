"""Judged requests in memory, between two launches of block verification."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

from specjax.core.block_acceptance import REJECTED
from specjax.core.logsumexp import LogNormalizer
from specjax.pallas.block.judge import JudgedRequest
from specjax.pallas.kernel_config import next_power_of_2
from specjax.pallas.launch import output
from specjax.pallas.load_request import Request, Schedule, load_drafted, load_masked
from specjax.pallas.next_token import AcceptedPrefix


class JudgedArrays(NamedTuple):
    """Requests [B], and the tests that decide the lengths of their accepted prefixes.

    Attributes:
      num_accepted: i32, accepted tokens; -1 if the statuses decide, with the open residuals.
      is_block: i32, 1 if a prefix is accepted as a whole, 0 where a request is verified token by
        token.
      status: i32[B, K], `REJECTED`, `OPEN` or `ACCEPTED` of the prefix of j < K tokens; all
        rejected where no residual is needed.
      log_rho: f32[B, K], of these prefixes.
      uniform: f32[B, K] or f64, of these prefixes.
      shift: f32[B, K + 1], of each target row's normalizer. In a large batch the bonus row's
        entry is not valid: `bonus_row` loads its statistics.
      log_sum: f32[B, K + 1], of the normalizer; NaN where the row is not a distribution.
      logprobs: f32[B, K + 1], log p of the drafted tokens.
      argmax: i32[B, K + 1], of the rows, where the request is greedy.
    """

    num_accepted: Any
    is_block: Any
    status: Any
    log_rho: Any
    uniform: Any
    shift: Any
    log_sum: Any
    logprobs: Any
    argmax: Any


def judged_shape(schedule: Schedule) -> JudgedArrays:
    """Returns the shapes of the judged requests of a batch."""
    size, k = schedule.num_requests, schedule.max_draft_tokens
    prefixes_shape, rows_shape = (size, k), (size, k + 1)
    return JudgedArrays(
        num_accepted=output((size,), jnp.int32),
        is_block=output((size,), jnp.int32),
        status=output(prefixes_shape, jnp.int32),
        log_rho=output(prefixes_shape),
        uniform=output(prefixes_shape, schedule.noise_dtype),
        shift=output(rows_shape),
        log_sum=output(rows_shape),
        logprobs=output(rows_shape),
        argmax=output(rows_shape, jnp.int32),
    )


def store_judged(judged: JudgedRequest, out: JudgedArrays, is_own: jax.Array) -> None:
    """Stores a judged request: its scalars, and prefixes and rows where `is_own`, bool[N]."""
    b, result = judged.request.b, judged.result
    out.num_accepted[b] = judged.num_accepted
    out.is_block[b] = judged.is_block.astype(jnp.int32)
    values = {
        "status": judged.status,
        "log_rho": judged.log_rho,
        "uniform": judged.uniform,
        "shift": result.normalizer.shift,
        "log_sum": result.normalizer.log_sum,
        "logprobs": result.logprobs,
        "argmax": result.argmax,
    }
    i = jax.lax.iota(jnp.int32, judged.status.shape[0])
    for name, value in values.items():
        array = getattr(out, name)
        plgpu.store(array.at[b, i], value, mask=is_own & (i < array.shape[1]))


def load_status(judged: JudgedArrays, b: jax.Array, i: jax.Array) -> jax.Array:
    """Loads the status of the prefixes of i tokens, i32[N]; `REJECTED` past the last."""
    inside = i < judged.status.shape[1]
    return plgpu.load(judged.status.at[b, i], mask=inside, other=jnp.int32(REJECTED))


def load_prefix(judged: JudgedArrays, request: Request, n: jax.Array) -> AcceptedPrefix:
    """Returns the prefix of n tokens, and the row that decides the next token."""
    b, k = request.b, request.schedule.max_draft_tokens
    i = jax.lax.iota(jnp.int32, next_power_of_2(k + 1))
    prefix = AcceptedPrefix.from_row(
        request,
        n,
        LogNormalizer(judged.shift[b, n], judged.log_sum[b, n]),
        drafted=load_drafted(request, n, n < request.num_draft_tokens),
        argmax=judged.argmax[b, n],
        logprobs=load_masked(judged.logprobs, (b, i), i < n),
    )
    return prefix.times_rho(judged.is_block[b] > 0, judged.log_rho[b, jnp.minimum(n, k - 1)])
