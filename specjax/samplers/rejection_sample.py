"""`rejection_sample`: checks, and the jitted body."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.call_arrays import VerifyInputs, cumulative_counts
from specjax.call_options import CallOptions, Options, check_options
from specjax.checks import (
    as_array,
    check_draft,
    check_flag,
    check_keys,
    check_logits,
    check_ragged_draft,
    parse_array,
    parse_optional,
    parse_rates,
)
from specjax.core.rule import (
    COUPLED,
    STANDARD,
    Rule,
    SyntheticRule,
    VerificationRule,
    check_rule,
    static_rule,
)
from specjax.core.token_map import check_token_map
from specjax.devices.map_parts import map_parts
from specjax.devices.placement import check_unsharded
from specjax.devices.vocabulary_split import parse_split
from specjax.samplers.batch import (
    empty_verification,
    once_per_request,
    resize_tokens,
    verify_ragged,
    verify_shard,
)
from specjax.types import Draft, RaggedDraft, Verification


def rejection_sample(
    draft: Draft | RaggedDraft,
    target_logits: jax.Array,
    *,
    keys: jax.Array,
    positions: Any,
    temperature: Any = 1.0,
    cutoff: Any = None,
    bonus_token_ids: Any = None,
    rule: VerificationRule = STANDARD,
    greedy_logprobs: bool = True,
    options: Options = Options(),
) -> Verification:
    r"""Verifies drafted tokens so that the emitted tokens follow the target exactly.

    Drafted token x is accepted with probability :math:`\min(1, p(x) / q(x))`. After the first
    rejection one token is drawn from the residual
    :math:`\max(p - q, 0) / \sum \max(p - q, 0)`. If all are accepted, a bonus token is drawn
    from the last target row. One-hot drafts have q = 1. Greedy requests accept the target's
    argmax alone. All of these mix in one batch. Another `rule` accepts in another way.

    Args:
      draft: `Draft` with token arrays [B, K], K >= 0, logits [S, K, V_d]; or `RaggedDraft`, of
        requests laid end to end, with token arrays [N], logits [S, V_d].
      target_logits: [B, K + 1, V], bf16, f16 or f32, raw. Row i decides drafted token i, the row
        after the last drafted token the bonus. With a `RaggedDraft` [N + B, V].
      keys: typed threefry keys, [B] or (). With () each request folds in its index; inside
        `shard_map` pass [B], because every shard counts its requests from 0.
      positions: i32, [B] or scalar: row i decides the token at absolute position
        ``positions + i``. Either a fixed key per request and true positions, or a fresh
        key per call and positions 0.
      temperature: f32, [B] or scalar, >= 0. Below 1e-5 the request is greedy. Negative or
        not finite makes the request invalid: it emits nothing.
      cutoff: f32, [B, K + 1] or, of a `RaggedDraft`, [N + B], target logits below it are left out.
        None keeps all.
      bonus_token_ids: i32, [B], replaces the bonus token; outside [0, V) it is sampled. Its
        log-probability is -inf where the bonus row is invalid.
      rule: what accepts, a value of `specjax.rules`: `standard`, `block` and `coupled` are exact,
        `synthetic` accepts at given rates, others are looser. Or a `Rule` of your own.
      greedy_logprobs: bool, static, whether greedy requests get log-probabilities. False leaves
        them 0, and exponentiates no logit of a greedy request.
      options: `Options`, static. Its `axis_name` is the vocabulary axis of `target_logits` and
        `draft.logits`, which then have the same tokens on a device. It does not go with a `Rule` or
        `draft.token_map`: with these pass None, which gathers rows that a sharding splits.

    Returns:
      `Verification`. A request emits `num_accepted + 1` tokens. The last one is missing where
      the target row that decides it is invalid: it holds NaN or +inf, or is -inf everywhere.
      The tokens of a `RaggedDraft` are padded to `max_draft_tokens + 1`.

    Raises:
      ValueError: for wrong shapes, dtypes, keys or rules, or an unknown implementation.

    Example:
      >>> target_logits = jnp.log(jnp.array([[[0.1, 0.9], [0.5, 0.5]]]))
      >>> draft = specjax.Draft(jnp.array([[1]]), logits=target_logits[:, :1])
      >>> step = specjax.rejection_sample(
      ...     draft, target_logits, keys=jax.random.key(0), positions=0)
      >>> step.num_accepted, step.num_emitted
      (Array([1], dtype=int32), Array([2], dtype=int32))

    References:
      Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    check_options(options)
    check_rule(rule)
    target_logits = as_array("target_logits", target_logits)
    draft, size, k = _check_rows(draft, target_logits)
    if rule == COUPLED:
        draft = draft.without_q()
    elif draft.on_target_stream and not isinstance(rule, SyntheticRule):
        raise ValueError(
            "draft.on_target_stream is True: its tokens were drawn with the target's own noise, "
            f"which biases the output of {rule}; verify them by rules.coupled(), or draft for this "
            "rule, as by propose(..., rule=rule)."
        )
    if isinstance(draft, RaggedDraft):
        for name, logits in (("target_logits", target_logits), ("draft.logits", draft.logits)):
            if logits is not None:
                check_unsharded(name, logits)
    split = parse_split(
        options.axis_name,
        options.vocab_size,
        target_logits,
        draft=draft,
        rule=rule if isinstance(rule, Rule) else None,
    )
    check_token_map("draft.token_map", draft.token_map, target_logits.shape[-1])
    rates = rule.conditional_rates if isinstance(rule, SyntheticRule) else None
    each, f32, i32 = ((), (size,)), jnp.float32, jnp.int32
    inputs = VerifyInputs(
        draft,
        target_logits,
        parse_optional("cutoff", cutoff, f32, target_logits.shape[:-1]),
        keys=check_keys(keys, size),
        positions=parse_array("positions", positions, i32, *each),
        temperature=parse_array("temperature", temperature, f32, *each),
        conditional_rates=parse_rates(rates, size, k),
        bonus_token_ids=parse_optional("bonus_token_ids", bonus_token_ids, i32, (size,)),
    )
    call_options = CallOptions.from_options(
        options,
        max_draft_tokens=k,
        rule=static_rule(rule),
        greedy_logprobs=check_flag("greedy_logprobs", greedy_logprobs),
        split=split,
    )
    return run_verification(inputs, options=call_options)


