"""Whole-batch calls, compiled: arguments become requests, requests are verified."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.mesh import map_batch_shards, vary_like
from specjax.noise import addresses, fold_in_rows, key_words
from specjax.ragged import ragged_requests
from specjax.request import PerRequest, Request, Rows
from specjax.sampling import sample_row
from specjax.typing import Draft, Sample, Verification
from specjax.verify import verify_batch

__all__ = ["Options", "run_gumbel_sample", "run_rejection_sample", "run_rejection_sample_ragged"]


class Options(NamedTuple):
    """The keyword arguments that every form of verification shares, as arrays."""

    keys: jax.Array
    positions: jax.Array
    temperature: jax.Array
    conditional_rates: jax.Array | None
    bonus_token_ids: jax.Array | None

    def spread(self, size: int, k: int) -> PerRequest:
        """Each option once per request: [B], rates [B, K]."""
        rates = self.conditional_rates
        return PerRequest(
            key=_request_keys(self.keys, size),
            position=jnp.broadcast_to(self.positions, (size,)),
            temperature=jnp.broadcast_to(self.temperature, (size,)),
            rates=None if rates is None else jnp.broadcast_to(rates, (size, k)),
            bonus_token_id=self.bonus_token_ids,
        )


def _request_keys(keys: jax.Array, size: int) -> Any:
    """Key words u32[B] of each request; a single key folds in the row index."""
    return key_words(keys if keys.shape else fold_in_rows(keys, size))


@functools.partial(jax.jit, static_argnames="noise_dtype")
def run_gumbel_sample(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    stream: jax.Array,
    temperature: jax.Array,
    cutoff: jax.Array | None,
    *,
    noise_dtype: Any,
) -> Sample:
    """`gumbel_sample` on checked arguments."""
    size = logits.shape[0]
    each = [jnp.broadcast_to(x, (size,)) for x in (positions, stream, temperature)]

    def sample(batch: Any, _: Any) -> Sample:
        logits, key, position, stream, temperature, cutoff = batch
        at = addresses(key, position, stream)
        one = functools.partial(sample_row, noise_dtype=noise_dtype)
        return jax.vmap(one)(logits, at, temperature, cutoff)

    batch = (logits, _request_keys(keys, size), *each, cutoff)
    return map_batch_shards(sample, logits, batch, ())


@functools.partial(jax.jit, static_argnames="noise_dtype")
def run_rejection_sample(
    draft: Draft,
    target_logits: jax.Array,
    cutoff: jax.Array | None,
    options: Options,
    *,
    noise_dtype: Any,
) -> Verification:
    """`rejection_sample` on checked arguments."""
    size, num_rows, vocab_size = target_logits.shape

    def verify(batch: Any, shared_logits: jax.Array | None) -> Verification:
        # Inside shard_map a scalar default varies over no axis; a request varies as a whole.
        (draft, target_logits, cutoff, options), shared_logits = vary_like(
            (batch, shared_logits), batch, shared_logits
        )
        logits = draft.logits if shared_logits is None else shared_logits
        flat_cutoff = None if cutoff is None else cutoff.reshape(-1)
        return verify_batch(
            Request.of_padded(draft, options, num_target_rows=num_rows),
            Rows(target_logits.reshape(-1, vocab_size), flat_cutoff),
            None if logits is None else logits.reshape(-1, logits.shape[2]),
            noise_dtype,
        )

    if size == 0:
        return _nothing(num_rows)
    spread = options.spread(size, num_rows - 1)
    if num_rows == 1:
        draft, spread = _no_drafts(draft, size), spread._replace(rates=None)
    shared_logits = None
    if draft.rows is not None:
        # A row may lie on any shard, so that every shard gets all of them.
        draft, shared_logits = draft._replace(logits=None), draft.logits
    batch = (draft, target_logits, cutoff, spread)
    return _first_rows(map_batch_shards(verify, target_logits, batch, shared_logits), num_rows)


@functools.partial(jax.jit, static_argnames=("max_draft_tokens", "noise_dtype"))
def run_rejection_sample_ragged(
    draft: Draft,
    target_logits: jax.Array,
    cu_num_draft_tokens: jax.Array,
    cutoff: jax.Array | None,
    options: Options,
    *,
    max_draft_tokens: int,
    noise_dtype: Any,
) -> Verification:
    """`rejection_sample_ragged` on checked arguments."""
    size = cu_num_draft_tokens.shape[0] - 1
    if size == 0:
        return _nothing(max_draft_tokens + 1)
    spread = options.spread(size, max_draft_tokens)
    everything = (draft, target_logits, cu_num_draft_tokens, cutoff, spread)
    draft, target_logits, cu_num_draft_tokens, cutoff, spread = vary_like(everything, everything)
    starts = cu_num_draft_tokens[:-1]
    if draft.token_ids.shape[0] and max_draft_tokens:
        requests = ragged_requests(draft, spread, cu_num_draft_tokens, max_draft_tokens)
    else:
        draft = _no_drafts(draft, size)
        place = starts + jnp.arange(size, dtype=jnp.int32)
        requests = Request.of_padded(draft, spread._replace(rates=None), num_target_rows=1)
        requests = requests._replace(target_row=place)
    done = verify_batch(requests, Rows(target_logits, cutoff), draft.logits, noise_dtype)
    return _first_rows(done, max_draft_tokens + 1)


def _no_drafts(draft: Draft, size: int) -> Draft:
    """One place per request and nothing drafted in it, for K = 0."""
    return Draft(jnp.full((size, 1), -1, jnp.int32), num_tokens=draft.num_tokens)


def _nothing(num_rows: int) -> Verification:
    """The verification of no requests."""
    none = jnp.zeros((0,), jnp.int32)
    padded = jnp.zeros((0, num_rows), jnp.int32)
    return Verification(padded, none, none, padded.astype(jnp.float32))


def _first_rows(done: Verification, num_rows: int) -> Verification:
    return done._replace(
        token_ids=done.token_ids[:, :num_rows], logprobs=done.logprobs[:, :num_rows]
    )
