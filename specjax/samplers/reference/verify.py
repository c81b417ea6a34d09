"""The reference: verification of one request in plain JAX, for each request of a batch.

Target rows are read in order, and only while drafted tokens are accepted. Each pass reduces one row
to block partials. They give the drafted token's log-probability, the argmax and, at the deciding
row, the masses that choose the next token's block.

A batch is a map over requests on a CPU, which skips the rows after a rejection, and a `vmap`
elsewhere.

References:
  Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.call_arrays import VerifyInputs, flatten
from specjax.call_options import CallOptions
from specjax.core.acceptance import accept_greedy, accept_random, accept_synthetic
from specjax.core.gumbel_max import token_logprobs
from specjax.core.logsumexp import LogNormalizer, MaxSum, RowStatistics
from specjax.core.noise import SAMPLING_BLOCK, Stream, uniform, uniform_at_once
from specjax.core.rule import BLOCK, COUPLED, STANDARD, Rule, StaticRule
from specjax.core.temperature import parse_temperature
from specjax.devices.placement import pvary_like
from specjax.devices.rows import logit_rows
from specjax.samplers.reference.block import accept_block_prefix, drafted_tokens, is_block_request
from specjax.samplers.reference.coupled import couple_request
from specjax.samplers.reference.next_token import AcceptedPrefix, emit, is_active, next_token
from specjax.samplers.reference.request import (
    DraftedToken,
    DraftRows,
    Request,
    RequestRows,
    drafted_token,
    first_false,
)
from specjax.samplers.reference.rule import accepts_by_rule, next_token_by_rule
from specjax.types import Verification

# Requests of block verification that are verified at once.
_BLOCK_REQUESTS = 8


class _PrefixState(NamedTuple):
    """State of the loop over drafted tokens.

    Attributes:
      prefix: the tokens accepted so far, and the target row read last.
      active: bool, whether the last token was accepted, so that the next row is read.
      logprobs: f32[K], log p of the accepted tokens.
    """

    prefix: AcceptedPrefix
    active: jax.Array
    logprobs: jax.Array


def verify_request(
    rows: RequestRows, rule: StaticRule = STANDARD, only_maxima: jax.Array | None = None
) -> Verification:
    """Verifies the drafted tokens of one request by a rule.

    Args:
      rows: one request and its rows.
      rule: static.
      only_maxima: bool[], whether the maxima of its target rows suffice: it is greedy, and its
        log-probabilities are not asked for. None is False.

    Returns:
      `Verification` without a batch axis.
    """
    if rule == COUPLED:
        return couple_request(rows, only_maxima)
    custom = rule if isinstance(rule, Rule) else None
    if rule == BLOCK and rows.draft is not None:
        request, drafted = rows.request, drafted_tokens(rows)

        def with_rho() -> tuple[AcceptedPrefix, jax.Array]:
            prefix, logprobs = _accept_prefix(rows, custom, only_maxima)
            return prefix._replace(log_rho=pvary_like(jnp.float32(0), request)), logprobs

        prefix, logprobs = jax.lax.cond(
            is_block_request(request, drafted), lambda: accept_block_prefix(rows, drafted), with_rho
        )
    else:
        prefix, logprobs = _accept_prefix(rows, custom, only_maxima)
    draw = next_token if custom is None else functools.partial(next_token_by_rule, custom)
    token, logprob = draw(rows, prefix)
    return emit(rows, prefix.num_accepted, prefix.row, token, logprob, logprobs)


def _accept_prefix(
    rows: RequestRows, rule: Rule | None, only_maxima: jax.Array | None
) -> tuple[AcceptedPrefix, jax.Array]:
    """Returns the accepted prefix of a request, and log p of its drafted tokens, f32[K].

    Target rows are read in order until a drafted token is rejected or all are accepted. Rows that
    lie over devices are read at once, because every read is a message.
    """
    request, k, scale = rows.request, rows.request.token_ids.shape[0], rows.temperature.scale

    def judge(index: jax.Array) -> tuple[AcceptedPrefix, jax.Array, jax.Array]:
        i = jnp.minimum(index, k - 1)
        target_row = rows.target_row(index)
        partials, row = target_row.statistics(scale, only_maxima)
        drafted = drafted_token(rows, i)
        logprob = token_logprobs(target_row.take(drafted.token_id), row.normalizer, scale)
        best = target_row.argmax(partials)
        prefix = AcceptedPrefix(index, partials, row, drafted)
        if rule is None:
            accepted = _accepts(rows, i, drafted, logprob, best)
        else:
            accepted = accepts_by_rule(rule, rows, i, prefix, logprob, best)
        accepted &= (index < request.num_tokens) & row.valid
        return prefix, accepted, logprob

    def step(state: _PrefixState) -> _PrefixState:
        index = state.prefix.num_accepted
        prefix, accepted, logprob = judge(index)
        i = jnp.minimum(index, k - 1)
        logprobs = state.logprobs.at[i].set(jnp.where(accepted, logprob, state.logprobs[i]))
        prefix = prefix._replace(num_accepted=index + accepted.astype(jnp.int32))
        return pvary_like(_PrefixState(prefix, accepted, logprobs), state)

    def accept_in_turn() -> tuple[AcceptedPrefix, jax.Array]:
        start = _PrefixState(
            _empty_prefix(rows.target.vocab_size), is_active(request), jnp.zeros((k,), jnp.float32)
        )
        start = pvary_like(start, request, rows.target, rows.draft)
        end = jax.lax.while_loop(lambda state: state.active, step, start)
        return end.prefix, end.logprobs

    def accept_at_once() -> tuple[AcceptedPrefix, jax.Array]:
        index = pvary_like(jnp.arange(k + 1, dtype=jnp.int32), request)
        prefixes, accepted, logprobs = jax.vmap(judge)(index)
        num_accepted = first_false(accepted & is_active(request))
        return jax.tree.map(lambda x: x[num_accepted], prefixes), logprobs[:k]

    return rows.target.read(accept_in_turn, accept_at_once)


def _empty_prefix(vocab_size: int) -> AcceptedPrefix:
    """Returns no accepted tokens, and statistics of no row."""
    blocks = jnp.full((-(-vocab_size // SAMPLING_BLOCK),), -jnp.inf, jnp.float32)
    zero = jnp.float32(0)
    return AcceptedPrefix(
        num_accepted=jnp.int32(0),
        partials=MaxSum(blocks, jnp.zeros_like(blocks)),
        row=RowStatistics(LogNormalizer(zero, zero), jnp.bool_(False)),
        drafted=DraftedToken(jnp.int32(-1), zero, LogNormalizer(zero, zero), jnp.bool_(True)),
    )


def _accepts(
    rows: RequestRows, i: jax.Array, drafted: DraftedToken, logprob: jax.Array, best: jax.Array
) -> jax.Array:
    """Returns whether drafted token i, of target log-probability `logprob`, is accepted."""
    request, target, dtype = rows.request, rows.target, rows.noise_dtype
    at = rows.address(i, Stream.accept(i))
    u = target.read(lambda: uniform(at, jnp.uint32(0), dtype), lambda: uniform_at_once(at, dtype))
    if request.rates is not None:
        in_vocabulary = (drafted.token_id >= 0) & (drafted.token_id < target.vocab_size)
        return in_vocabulary & accept_synthetic(u, request.rates[i])
    return jnp.where(
        rows.temperature.greedy,
        accept_greedy(drafted.token_id, best),
        accept_random(u, logprob, drafted.logprob),
    )


def verify_batch(inputs: VerifyInputs, options: CallOptions, cpu_alone: bool) -> Verification:
    """Verifies a batch: `verify_request` for each of its requests.

    Args:
      inputs: from `once_per_request`.
      options: static.
      cpu_alone: whether it runs on no other device. Then what others would run is not traced, which
        takes twice as long as the rest.

    Returns:
      `Verification` of K drafted tokens; of one without drafts.
    """
    target_logits, draft_logits = (
        flatten(x, 1) for x in (inputs.target_logits, inputs.draft.logits)
    )
    target = logit_rows(target_logits, options.split, flatten(inputs.target_cutoff))
    draft = None
    if draft_logits is not None:
        draft = DraftRows(logit_rows(draft_logits, options.split), inputs.draft_ids)
    requests = Request.from_inputs(inputs, options.max_draft_tokens)
    # Inside shard_map the rows' numbers vary over no axis; a request varies as a whole.
    requests = pvary_like(requests, requests)

    def one(request: Request) -> Verification:
        greedy = parse_temperature(request.temperature).greedy
        only_maxima = greedy if options.skips_greedy_sums else None
        # Without drafts every rule draws the row's token, and this one has the smallest program.
        rule = options.rule if options.max_draft_tokens else COUPLED
        rows = RequestRows(request, target, draft, options.noise_dtype)
        verified = verify_request(rows, rule, only_maxima)
        if options.greedy_logprobs:
            return verified
        return verified._replace(logprobs=jnp.where(greedy, jnp.float32(0), verified.logprobs))

    def vmapped(requests: Request) -> Verification:
        if options.rule == BLOCK:
            # A few at once: each holds several rows of float32.
            return jax.lax.map(one, requests, batch_size=_BLOCK_REQUESTS)
        return jax.vmap(one)(requests)

    def by_device(requests: Request) -> Verification:
        if inputs.temperature.shape[0] == 1:
            # One request is no batch: tracing a map and a batched loop takes three times as long.
            verification = one(jax.tree.map(lambda x: x[0], requests))
            return jax.tree.map(lambda x: x[None], verification)
        mapped = functools.partial(jax.lax.map, one)
        if cpu_alone:
            return mapped(requests)
        return jax.lax.platform_dependent(requests, cpu=mapped, default=vmapped)

    return target.read(lambda: by_device(requests), lambda: vmapped(requests))
