"""The target's K + 1 rows of a step: logits after the last token and after each drafted one.

    last token, draft -> target -> hidden states -> logits -> sampling rules -> `TargetRows`

A row is one position of a request. Row i decides the token after the first i drafted ones, and
row K the bonus token. `step.compute_rows` and `prefill` call these functions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from specjax.checks import check_applied, check_model_logits
from specjax.core.acceptance import num_valid_drafts
from specjax.decode.adaptive_k import cond_in_place
from specjax.decode.kinds import Kind, kind_of_model
from specjax.decode.state import DecodeState, Settings
from specjax.devices.placement import Placement, with_auto_axes
from specjax.devices.vocabulary_split import VocabularySplit
from specjax.implementation import Implementation, resolve_implementation
from specjax.processing.apply_sampling import apply_rules_and_filters
from specjax.processing.host_masks import has_row_masks
from specjax.processing.logit_rules import RowContext
from specjax.processing.rule_checks import check_widths
from specjax.processing.sampling_params import SamplingParams, split_sampling
from specjax.types import Model


class TargetRows(NamedTuple):
    """The target's outputs at the K + 1 positions of a step, or at the first k + 1 of them.

    Where K is adaptive, rows after the longest draft of the batch are not computed, and are zeros.

    Attributes:
      hidden: [B, K + 1, D], hidden states.
      features: [B, K + 1, A * D], the target's states after the A layers that the drafter taps;
        None without taps.
      raw_logits: [B, K + 1, V] of the model, if raw log-probabilities are listed; else None.
      logits: [B, K + 1, V] after the rules of the sampling parameters.
      cutoff: f32[B, K + 1], logits below which no token is sampled; or None.
      split: how the vocabulary lies over N devices with W columns each, if `logits` are
        [B, K + 1, N * W] from `Model.split_logits`; else None.
      placement: the target's, or None.
    """

    hidden: jax.Array
    features: jax.Array | None
    raw_logits: jax.Array | None
    logits: jax.Array
    cutoff: jax.Array | None
    split: VocabularySplit | None = None
    placement: Placement | None = None


def score_hidden(
    target: Model,
    state: DecodeState,
    implementation: Implementation | None,
    hidden: jax.Array,
    features: jax.Array | None,
) -> TargetRows:
    """Returns the rows that hidden states give: their logits, after the sampling rules.

    Args:
      target: as in `run_step`.
      state: before the step.
      implementation: of the cutoffs, as in `StepOptions`.
      hidden: [B, k + 1, D], hidden states of the last token and of the first k drafted ones.
      features: [B, k + 1, A * D] of the drafter's taps, or None.
    """
    settings, num_rows = state.settings, hidden.shape[1]
    raw, split = _raw_logits(target, settings, hidden)
    _check_settings(settings, raw.shape[-1])
    resolved = resolve_implementation(implementation)
    logits, cutoff = _apply_sampling(state, state.draft.token_ids[:, : num_rows - 1], raw, resolved)
    reads_raw = settings.token_info is not None and settings.token_info.reads_raw
    listed = raw if reads_raw else None
    return TargetRows(hidden, features, listed, logits, cutoff, split, target.placement)


def _raw_logits(
    target: Model, settings: Settings, hidden: jax.Array
) -> tuple[jax.Array, VocabularySplit | None]:
    """Returns logits [B, k + 1, V] and None, or logits split over devices and their split.

    They are split if the model can, and if verification alone reads them.
    """
    if target.split_logits is None or (settings.sampling, settings.token_info) != (None, None):
        return _whole_logits(target, hidden), None
    vocab_size = jax.eval_shape(target.logits, target.params, hidden).shape[-1]
    logits = target.split_logits(target.params, hidden)
    check_model_logits("target.split_logits", logits, hidden)
    return logits, VocabularySplit(target.placement.model, vocab_size)


@functools.partial(jax.jit, static_argnames="taps")
def apply_model(
    model: Model, token_ids: jax.Array, positions: jax.Array, cache: Any, taps: tuple[int, ...] = ()
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Returns the hidden states [B, C, D] of tokens i32[B, C], their features, and the cache.

    Features are [B, C, A * D] of A taps, or None without taps. `jax.jit` lets one trace serve the
    shapes of the outputs, which `prefill` asks for first, and the outputs.
    """
    operands = (model.params, token_ids, positions, cache)
    if not taps:
        outputs = model.apply(*operands)
        check_applied("target.apply", outputs, token_ids, cache)
        return outputs[0], None, outputs[1]
    if model.apply_with_taps is None:
        raise ValueError(
            f"the drafter reads the target's states after layers {list(taps)}, and this target has "
            "no apply_with_taps to hand them out; take a model that specjax.models loads or "
            "builds, or a drafter without taps."
        )
    states = model.apply_with_taps(*operands, taps)
    check_applied("target.apply_with_taps", states, token_ids, cache, len(taps))
    return states


