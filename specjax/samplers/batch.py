"""A batch of requests: one key, position and temperature of each, and what verifies the batch."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.call_arrays import CallOptions, VerifyArrays
from specjax.core.noise import fold_in_rows
from specjax.core.token_map import invert_token_map
from specjax.implementation import select
from specjax.mesh import pvary_like
from specjax.samplers.split_kernels import may_run_kernels, missing_of_verification
from specjax.samplers.verify_xla import verify_batch
from specjax.verification import Verification

__all__ = [
    "SharedArrays",
    "empty_verification",
    "key_words_per_request",
    "once_per_request",
    "resize_tokens",
    "verify_flat",
    "verify_shard",
]


class SharedArrays(NamedTuple):
    """What every shard of a batch needs whole.

    Attributes:
      draft_logits: of all shards, where `draft_rows` may name any; else None.
      draft_ids: as in `VerifyArrays`.
    """

    draft_logits: jax.Array | None = None
    draft_ids: jax.Array | None = None


def key_words_per_request(keys: jax.Array, size: int) -> jax.Array:
    """Returns key words u32[B, 2]; a single key folds in the index of each request."""
    return jax.random.key_data(keys if keys.shape else fold_in_rows(keys, size))


def once_per_request(arrays: VerifyArrays, size: int, max_draft_tokens: int) -> VerifyArrays:
    """Returns the arrays with one value per request: [B], and rates [B, K]; a map is inverted."""
    if not max_draft_tokens:
        arrays = arrays.without_drafts()
    if arrays.token_map is not None:
        draft_ids = invert_token_map(arrays.token_map, arrays.target_logits.shape[-1])
        arrays = arrays._replace(token_map=None, draft_ids=draft_ids)
    rates = arrays.conditional_rates
    return arrays._replace(
        keys=key_words_per_request(arrays.keys, size),
        positions=jnp.broadcast_to(arrays.positions, (size,)),
        temperature=jnp.broadcast_to(arrays.temperature, (size,)),
        conditional_rates=None
        if rates is None
        else jnp.broadcast_to(rates, (size, max_draft_tokens)),
    )


def verify_shard(
    arrays: VerifyArrays, shared: SharedArrays, *, options: CallOptions
) -> Verification:
    """Verifies a padded batch, or one shard of it; neither checks nor shards.

    Args:
      arrays: from `once_per_request`.
      shared: arrays that stand in `arrays` where the batch is not sharded; else None there.
      options: static.

    Returns:
      `Verification`.
    """
    # Inside shard_map a scalar default varies over no axis; a request varies as a whole.
    arrays, shared = pvary_like((arrays, shared), arrays, shared, without=options.axis_name)
    target, cutoff = arrays.target_logits, arrays.target_cutoff
    draft = arrays.draft_logits if shared.draft_logits is None else shared.draft_logits
    arrays = arrays._replace(
        target_logits=target.reshape(-1, target.shape[2]),
        target_cutoff=None if cutoff is None else cutoff.reshape(-1),
        draft_logits=None if draft is None else draft.reshape(-1, draft.shape[2]),
        draft_ids=arrays.draft_ids if shared.draft_ids is None else shared.draft_ids,
    )
    return _verifier(arrays, options)(arrays)


def verify_flat(arrays: VerifyArrays, options: CallOptions) -> Verification:
    """Verifies flat rows, of arrays that stand in the call once per request."""
    arrays = pvary_like(arrays, arrays, without=options.axis_name)
    return _verifier(arrays, options)(arrays)


def _verifier(arrays: VerifyArrays, options: CallOptions) -> Callable[[VerifyArrays], Verification]:
    """Returns the function that verifies flat rows: the reference or the kernels."""
    reference = functools.partial(_verify_by_reference, options=options)
    missing = missing_of_verification(arrays, options)
    if not may_run_kernels(options, arrays.target_logits.shape[1], missing):
        return reference
    from specjax.pallas.verify import verify_rows

    kernels = functools.partial(verify_rows, options=options)
    return select(options.implementation, reference, kernels)


def _verify_by_reference(arrays: VerifyArrays, options: CallOptions) -> Verification:
    return resize_tokens(verify_batch(arrays, options), options.max_draft_tokens + 1)


def empty_verification(num_rows: int) -> Verification:
    """Returns the verification of no requests."""
    empty = jnp.zeros((0,), jnp.int32)
    padded = jnp.zeros((0, num_rows), jnp.int32)
    return Verification(padded, empty, empty, padded.astype(jnp.float32))


def resize_tokens(verification: Verification, num_rows: int) -> Verification:
    """Returns a verification cut or padded to `num_rows` tokens per request."""
    ids, logprobs = verification.token_ids[:, :num_rows], verification.logprobs[:, :num_rows]
    width = ((0, 0), (0, num_rows - ids.shape[1]))
    return verification._replace(
        token_ids=jnp.pad(ids, width, constant_values=-1), logprobs=jnp.pad(logprobs, width)
    )
