"""The law a request asked for: its processed logits, and the cutoff below which nothing is kept."""

from typing import Any

import jax

from specjax.processing.cutoff import logit_cutoff
from specjax.processing.process_logits import process_logits
from specjax.processing.sampling_params import (
    SamplingParams,
    check_sampling,
    fit_vocabulary,
    fit_width,
)
from specjax.processing.token_counts import History

__all__ = ["apply_sampling", "apply_to_draft"]


def apply_sampling(
    logits: jax.Array,
    sampling: SamplingParams | None,
    *,
    temperature: Any = 1.0,
    history: History | None = None,
    drafted_token_ids: Any = None,
    first_row: Any = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """`process_logits`, then the `logit_cutoff` of each processed row: what the samplers take.

    Args:
      logits: [B, R, V] or [B, V], bf16, f16 or f32, raw.
      sampling: what is asked; None leaves all as it is.
      temperature: f32, [B] or scalar, at which top_p and min_p weigh.
      history: as in `process_logits`; likewise the arguments below.
      drafted_token_ids: i32[B, D] or None.
      first_row: i32 scalar.
      implementation: of the cutoffs, as in `logit_cutoff`.

    Returns:
      Logits of the same shape and dtype, and the cutoffs f32[B, R] or f32[B]; None where
      neither top_k nor top_p nor min_p is given.

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
    check_sampling(sampling)
    top_k, top_p, min_p, *rules = sampling
    names = SamplingParams._fields[3:]
    processed = {name: rule for name, rule in zip(names, rules, strict=True) if rule is not None}
    if processed:
        logits = process_logits(
            logits,
            **processed,
            history=history,
            drafted_token_ids=drafted_token_ids,
            first_row=first_row,
        )
    if top_k is None and top_p is None and min_p is None:
        return logits, None
    thresholds = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    return logits, logit_cutoff(
        logits, temperature=temperature, **thresholds, implementation=implementation
    )


def apply_to_draft(
    logits: jax.Array, sampling: SamplingParams | None, *, history: History | None, **options: Any
) -> tuple[jax.Array, jax.Array | None]:
    """`apply_sampling` to draft logits [B, V_d], whatever the vocabulary it was asked for.

    A bias, a mask and counts are cut or filled up at their end: tokens that the target does
    not know are not allowed where there is a mask, and count 0.
    """
    if sampling is not None:
        sampling = fit_vocabulary(sampling, logits.shape[-1])
    if history is not None and history.counts is not None:
        counts = jax.tree.map(lambda table: fit_width(table, logits.shape[-1]), history.counts)
        history = history._replace(counts=counts)
    return apply_sampling(logits, sampling, history=history, **options)