def vocabulary_size(target: Model, size: int, num_rows: int, max_length: int) -> int:
    """Returns V of the target's logits, of which only shapes are computed.

    `prefill` reuses what is traced for it, if the sizes are those of the loop.

    Args:
      target: a `Model`.
      size: B.
      num_rows: K + 1.
      max_length: S.
    """
    sizes = {"size": size, "num_rows": num_rows, "max_length": max_length}
    if target.placement is None:
        return _vocabulary_size(kind_of_model(target), **sizes)
    logits = with_auto_axes(
        functools.partial(_logits.eval_shape, **sizes), target.placement, target, like=()
    )
    vocab_size: int = logits.shape[-1]
    return vocab_size


@functools.lru_cache(maxsize=64)
def _vocabulary_size(target: Kind, **sizes: int) -> int:
    """Returns V for a target of this kind: JAX takes milliseconds to find what it traced."""
    vocab_size: int = _logits.eval_shape(target.shapes(), **sizes).shape[-1]
    return vocab_size


@functools.partial(jax.jit, static_argnames=("size", "num_rows", "max_length"))
def _logits(target: Model, *, size: int, num_rows: int, max_length: int) -> jax.Array:
    zeros = jnp.zeros((size, num_rows), jnp.int32)
    hidden, *_ = apply_model(target, zeros, zeros, target.init_cache(size, max_length))
    return _whole_logits(target, hidden)


def _whole_logits(target: Model, hidden: jax.Array) -> jax.Array:
    logits = target.logits(target.params, hidden)
    check_model_logits("target.logits", logits, hidden)
    return logits


def _check_settings(settings: Settings, vocab_size: int) -> None:
    """Refuses settings that do not fit the target's vocabulary."""
    if settings.sampling is not None:
        rules, _ = split_sampling(settings.sampling)
        check_widths(rules, vocab_size)
    if settings.token_info is not None:
        settings.token_info.check_vocabulary(vocab_size)


def _apply_sampling(
    state: DecodeState, drafted: jax.Array, logits: jax.Array, implementation: Implementation
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the logits [B, k + 1, V] after the sampling rules, and the filters' cutoffs.

    Args:
      state: before the step.
      drafted: i32[B, k], the tokens before each row, which the rules count.
      logits: [B, k + 1, V] of the model.
      implementation: of the cutoffs.
    """
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
    """Returns K + 1, the number of rows that a step verifies."""
    return state.draft.token_ids.shape[1] + 1


def count_drafted(state: DecodeState) -> jax.Array:
    """Returns the number of tokens in each request's pending draft, i32[B]; -1 if it ended."""
    return num_valid_drafts(state.draft.token_ids, state.draft.num_tokens)


def step_inputs(state: DecodeState) -> tuple[jax.Array, jax.Array]:
    """Returns the tokens that a step feeds the target and their positions, two i32[B, K + 1].

    They are the last committed token and the draft. After the draft's end positions are -1, which
    is no token.
    """
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
    """Returns the results of `function` for the smallest k that holds every draft of the batch.

    Where K is fixed, k = K. Where it is adaptive, `function` is compiled for each of a few k.

    Args:
      state: before the step.
      function: `(k, operand) -> (operand, arrays)`, with arrays [B, k + 1, ...].
      operand: for instance a cache, which is updated in place.
      buckets: k besides 0 and K, as in `KPolicy.draft_sizes`.

    Returns:
      The operand, and the arrays padded to [B, K + 1, ...] with zeros.
    """
    num_drafted, num_rows = count_drafted(state), count_rows(state)
    *sizes, k = state.k_policy.draft_sizes(num_rows - 1, buckets)
    if not sizes:  # K is fixed.
        return function(k, operand)
    shapes = jax.eval_shape(functools.partial(function, k), operand)[1]

    def run(size: int, last: tuple[Any, Any]) -> tuple[Any, Any]:
        operand, arrays = function(size, last[0])
        return operand, jax.tree.map(functools.partial(_pad_rows, num_rows=num_rows), arrays)

    last = operand, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    longest = jnp.max(num_drafted)
    is_done = longest <= 0
    last = cond_in_place(is_done, functools.partial(run, 0), last)
    for size in sizes[1:]:
        fits = ~is_done & (longest <= size)
        last = cond_in_place(fits, functools.partial(run, size), last)
        is_done |= fits
    return cond_in_place(~is_done, functools.partial(run, k), last)


def _pad_rows(rows: jax.Array, num_rows: int) -> jax.Array:
    """Returns rows [B, num_rows, ...] with zeros after the given ones."""
    widths = [(0, 0)] * rows.ndim
    widths[1] = (0, num_rows - rows.shape[1])
    return jnp.pad(rows, widths)


def gather_row(values: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `values[b, index[b]]` of each request b: [B, L, ...] -> [B, ...]."""
    return jax.vmap(lambda value, i: jax.lax.dynamic_index_in_dim(value, i, keepdims=False))(
        values, index
    )
