"""Sampling parameters applied to logits: processed logits, and a cutoff for each row."""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.checks import check_shape
from specjax.core.truncation import Filters
from specjax.implementation import Implementation
from specjax.processing.draft_vocabulary import DraftVocabulary
from specjax.processing.history import History
from specjax.processing.logit_cutoff import find_cutoff, logit_cutoff
from specjax.processing.logit_rules import RowContext, apply_rules
from specjax.processing.process_logits import process_logits
from specjax.processing.sampling_params import SamplingParams, mask_width, split_sampling
from specjax.processing.token_counts import TokenCounts, count_committed


def apply_sampling(
    logits: jax.Array,
    sampling: SamplingParams | None,
    *,
    temperature: Any = 1.0,
    history: History | None = None,
    drafted_token_ids: Any = None,
    first_row: Any = 0,
    implementation: str | Implementation | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Applies sampling parameters to logits: `process_logits`, then `logit_cutoff` of each row.

    Args:
      logits: [B, R, V] or [B, V], bf16, f16 or f32, raw.
      sampling: `SamplingParams`; None changes nothing.
      temperature: f32, [B] or scalar, of the probabilities that top_p and min_p compare.
      history: as in `process_logits`.
      drafted_token_ids: i32[B, D] or None, as in `process_logits`.
      first_row: i32 scalar, as in `process_logits`.
      implementation: of the cutoffs, as in `logit_cutoff`.

    Returns:
      The processed logits, of the shape and dtype of `logits`, and the cutoffs, f32[B, R] or
      f32[B]; None where top_k, top_p and min_p are all None. The samplers take both.

    Raises:
      ValueError: for what `process_logits` and `logit_cutoff` refuse.

    Example:
      >>> logits, cutoff = specjax.apply_sampling(
      ...     jnp.array([[3.0, 1.0, 2.0]]),
      ...     specjax.SamplingParams(top_k=1, allowed=jnp.array([False, True, True])))
      >>> logits.tolist(), cutoff.tolist()
      ([[-inf, 1.0, 2.0]], [2.0])
    """
    if sampling is None:
        return logits, None
    rules, filters = split_sampling(sampling)
    if _has_any(rules):
        logits = process_logits(
            logits, rules, history=history, drafted_token_ids=drafted_token_ids, first_row=first_row
        )
    if not _has_any(filters):
        return logits, None
    cutoff = logit_cutoff(
        logits, temperature=temperature, **filters._asdict(), implementation=implementation
    )
    return logits, cutoff


def apply_rules_and_filters(
    logits: jax.Array,
    rules: SamplingParams,
    filters: Filters,
    context: RowContext,
    *,
    temperature: jax.Array,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits and cutoffs of `apply_sampling`, of checked arrays.

    Args:
      logits: [B, R, V] or [B, V].
      rules: as `parse_sampling` returns them, as wide as the logits.
      filters: arrays [] or [B].
      context: the tokens before each row.
      temperature: f32[B].
      implementation: a resolved one.
    """
    if _has_any(rules):
        logits = apply_rules(logits, rules, context)
    if not _has_any(filters):
        return logits, None
    return logits, find_cutoff(logits, temperature, filters, implementation=implementation)


def _has_any(fields: SamplingParams | Filters) -> bool:
    return any(field is not None for field in fields)


def apply_sampling_to_draft(
    logits: jax.Array,
    rules: SamplingParams,
    filters: Filters,
    context: RowContext,
    *,
    temperature: jax.Array,
    implementation: Implementation,
    vocabulary: DraftVocabulary | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns draft logits [B, V_d] or [B, K, V_d] after the rules, and the cutoffs of the filters.

    Arguments and results are as in `apply_rules_and_filters`. Rules and counts of another
    vocabulary are cut or filled with zeros at their end. A token that they do not have counts 0,
    has no bias, and is not allowed where there is a mask. Spare bits in the last word of a packed
    mask are kept. With a `vocabulary` the rules and the history are those that its `take` returned.
    """
    vocab_size, drafted = logits.shape[-1], context.drafted_token_ids
    if vocabulary is not None:
        check_shape("logits", logits, (*logits.shape[:-1], *vocabulary.token_map.shape))
        columns = None if drafted is None else vocabulary.columns(drafted)
        context = context._replace(drafted_columns=columns, token_map=vocabulary.token_map)
    bias, allowed, history = rules.bias, rules.allowed, context.history
    if bias is not None:
        bias = _resize(bias, vocab_size)
    if allowed is not None:
        allowed = _resize(allowed, mask_width(allowed, vocab_size))
    if history.counts is not None:
        counts = jax.tree.map(lambda table: _resize(table, vocab_size), history.counts)
        history = history._replace(counts=counts)
    return apply_rules_and_filters(
        logits,
        rules._replace(bias=bias, allowed=allowed),
        filters,
        context._replace(history=history),
        temperature=temperature,
        implementation=implementation,
    )


def _resize(array: jax.Array, width: int) -> jax.Array:
    """Returns the array with its last axis cut, or filled with zeros, to `width`."""
    array = array[..., :width]
    padding = [(0, 0)] * (array.ndim - 1) + [(0, width - array.shape[-1])]
    return jnp.pad(array, padding) if padding[-1][1] else array


def count_prompt(
    sampling: SamplingParams | None, token_ids: jax.Array, lengths: jax.Array, vocab_size: int
) -> TokenCounts | None:
    """Returns the counts of prompts that the parameters' penalties read, None without penalties."""
    rules, _ = split_sampling(sampling or SamplingParams())
    if not rules.penalties:
        return None
    counts = count_committed(token_ids, lengths, lengths, vocab_size)
    return counts if rules.reads_prompt else counts._replace(prompt=None)
