"""A batch of requests: one key, position and temperature of each, and what verifies the batch."""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specjax.call_arrays import SampleArrays, TreeArrays, VerifyInputs
from specjax.call_options import CallOptions
from specjax.core.noise import fold_in_rows
from specjax.core.rule import BLOCK, COUPLED
from specjax.core.token_map import invert_token_map
from specjax.devices.map_parts import map_vocabulary
from specjax.devices.placement import Placement, pvary_like
from specjax.devices.rows import logit_rows
from specjax.devices.vocabulary_split import VocabularySplit, why_no_kernels
from specjax.implementation import choose_implementation, is_for_cpu_alone
from specjax.samplers.reference.verify import verify_batch
from specjax.types import Verification

_Arrays = TypeVar("_Arrays", VerifyInputs, SampleArrays, TreeArrays)


def broadcast_requests(arrays: _Arrays, size: int) -> _Arrays:
    """Returns arrays of a call with one value per request, [B], and key words u32[B, 2].

    A single key folds in the index of each request.
    """
    keys = arrays.keys if arrays.keys.shape else fold_in_rows(arrays.keys, size)
    names = {"positions", "stream", "temperature", "draft_temperature"} & set(arrays._fields)
    values = {name: getattr(arrays, name) for name in names}
    once: dict[str, Any] = {
        name: jnp.broadcast_to(x, (size,)) for name, x in values.items() if x is not None
    }
    return arrays._replace(keys=jax.random.key_data(keys), **once)


def once_per_request(inputs: VerifyInputs, size: int, max_draft_tokens: int) -> VerifyInputs:
    """Returns the inputs of `broadcast_requests` with rates [B, K]; a map is inverted."""
    draft, rates, draft_ids = inputs.draft, inputs.conditional_rates, None
    if not max_draft_tokens:
        draft, rates = draft.without_q().replace(token_ids=None), None
    if draft.token_map is not None:
        draft_ids = invert_token_map(draft.token_map, inputs.target_logits.shape[-1])
        draft = draft.replace(token_map=None)
    if draft.temperature is not None:
        draft = draft.replace(temperature=jnp.broadcast_to(draft.temperature, (size,)))
    if rates is not None:
        rates = jnp.broadcast_to(rates, (size, max_draft_tokens))
    inputs = inputs._replace(draft=draft, conditional_rates=rates, draft_ids=draft_ids)
    return broadcast_requests(inputs, size)


def verify_shard(inputs: VerifyInputs, *, options: CallOptions) -> Verification:
    """Verifies a batch, or one shard of a padded one; neither checks nor shards.

    Args:
      inputs: from `once_per_request`. Where the batch is sharded, every shard has `draft_ids`
        whole, and the draft's `logits` too if it has `rows`.
      options: static.

    Returns:
      `Verification`.
    """
    # Inside shard_map a scalar default varies over no axis; a request varies as a whole.
    inputs = pvary_like(inputs, inputs, without=options.axis_name)
    cpu_alone = is_for_cpu_alone(options.implementation)
    missing = _missing_of_verification(inputs, options)
    if not kernels_available(options, inputs.target_logits.shape[-1], missing):
        return _verify_by_reference(inputs, options, cpu_alone)
    from specjax.pallas.verify import verify_rows

    # Where JAX chooses, a GPU runs the kernels, and the reference is left for a CPU.
    cpu_alone |= options.implementation.name == "auto"
    reference = functools.partial(_verify_by_reference, options=options, cpu_alone=cpu_alone)
    kernels = functools.partial(verify_rows, options=options)
    return choose_implementation(options.implementation, reference, kernels)(inputs)


