"""`coupled_sample`: checks, and the jitted body."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, Options, VerifyArrays, check_options
from specjax.checks import (
    as_array,
    check_flag,
    check_keys,
    check_logits,
    parse_array,
    parse_optional,
)
from specjax.devices.map_parts import map_parts
from specjax.devices.vocabulary_split import parse_split
from specjax.samplers.batch import (
    SharedArrays,
    empty_verification,
    once_per_request,
    verify_shard,
)
from specjax.types import Draft, Verification

__all__ = ["coupled_sample"]


def coupled_sample(
    draft_token_ids: jax.Array,
    target_logits: jax.Array,
    *,
    keys: jax.Array,
    positions: Any,
    num_tokens: Any = None,
    temperature: Any = 1.0,
    cutoff: Any = None,
    bonus_token_ids: Any = None,
    greedy_logprobs: bool = True,
    options: Options = Options(),
) -> Verification:
    r"""Draws the target's token at every position, and accepts drafted tokens while they agree.

    .. math:: y_i = \text{the draw of } \mathrm{softmax}(\text{logits}_i / \text{temperature})
      \text{ at (position} + i, \text{TARGET)}, \qquad x_i \text{ is accepted iff } x_i = y_i

    What is emitted is :math:`y_0, y_1, \dots` up to the first disagreement: token for token what
    `gumbel_sample` draws from these rows without a draft. A seeded text does not depend on what
    drafted, so any tokens may be verified, and q is not read.

    Draft with the noise of the target, ``gumbel_sample(..., stream=Stream.TARGET)`` with these keys
    and positions: draft and target then agree often. Two-level draws agree with probability
    :math:`\sum_b M_b \sum_{v \in b} M_{v | b}`, where
    :math:`M_i = 1 / \sum_j \max(p_j / p_i, q_j / q_i)`, over blocks of 128 tokens and within each;
    no rule accepts more often than :math:`\sum \min(p, q)`, which `rejection_sample` does. Tokens
    that were chosen without that noise, such as those of a greedy draft or prompt lookup, are
    accepted with probability p(x), which is optimal. Tokens drawn on the target's stream may not be
    given to `rejection_sample`: its output would be biased.

    Args:
      draft_token_ids: i32[B, K], K >= 0. A -1 ends a request's drafts. An id outside [0, V)
        agrees with nothing.
      target_logits: [B, K + 1, V], bf16, f16 or f32, raw. Row i decides the token after i drafted
        ones.
      keys: typed threefry keys, [B] or (), as in `rejection_sample`.
      positions: i32, [B] or scalar: row i decides the token at absolute position
        ``positions + i``.
      num_tokens: i32[B], drafted tokens of each request: 0 for none, -1 for an inactive request,
        for which nothing is emitted. None is K.
      temperature: f32, [B] or scalar, >= 0. Below 1e-5 the request is greedy. Negative or not
        finite makes the request invalid: it emits nothing.
      cutoff: f32, [B, K + 1], target logits below it are left out. None keeps all.
      bonus_token_ids: i32, [B], replaces the bonus token; outside [0, V) it is drawn. The text is
        then no longer that of plain decoding.
      greedy_logprobs: bool, static, whether greedy requests get log-probabilities. False leaves
        them 0, and exponentiates no logit of a greedy request.
      options: `Options`, static.

    Returns:
      `Verification`. A request emits `num_accepted + 1` tokens. The last one is missing where
      the target row that decides it is invalid: it holds NaN or +inf, or is -inf everywhere.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or an unknown implementation.

    Example:
      >>> target_logits = jnp.log(jnp.array([[[0.1, 0.9], [0.5, 0.5]]]))
      >>> keys = jax.vmap(jax.random.key)(jnp.array([7]))
      >>> draft = specjax.gumbel_sample(
      ...     target_logits[:, 0], keys=keys, positions=3, stream=specjax.Stream.TARGET)
      >>> step = specjax.coupled_sample(
      ...     draft.token_ids[:, None], target_logits, keys=keys, positions=3)
      >>> step.num_accepted, step.num_emitted
      (Array([1], dtype=int32), Array([2], dtype=int32))

    References:
      Daliri, Musco and Suresh, 2024, arXiv:2408.07978.
    """
    check_options(options)
    ids = as_array("draft_token_ids", draft_token_ids)
    if ids.ndim != 2:
        raise ValueError(f"draft_token_ids has shape {ids.shape}; it needs [B, K].")
    size, k = ids.shape
    target_logits = as_array("target_logits", target_logits)
    check_logits("target_logits", target_logits, "[B, K + 1, V]", size)
    if target_logits.shape[1] != k + 1:
        raise ValueError(
            f"target_logits has {target_logits.shape[1]} rows per request for {k} draft tokens; "
            f"it needs {k + 1}: one per draft and one for the bonus token."
        )
    each = ((), (size,))
    draft = Draft(
        parse_array("draft_token_ids", ids, jnp.int32, ids.shape),
        num_tokens=parse_optional("num_tokens", num_tokens, jnp.int32, (size,)),
    )
    arrays = VerifyArrays.from_draft(
        draft,
        target_logits,
        keys=check_keys(keys, size),
        positions=parse_array("positions", positions, jnp.int32, *each),
        temperature=parse_array("temperature", temperature, jnp.float32, *each),
        cutoff=parse_optional("cutoff", cutoff, jnp.float32, (size, k + 1)),
        bonus_token_ids=parse_optional("bonus_token_ids", bonus_token_ids, jnp.int32, (size,)),
    )
    call_options = CallOptions.from_options(
        options,
        max_draft_tokens=k,
        method="coupled",
        greedy_logprobs=check_flag("greedy_logprobs", greedy_logprobs),
        split=parse_split(options.axis_name, options.vocab_size, target_logits),
    )
    return _coupled_sample(arrays, options=call_options)


@functools.partial(jax.jit, static_argnames="options")
def _coupled_sample(arrays: VerifyArrays, *, options: CallOptions) -> Verification:
    """Runs `coupled_sample` on checked arguments."""
    size, num_rows = arrays.target_logits.shape[:2]
    if size == 0:
        return empty_verification(num_rows)
    arrays = once_per_request(arrays, size, num_rows - 1)
    run = functools.partial(verify_shard, options=options)
    check_vma = not options.implementation.interpret
    rows = arrays.target_logits
    mapped = map_parts(run, rows, options.split, [rows], check_vma=check_vma)
    return mapped(arrays, SharedArrays())
