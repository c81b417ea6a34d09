"""The target's K + 1 rows of a step: the last token and the drafted ones are fed, and processed.

Where K is "auto", a step in which no request of the batch has a draft computes one row. An engine
has programs of a few more numbers of rows, and takes the smallest that holds the longest draft.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_logits, check_shape
from specjax.core.acceptance import num_valid_drafts
from specjax.decode.logprobs import check_num_listed
from specjax.decode.state import DecodeState, Settings
from specjax.devices.placement import Placement, call_on_auto_axes
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.implementation import Implementation, resolve_implementation
from specjax.processing.apply_sampling import apply_rules_and_filters
from specjax.processing.logit_rules import RowContext
from specjax.processing.row_masks import has_row_masks
from specjax.processing.rule_checks import check_widths
from specjax.processing.sampling_params import SamplingParams, split_sampling
from specjax.types import Model

__all__ = [
    "TargetRows",
    "apply_model",
    "count_drafted",
    "count_rows",
    "gather_row",
    "run_smallest_k",
    "score_draft",
    "score_hidden",
    "step_inputs",
    "vocabulary_size",
]


class TargetRows(NamedTuple):
    """What the target says of K + 1 rows; in `run_step` zeros where only the first was computed.

    Attributes:
      hidden: [B, K + 1, D].
      features: [B, K + 1, A * D] of the drafter's A taps, or None without any.
      raw_logits: [B, K + 1, V], or None where they are not listed.
      logits: [B, K + 1, V], processed.
      cutoff: f32[B, K + 1], or None.
      split: of the vocabulary, where `logits` are [B, K + 1, N * W] of `Model.split_logits`; or
        None.
      placement: of the target, or None.
    """

    hidden: jax.Array
    features: jax.Array | None
    raw_logits: jax.Array | None
    logits: jax.Array
    cutoff: jax.Array | None
    split: VocabularySplit | None = None
    placement: Placement | None = None


def score_draft(
    target: Model,
    state: DecodeState,
    cache: Any,
    *,
    k: int,
    implementation: Implementation | None,
    taps: tuple[int, ...] = (),
) -> tuple[Any, TargetRows]:
    """Feeds the last token and k drafted ones to the target: the first part of `run_step`.

    Args:
      target: as in `run_step`.
      state: as in `run_step`; its cache is not read.
      cache: the target's.
      k: how many drafted tokens are fed: K, or 0 if nothing was drafted.
      implementation: as in `run_step`.
      taps: of the drafter.

    Returns:
      The target's cache, and k + 1 rows.
    """
    input_ids, positions = (fed[:, : k + 1] for fed in step_inputs(state))
    *hidden, cache = apply_model(target, input_ids, positions, cache, taps)
    return cache, score_hidden(target, state, implementation, *hidden)


def score_hidden(
    target: Model,
    state: DecodeState,
    implementation: Implementation | None,
    hidden: jax.Array,
    features: jax.Array | None,
) -> TargetRows:
    """Returns the rows of hidden states [B, k + 1, D], the last token's and those of k drafted."""
    settings, (size, num_rows) = state.settings, hidden.shape[:2]
    split = _vocabulary_split(target, settings, hidden)
    logits_of = target.logits if split is None else target.split_logits
    assert logits_of is not None
    raw = logits_of(target.params, hidden)
    _check_target_logits(raw, settings, size, num_rows)
    resolved = resolve_implementation(implementation)
    logits, cutoff = _apply_sampling(state, state.draft.token_ids[:, : num_rows - 1], raw, resolved)
    lists_raw = settings.logprobs is not None and settings.logprobs.mode == "raw"
    listed = raw if lists_raw else None
    return TargetRows(hidden, features, listed, logits, cutoff, split, target.placement)


def _vocabulary_split(
    target: Model, settings: Settings, hidden: jax.Array
) -> VocabularySplit | None:
    """Returns how rows of logits lie over devices where verification alone reads them, or None."""
    if target.split_logits is None or (settings.sampling, settings.logprobs) != (None, None):
        return None
    vocab_size = jax.eval_shape(target.logits, target.params, hidden).shape[-1]
    return VocabularySplit(target.placement.model, vocab_size)