def verify_over_mesh(
    inputs: VerifyInputs,
    placement: Placement,
    split: VocabularySplit | None,
    *,
    options: CallOptions,
) -> Verification:
    """Verifies a padded batch inside a program, on every device its requests and its vocabulary.

    Args:
      inputs: checked arguments, B >= 1. Rows of a split vocabulary are [B, K + 1, N * W], W of
        each device, padding included; the draft's are whole.
      placement: of the target.
      split: of `target_logits`, or None.
      options: static, without a split.

    Returns:
      `Verification`.
    """
    size, num_rows = inputs.target_logits.shape[:2]
    rows = logit_rows(inputs.target_logits, split)
    if not _supports_sharded_vocab(inputs, rows.vocab_size, options):
        # The one place where rows are gathered.
        rows = rows.gather(placement)
    draft = inputs.draft.replace(logits=rows.fit(inputs.draft.logits))
    options = dataclasses.replace(options, split=rows.split)
    inputs = inputs._replace(draft=draft, target_logits=rows.logits)
    inputs = once_per_request(inputs, size, num_rows - 1)
    run = functools.partial(verify_shard, options=options)
    if inputs.draft.rows is not None:
        # A row may be any request's.
        return run(inputs)
    requests, row_spec, draft_ids = placement.spec(), rows.spec(placement), inputs.draft_ids
    inputs = jax.tree.map(placement.pad, inputs._replace(draft_ids=None))
    specs = jax.tree.map(lambda _: requests, inputs)
    specs = specs._replace(
        target_logits=row_spec,
        draft=specs.draft.replace(logits=None if inputs.draft.logits is None else row_spec),
        draft_ids=None if draft_ids is None else PartitionSpec(),
    )
    check_vma = not options.implementation.interpret
    mapped = placement.map(run, (specs,), requests, check_vma)
    verification = mapped(inputs._replace(draft_ids=draft_ids))
    return jax.tree.map(lambda x: x[:size], verification)


def _supports_sharded_vocab(inputs: VerifyInputs, vocab_size: int, options: CallOptions) -> bool:
    """Returns whether a verification takes rows whose vocabulary lies over devices."""
    draft = inputs.draft
    is_plain = options.custom_rule is None and draft.token_map is None and draft.rows is None
    # Columns past V are cut: a draft that has some needs its `logsumexp`.
    width = 0 if draft.logits is None else draft.logits.shape[-1]
    is_alike = width <= vocab_size or draft.logsumexp is not None
    missing = _missing_of_verification(inputs, options)
    by_name = options.implementation.name in ("triton", "interpret")
    return is_plain and is_alike and not (by_name and missing)


def verify_ragged(inputs: VerifyInputs, *, options: CallOptions) -> Verification:
    """Verifies requests laid end to end; every device has all of them.

    Args:
      inputs: from `once_per_request`.
      options: static.

    Returns:
      `Verification`.
    """
    run = functools.partial(verify_shard, options=options)
    rows = (inputs.target_logits, inputs.draft.logits)
    check_vma = not options.implementation.interpret
    return map_vocabulary(run, options.split, rows, check_vma=check_vma)(inputs)


def kernels_available(options: CallOptions, width: int, missing: str | None = None) -> bool:
    """Returns whether a call may run on the kernels; a name that they cannot follow is refused.

    Args:
      options: of the call.
      width: the tokens of a row that a device holds.
      missing: what the kernels lack for this call where a vocabulary is split, or None.

    Raises:
      ValueError: for kernels by name that do not read the call's split vocabulary.
    """
    name = options.implementation.name
    if name == "xla":
        return False
    reason = why_no_kernels(options.split, width, options.noise_dtype, missing)
    if reason is not None and name != "auto":
        raise ValueError(
            f"implementation={name!r} names the kernels, which over devices of axis "
            f"{options.axis_name!r} {reason}; use None or 'xla'."
        )
    return reason is None


def _missing_of_verification(inputs: VerifyInputs, options: CallOptions) -> str | None:
    """Returns the reason why kernels cannot verify this call of a split vocabulary, or None."""
    draft = inputs.draft
    if options.max_draft_tokens == 0:
        return None
    if options.rule == BLOCK and draft.logits is not None:
        return "do not verify blocks"
    if options.rule == COUPLED:
        return None if inputs.bonus_token_ids is None else "take no bonus_token_ids"
    has_statistics = draft.logprobs is not None and draft.logsumexp is not None
    if draft.logits is not None and not has_statistics:
        return "need draft.logprobs and draft.logsumexp with draft.logits"
    return None


def _verify_by_reference(
    inputs: VerifyInputs, options: CallOptions, cpu_alone: bool
) -> Verification:
    verification = verify_batch(inputs, options, cpu_alone)
    return resize_tokens(verification, options.max_draft_tokens + 1)


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
