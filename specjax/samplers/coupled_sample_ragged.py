"""`coupled_sample_ragged`: checks, and the jitted body."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, Options, VerifyArrays, check_options
from specjax.checks import (
    as_array,
    check_count,
    check_cumulative,
    check_flag,
    check_keys,
    check_logits,
    parse_array,
    parse_optional,
)
from specjax.devices.placement import check_unsharded
from specjax.devices.vocabulary_split import parse_split
from specjax.samplers.batch import (
    empty_verification,
    once_per_request,
    resize_tokens,
    verify_ragged,
)
from specjax.types import Draft, Verification

__all__ = ["coupled_sample_ragged"]


def coupled_sample_ragged(
    draft_token_ids: jax.Array,
    target_logits: jax.Array,
    *,
    cu_num_draft_tokens: jax.Array,
    max_draft_tokens: int,
    keys: jax.Array,
    positions: Any,
    num_tokens: Any = None,
    temperature: Any = 1.0,
    cutoff: Any = None,
    bonus_token_ids: Any = None,
    greedy_logprobs: bool = True,
    options: Options = Options(),
) -> Verification:
    r"""Draws the target's tokens of all requests laid end to end, as `coupled_sample` does.

    Request r owns drafted tokens ``cu[r]:cu[r + 1]`` and target rows
    ``cu[r] + r : cu[r + 1] + r + 1``, the last its bonus row, with
    ``cu = cu_num_draft_tokens``. Rows past ``cu[B]`` are padding and change nothing. The
    emitted tokens are those of the padded form.

    Args:
      draft_token_ids: i32[N].
      target_logits: [N + B, V], bf16, f16 or f32, raw.
      cu_num_draft_tokens: i32[B + 1], or i32[B], as in `rejection_sample_ragged`.
      max_draft_tokens: K, a Python int; a request with more has only its first K verified.
      keys: as in `coupled_sample`, as is every argument below.
      positions: i32, [B] or scalar.
      num_tokens: i32[B]; None takes all of `cu_num_draft_tokens`, -1 is inactive.
      temperature: f32, [B] or scalar.
      cutoff: f32, [N + B], or None.
      bonus_token_ids: i32, [B], or None.
      greedy_logprobs: bool, static; False leaves log-probabilities of greedy requests 0.
      options: `Options`, static.

    Returns:
      `Verification`, padded to K + 1 tokens.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> step = specjax.coupled_sample_ragged(
      ...     jnp.array([3, 1, 4]), jnp.zeros((5, 8)), cu_num_draft_tokens=jnp.array([0, 2, 3]),
      ...     max_draft_tokens=2, keys=jax.random.key(0), positions=0)
      >>> step.token_ids.shape
      (2, 3)

    References:
      Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
    """
    check_options(options)
    why = "the most drafted tokens of any request, because it is the width of the result"
    k = check_count("max_draft_tokens", max_draft_tokens, 0, why)
    ids = as_array("draft_token_ids", draft_token_ids)
    if ids.ndim != 1:
        raise ValueError(f"draft_token_ids has shape {ids.shape}; it needs [N].")
    target_logits = as_array("target_logits", target_logits)
    check_logits("target_logits", target_logits, "[N + B, V]")
    num_rows = target_logits.shape[0]
    cumulative = check_cumulative(cu_num_draft_tokens, ids.shape[0], num_rows)
    size = num_rows - ids.shape[0]
    check_unsharded("target_logits", target_logits)
    each = ((), (size,))
    draft = Draft(
        parse_array("draft_token_ids", ids, jnp.int32, ids.shape),
        num_tokens=parse_optional("num_tokens", num_tokens, jnp.int32, (size,)),
    )
    arrays = VerifyArrays.from_draft(
        draft,
        target_logits,
        cu_num_draft_tokens=cumulative,
        keys=check_keys(keys, size),
        positions=parse_array("positions", positions, jnp.int32, *each),
        temperature=parse_array("temperature", temperature, jnp.float32, *each),
        cutoff=parse_optional("cutoff", cutoff, jnp.float32, (num_rows,)),
        bonus_token_ids=parse_optional("bonus_token_ids", bonus_token_ids, jnp.int32, (size,)),
    )
    call_options = CallOptions.from_options(
        options,
        max_draft_tokens=k,
        method="coupled",
        greedy_logprobs=check_flag("greedy_logprobs", greedy_logprobs),
        split=parse_split(options.axis_name, options.vocab_size, target_logits),
    )
    return _coupled_sample_ragged(arrays, options=call_options)


@functools.partial(jax.jit, static_argnames="options")
def _coupled_sample_ragged(arrays: VerifyArrays, *, options: CallOptions) -> Verification:
    """Runs `coupled_sample_ragged` on checked arguments."""
    size, num_rows = arrays.cu_num_draft_tokens.shape[0] - 1, options.max_draft_tokens + 1
    if size == 0:
        return empty_verification(num_rows)
    if not arrays.token_ids.shape[0]:
        options = dataclasses.replace(options, max_draft_tokens=0)
    arrays = once_per_request(arrays, size, options.max_draft_tokens)
    return resize_tokens(verify_ragged(arrays, options=options), num_rows)