@functools.partial(jax.jit, static_argnames="taps")
def apply_model(
    model: Model,
    token_ids: jax.Array,
    positions: jax.Array,
    cache: Any,
    taps: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Returns what `model.apply_with_taps` does, or `model.apply` and no features without taps.

    Traced once where its shapes are asked for before.
    """
    operands = (model.params, token_ids, positions, cache)
    if not taps:
        hidden, cache = model.apply(*operands)
        return hidden, None, cache
    if model.apply_with_taps is None:
        raise ValueError(
            f"the drafter reads the target's states after layers {list(taps)}, and this target has "
            "no apply_with_taps to hand them out; take a model that specjax.models loads or "
            "builds, or a drafter without taps."
        )
    return model.apply_with_taps(*operands, taps)


def vocabulary_size(target: Model, size: int, num_rows: int, max_length: int) -> int:
    """Returns V of the target's logits; nothing is traced that `prefill` does not trace.

    Args:
      target: a `Model`.
      size: B.
      num_rows: rows of a step.
      max_length: S.
    """
    keywords = {"size": size, "num_rows": num_rows, "max_length": max_length}
    rows = call_on_auto_axes(_logits.eval_shape, target, like=(), **keywords)
    vocab_size: int = rows.shape[-1]
    return vocab_size


@functools.partial(jax.jit, static_argnames=("size", "num_rows", "max_length"))
def _logits(target: Model, *, size: int, num_rows: int, max_length: int) -> jax.Array:
    rows = jnp.zeros((size, num_rows), jnp.int32)
    hidden, *_ = apply_model(target, rows, rows, target.init_cache(size, max_length))
    return target.logits(target.params, hidden)


def _check_target_logits(logits: jax.Array, settings: Settings, size: int, num_rows: int) -> None:
    """Refuses logits [B, K + 1, V] that the settings were not made for."""
    check_logits("target_logits", logits, "[B, K + 1, V]", size)
    vocab_size = logits.shape[-1]
    check_shape("target_logits", logits, (size, num_rows, vocab_size))
    if settings.sampling is not None:
        rules, _ = split_sampling(settings.sampling)
        check_widths(rules, vocab_size)
    if settings.logprobs is not None:
        check_num_listed("num_logprobs", settings.logprobs.num, vocab_size)


def _apply_sampling(
    state: DecodeState, drafted: jax.Array, logits: jax.Array, implementation: Implementation
) -> tuple[jax.Array, jax.Array | None]:
    """Returns processed logits and cutoffs of the target's rows."""
    settings = state.settings
    rules, filters = split_sampling(settings.sampling or SamplingParams())
    if has_row_masks(settings.sampling):
        rules = rules._replace(allowed=rules.allowed[:, : logits.shape[1]])
    context = RowContext(state.history, drafted if drafted.shape[1] else None, jnp.int32(0))
    return apply_rules_and_filters(
        logits,
        rules,
        filters,
        context,
        temperature=settings.temperature,
        implementation=implementation,
    )


def count_rows(state: DecodeState) -> int:
    """Returns K + 1."""
    return state.draft.token_ids.shape[1] + 1


def count_drafted(state: DecodeState) -> jax.Array:
    """Returns how many tokens the pending draft of each request has, i32[B]; -1 if it ended."""
    return num_valid_drafts(state.draft.token_ids, state.draft.num_tokens)


def step_inputs(state: DecodeState) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens that a step feeds and their positions, two i32[B, K + 1]."""
    last = gather_row(state.token_ids, state.lengths - 1)
    input_ids = jnp.concatenate([last[:, None], state.draft.token_ids], axis=1)
    index = jnp.arange(count_rows(state), dtype=jnp.int32)[None]
    positions = jnp.where(
        index <= count_drafted(state)[:, None], state.lengths[:, None] - 1 + index, jnp.int32(-1)
    )
    return jnp.maximum(input_ids, 0), positions


def run_smallest_k(
    state: DecodeState,
    function: Callable[[int, Any], tuple[Any, Any]],
    operand: Any,
    buckets: tuple[int, ...] = (),
) -> tuple[Any, Any]:
    """Returns `function(k, operand)` of K, or where K is adaptive of the smallest k in use.

    Args:
      state: before the step.
      function: as in `AdaptiveK.run_smallest_k`.
      operand: for instance a cache.
      buckets: numbers of drafted tokens besides 0 and K.
    """
    num_drafted, k = count_drafted(state), count_rows(state) - 1
    return state.k_policy.run_smallest_k(function, operand, num_drafted, k, buckets)


def gather_row(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns entry `index[b]` of row b: [B, L, ...] -> [B, ...]."""
    return jax.vmap(lambda row, i: jax.lax.dynamic_index_in_dim(row, i, keepdims=False))(
        values, index
    )
