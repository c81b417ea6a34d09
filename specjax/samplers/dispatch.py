"""Whole-batch calls, compiled: arguments become requests, requests are verified."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.core.gumbel_max import sample_row
from specjax.core.noise import batch_addresses, fold_in_rows
from specjax.implementation import by_implementation
from specjax.mesh import pvary_like, shard_map_batch
from specjax.samplers.request import PerRequest, Request, Rows, ragged_requests
from specjax.samplers.verify import verify_batch
from specjax.typing import Draft, Sample, Verification

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


class _Batch(NamedTuple):
    """A call as both implementations take it: logits as flat rows, requests row behind row."""

    draft: Draft
    draft_logits: jax.Array | None
    target: Rows
    options: PerRequest
    cu_num_draft_tokens: jax.Array | None


def _request_keys(keys: jax.Array, size: int) -> jax.Array:
    """Key words u32[B, 2] of each request; a single key folds in the row index."""
    return jax.random.key_data(keys if keys.shape else fold_in_rows(keys, size))


_static = functools.partial(jax.jit, static_argnames=("noise_dtype", "implementation"))


@_static
def run_gumbel_sample(
    logits: jax.Array,
    keys: jax.Array,
    positions: jax.Array,
    stream: jax.Array,
    temperature: jax.Array,
    cutoff: jax.Array | None,
    *,
    noise_dtype: Any,
    implementation: str,
) -> Sample:
    """`gumbel_sample` on checked arguments."""
    size = logits.shape[0]
    if size == 0:
        none = jnp.zeros((0,), jnp.float32)
        return Sample(none.astype(jnp.int32), none, none)
    each = [jnp.broadcast_to(x, (size,)) for x in (positions, stream, temperature)]

    def xla(
        logits: Any, key: Any, position: Any, stream: Any, temperature: Any, cutoff: Any
    ) -> Sample:
        at = batch_addresses((key[:, 0], key[:, 1]), position, stream)
        one = functools.partial(sample_row, noise_dtype=noise_dtype)
        return jax.vmap(one)(logits, at, temperature, cutoff)

    def kernels(*batch: Any, interpret: bool) -> Sample:
        from specjax.pallas.sample import sample_rows

        return sample_rows(*batch, noise_dtype=noise_dtype, interpret=interpret)

    def sample(batch: Any, _: Any) -> Sample:
        batch = pvary_like(batch, batch)
        return by_implementation(implementation, xla, kernels, *batch)

    batch = (logits, _request_keys(keys, size), *each, cutoff)
    check_vma = implementation != "interpret"
    return shard_map_batch(sample, logits, batch, (), check_vma)


@_static
def run_rejection_sample(
    draft: Draft,
    target_logits: jax.Array,
    cutoff: jax.Array | None,
    options: Options,
    *,
    noise_dtype: Any,
    implementation: str,
) -> Verification:
    """`rejection_sample` on checked arguments."""
    size, num_rows, vocab_size = target_logits.shape
    if size == 0:
        return _nothing(num_rows)

    def verify(batch: Any, shared_logits: jax.Array | None) -> Verification:
        # Inside shard_map a scalar default varies over no axis; a request varies as a whole.
        (draft, target_logits, cutoff, options), shared_logits = pvary_like(
            (batch, shared_logits), batch, shared_logits
        )
        logits = draft.logits if shared_logits is None else shared_logits
        batch = _Batch(
            draft._replace(logits=None),
            None if logits is None else logits.reshape(-1, logits.shape[2]),
            Rows(
                target_logits.reshape(-1, vocab_size),
                None if cutoff is None else cutoff.reshape(-1),
            ),
            options,
            None,
        )
        return _verify(batch, num_rows - 1, noise_dtype, implementation)

    spread = options.spread(size, num_rows - 1)
    if num_rows == 1:
        draft, spread = _no_drafts(draft), spread._replace(rates=None)
    shared_logits = None
    if draft.rows is not None:
        # A row may lie on any shard, so that every shard gets all of them.
        draft, shared_logits = draft._replace(logits=None), draft.logits
    batch = (draft, target_logits, cutoff, spread)
    check_vma = implementation != "interpret"
    return shard_map_batch(verify, target_logits, batch, shared_logits, check_vma)


@functools.partial(jax.jit, static_argnames=("max_draft_tokens", "noise_dtype", "implementation"))
def run_rejection_sample_ragged(
    draft: Draft,
    target_logits: jax.Array,
    cu_num_draft_tokens: jax.Array,
    cutoff: jax.Array | None,
    options: Options,
    *,
    max_draft_tokens: int,
    noise_dtype: Any,
    implementation: str,
) -> Verification:
    """`rejection_sample_ragged` on checked arguments."""
    size = cu_num_draft_tokens.shape[0] - 1
    if size == 0:
        return _nothing(max_draft_tokens + 1)
    spread = options.spread(size, max_draft_tokens)
    k = max_draft_tokens
    if not (draft.token_ids.shape[0] and k):
        draft, spread, k = _no_drafts(draft), spread._replace(rates=None), 0
    batch = _Batch(
        draft._replace(logits=None),
        draft.logits,
        Rows(target_logits, cutoff),
        spread,
        cu_num_draft_tokens,
    )
    done = _verify(pvary_like(batch, batch), k, noise_dtype, implementation)
    return _of_width(done, max_draft_tokens + 1)


def _verify(batch: _Batch, num_drafts: int, noise_dtype: Any, implementation: str) -> Verification:
    """Verifies a batch of at most `num_drafts` drafted tokens each."""

    def xla(batch: _Batch) -> Verification:
        requests = _requests(batch, num_drafts)
        done = verify_batch(requests, batch.target, batch.draft_logits, noise_dtype)
        return _of_width(done, num_drafts + 1)

    def kernels(batch: _Batch, interpret: bool) -> Verification:
        from specjax.pallas.inputs import Inputs
        from specjax.pallas.verify import verify_rows

        draft, options = batch.draft, batch.options
        inputs = Inputs(
            target=batch.target.logits,
            target_cutoff=batch.target.cutoff,
            draft=batch.draft_logits,
            token_ids=draft.token_ids.reshape(-1) if num_drafts else None,
            logprobs=_flat(draft.logprobs),
            logsumexp=_flat(draft.logsumexp),
            draft_cutoff=_flat(draft.cutoff),
            draft_temperature=draft.temperature,
            num_tokens=draft.num_tokens,
            rows=draft.rows,
            cu=batch.cu_num_draft_tokens,
            **options._asdict(),
        )
        return verify_rows(
            inputs, num_drafts=num_drafts, noise_dtype=noise_dtype, interpret=interpret
        )

    return by_implementation(implementation, xla, kernels, batch)


def _requests(batch: _Batch, k: int) -> Request:
    """The batch as the reference takes it: token arrays [B, K], K >= 1."""
    cu = batch.cu_num_draft_tokens
    if k and cu is not None:
        return ragged_requests(batch.draft, batch.options, cu, k)
    if k:
        return Request.of_padded(batch.draft, batch.options, num_target_rows=k + 1)
    size = batch.options.position.shape[0]
    draft = batch.draft._replace(token_ids=jnp.full((size, 1), -1, jnp.int32))
    requests = Request.of_padded(draft, batch.options, num_target_rows=1)
    return requests if cu is None else requests._replace(target_row=requests.target_row + cu[:-1])


def _no_drafts(draft: Draft) -> Draft:
    """What counts of a draft without tokens."""
    return Draft(jnp.zeros((0, 0), jnp.int32), num_tokens=draft.num_tokens)


def _flat(array: jax.Array | None) -> jax.Array | None:
    return None if array is None else array.reshape(-1)


def _nothing(num_rows: int) -> Verification:
    """The verification of no requests."""
    none = jnp.zeros((0,), jnp.int32)
    padded = jnp.zeros((0, num_rows), jnp.int32)
    return Verification(padded, none, none, padded.astype(jnp.float32))


def _of_width(done: Verification, num_rows: int) -> Verification:
    """Cut or padded to `num_rows` tokens per request."""
    ids, logprobs = done.token_ids[:, :num_rows], done.logprobs[:, :num_rows]
    width = ((0, 0), (0, num_rows - ids.shape[1]))
    return done._replace(
        token_ids=jnp.pad(ids, width, constant_values=-1), logprobs=jnp.pad(logprobs, width)
    )