def _check_rows(
    draft: Draft | RaggedDraft, target_logits: jax.Array
) -> tuple[Draft | RaggedDraft, int, int]:
    """Returns a draft that fits to its target rows, B, and K; or refuses them."""
    if isinstance(draft, RaggedDraft):
        check_logits("target_logits", target_logits, "[N + B, V]")
        ragged = check_ragged_draft(draft, target_logits.shape[0])
        return ragged, ragged.cu_num_draft_tokens.shape[0] - 1, ragged.max_draft_tokens
    draft = check_draft(draft)
    size, k = draft.token_ids.shape
    check_logits("target_logits", target_logits, "[B, K + 1, V]", size)
    if target_logits.shape[1] != k + 1:
        raise ValueError(
            f"target_logits has {target_logits.shape[1]} rows per request for {k} draft tokens; "
            f"it needs {k + 1}: one per draft and one for the bonus token."
        )
    return draft, size, k


@functools.partial(jax.jit, static_argnames="options")
def run_verification(inputs: VerifyInputs, *, options: CallOptions) -> Verification:
    """Runs `rejection_sample` on checked arguments."""
    num_rows, cumulative = options.max_draft_tokens + 1, cumulative_counts(inputs.draft)
    size = inputs.target_logits.shape[0] if cumulative is None else cumulative.shape[0] - 1
    if size == 0:
        return empty_verification(num_rows)
    if cumulative is not None and not inputs.draft.token_ids.shape[0]:
        options = dataclasses.replace(options, max_draft_tokens=0)
    inputs = once_per_request(inputs, size, options.max_draft_tokens)
    if cumulative is not None:
        return resize_tokens(verify_ragged(inputs, options=options), num_rows)
    draft = inputs.draft
    rows = (inputs.target_logits, draft.logits)
    # A row that `draft.rows` names may lie on any shard, so that every shard gets all of them.
    on_all = (inputs.draft_ids, None if draft.rows is None else draft.logits)
    whole = jax.tree.map(lambda x: any(x is each for each in on_all), inputs)
    run = functools.partial(verify_shard, options=options)
    check_vma = not options.implementation.interpret
    mapped = map_parts(run, rows[0], options.split, rows, whole=whole, check_vma=check_vma)
    return mapped(inputs)


def verify_draft(inputs: VerifyInputs, *, options: CallOptions) -> Verification:
    """Verifies a padded batch inside a program; neither checks, compiles nor shards.

    Args:
      inputs: checked arguments, B >= 1.
      options: static.

    Returns:
      `Verification`.
    """
    size, num_rows = inputs.target_logits.shape[:2]
    return verify_shard(once_per_request(inputs, size, num_rows - 1), options=options)
