"""`rejection_sample_ragged`: checks, and the jitted body."""

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
    check_draft,
    check_draft_ids,
    check_flag,
    check_keys,
    check_logits,
    parse_array,
    parse_optional,
    parse_rates,
)
from specjax.core.rule import Rule, check_rule
from specjax.core.token_map import check_token_map
from specjax.devices.placement import check_unsharded
from specjax.devices.vocabulary_split import parse_split
from specjax.samplers.batch import (
    empty_verification,
    once_per_request,
    resize_tokens,
    verify_ragged,
)
from specjax.types import Draft, Verification

__all__ = ["check_ragged_verification", "rejection_sample_ragged", "run_ragged_verification"]


def rejection_sample_ragged(
    draft: Draft,
    target_logits: jax.Array,
    *,
    cu_num_draft_tokens: jax.Array,
    max_draft_tokens: int,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    conditional_rates: Any = None,
    bonus_token_ids: Any = None,
    rule: Rule | None = None,
    greedy_logprobs: bool = True,
    options: Options = Options(),
) -> Verification:
    r"""Verifies drafted tokens of all requests laid end to end, as `rejection_sample` does.

    Request r owns drafted rows ``cu[r]:cu[r + 1]`` and target rows
    ``cu[r] + r : cu[r + 1] + r + 1``, the last its bonus row, with
    ``cu = cu_num_draft_tokens``. Rows past ``cu[B]`` are padding and change nothing. The
    emitted tokens are those of the padded form.

    Args:
      draft: `Draft` with `token_ids`, `logprobs`, `logsumexp`, `cutoff` [N], `logits`
        [S, V_d] with S = N unless `rows` i32[N] is given, `temperature` f32[B] and
        `num_tokens` i32[B] (None takes all of `cu_num_draft_tokens`; -1 is inactive).
      target_logits: [N + B, V], bf16, f16 or f32, raw.
      cu_num_draft_tokens: i32[B + 1], from 0, non-decreasing, at most N; or i32[B], as vLLM has
        it, without the 0. Others are refused where the host reads them without a transfer.
      max_draft_tokens: K, a Python int; a request with more has only its first K verified.
      keys: as in `rejection_sample`, as is every argument below.
      positions: i32, [B] or scalar.
      temperature: f32, [B] or scalar.
      cutoff: f32, [N + B], or None.
      conditional_rates: f32, [K] or [B, K], or None.
      bonus_token_ids: i32, [B], or None.
      rule: a `Rule`, or None.
      greedy_logprobs: bool, static; False leaves log-probabilities of greedy requests 0.
      options: as in `rejection_sample`.

    Returns:
      `Verification`, padded to K + 1 tokens.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> target_logits = jnp.zeros((5, 8))
      >>> draft = specjax.Draft(jnp.array([3, 1, 4]))  # two drafts, then one
      >>> step = specjax.rejection_sample_ragged(
      ...     draft, target_logits, cu_num_draft_tokens=jnp.array([0, 2, 3]),
      ...     max_draft_tokens=2, keys=jax.random.key(0), positions=0)
      >>> step.token_ids.shape
      (2, 3)
    """
    arrays, call_options = check_ragged_verification(
        draft,
        target_logits,
        cu_num_draft_tokens=cu_num_draft_tokens,
        max_draft_tokens=max_draft_tokens,
        keys=keys,
        positions=positions,
        temperature=temperature,
        cutoff=cutoff,
        conditional_rates=conditional_rates,
        rule=rule,
        bonus_token_ids=bonus_token_ids,
        greedy_logprobs=greedy_logprobs,
        options=options,
    )
    return run_ragged_verification(arrays, options=call_options)


def check_ragged_verification(
    draft: Draft,
    target_logits: jax.Array,
    *,
    cu_num_draft_tokens: jax.Array,
    max_draft_tokens: int,
    keys: jax.Array,
    positions: Any,
    temperature: Any,
    cutoff: Any,
    bonus_token_ids: Any,
    greedy_logprobs: bool,
    options: Options,
    conditional_rates: Any = None,
    rule: Rule | None = None,
    method: str = "standard",
) -> tuple[VerifyArrays, CallOptions]:
    """Returns the arrays and options of a call of `rejection_sample_ragged`, or refuses them."""
    check_options(options)
    why = "the most drafted tokens of any request, because it is the width of the result"
    max_draft_tokens = check_count("max_draft_tokens", max_draft_tokens, 0, why)
    target_logits = as_array("target_logits", target_logits)
    check_logits("target_logits", target_logits, "[N + B, V]")
    num_drafted, num_rows = check_draft_ids(draft, is_ragged=True).shape[0], target_logits.shape[0]
    cumulative = check_cumulative(cu_num_draft_tokens, num_drafted, num_rows)
    size = num_rows - num_drafted
    draft = check_draft(draft, ragged_batch_size=size)
    for name, logits in (("target_logits", target_logits), ("draft.logits", draft.logits)):
        if logits is not None:
            check_unsharded(name, logits)
    split = parse_split(
        options.axis_name, options.vocab_size, target_logits, draft=draft, rule=rule
    )
    check_token_map("draft.token_map", draft.token_map, target_logits.shape[1])
    k, each = max_draft_tokens, ((), (size,))
    arrays = VerifyArrays.from_draft(
        draft,
        target_logits,
        cu_num_draft_tokens=cumulative,
        keys=check_keys(keys, size),
        positions=parse_array("positions", positions, jnp.int32, *each),
        temperature=parse_array("temperature", temperature, jnp.float32, *each),
        cutoff=parse_optional("cutoff", cutoff, jnp.float32, (num_rows,)),
        conditional_rates=parse_rates(conditional_rates, size, k),
        bonus_token_ids=parse_optional("bonus_token_ids", bonus_token_ids, jnp.int32, (size,)),
    )
    check_rule(rule, conditional_rates)
    call_options = CallOptions.from_options(
        options,
        max_draft_tokens=k,
        method=method,
        rule=rule,
        greedy_logprobs=check_flag("greedy_logprobs", greedy_logprobs),
        split=split,
    )
    return arrays, call_options


@functools.partial(jax.jit, static_argnames="options")
def run_ragged_verification(arrays: VerifyArrays, *, options: CallOptions) -> Verification:
    """Runs what `check_ragged_verification` returns."""
    size, num_rows = arrays.cu_num_draft_tokens.shape[0] - 1, options.max_draft_tokens + 1
    if size == 0:
        return empty_verification(num_rows)
    if not arrays.token_ids.shape[0]:
        options = dataclasses.replace(options, max_draft_tokens=0)
    arrays = once_per_request(arrays, size, options.max_draft_tokens)
    return resize_tokens(verify_ragged(arrays, options=options), num_rows)
